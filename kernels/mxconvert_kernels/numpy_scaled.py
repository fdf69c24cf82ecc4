"""FP8 times factors in numpy, as the bits of float32, by steps that flush no subnormal number."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np

from mxconvert_kernels.lanes import FLOAT32_MANTISSA_BITS, lowest_factor_field
from mxconvert_kernels.spec import FloatType
from mxconvert_kernels.units import UNIT_EXPONENT, float32_product

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_LAYOUT: Final = FloatType.F32.layout
_SIGN: Final = _LAYOUT.magnitude_mask + 1
_ONE: Final = 0x3F800000


def multiply(elements: Array, dtype: FloatType, factors: Array) -> Array:
    """Float32 bits of the values `[B, 32]`.

    Args:
        elements: FP8 bytes `[B, 32]`.
        dtype: Their type.
        factors: The bits of float32 `[B]`.
    """
    bits: Array = _values(dtype).take(elements)
    lowest = lowest_factor_field(dtype.layout) << FLOAT32_MANTISSA_BITS
    with np.errstate(over="ignore", invalid="ignore"):
        bits.view(np.float32)[...] *= factors.view(np.float32)[:, None]
    rows = np.flatnonzero(factors - np.uint32(lowest) >= _LAYOUT.infinity - lowest)
    if rows.size:
        bits[rows] = _multiply_tiny(elements[rows], dtype, factors[rows, None])
    return bits


def narrow(bits: Array) -> Array:
    """Float32 bits as those of BF16, to nearest, ties to even; NaN must end in 16 zeros."""
    lowest_kept = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: Array = (bits + np.uint32(0x7FFF) + lowest_kept) >> np.uint32(16)
    return rounded.astype(np.uint16)


def _multiply_tiny(elements: Array, dtype: FloatType, factors: Array) -> Array:
    """The same for factors `[B, 1]` of any size: products in float64 are exact and normal."""
    values = _values(dtype).take(elements).view(np.float32).astype(np.float64)
    magnitudes = factors & _LAYOUT.magnitude_mask
    smallest_normal = np.uint32(1 << FLOAT32_MANTISSA_BITS)
    exact_factors = np.where(
        magnitudes < smallest_normal,
        magnitudes * 2.0**-UNIT_EXPONENT,
        magnitudes.view(np.float32).astype(np.float64),
    )
    with np.errstate(over="ignore", invalid="ignore"):
        products = np.abs(values) * exact_factors
        small = products < 2.0 ** (1 - _LAYOUT.bias)
        bits = np.where(small, 1.0, products).astype(np.float32).view(np.uint32)
        # A subnormal's bits, and those of the smallest normal number, are its number of units.
        units = np.rint(np.where(small, products, 0.0) * 2.0**UNIT_EXPONENT).astype(np.uint32)
    signs = (elements.astype(np.uint32) << np.uint32(24)) ^ factors
    found: Array = np.where(small, units, bits & _LAYOUT.magnitude_mask)
    found |= signs & np.uint32(_SIGN)
    return found


@cache
def _values(dtype: FloatType) -> Array:
    """The float32 bits of all 256 elements."""
    return np.array([float32_product(code, dtype, _ONE) for code in range(256)], np.uint32)
