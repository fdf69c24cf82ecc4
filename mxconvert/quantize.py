"""The one door to the kernels: which backend, and a call per piece."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from mxconvert_kernels import (
    Backend,
    BackendUnavailableError,
    ErrorSums,
    FloatType,
    NonFinite,
    ScaleRule,
    explain_backend,
    get_backend,
)
from mxconvert_kernels.histograms import SAMPLE_EVERY, HistogramSampler
from mxconvert_kernels.program_sums import NO_PLACE, SUMS, add_up

from mxconvert.errors import MissingExtraError
from mxconvert.model import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from _typeshed import ReadableBuffer as Buffer

__all__ = [
    "NO_PLACE",
    "SAMPLE_EVERY",
    "SUMS",
    "Backend",
    "ErrorSums",
    "FloatType",
    "HistogramSampler",
    "NonFinite",
    "Quantizer",
    "add_up",
    "backend_names",
    "compiling",
    "explain_backend",
    "load_backend",
]


_FIRST_UNSAFE_SCALE = 253  # from which on 4 or more times the scale is no BF16


def backend_names() -> Sequence[str]:
    """Return what ``--backend`` takes."""
    return ("auto", "triton", "llvm", "numpy")


def load_backend(name: str) -> Backend:
    """Return the kernels to use.

    Raises:
        MissingExtraError: The named backend cannot be loaded here.
    """
    try:
        return get_backend(name)  # type: ignore[arg-type]  # the CLI offers known names only
    except BackendUnavailableError as error:
        raise MissingExtraError(
            f"backend {name}: {error}",
            hint="use --backend numpy, which needs nothing, or --backend auto",
        ) from error


class Quantizer:
    """Kernels bound to one scale rule; may be shared between threads."""

    def __init__(self, backend: Backend, scale_rule: str) -> None:
        self.backend = backend
        self._rule = ScaleRule(scale_rule)

    @property
    def rule(self) -> str:
        """The scale rule."""
        return str(self._rule)

    def quantize(
        self,
        source: memoryview,
        dtype: str,
        packed: memoryview,
        scales: memoryview,
        *,
        sums: ErrorSums | None = None,
    ) -> NonFinite:
        """Quantize whole blocks.

        Args:
            source: ``32 n`` elements of ``dtype``, little-endian, flat.
            dtype: ``BF16``, ``F16`` or ``F32``.
            packed: ``16 n`` bytes for the codes, low nibble = even element.
            scales: ``n`` bytes for the E8M0 scales.
            sums: What quantization does to the values is added here.

        Returns:
            How many elements are not finite, and the first of them.
        """
        return self.backend.quantize(
            source, FloatType(dtype), self._rule, packed, scales, sums=sums
        )

    def dequantize(self, packed: memoryview, scales: memoryview, out: memoryview) -> int:
        """Make BF16 of whole blocks; return how many elements it cannot hold.

        Args:
            packed: ``16 n`` bytes of codes, low nibble = even element.
            scales: ``n`` E8M0 bytes.
            out: ``64 n`` bytes for ``32 n`` elements.
        """
        self.backend.dequantize(packed, scales, FloatType.BF16, out)
        return self.unfit(scales, out)

    def unfit(self, scales: memoryview, out: memoryview) -> int:
        """Return how many elements of what `dequantize` made BF16 cannot hold."""
        if max(scales, default=0) < _FIRST_UNSAFE_SCALE:
            return 0
        return self.backend.scan(out, FloatType.BF16).count

    def quantize_scaled(
        self,
        source: memoryview,
        dtype: str,
        factors: Buffer,
        packed: memoryview,
        scales: memoryview,
        *,
        sums: ErrorSums | None = None,
    ) -> NonFinite:
        """Do as `quantize` with FP8 elements times ``factors``, float32, one for each block."""
        return self.backend.quantize_scaled(
            source, FloatType(dtype), self._rule, factors, packed, scales, sums
        )

    def widen_scaled(
        self, source: memoryview, dtype: str, factors: Buffer, output: memoryview
    ) -> NonFinite:
        """Make BF16 of FP8 elements times ``factors``, float32, one for each block of 32."""
        return self.backend.widen_scaled(source, FloatType(dtype), factors, output)

    def scan(self, source: memoryview, dtype: str) -> NonFinite:
        """Count elements that are not finite; dtypes without NaN or Inf have none."""
        if dtype not in FloatType.__members__:
            return NonFinite(0, -1)
        return self.backend.scan(source, FloatType(dtype))


@contextlib.contextmanager
def compiling(backend: str, scale_rule: str, *, sums: bool) -> Iterator[None]:
    """Compile the kernel for BF16 on a thread of its own, while other things are prepared.

    Most checkpoints need it. Errors are left to whoever uses the kernel.
    """

    def compile_kernel() -> None:
        with contextlib.suppress(MissingExtraError):
            quantizer = Quantizer(load_backend(backend), scale_rule)
            block, packed, scales = (
                memoryview(bytearray(size)) for size in (2 * BLOCK_SIZE, BLOCK_SIZE // 2, 1)
            )
            quantizer.quantize(block, "BF16", packed, scales, sums=ErrorSums() if sums else None)

    thread = threading.Thread(target=compile_kernel, name="mxconvert-compile")
    thread.start()
    try:
        yield
    finally:
        thread.join()
