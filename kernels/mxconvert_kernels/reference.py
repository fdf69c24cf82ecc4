"""The oracle: MXFP4 in exact integers, one block at a time, written to be read.

Magnitudes are whole numbers of 2 ** -149, named `n_units` or `units`; see `units`.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from mxconvert_kernels.buffers import (
    byte_length,
    count_blocks,
    count_elements,
    count_scaled_blocks,
    count_widened_blocks,
)
from mxconvert_kernels.error_sums import ErrorSums
from mxconvert_kernels.spec import (
    ALL_FINITE,
    BLOCK_SIZE,
    E2M1_HALVES,
    ELEMENT_EMAX,
    ERROR_FRACTION_BITS,
    MAX_SCALE_BYTE,
    NAN_SCALE_BYTE,
    PACKED_BLOCK_BYTES,
    SCALE_BIAS,
    SIGN_BIT,
    FloatType,
    NonFinite,
    ScaleRule,
)
from mxconvert_kernels.units import (
    UNIT_EXPONENT,
    float32_product,
    magnitude_units,
    narrow_to_bf16,
    nearest_bits,
    quiet_nan,
    round_shift,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

TIES_IN_QUARTERS: Final = (1, 3, 5, 7, 10, 14, 20)
"""Four times the point halfway between the magnitudes of codes i and i + 1."""

BF16_OVERFLOW: Final = 1 << (128 + UNIT_EXPONENT)
"""The first power of two above BF16's range, in units."""


def scale_units(scale_byte: int) -> int:
    """The value of a scale byte in units of 2 ** -149."""
    return 1 << (scale_byte - SCALE_BIAS + UNIT_EXPONENT)


def magnitude_code(units: int, scale_byte: int) -> int:
    """The 3-bit code nearest to a magnitude: ties to the even code, saturating at 6 (code 7)."""
    scale = scale_units(scale_byte)
    code = 0
    for lower, tie in enumerate(TIES_IN_QUARTERS):
        above = 4 * units - tie * scale
        if above > 0 or (above == 0 and lower % 2 == 1):
            code = lower + 1
    return code


def floor_exponent(amax_units: int) -> int:
    """The biased exponent that moves the block maximum into [4, 8), not yet clamped."""
    return amax_units.bit_length() - 1 - UNIT_EXPONENT - ELEMENT_EMAX + SCALE_BIAS


def clamp(scale_byte: int) -> int:
    """The nearest scale byte that is a number."""
    return min(max(scale_byte, 0), MAX_SCALE_BYTE)


def stays_finite(amax_units: int, scale_byte: int) -> bool:
    """Whether the block maximum decodes to a value that is finite in BF16."""
    halves = E2M1_HALVES[magnitude_code(amax_units, scale_byte)]
    return halves * scale_units(scale_byte) < 2 * BF16_OVERFLOW


def keep_finite(amax_units: int, scale_byte: int) -> int:
    """The scale byte, or the next smaller one if the block maximum would overflow BF16."""
    return scale_byte if stays_finite(amax_units, scale_byte) else scale_byte - 1


def squared_error(units: Sequence[int], floor_byte: int, scale_byte: int) -> int:
    """The squared error of a block quantized with `scale_byte`.

    Counts in the square of 2 ** -10 of the scale of `floor_byte`; every magnitude is rounded to a
    whole number of those first. `scale_byte` is at most one away from `floor_byte`.
    """
    unit_shift = floor_byte - SCALE_BIAS - ERROR_FRACTION_BITS + UNIT_EXPONENT
    half_step = 1 << (scale_byte - floor_byte + ERROR_FRACTION_BITS - 1)
    total = 0
    for magnitude in units:
        wanted = round_shift(magnitude, unit_shift)
        found = E2M1_HALVES[magnitude_code(magnitude, scale_byte)] * half_step
        total += (wanted - found) ** 2
    return total


def mse_scale_byte(units: Sequence[int]) -> int:
    """The scale byte of rule `mse`: least squared error, ties to the smaller exponent."""
    amax = max(units)
    floor_byte = clamp(floor_exponent(amax))
    candidates = sorted({clamp(floor_byte + step) for step in (-1, 0, 1)})
    finite = [byte for byte in candidates if stays_finite(amax, byte)]
    return min(finite, key=lambda byte: (squared_error(units, floor_byte, byte), byte))


def choose_scale_byte(units: Sequence[int], rule: ScaleRule) -> int:
    """The scale byte of a block of finite magnitudes.

    Args:
        units: 32 magnitudes in units of 2 ** -149.
        rule: How to choose.
    """
    amax = max(units)
    if amax == 0:
        return 0
    if rule is ScaleRule.MSE:
        return mse_scale_byte(units)
    exponent = floor_exponent(amax)
    if rule is ScaleRule.EVEN:
        binade = 1 << (amax.bit_length() - 1)
        exponent += 4 * amax >= 7 * binade
    elif rule is ScaleRule.RCEIL:
        exponent = clamp(exponent)
        exponent += amax > 6 * scale_units(exponent)
    return keep_finite(amax, clamp(exponent))


def quantize_block(bits: Sequence[int], dtype: FloatType, rule: ScaleRule) -> tuple[int, list[int]]:
    """Quantize one block.

    Args:
        bits: The bit patterns of 32 elements.
        dtype: Their type.
        rule: How the scale is chosen.

    Returns:
        The scale byte and 32 codes of 4 bits; 255 and zeros if an element is not finite.
    """
    units: list[int] = []
    for element in bits:
        magnitude = magnitude_units(element, dtype)
        if magnitude is None:
            return NAN_SCALE_BYTE, [0] * BLOCK_SIZE
        units.append(magnitude)
    scale_byte = choose_scale_byte(units, rule)
    mask = dtype.layout.magnitude_mask
    codes = [
        magnitude_code(magnitude, scale_byte) | (SIGN_BIT if magnitude and element > mask else 0)
        for element, magnitude in zip(bits, units, strict=True)
    ]
    return scale_byte, codes


def decode(code: int, scale_byte: int, dtype: FloatType) -> int:
    """The bit pattern in `dtype` of a 4-bit code under a scale byte."""
    layout = dtype.layout
    sign = (layout.magnitude_mask + 1) if code & SIGN_BIT else 0
    if scale_byte == NAN_SCALE_BYTE:
        return sign | quiet_nan(dtype)
    units = E2M1_HALVES[code & 7] * scale_units(scale_byte) // 2
    return sign | nearest_bits(units, UNIT_EXPONENT, dtype)


class ExactSums:
    """`ErrorSums` without any rounding: squares count in units of 2 ** -298."""

    def __init__(self) -> None:
        self.counts = ErrorSums()
        self.x2 = self.q2 = self.err2 = self.largest = 0

    def add(
        self, bits: Sequence[int], codes: Sequence[int], scale_byte: int, dtype: FloatType
    ) -> None:
        """Add a quantized block of finite elements."""
        units = [magnitude_units(element, dtype) or 0 for element in bits]
        amax = max(units)
        floor_byte = clamp(floor_exponent(amax)) if amax else 0
        below, floor, above = (
            int(scale_byte < floor_byte),
            int(scale_byte == floor_byte),
            int(scale_byte > floor_byte),
        )
        scale = scale_units(scale_byte)
        flushed = saturated = 0
        for x, code in zip(units, codes, strict=True):
            q = E2M1_HALVES[code & 7] * scale // 2
            self.x2 += x * x
            self.q2 += q * q
            self.err2 += (x - q) ** 2
            self.largest = max(self.largest, abs(x - q))
            flushed += x > 0 and q == 0
            saturated += x > 6 * scale
        self.counts.add(
            ErrorSums(
                elements=BLOCK_SIZE,
                blocks=1,
                flushed=flushed,
                saturated=saturated,
                exponents=(below, floor, above),
            )
        )

    def rounded(self) -> ErrorSums:
        """The sums in float64, each rounded once."""
        unit, squared = 1 << UNIT_EXPONENT, 1 << 2 * UNIT_EXPONENT
        return replace(
            self.counts,
            sum_x2=self.x2 / squared,
            sum_q2=self.q2 / squared,
            sum_err2=self.err2 / squared,
            max_abs_err=self.largest / unit,
        )


class ReferenceBackend:
    """The oracle behind the backends' interface; slow, for tests and small tensors."""

    name = "reference"

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
        blocks = count_blocks(
            byte_length(src, "src"),
            dtype,
            byte_length(packed, "packed", writable=True),
            byte_length(scales, "scales", writable=True),
            "src",
        )
        elements = _read_elements(src, dtype)
        packed_out, scales_out = _writable_bytes(packed), _writable_bytes(scales)
        exact = ExactSums()
        for block in range(blocks):
            bits = elements[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
            scales_out[block], codes = quantize_block(bits, dtype, rule)
            if sums is not None and scales_out[block] != NAN_SCALE_BYTE:
                exact.add(bits, codes, scales_out[block], dtype)
            for i in range(PACKED_BLOCK_BYTES):
                byte = codes[2 * i] | codes[2 * i + 1] << 4
                packed_out[block * PACKED_BLOCK_BYTES + i] = byte
        if sums is not None:
            sums.add(exact.rounded())
        return self.scan(src, dtype)

    def dequantize(self, packed: Buffer, scales: Buffer, dtype: FloatType, out: Buffer) -> None:
        """See `Backend.dequantize`."""
        count_blocks(
            byte_length(out, "out", writable=True),
            dtype,
            byte_length(packed, "packed"),
            byte_length(scales, "scales"),
            "out",
        )
        packed_in, scales_in = memoryview(packed).tobytes(), memoryview(scales).tobytes()
        out_bytes = _writable_bytes(out)
        size = dtype.itemsize
        for i, byte in enumerate(packed_in):
            for half, code in enumerate((byte & 15, byte >> 4)):
                bits = decode(code, scales_in[i // PACKED_BLOCK_BYTES], dtype)
                at = (2 * i + half) * size
                out_bytes[at : at + size] = bits.to_bytes(size, "little")

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
        count_scaled_blocks(
            byte_length(source, "source"),
            dtype,
            byte_length(factors, "factors"),
            byte_length(packed, "packed", writable=True),
            byte_length(scales, "scales", writable=True),
        )
        values = _join_elements(_multiply(source, dtype, factors), FloatType.F32)
        return self.quantize(values, FloatType.F32, rule, packed, scales, sums=sums)

    def widen_scaled(
        self, source: Buffer, dtype: FloatType, factors: Buffer, output_bf16: Buffer
    ) -> NonFinite:
        """See `Backend.widen_scaled`."""
        count_widened_blocks(
            byte_length(source, "source"),
            dtype,
            byte_length(factors, "factors"),
            byte_length(output_bf16, "output_bf16", writable=True),
        )
        values = [narrow_to_bf16(bits) for bits in _multiply(source, dtype, factors)]
        _writable_bytes(output_bf16)[:] = _join_elements(values, FloatType.BF16)
        return self.scan(output_bf16, FloatType.BF16)

    def scan(self, src: Buffer, dtype: FloatType) -> NonFinite:
        """See `Backend.scan`."""
        count_elements(byte_length(src, "src"), dtype, "src")
        found = [
            index
            for index, bits in enumerate(_read_elements(src, dtype))
            if magnitude_units(bits, dtype) is None
        ]
        return NonFinite(count=len(found), first=found[0]) if found else ALL_FINITE


def _read_elements(src: Buffer, dtype: FloatType) -> list[int]:
    """The bit patterns of all elements."""
    data, size = memoryview(src).tobytes(), dtype.itemsize
    return [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]


def _join_elements(bits: Sequence[int], dtype: FloatType) -> bytes:
    """The inverse of `_read_elements`."""
    return b"".join(element.to_bytes(dtype.itemsize, "little") for element in bits)


def _multiply(source: Buffer, dtype: FloatType, factors: Buffer) -> list[int]:
    """The float32 bits of all elements times their blocks' factors."""
    by_block = _read_elements(factors, FloatType.F32)
    return [
        float32_product(element, dtype, by_block[index // BLOCK_SIZE])
        for index, element in enumerate(_read_elements(source, dtype))
    ]


def _writable_bytes(buffer: Buffer) -> memoryview:
    """A view of a buffer's bytes, whatever the type of its items."""
    nbytes = memoryview(buffer).nbytes
    return memoryview((ctypes.c_ubyte * nbytes).from_buffer(buffer)).cast("B")
