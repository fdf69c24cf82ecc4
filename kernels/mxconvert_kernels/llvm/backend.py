"""Calls the compiled kernels through ctypes, which releases the GIL while they run."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any, Final

from mxconvert_kernels.buffers import (
    count_blocks,
    count_elements,
    count_scaled_blocks,
    count_widened_blocks,
)
from mxconvert_kernels.lanes import FLOAT32_MANTISSA_BITS, rule_bias
from mxconvert_kernels.llvm import avx512_bf16, dequantize, jit, quantize, scaled, scan
from mxconvert_kernels.llvm.memory import View
from mxconvert_kernels.llvm.sums import SumsMemory
from mxconvert_kernels.spec import (
    ALL_FINITE,
    BLOCK_SIZE,
    FACTOR_BYTES,
    SCALED_TYPES,
    FloatType,
    NonFinite,
    ScaleRule,
)
from mxconvert_kernels.units import float32_product

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
_QUANTIZE_SCALED: Final = ctypes.CFUNCTYPE(
    _COUNT, _POINTER, _POINTER, _POINTER, _COUNT, ctypes.c_int32, _POINTER
)
_QUANTIZE_SCALED_WITH_SUMS: Final = ctypes.CFUNCTYPE(
    _COUNT, _POINTER, _POINTER, _POINTER, _COUNT, ctypes.c_int32, _POINTER, _POINTER, _POINTER
)
_SCAN_SCALED: Final = ctypes.CFUNCTYPE(_COUNT, _POINTER, _POINTER, _COUNT)
_DEQUANTIZE: Final = ctypes.CFUNCTYPE(_COUNT, _POINTER, _POINTER, _POINTER, _COUNT)
_SCAN: Final = ctypes.CFUNCTYPE(_COUNT, _POINTER, _COUNT)

_QUANTIZERS: Final = (
    (quantize.build, (_QUANTIZE, _QUANTIZE_WITH_SUMS)),
    (scaled.build, (_QUANTIZE_SCALED, _QUANTIZE_SCALED_WITH_SUMS)),
)
"""How to build and call the kernels without factors and those with."""


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
            if _run(kernel, (*addresses, blocks, bias), blocks, sums):
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

    def quantize_scaled(  # noqa: PLR0917  (a parameter for each buffer)
        self,
        source: Buffer,
        dtype: FloatType,
        rule: ScaleRule,
        factors: Buffer,
        packed: Buffer,
        scales: Buffer,
        sums: ErrorSums | None = None,
    ) -> NonFinite:
        """See `Backend.quantize_scaled`."""
        with (
            View(source, "source") as elements,
            View(factors, "factors") as by_block,
            View(packed, "packed", writable=True) as codes,
            View(scales, "scales", writable=True) as exponents,
        ):
            blocks = count_scaled_blocks(
                elements.nbytes, dtype, by_block.nbytes, codes.nbytes, exponents.nbytes
            )
            kernel, bias = self._quantize(dtype, rule, sums=sums is not None)
            addresses = elements.address, codes.address, exponents.address
            arguments = *addresses, blocks, bias, by_block.address
            if _run(kernel, arguments, blocks, sums):
                return self._locate_products(elements, dtype, by_block, blocks)
        return ALL_FINITE

    def widen_scaled(
        self, source: Buffer, dtype: FloatType, factors: Buffer, output_bf16: Buffer
    ) -> NonFinite:
        """See `Backend.widen_scaled`."""
        with (
            View(source, "source") as elements,
            View(factors, "factors") as by_block,
            View(output_bf16, "output_bf16", writable=True) as floats,
        ):
            blocks = count_widened_blocks(elements.nbytes, dtype, by_block.nbytes, floats.nbytes)
            kernel = self._kernel("widen", dtype, lambda: scaled.build_widen(dtype), _DEQUANTIZE)
            if kernel(elements.address, by_block.address, floats.address, blocks):
                return self._locate(floats, FloatType.BF16)
        return ALL_FINITE

    def scan(self, src: Buffer, dtype: FloatType) -> NonFinite:
        """See `Backend.scan`."""
        with View(src, "src") as floats:
            return self._locate(floats, dtype)

    def _locate(self, floats: View, dtype: FloatType) -> NonFinite:
        """Count the non-finite elements and find the first."""
        kernel = self._scan(dtype)

        def count(begin: int, end: int) -> int:
            return kernel(floats.address + begin * dtype.itemsize, end - begin)

        total, first = _bisect(count, count_elements(floats.nbytes, dtype, "src"))
        return NonFinite(total, first) if total else ALL_FINITE

    def _locate_products(
        self, elements: View, dtype: FloatType, factors: View, blocks: int
    ) -> NonFinite:
        """Count the products that are not finite and find the first."""
        kernel = self._kernel("scan scaled", dtype, lambda: scaled.build_scan(dtype), _SCAN_SCALED)

        def count(begin: int, end: int) -> int:
            first = elements.address + begin * BLOCK_SIZE, factors.address + begin * FACTOR_BYTES
            return kernel(*first, end - begin)

        total, block = _bisect(count, blocks)
        return NonFinite(total, block * BLOCK_SIZE + _first_in(elements, dtype, factors, block))

    def _quantize(
        self, dtype: FloatType, rule: ScaleRule, *, sums: bool
    ) -> tuple[Callable[..., int], int]:
        """The kernel for a rule, and its bias."""
        entry = self._quantizers.get((dtype, rule, sums))
        if entry is None:
            search = rule is ScaleRule.MSE
            build, prototypes = _QUANTIZERS[dtype in SCALED_TYPES]
            kernel = self._kernel(
                ("search" if search else "quantize") + (" with sums" if sums else ""),
                dtype,
                lambda: build(dtype, search=search, sums=sums, native=self._native),
                prototypes[sums],
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


def _run(
    kernel: Callable[..., int], arguments: tuple[int, ...], blocks: int, sums: ErrorSums | None
) -> int:
    """Call a quantization kernel; returns how many blocks are not finite."""
    if sums is None:
        return kernel(*arguments)
    memory = SumsMemory()
    bad_blocks = kernel(*arguments, memory.result, memory.scratch)
    sums.add(memory.read(blocks - bad_blocks))
    return bad_blocks


def _bisect(count: Callable[[int, int], int], end: int) -> tuple[int, int]:
    """How many there are in 0 ... end - 1, and where the first is, if any."""
    begin, total = 0, count(0, end)
    while total and end - begin > 1:
        middle = (begin + end) // 2
        if count(begin, middle):
            end = middle
        else:
            begin = middle
    return total, begin


def _first_in(elements: View, dtype: FloatType, factors: View, block: int) -> int:
    """The first element of a block whose product is not finite."""
    stored = ctypes.string_at(elements.address + block * BLOCK_SIZE, BLOCK_SIZE)
    factor = ctypes.string_at(factors.address + block * FACTOR_BYTES, FACTOR_BYTES)
    bits = int.from_bytes(factor, "little")
    products = (float32_product(element, dtype, bits) for element in stored)
    infinity = FloatType.F32.layout.infinity
    magnitude_mask = FloatType.F32.layout.magnitude_mask
    return [product & magnitude_mask >= infinity for product in products].index(True)
