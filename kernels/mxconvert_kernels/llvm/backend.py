"""Calls the compiled kernels through ctypes, which releases the GIL while they run."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any, Final

from mxconvert_kernels.buffers import count_blocks, count_elements
from mxconvert_kernels.lanes import FLOAT32_MANTISSA_BITS, rule_bias
from mxconvert_kernels.llvm import avx512_bf16, dequantize, jit, quantize, scan
from mxconvert_kernels.llvm.memory import View
from mxconvert_kernels.llvm.sums import SumsMemory
from mxconvert_kernels.spec import ALL_FINITE, FloatType, NonFinite, ScaleRule

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from mxconvert_kernels.error_sums import ErrorSums

_POINTER: Final = ctypes.c_void_p
_COUNT: Final = ctypes.c_int64
_QUANTIZE: Final = ctypes.CFUNCTYPE(_COUNT, _POINTER, _POINTER, _POINTER, _COUNT, ctypes.c_int32)
_QUANTIZE_WITH_SUMS: Final = ctypes.CFUNCTYPE(
    _COUNT, _POINTER, _POINTER, _POINTER, _COUNT, ctypes.c_int32, _POINTER, _POINTER
)
_DEQUANTIZE: Final = ctypes.CFUNCTYPE(_COUNT, _POINTER, _POINTER, _POINTER, _COUNT)
_SCAN: Final = ctypes.CFUNCTYPE(_COUNT, _POINTER, _COUNT)


class LlvmBackend:
    """Kernels in vector IR, each compiled when first used (some 30 ms) and kept.

    Raises:
        RuntimeError: llvmlite is too old, or cannot generate code for this processor.
    """

    name = "llvm"

    def __init__(self) -> None:
        jit.check_version()
        self._lock = threading.Lock()
        self._kernels: dict[tuple[str, FloatType], Callable[..., int]] = {}
        self._quantizers: dict[
            tuple[FloatType, ScaleRule, bool], tuple[Callable[..., int], int]
        ] = {}
        self._compiled: list[jit.Compiled] = []
        self._native = jit.host_has(avx512_bf16.FEATURES)
        self._scan(FloatType.BF16)  # the smallest kernel shows that LLVM works here

    def quantize(
        self,
        src: Buffer,
        dtype: FloatType,
        rule: ScaleRule,
        packed: Buffer,
        scales: Buffer,
        *,
        sums: ErrorSums | None = None,
    ) -> NonFinite:
        """See `Backend.quantize`."""
        with (
            View(src, "src") as floats,
            View(packed, "packed", writable=True) as codes,
            View(scales, "scales", writable=True) as exponents,
        ):
            blocks = count_blocks(floats.nbytes, dtype, codes.nbytes, exponents.nbytes, "src")
            kernel, bias = self._quantize(dtype, rule, sums=sums is not None)
            addresses = floats.address, codes.address, exponents.address
            if sums is None:
                bad_blocks = kernel(*addresses, blocks, bias)
            else:
                memory = SumsMemory()
                bad_blocks = kernel(*addresses, blocks, bias, memory.result, memory.scratch)
                sums.add(memory.read(blocks - bad_blocks))
            if bad_blocks:
                return self._locate(floats, dtype)
        return ALL_FINITE

    def dequantize(self, packed: Buffer, scales: Buffer, dtype: FloatType, out: Buffer) -> None:
        """See `Backend.dequantize`."""
        with (
            View(packed, "packed") as codes,
            View(scales, "scales") as exponents,
            View(out, "out", writable=True) as floats,
        ):
            blocks = count_blocks(floats.nbytes, dtype, codes.nbytes, exponents.nbytes, "out")
            kernel = self._dequantize(dtype)
            kernel(codes.address, exponents.address, floats.address, blocks)

    def scan(self, src: Buffer, dtype: FloatType) -> NonFinite:
        """See `Backend.scan`."""
        with View(src, "src") as floats:
            return self._locate(floats, dtype)

    def _locate(self, floats: View, dtype: FloatType) -> NonFinite:
        """Count the non-finite elements and find the first by bisection."""
        begin, end = 0, count_elements(floats.nbytes, dtype, "src")
        kernel = self._scan(dtype)
        count = kernel(floats.address, end)
        if count == 0:
            return ALL_FINITE
        while end - begin > 1:
            middle = (begin + end) // 2
            if kernel(floats.address + begin * dtype.itemsize, middle - begin):
                end = middle
            else:
                begin = middle
        return NonFinite(count, begin)

    def _quantize(
        self, dtype: FloatType, rule: ScaleRule, *, sums: bool
    ) -> tuple[Callable[..., int], int]:
        """The kernel for a rule, and its bias."""
        entry = self._quantizers.get((dtype, rule, sums))
        if entry is None:
            search = rule is ScaleRule.MSE
            kernel = self._kernel(
                ("search" if search else "quantize") + (" with sums" if sums else ""),
                dtype,
                lambda: quantize.build(dtype, search=search, sums=sums, native=self._native),
                _QUANTIZE_WITH_SUMS if sums else _QUANTIZE,
            )
            entry = kernel, rule_bias(rule, FLOAT32_MANTISSA_BITS)
            self._quantizers[dtype, rule, sums] = entry
        return entry

    def _dequantize(self, dtype: FloatType) -> Callable[..., int]:
        return self._kernel("dequantize", dtype, lambda: dequantize.build(dtype), _DEQUANTIZE)

    def _scan(self, dtype: FloatType) -> Callable[..., int]:
        return self._kernel("scan", dtype, lambda: scan.build(dtype), _SCAN)

    def _kernel(
        self, kind: str, dtype: FloatType, build: Callable[[], str], prototype: Any
    ) -> Callable[..., int]:
        """The kernel, compiled by whichever thread comes first."""
        key = (kind, dtype)
        kernel = self._kernels.get(key)
        if kernel is None:
            with self._lock:
                kernel = self._kernels.get(key)
                if kernel is None:
                    compiled = jit.compile_for_host(build())
                    self._compiled.append(compiled)
                    kernel = self._kernels[key] = prototype(compiled.address)
        return kernel
