"""Blocks to quantize and helpers to do it; bits are unsigned integers `[blocks, 32]`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from mxconvert_kernels import BLOCK_SIZE, Backend, ErrorSums, FloatType, NonFinite, ScaleRule

UNSIGNED = {FloatType.BF16: np.uint16, FloatType.F16: np.uint16, FloatType.F32: np.uint32}
UNWRITTEN = 0xA5


class Result(NamedTuple):
    packed: np.ndarray
    scales: np.ndarray
    nonfinite: NonFinite


def quantize(backend: Backend, bits: np.ndarray, dtype: FloatType, rule: ScaleRule) -> Result:
    blocks = bits.size // BLOCK_SIZE
    packed = np.full((blocks, BLOCK_SIZE // 2), UNWRITTEN, np.uint8)
    scales = np.full(blocks, UNWRITTEN, np.uint8)
    return Result(packed, scales, backend.quantize(bits, dtype, rule, packed, scales))


def sum_errors(backend: Backend, bits: np.ndarray, dtype: FloatType, rule: ScaleRule) -> ErrorSums:
    found = ErrorSums()
    packed = np.zeros(bits.size // 2, np.uint8)
    scales = np.zeros(bits.size // BLOCK_SIZE, np.uint8)
    backend.quantize(bits, dtype, rule, packed, scales, sums=found)
    return found


def dequantize(backend: Backend, packed, scales, dtype: FloatType) -> np.ndarray:
    out = np.full((scales.size, BLOCK_SIZE), UNWRITTEN, UNSIGNED[dtype])
    backend.dequantize(packed, scales, dtype, out)
    return out


def assert_same(found: Result, expected: Result) -> None:
    np.testing.assert_array_equal(found.scales, expected.scales)
    np.testing.assert_array_equal(found.packed, expected.packed)
    assert found.nonfinite == expected.nonfinite


def codes(packed: np.ndarray) -> np.ndarray:
    """Codes in element order."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), BLOCK_SIZE)


def encode(values, dtype: FloatType) -> np.ndarray:
    """The bits of blocks of values that `dtype` holds exactly; short blocks end in zeros."""
    rows = [list(row) + [0.0] * (BLOCK_SIZE - len(row)) for row in values]
    exact = np.array(rows, np.float64)
    if dtype is FloatType.F16:
        bits = exact.astype(np.float16).view(np.uint16)
    else:
        bits = exact.astype(np.float32).view(np.uint32)
        if dtype is FloatType.BF16:
            assert not (bits & 0xFFFF).any()
            bits = (bits >> 16).astype(np.uint16)
    np.testing.assert_array_equal(to_floats(bits, dtype), exact)
    return bits


def to_floats(bits: np.ndarray, dtype: FloatType) -> np.ndarray:
    """The values as float64."""
    if dtype is FloatType.F16:
        return bits.view(np.float16).astype(np.float64)
    wide = bits.astype(np.uint32) << 16 if dtype is FloatType.BF16 else bits
    with np.errstate(invalid="ignore"):
        return wide.view(np.float32).astype(np.float64)


def random_bits(dtype: FloatType, blocks: int, seed: int) -> np.ndarray:
    """Any bit pattern at all."""
    rng = np.random.default_rng(seed)
    width = 8 * dtype.itemsize
    return rng.integers(0, 1 << width, (blocks, BLOCK_SIZE), np.uint64).astype(UNSIGNED[dtype])


def spread_bits(dtype: FloatType, blocks: int, seed: int, *, top: int | None = None) -> np.ndarray:
    """Blocks of values within 12 binades, half of them on or next to ties.

    Args:
        dtype: What the bits mean.
        blocks: How many blocks.
        seed: Of the random numbers.
        top: The exponent field of the largest values; random for each block by default.
    """
    rng = np.random.default_rng(seed)
    layout = dtype.layout
    shape = (blocks, BLOCK_SIZE)
    highest = (1 << layout.exponent_bits) - 1
    tops = rng.integers(0, highest, (blocks, 1)) if top is None else top
    fields = np.maximum(tops - rng.integers(0, 12, shape), 0)
    mantissas = rng.integers(0, 1 << layout.mantissa_bits, shape)
    coarse = layout.mantissa_bits - 3
    near_tie = (mantissas >> coarse << coarse) + rng.integers(-1, 2, shape)
    mantissas = np.where(rng.random(shape) < 0.5, mantissas, near_tie)
    magnitudes = np.maximum((fields << layout.mantissa_bits) + mantissas, 0)
    magnitudes = np.minimum(magnitudes, layout.infinity - 1)
    signs = rng.integers(0, 2, shape) << (8 * dtype.itemsize - 1)
    return (signs | magnitudes).astype(UNSIGNED[dtype])


def anchored_bits(dtype: FloatType, anchor: int) -> np.ndarray:
    """Every value that a block with this maximum can hold within 10 binades, both signs.

    Args:
        dtype: A 16-bit type.
        anchor: The magnitude bits of the first element of each block, its maximum.
    """
    layout = dtype.layout
    lowest = max(anchor - (10 << layout.mantissa_bits), 0)
    magnitudes = np.arange(lowest, anchor + 1, dtype=np.uint16)
    values = np.concatenate([magnitudes, magnitudes | np.uint16(0x8000)])
    rows = -(-values.size // (BLOCK_SIZE - 1))
    bits = np.zeros((rows, BLOCK_SIZE), np.uint16)
    bits[:, 0] = anchor
    bits[:, 1:] = np.resize(values, (rows, BLOCK_SIZE - 1))
    return bits
