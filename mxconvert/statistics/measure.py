"""Measuring a stored weight against the tensor it was made from, piece by piece.

Codes are decoded by the kernels; everything here is float64 on whole blocks, so that the result
does not depend on the code that wrote them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mxconvert.model import BLOCK_SIZE
from mxconvert.statistics.figures import Sums

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from mxconvert.model import TensorInfo

    Doubles = NDArray[np.float64]
    Bytes = NDArray[np.uint8]

PIECE_ELEMENTS = 512 * 1024
"""Elements in memory at a time, whole blocks."""

ITEM_SIZES = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes of an element of the dtypes that the kernels take."""

_BF16_SHIFT = 16
_CODES = 16
_BYTES = 256
_LARGEST = 6.0
_ELEMENT_EMAX = 2
_BIAS = 127


class RangeReader(Protocol):
    """Serves byte ranges of files."""

    def read_into(self, file: str, offset: int, buffer: memoryview, /) -> None:
        """Fill ``buffer`` from ``file`` at ``offset``."""


class Decoder(Protocol):
    """Decodes codes and scales into float32 bytes."""

    def __call__(self, codes: bytearray, scales: bytearray, out: bytearray, /) -> None:
        """Fill ``out`` with one float32 for each code."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where bytes begin: a file and an offset in it."""

    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Where the codes and the scales of a weight lie, in row-major order of its blocks."""

    codes: Place
    scales: Place

    def read(self, reader: RangeReader, first: int, count: int) -> tuple[bytearray, bytearray]:
        """Return codes and scales of ``count`` blocks from block ``first`` on."""
        half = BLOCK_SIZE // 2
        codes, scales = bytearray(count * half), bytearray(count)
        reader.read_into(self.codes.file, self.codes.offset + first * half, memoryview(codes))
        reader.read_into(self.scales.file, self.scales.offset + first, memoryview(scales))
        return codes, scales


@dataclass(slots=True)
class Counts:
    """Codes and scale bytes counted so far."""

    codes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_CODES, np.int64))
    scales: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BYTES, np.int64))

    def add(self, codes: bytearray, scales: bytearray) -> None:
        """Count the two codes of each byte, and each scale byte."""
        pairs = np.bincount(np.frombuffer(codes, np.uint8), minlength=_BYTES)
        pairs = pairs.reshape(_CODES, _CODES)
        self.codes += pairs.sum(axis=0) + pairs.sum(axis=1)
        self.scales += np.bincount(np.frombuffer(scales, np.uint8), minlength=_BYTES)


def as_float64(data: bytearray, dtype: str) -> Doubles:
    """Return little-endian elements of a kernel dtype as float64."""
    if dtype == "BF16":
        bits = np.frombuffer(data, "<u2").astype(np.uint32) << _BF16_SHIFT
        return bits.view(np.float32).astype(np.float64)
    return np.frombuffer(data, "<f2" if dtype == "F16" else "<f4").astype(np.float64)


def measure_weight(
    weight: StoredWeight,
    stored: RangeReader,
    source: TensorInfo,
    originals: RangeReader,
    decode: Decoder,
    *,
    counts: Counts | None = None,
    advanced: Callable[[int], None] = lambda _: None,
) -> Sums:
    """Decode a weight and compare it with the tensor it was made from.

    Args:
        weight: Where its codes and scales lie.
        stored: Reads them.
        source: The original, of a dtype of `ITEM_SIZES` and whole blocks.
        originals: Reads it.
        decode: The kernels.
        counts: Also counts codes and scales.
        advanced: Told the bytes of source after each piece.
    """
    item = ITEM_SIZES[source.dtype]
    elements = source.size // item
    total = Sums()
    for begin in range(0, elements, PIECE_ELEMENTS):
        count = min(PIECE_ELEMENTS, elements - begin)
        original = bytearray(count * item)
        originals.read_into(source.file, source.offset + begin * item, memoryview(original))
        codes, scales = weight.read(stored, begin // BLOCK_SIZE, count // BLOCK_SIZE)
        decoded = bytearray(count * 4)
        decode(codes, scales, decoded)
        total += measure_blocks(
            as_float64(original, source.dtype),
            as_float64(decoded, "F32"),
            np.frombuffer(scales, np.uint8),
        )
        if counts is not None:
            counts.add(codes, scales)
        advanced(len(original))
    return total


def measure_blocks(original: Doubles, decoded: Doubles, scales: Bytes) -> Sums:
    """Return the sums over whole blocks.

    Args:
        original: ``[32 n]`` elements.
        decoded: Their stored values.
        scales: ``[n]`` E8M0 bytes.
    """
    error = decoded - original
    magnitudes = np.abs(original).reshape(-1, BLOCK_SIZE)
    limits = np.ldexp(_LARGEST, scales.astype(np.int32) - _BIAS)
    steps = scales.astype(np.int32) - floor_scales(magnitudes.max(axis=1, initial=0.0))
    below, floor, above = (int(np.count_nonzero(steps == step)) for step in (-1, 0, 1))
    return Sums(
        elements=original.size,
        blocks=scales.size,
        sum_x2=float(np.square(original).sum()),
        sum_q2=float(np.square(decoded).sum()),
        sum_err2=float(np.square(error).sum()),
        max_abs_err=float(np.abs(error).max(initial=0.0)),
        flushed=int(np.count_nonzero((original != 0) & (decoded == 0))),
        saturated=int(np.count_nonzero(magnitudes > limits[:, None])),
        exponents=(below, floor, above),
    )


def floor_scales(maxima: Doubles) -> NDArray[np.int32]:
    """Return the scale bytes that the rule ``floor`` gives blocks of these maxima."""
    exponents = np.frexp(maxima)[1] - 1  # a maximum in [1, 2) has 0
    biased = np.maximum(exponents - _ELEMENT_EMAX + _BIAS, 0)
    return np.where(maxima == 0, 0, biased).astype(np.int32)
