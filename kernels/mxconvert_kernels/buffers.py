"""Checks on the buffers that callers pass in, shared by the backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxconvert_kernels.spec import BLOCK_SIZE, PACKED_BLOCK_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from mxconvert_kernels.spec import FloatType


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
        ValueError: The sizes do not fit together.
    """
    block_bytes = BLOCK_SIZE * dtype.itemsize
    if float_bytes % block_bytes:
        raise ValueError(
            f"{name}: expected a multiple of {block_bytes} bytes (blocks of {BLOCK_SIZE} {dtype} "
            f"elements), found {float_bytes} bytes"
        )
    blocks = float_bytes // block_bytes
    if packed_bytes != blocks * PACKED_BLOCK_BYTES:
        raise ValueError(
            f"packed: expected {blocks * PACKED_BLOCK_BYTES} bytes for {blocks * BLOCK_SIZE} "
            f"elements, found {packed_bytes} bytes"
        )
    if scale_bytes != blocks:
        raise ValueError(
            f"scales: expected {blocks} bytes for {blocks * BLOCK_SIZE} elements, "
            f"found {scale_bytes} bytes"
        )
    return blocks
