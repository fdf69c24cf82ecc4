"""How often each code and each scale occurs, on a sample of the blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from mxconvert_kernels.buffers import byte_length
from mxconvert_kernels.spec import PACKED_BLOCK_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

Counts: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

SAMPLE_EVERY: Final = 1021
"""A prime, so that the sample does not stay in the same columns of a matrix."""


class Histograms(NamedTuple):
    """Counts over the sampled blocks."""

    codes: Counts
    """Of each of the 16 codes."""
    scales: Counts
    """Of each of the 256 scale bytes."""


def histograms(
    packed: Buffer, scales: Buffer, every: int = SAMPLE_EVERY, first_block: int = 0
) -> Histograms:
    """Count codes and scales in the blocks whose index in the tensor is a multiple of `every`.

    The sample depends on neither the data nor how the tensor is cut into pieces, so counts of
    pieces add up to those of the whole.

    Args:
        packed: Codes, 16 bytes to a block.
        scales: Scale bytes, one to a block.
        every: 1 counts every block.
        first_block: The index in the tensor of the first block of the piece.

    Raises:
        ValueError: The sizes do not fit together, or `every` or `first_block` is out of range.
    """
    blocks = byte_length(scales, "scales")
    expected = blocks * PACKED_BLOCK_BYTES
    if (found := byte_length(packed, "packed")) != expected:
        raise ValueError(
            f"packed: expected {expected} bytes for {blocks} scales, found {found} bytes"
        )
    if every < 1 or first_block < 0:
        raise ValueError(
            f"expected every >= 1 and first_block >= 0, found {every} and {first_block}"
        )
    if blocks == 0:
        return Histograms(np.zeros(16, np.int64), np.zeros(256, np.int64))
    sample = slice(-first_block % every, None, every)
    scale_bytes = np.frombuffer(memoryview(scales), np.uint8)[sample]
    # One item to a block: numpy gathers those faster than rows.
    rows = np.frombuffer(memoryview(packed), np.dtype((np.void, PACKED_BLOCK_BYTES)))[sample]
    pairs = np.bincount(np.ascontiguousarray(rows).view(np.uint8), minlength=256)
    by_nibble = pairs.reshape(16, 16)
    return Histograms(
        (by_nibble.sum(axis=0) + by_nibble.sum(axis=1)).astype(np.int64, copy=False),
        np.bincount(scale_bytes, minlength=256).astype(np.int64, copy=False),
    )
