"""The error sums in numpy, in float64: from a chunk's elements and what they were quantized to."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

from mxconvert_kernels.error_sums import ErrorSums
from mxconvert_kernels.spec import (
    E2M1_HALVES,
    ELEMENT_EMAX,
    NAN_SCALE_BYTE,
    SCALE_BIAS,
    FloatType,
)

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

PART_BLOCKS: Final = 256
"""Blocks whose values in float64 are small enough for the allocator to keep: 64 KiB."""

_FLOAT64_MANTISSA_BITS: Final = 52
_FLOAT64_BIAS: Final = 1023
_VALUES: Final = np.array(E2M1_HALVES * 2, np.float64) / 2
_BYTES: Final = np.arange(256)
_PAIRS: Final = _VALUES[_BYTES & 15] + 1j * _VALUES[_BYTES >> 4]
"""Magnitudes of the two codes in a byte, side by side in memory."""


def sum_blocks(bits: Array, dtype: FloatType, packed: Array, scales: Array) -> ErrorSums:
    """The sums of the blocks of numbers.

    Args:
        bits: Elements `[B, 32]`.
        dtype: Their type.
        packed: Codes `[B, 16]`.
        scales: Scale bytes `[B]`.
    """
    sums = ErrorSums()
    for start in range(0, len(scales), PART_BLOCKS):
        part = slice(start, start + PART_BLOCKS)
        sums.add(_sum_part(bits[part], dtype, packed[part], scales[part]))
    return sums


def _sum_part(bits: Array, dtype: FloatType, packed: Array, scales: Array) -> ErrorSums:
    finite = scales != NAN_SCALE_BYTE
    if not finite.all():
        bits, packed, scales = bits[finite], packed[finite], scales[finite]
    blocks = len(scales)
    if blocks == 0:
        return ErrorSums()
    x = _magnitudes(bits, dtype)
    scale = np.ldexp(1.0, scales.astype(np.int32) - SCALE_BIAS)[:, None]
    q = _PAIRS.take(packed).view(np.float64)
    q *= scale
    error = x - q
    amax = np.ascontiguousarray(x.T).max(axis=0)  # faster than reducing a short axis
    floor = np.frexp(amax)[1] - 1 - ELEMENT_EMAX + SCALE_BIAS
    floor = np.where(amax > 0, np.maximum(floor, 0), 0)
    below, above = int((scales < floor).sum()), int((scales > floor).sum())
    return ErrorSums(
        elements=x.size,
        blocks=blocks,
        sum_x2=_sum_of_squares(x),
        sum_q2=_sum_of_squares(q),
        sum_err2=_sum_of_squares(error),
        max_abs_err=float(np.abs(error).max()),
        flushed=int(np.count_nonzero((q == 0) & (x > 0))),
        saturated=int(np.count_nonzero(x > E2M1_HALVES[-1] / 2 * scale)),
        exponents=(below, blocks - below - above, above),
    )


def _magnitudes(bits: Array, dtype: FloatType) -> Array:
    """Magnitudes in float64, by steps that flush no subnormal number."""
    layout = dtype.layout
    magnitudes = (bits & layout.magnitude_mask).astype(np.int64)
    missing_bits = _FLOAT64_MANTISSA_BITS - layout.mantissa_bits
    rebias = (_FLOAT64_BIAS - layout.bias) << _FLOAT64_MANTISSA_BITS
    values: Array = ((magnitudes << missing_bits) + rebias).view(np.float64)
    small = magnitudes < 1 << layout.mantissa_bits
    if small.any():
        unit = 2.0 ** (1 - layout.bias - layout.mantissa_bits)
        values[small] = magnitudes[small] * unit
    return values


def _sum_of_squares(values: Array) -> float:
    flat = values.ravel()
    return float(np.dot(flat, flat))
