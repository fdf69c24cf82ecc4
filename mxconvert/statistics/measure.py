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
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

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


def as_float64(data: bytearray | memoryview, dtype: str) -> Doubles:
    """Return little-endian elements of a kernel dtype as float64."""
    if dtype == "BF16":
        bits = np.frombuffer(data, "<u2").astype(np.uint32) << _BF16_SHIFT
        return bits.view(np.float32).astype(np.float64)
    return np.frombuffer(data, "<f2" if dtype == "F16" else "<f4").astype(np.float64)


@dataclass(frozen=True, slots=True)
class Original:
    """Some rows of a weight's original; if it is stored transposed, some columns of it.

    Attributes:
        first: Number of the first row, or of the first column.
        values: ``[rows, columns]``, whole blocks.
        size: Bytes that were read for them.
    """

    first: int
    values: Doubles
    size: int


class Window:
    """Codes and scales of a weight, taken as its original comes: by rows or by columns.

    Args:
        weight: Where they lie.
        reader: Reads them.
        shape: Of the weight.
        by_columns: Whether the original comes by columns; then all are kept in memory.
    """

    def __init__(
        self, weight: StoredWeight, reader: RangeReader, shape: tuple[int, int], *, by_columns: bool
    ) -> None:
        self._weight, self._reader = weight, reader
        self._rows, self._columns = shape
        blocks = self._rows * self._columns // BLOCK_SIZE
        self._all = weight.read(reader, 0, blocks) if by_columns else None

    def take(self, first: int, shape: tuple[int, ...]) -> tuple[bytearray, bytearray]:
        """Return codes and scales of some rows, or columns, from number ``first`` on."""
        rows, columns = shape
        if self._all is None:
            per_row = columns // BLOCK_SIZE
            return self._weight.read(self._reader, first * per_row, rows * per_row)
        codes, scales = self._all
        return self._stripe(codes, first, columns, 2), self._stripe(
            scales, first, columns, BLOCK_SIZE
        )

    def _stripe(self, data: bytearray, first: int, columns: int, per: int) -> bytearray:
        matrix = np.frombuffer(data, np.uint8).reshape(self._rows, self._columns // per)
        return bytearray(matrix[:, first // per : (first + columns) // per].tobytes())


def measure_weight(
    window: Window,
    originals: Iterable[Original],
    decode: Decoder,
    *,
    counts: Counts | None = None,
    advanced: Callable[[int], None] = lambda _: None,
) -> Sums:
    """Decode a weight and compare it with the tensor it was made from.

    Args:
        window: Its codes and scales.
        originals: The original, piece by piece.
        decode: The kernels.
        counts: Also counts codes and scales.
        advanced: Told the bytes of source after each piece.
    """
    total = Sums()
    for original in originals:
        codes, scales = window.take(original.first, original.values.shape)
        decoded = bytearray(original.values.size * 4)
        decode(codes, scales, decoded)
        total += measure_blocks(
            original.values.reshape(-1),
            as_float64(decoded, "F32"),
            np.frombuffer(scales, np.uint8),
        )
        if counts is not None:
            counts.add(codes, scales)
        advanced(original.size)
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
