"""The error sums in numpy, in float64: from a chunk's elements and what they were quantized to."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

from mxconvert_kernels.error_sums import ErrorSums
from mxconvert_kernels.spec import (
    BLOCK_SIZE,
    E2M1_HALVES,
    ELEMENT_EMAX,
    NAN_SCALE_BYTE,
    SCALE_BIAS,
    SIGN_BIT,
    FloatType,
)

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

VALUES: Final = np.array(E2M1_HALVES * 2, np.float64) / 2
"""Magnitudes of the 16 codes."""


def sum_chunk(bits: Array, dtype: FloatType, packed: Array, scales: Array) -> ErrorSums:
    """The sums of the blocks of numbers.

    Args:
        bits: Elements `[B, 32]`.
        dtype: Their type.
        packed: Codes `[B, 16]`.
        scales: Scale bytes `[B]`.
    """
    finite = scales != NAN_SCALE_BYTE
    if not finite.all():
        bits, packed, scales = bits[finite], packed[finite], scales[finite]
    blocks = len(scales)
    if blocks == 0:
        return ErrorSums()
    x = _magnitudes(bits, dtype)
    codes = np.empty((blocks, BLOCK_SIZE), np.uint8)
    codes[:, ::2], codes[:, 1::2] = packed & (2 * SIGN_BIT - 1), packed >> 4
    scale = np.ldexp(1.0, scales.astype(np.int32) - SCALE_BIAS)[:, None]
    q = VALUES[codes] * scale
    error = x - q
    floor = np.frexp(x.max(axis=1))[1] - 1 - ELEMENT_EMAX + SCALE_BIAS
    floor = np.where(x.any(axis=1), np.maximum(floor, 0), 0)
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
    magnitudes = bits & layout.magnitude_mask
    field = (magnitudes >> layout.mantissa_bits).astype(np.int32)
    mantissa = (magnitudes & ((1 << layout.mantissa_bits) - 1)).astype(np.int64)
    mantissa += (field > 0).astype(np.int64) << layout.mantissa_bits
    exponent = np.maximum(field, 1) - (layout.bias + layout.mantissa_bits)
    values: Array = np.ldexp(mantissa.astype(np.float64), exponent)
    return values


def _sum_of_squares(values: Array) -> float:
    flat = values.ravel()
    return float(np.dot(flat, flat))
