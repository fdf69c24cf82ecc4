"""The MXFP4 format and the choices this project makes within it.

Sources: OCP Microscaling Formats (MX) Specification v1.0, sections 5.1 (blocks of k elements that
share one scale), 5.3.3 (FP4, E2M1), 5.4.1 (E8M0 scales) and 6.3 (conversion). The scale rules
beyond the specification's are described in docs/explanation/numerics.md.

This module imports the standard library only, so that a command line can name the rules without
loading numpy or LLVM.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from mxconvert_kernels.error_sums import ErrorSums

BLOCK_SIZE: Final = 32
"""Elements that share one scale, consecutive along the contiguous dimension."""

PACKED_BLOCK_BYTES: Final = BLOCK_SIZE // 2
"""Bytes of one block's codes: two per byte, the element of even index in the low nibble."""

SCALE_BIAS: Final = 127
"""A scale byte e means 2 ** (e - 127)."""

MAX_SCALE_BYTE: Final = 254
"""The largest scale that is a number."""

NAN_SCALE_BYTE: Final = 255
"""The E8M0 code of NaN; written for blocks that hold a NaN or an infinity, whose codes are 0."""

SIGN_BIT: Final = 8
"""The bit of a 4-bit code that holds the sign; the three bits below index `E2M1_HALVES`."""

E2M1_HALVES: Final = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the magnitude of each E2M1 code: 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""

ELEMENT_EMAX: Final = 2
"""The exponent of E2M1's largest binade: the block maximum is moved into [4, 8)."""

ERROR_FRACTION_BITS: Final = 10
"""The squared error counts in units of 2 ** -10 of the scale that rule `floor` gives the block."""


class ScaleRule(StrEnum):
    """How a block's scale exponent follows from its values."""

    MSE = "mse"
    """Least squared error over the floor exponent and its two neighbours."""
    EVEN = "even"
    """One above the floor exponent if the maximum is at least 1.75 times its power of two."""
    FLOOR = "floor"
    """floor(log2(amax)) - 2, the OCP specification's rule."""
    RCEIL = "rceil"
    """The smallest exponent at which the maximum does not exceed 6, so nothing saturates."""


@dataclass(frozen=True, slots=True)
class FloatLayout:
    """The bit fields of a binary floating-point format, sign first."""

    itemsize: int
    mantissa_bits: int
    exponent_bits: int
    bias: int
    has_infinity: bool = True
    """False for OCP's E4M3: its highest exponent holds numbers and, as the last pattern, NaN."""

    @property
    def infinity(self) -> int:
        """The bits of +Inf, or of NaN if that is all there is; from here on nothing is finite."""
        if not self.has_infinity:
            return self.magnitude_mask
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def magnitude_mask(self) -> int:
        """All bits but the sign."""
        return (1 << (self.mantissa_bits + self.exponent_bits)) - 1


class FloatType(StrEnum):
    """An element type by its name in safetensors."""

    BF16 = "BF16"
    F16 = "F16"
    F32 = "F32"
    F8_E4M3 = "F8_E4M3"
    """OCP FP8 without infinities, S.1111.111 is NaN; a source whose blocks have a factor."""
    F8_E5M2 = "F8_E5M2"
    """OCP FP8 laid out as IEEE 754 has it; a source whose blocks have a factor."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _LAYOUTS[self].itemsize

    @property
    def layout(self) -> FloatLayout:
        """Where sign, exponent and mantissa lie."""
        return _LAYOUTS[self]


_LAYOUTS: Final = {
    FloatType.BF16: FloatLayout(itemsize=2, mantissa_bits=7, exponent_bits=8, bias=127),
    FloatType.F16: FloatLayout(itemsize=2, mantissa_bits=10, exponent_bits=5, bias=15),
    FloatType.F32: FloatLayout(itemsize=4, mantissa_bits=23, exponent_bits=8, bias=127),
    FloatType.F8_E4M3: FloatLayout(
        itemsize=1, mantissa_bits=3, exponent_bits=4, bias=7, has_infinity=False
    ),
    FloatType.F8_E5M2: FloatLayout(itemsize=1, mantissa_bits=2, exponent_bits=5, bias=15),
}

WHOLE_TYPES: Final = (FloatType.BF16, FloatType.F16, FloatType.F32)
"""Types whose elements mean what they say: `quantize` reads and `dequantize` writes them."""

SCALED_TYPES: Final = (FloatType.F8_E4M3, FloatType.F8_E5M2)
"""Types that mean something times a factor: `quantize_scaled` and `widen_scaled` read them."""

FACTOR_BYTES: Final = 4
"""Of the float32 that the elements of a block are multiplied by."""


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The NaN and infinite elements of a tensor; true if there is any."""

    count: int
    first: int
    """Flat index of the first one, -1 if there is none."""

    def __bool__(self) -> bool:
        return self.count > 0


ALL_FINITE: Final = NonFinite(count=0, first=-1)


class Backend(Protocol):
    """One implementation of the kernels. All give the same bytes.

    Buffers are C-contiguous, little-endian, may start at any address and must not overlap. A wrong
    size or an output that cannot be written raises ValueError before anything is written. Methods
    may be called from several threads at once.
    """

    name: str
    """`llvm`, `numpy` or `reference`."""

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
        """Quantize n elements, n a multiple of 32, to MXFP4.

        Args:
            src: n elements of `dtype`, `[..., K]` with K a multiple of 32.
            dtype: The type of the elements of `src`.
            rule: How scales are chosen.
            packed: Receives n / 2 bytes, `[..., K / 2]`, the even element in the low nibble.
            scales: Receives n / 32 E8M0 bytes, `[..., K / 32]`.
            sums: Is added to, in this thread; give each concurrent call its own and merge them.

        Returns:
            How many elements are NaN or infinite. Their blocks get scale byte 255 and codes 0.

        Raises:
            ValueError: A buffer has the wrong size, is not contiguous or cannot be written.
        """

    def dequantize(self, packed: Buffer, scales: Buffer, dtype: FloatType, out: Buffer) -> None:
        """Decode n / 32 blocks into n elements of `dtype`.

        The value is exact in BF16 and F32 wherever it is in their range, which holds for all that
        `quantize` writes. What exceeds the range becomes infinite; F16 rounds what is below its
        normal range to nearest, ties to even. Scale byte 255 gives NaN with the code's sign.

        Args:
            packed: n / 2 bytes, the even element in the low nibble.
            scales: n / 32 E8M0 bytes.
            dtype: The type to produce.
            out: Receives n elements of `dtype`.

        Raises:
            ValueError: A buffer has the wrong size, is not contiguous or cannot be written.
        """

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
        """Quantize n elements of FP8, n a multiple of 32, that are to be multiplied first.

        A value is the element times its block's factor: one multiplication of float32 (IEEE 754, to
        nearest, ties to even, nothing flushed). Then all is as `quantize` does it to float32.

        Args:
            source: n elements of `dtype`, flat.
            dtype: One of `SCALED_TYPES`.
            rule: How scales are chosen.
            factors: n / 32 float32, one for each block, finite and not negative.
            packed: Receives n / 2 bytes.
            scales: Receives n / 32 E8M0 bytes.
            sums: Is added to, over the values.

        Returns:
            How many values are NaN or infinite, be it that their element is or that they overflow.

        Raises:
            ValueError: A buffer has the wrong size, is not contiguous or cannot be written, or
                `dtype` is not FP8.
        """

    def widen_scaled(
        self, source: Buffer, dtype: FloatType, factors: Buffer, output_bf16: Buffer
    ) -> NonFinite:
        """Turn n elements of FP8 into BF16, n a multiple of 32.

        The values of `quantize_scaled`, rounded to nearest, ties to even. NaN becomes 0x7FC0 with
        the sign of element times factor.

        Args:
            source: n elements of `dtype`, flat.
            dtype: One of `SCALED_TYPES`.
            factors: n / 32 float32, one for each block, finite and not negative.
            output_bf16: Receives n elements.

        Returns:
            How many of them are NaN or infinite, be it that they overflow BF16 alone.

        Raises:
            ValueError: A buffer has the wrong size, is not contiguous or cannot be written, or
                `dtype` is not FP8.
        """

    def scan(self, src: Buffer, dtype: FloatType) -> NonFinite:
        """Count NaN and infinite elements of a tensor of any length and of any type.

        Args:
            src: Whole elements of `dtype`.
            dtype: The type of the elements of `src`.

        Raises:
            ValueError: `src` is not contiguous or ends within an element.
        """
