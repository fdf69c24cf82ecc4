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


_ROW: Final = np.dtype((np.void, PACKED_BLOCK_BYTES))
_COUNT_BYTES: Final = 1 << 16
"""A sample of more bytes of codes is counted and let go."""


class Histograms(NamedTuple):
    """Counts over the sampled blocks."""

    codes: Counts
    """Of each of the 16 codes."""
    scales: Counts
    """Of each of the 256 scale bytes."""


class HistogramSampler:
    """Collects the sample piece by piece and counts it seldom, which costs less for small pieces.

    Args:
        every: The blocks whose index in the tensor is a multiple of it are in the sample; 1 counts
            every block.

    Raises:
        ValueError: `every` is not positive.
    """

    def __init__(self, every: int = SAMPLE_EVERY) -> None:
        if every < 1:
            raise ValueError(f"every: expected at least 1, found {every}")
        self._every = every
        self._codes, self._scales = bytearray(), bytearray()
        self._pairs = np.zeros(256, np.int64)
        self._scale_counts = np.zeros(256, np.int64)

    def add(self, packed: Buffer, scales: Buffer, first_block: int = 0) -> None:
        """Take the sample of a piece; one thread at a time.

        Args:
            packed: Codes, 16 bytes to a block.
            scales: Scale bytes, one to a block.
            first_block: The index in its tensor of the first block of the piece.

        Raises:
            ValueError: The sizes do not fit together, or `first_block` is negative.
        """
        blocks = byte_length(scales, "scales")
        if (found := byte_length(packed, "packed")) != blocks * PACKED_BLOCK_BYTES:
            raise ValueError(
                f"packed: expected {blocks * PACKED_BLOCK_BYTES} bytes for {blocks} scales, "
                f"found {found} bytes"
            )
        if first_block < 0:
            raise ValueError(f"first_block: expected at least 0, found {first_block}")
        start = -first_block % self._every
        if start >= blocks:
            return
        self._scales += np.frombuffer(memoryview(scales), np.uint8)[start :: self._every].tobytes()
        # One item to a block: numpy gathers those faster than rows.
        self._codes += np.frombuffer(memoryview(packed), _ROW)[start :: self._every].tobytes()
        if len(self._codes) >= _COUNT_BYTES:
            self._count()

    def histograms(self) -> Histograms:
        """The counts over all pieces so far."""
        self._count()
        low_first = self._pairs.reshape(16, 16)
        codes = low_first.sum(axis=0) + low_first.sum(axis=1)
        return Histograms(codes, self._scale_counts.copy())

    def _count(self) -> None:
        self._pairs += np.bincount(np.frombuffer(self._codes, np.uint8), minlength=256)
        self._scale_counts += np.bincount(np.frombuffer(self._scales, np.uint8), minlength=256)
        self._codes, self._scales = bytearray(), bytearray()


def histograms(
    packed: Buffer, scales: Buffer, every: int = SAMPLE_EVERY, first_block: int = 0
) -> Histograms:
    """Count codes and scales in the blocks whose index in the tensor is a multiple of `every`.

    The sample depends on neither the data nor how the tensor is cut into pieces, so counts of
    pieces add up to those of the whole. Parameters and errors are those of `HistogramSampler`.
    """
    sampler = HistogramSampler(every)
    sampler.add(packed, scales, first_block)
    return sampler.histograms()
