"""Scaled FP8, MXFP4 and INT4: one IEEE float32 multiply for each element, no other rounding."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from mxconvert.errors import SourceError
from mxconvert.model import BLOCK_SIZE, CODES_DTYPE, INT4_DTYPE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mxconvert.model import BlockScale, TensorInfo

    Floats = NDArray[np.float32]

FP8_DTYPES = frozenset({"F8_E4M3", "F8_E5M2"})
_WIDE_BITS = {"F16": np.float16, "F32": np.float32}
_NAN_SCALE = 255
_MAGNITUDE = 0x7F
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BF16_OVERFLOW = 0x7F7F8000  # half a step beyond the largest BF16, a tie that goes up


@cache
def fp8_values(dtype: str) -> Floats:
    """Return the value of each byte of an FP8 dtype, exactly, as float32 ``[256]``.

    OCP FP8: ``F8_E4M3`` has no infinities, its NaN is ``S.1111.111``.
    """
    exponent_bits, mantissa_bits = (4, 3) if dtype == "F8_E4M3" else (5, 2)
    bias = (1 << (exponent_bits - 1)) - 1
    codes = np.arange(256)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    fraction = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
    values = np.ldexp(fraction.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    if dtype == "F8_E4M3":
        values[(codes & _MAGNITUDE) == _MAGNITUDE] = np.nan
    else:
        top = exponent == (1 << exponent_bits) - 1
        values[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    signed: Floats = np.where(codes <= _MAGNITUDE, values, -values).astype(np.float32)
    return signed


@cache
def pair_values() -> Floats:
    """Return the values of both E2M1 codes of each byte, the low nibble first: ``[256, 2]``."""
    codes = np.array([*_E2M1, *(-value for value in _E2M1)], np.float32)
    packed = np.arange(256)
    return np.stack([codes[packed & 15], codes[packed >> 4]], axis=1)


@cache
def int_pairs() -> Floats:
    """Return the values of both INT4 of each byte, the low nibble first: ``[256, 2]``.

    Nibble n is n - 8 (compressed-tensors, ``pack_to_int32``).
    """
    packed = np.arange(256)
    return (np.stack([packed & 15, packed >> 4], axis=1) - 8).astype(np.float32)


def _values_of(dtype: str) -> Floats:
    """Return the values of each byte of elements that have scales."""
    if dtype == CODES_DTYPE:
        return pair_values()
    return int_pairs() if dtype == INT4_DTYPE else fp8_values(dtype)


def scale_of(weight: TensorInfo) -> BlockScale:
    """Return the scale of a weight that is known to have one."""
    if weight.scale is None:
        raise AssertionError(f"{weight.name} has no scale")
    return weight.scale


def decode_scales(dtype: str, raw: bytearray) -> Floats:
    """Return stored scales as float32.

    Args:
        dtype: ``F8_E8M0`` or ``U8`` (byte b is 2^(b - 127), 255 is NaN), ``BF16``, ``F16`` or
            ``F32``.
        raw: Their bytes.
    """
    if dtype in ("F8_E8M0", "U8"):
        codes = np.frombuffer(raw, np.uint8).astype(np.int32)
        values = np.ldexp(np.float64(1), codes - 127)
        return np.where(codes == _NAN_SCALE, np.nan, values).astype(np.float32)
    if dtype == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, _WIDE_BITS[dtype]).astype(np.float32)


def stored_shape(weight: TensorInfo) -> tuple[int, int]:
    """Return rows and columns of a matrix in the order in which it is stored."""
    first, second = weight.shape
    return (second, first) if weight.transposed else (first, second)


def dequantize_rows(weight: TensorInfo, grid: Floats, first_row: int, data: memoryview) -> Floats:
    """Return whole stored rows of an FP8, MXFP4 or INT4 weight as float32 ``[rows, columns]``.

    Args:
        weight: The weight.
        grid: Its scales.
        first_row: Number of the first stored row in ``data``.
        data: The rows' bytes.

    Raises:
        SourceError: A scale is zero though its weights are not.
    """
    scale = scale_of(weight)
    columns = stored_shape(weight)[1]
    values = _values_of(weight.dtype)[np.frombuffer(data, np.uint8)].reshape(-1, columns)
    rows = np.arange(first_row, first_row + len(values)) // scale.rows
    factors = np.repeat(grid[rows], scale.columns, axis=1)[:, :columns]
    if not grid.all() and values[factors == 0].any():
        raise SourceError(
            f"{scale.tensor.file}: tensor {scale.tensor.name!r}: a scale is 0, but weights of "
            f"{weight.name} that it scales are not",
            hint="mend the checkpoint",
            code="bad-scale",
        )
    with np.errstate(over="ignore", invalid="ignore"):
        values *= factors
    return values


def has_block_factors(weight: TensorInfo) -> bool:
    """Whether the 32 elements of each block of a row of FP8 share a scale."""
    if weight.dtype not in FP8_DTYPES:
        return False
    columns, width = weight.shape[1], scale_of(weight).columns
    return columns % BLOCK_SIZE == 0 and (width % BLOCK_SIZE == 0 or width >= columns)


def block_factors(weight: TensorInfo, grid: Floats, first_block: int, count: int) -> Floats:
    """Return the scale of each block of 32 along the rows, float32 ``[count]``.

    For weights that are not transposed and whose scales change only between blocks.
    """
    scale = scale_of(weight)
    per_row = weight.shape[1] // BLOCK_SIZE
    blocks = np.arange(first_block, first_block + count)
    rows, columns = blocks // per_row // scale.rows, blocks % per_row * BLOCK_SIZE // scale.columns
    factors: Floats = np.ascontiguousarray(grid[rows, columns])
    return factors


def has_bf16(values: Floats) -> NDArray[np.bool_]:
    """Whether each float32 is finite and stays so when it is rounded to BF16."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    fits: NDArray[np.bool_] = (bits & np.uint32(0x7FFFFFFF)) < np.uint32(_BF16_OVERFLOW)
    return fits


def to_bf16(values: Floats) -> NDArray[np.uint16]:
    """Round float32 to the bits of BF16, ties to even; of those for which `has_bf16` holds."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype(np.uint16)
