"""Floats as exact integers: the arithmetic that the oracle is written in.

Every finite value of BF16, F16, F32 and FP8 is a whole multiple of 2 ** -149, the smallest float32.
Magnitudes are held as that multiple (a Python integer, named `n_units` or `units`), so that no
step rounds unless the format does.
"""

from __future__ import annotations

from typing import Final

from mxconvert_kernels.spec import FloatType

UNIT_EXPONENT: Final = 149
"""Magnitudes count in units of 2 ** -149."""


def magnitude_units(bits: int, dtype: FloatType) -> int | None:
    """The magnitude of an element in units of 2 ** -149, None if it is NaN or infinite."""
    layout = dtype.layout
    bits &= layout.magnitude_mask
    if bits >= layout.infinity:
        return None
    field = bits >> layout.mantissa_bits
    mantissa = bits & ((1 << layout.mantissa_bits) - 1)
    if field:
        mantissa |= 1 << layout.mantissa_bits
    exponent = max(field, 1) - layout.bias - layout.mantissa_bits
    return mantissa << (exponent + UNIT_EXPONENT)


def round_shift(value: int, shift: int) -> int:
    """Value / 2 ** shift, rounded to nearest, ties to even."""
    quotient, remainder = divmod(value, 1 << shift)
    half = (1 << shift) >> 1
    up = remainder > half or (remainder == half and quotient % 2 == 1)
    return quotient + int(up and shift > 0)


def nearest_bits(units: int, unit_exponent: int, dtype: FloatType) -> int:
    """The magnitude bits nearest to units * 2 ** -unit_exponent, ties to even.

    What is too large becomes infinite, as IEEE 754 conversion does. `unit_exponent` is at least
    149; `dtype` has an infinity.
    """
    layout = dtype.layout
    smallest_exponent = 1 - layout.bias - layout.mantissa_bits
    field = max(units.bit_length() - 1 - unit_exponent + layout.bias, 1)
    mantissa = round_shift(units, smallest_exponent + unit_exponent + field - 1)
    # The hidden bit of a normal number carries into the field, hence `field - 1`.
    return min(((field - 1) << layout.mantissa_bits) + mantissa, layout.infinity)


def quiet_nan(dtype: FloatType) -> int:
    """The magnitude bits of NaN; `dtype` has an infinity."""
    return dtype.layout.infinity | 1 << (dtype.layout.mantissa_bits - 1)


def float32_product(element: int, dtype: FloatType, factor: int) -> int:
    """The float32 bits of an element times a float32, rounded once.

    Args:
        element: The bits of the element.
        dtype: Its type.
        factor: The bits of a finite float32.
    """
    layout, wide = dtype.layout, FloatType.F32.layout
    negative = (element > layout.magnitude_mask) != (factor > wide.magnitude_mask)
    sign = wide.magnitude_mask + 1 if negative else 0
    value, multiplier = magnitude_units(element, dtype), magnitude_units(factor, FloatType.F32)
    if value is not None and multiplier is not None:
        return sign | nearest_bits(value * multiplier, 2 * UNIT_EXPONENT, FloatType.F32)
    is_infinity = layout.has_infinity and element & layout.magnitude_mask == layout.infinity
    return sign | (wide.infinity if is_infinity and multiplier else quiet_nan(FloatType.F32))


def narrow_to_bf16(bits: int) -> int:
    """A float32 as BF16, rounded to nearest, ties to even."""
    sign, magnitude = bits >> 31 << 15, magnitude_units(bits, FloatType.F32)
    if magnitude is not None:
        return sign | nearest_bits(magnitude, UNIT_EXPONENT, FloatType.BF16)
    return bits >> 16
