"""Checks on the buffers that callers pass in, shared by the backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxconvert_kernels.spec import (
    BLOCK_SIZE,
    FACTOR_BYTES,
    PACKED_BLOCK_BYTES,
    SCALED_TYPES,
    WHOLE_TYPES,
    FloatType,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer


def byte_length(buffer: Buffer, name: str, *, writable: bool = False) -> int:
    """The size of a buffer in bytes.

    Raises:
        ValueError: The buffer is not C-contiguous, or is to be written and cannot be.
    """
    with memoryview(buffer) as view:
        if not view.c_contiguous:
            raise ValueError(
                f"{name}: expected a C-contiguous buffer, found strides {view.strides}"
            )
        if writable and view.readonly:
            raise ValueError(f"{name}: expected a writable buffer, found a read-only one")
        return view.nbytes


def count_elements(float_bytes: int, dtype: FloatType, name: str) -> int:
    """The number of elements in a buffer of floats.

    Raises:
        ValueError: The buffer ends within an element.
    """
    if float_bytes % dtype.itemsize:
        raise ValueError(
            f"{name}: expected a multiple of {dtype.itemsize} bytes for {dtype}, "
            f"found {float_bytes} bytes"
        )
    return float_bytes // dtype.itemsize


def count_blocks(
    float_bytes: int, dtype: FloatType, packed_bytes: int, scale_bytes: int, name: str
) -> int:
    """The number of blocks that a tensor of floats and its codes and scales hold.

    Args:
        float_bytes: Size of the buffer of floats, called `name`.
        dtype: The type of the floats.
        packed_bytes: Size of the buffer of codes.
        scale_bytes: Size of the buffer of scales.
        name: What to call the buffer of floats in messages.

    Raises:
        ValueError: The sizes do not fit together, or floats of this type need factors.
    """
    _check_type(dtype, WHOLE_TYPES)
    blocks = _count(float_bytes, dtype, name)
    _check_codes(blocks, packed_bytes, scale_bytes)
    return blocks


def count_scaled_blocks(
    source_bytes: int, dtype: FloatType, factor_bytes: int, packed_bytes: int, scale_bytes: int
) -> int:
    """The number of blocks that a tensor of FP8, its factors, codes and scales hold.

    Raises:
        ValueError: The sizes do not fit together, or the type is not FP8.
    """
    blocks = _count_with_factors(source_bytes, dtype, factor_bytes)
    _check_codes(blocks, packed_bytes, scale_bytes)
    return blocks


def count_widened_blocks(
    source_bytes: int, dtype: FloatType, factor_bytes: int, output_bytes: int
) -> int:
    """The number of blocks that a tensor of FP8, its factors and a tensor of BF16 hold.

    Raises:
        ValueError: The sizes do not fit together, or the type is not FP8.
    """
    blocks = _count_with_factors(source_bytes, dtype, factor_bytes)
    _check(output_bytes, "output_bf16", blocks, BLOCK_SIZE * FloatType.BF16.itemsize)
    return blocks


def _count_with_factors(source_bytes: int, dtype: FloatType, factor_bytes: int) -> int:
    _check_type(dtype, SCALED_TYPES)
    blocks = _count(source_bytes, dtype, "source")
    _check(factor_bytes, "factors", blocks, FACTOR_BYTES)
    return blocks


def _count(float_bytes: int, dtype: FloatType, name: str) -> int:
    block_bytes = BLOCK_SIZE * dtype.itemsize
    if float_bytes % block_bytes:
        raise ValueError(
            f"{name}: expected a multiple of {block_bytes} bytes (blocks of {BLOCK_SIZE} {dtype} "
            f"elements), found {float_bytes} bytes"
        )
    return float_bytes // block_bytes


def _check_codes(blocks: int, packed_bytes: int, scale_bytes: int) -> None:
    _check(packed_bytes, "packed", blocks, PACKED_BLOCK_BYTES)
    _check(scale_bytes, "scales", blocks, 1)


def _check(found_bytes: int, name: str, blocks: int, block_bytes: int) -> None:
    """Refuse a buffer that does not have so many bytes for each block."""
    if found_bytes != blocks * block_bytes:
        raise ValueError(
            f"{name}: expected {blocks * block_bytes} bytes for {blocks * BLOCK_SIZE} elements, "
            f"found {found_bytes} bytes"
        )


def _check_type(dtype: FloatType, known: Sequence[FloatType]) -> None:
    if dtype not in known:
        *most, last = known
        raise ValueError(f"dtype: expected {', '.join(most)} or {last}, found {dtype}")
