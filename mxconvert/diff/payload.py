"""Comparing the bytes and the values of two stored tensors, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mxconvert.digest import xxh3_128
from mxconvert.fp8 import dequantize_rows
from mxconvert.safetensors_format import num_elements
from mxconvert.source.rows import output_rows, row_layout
from mxconvert.source.scales import load_scales
from mxconvert.statistics import ITEM_SIZES, PIECE_ELEMENTS, Sums, as_float64

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from mxconvert.diff.folder import Unit
    from mxconvert.model import TensorInfo
    from mxconvert.source import SourceReader
    from mxconvert.statistics import Decoder

_PIECE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Payload:
    """A folder's bytes: how to read them, and the digests that need no reading."""

    reader: SourceReader
    digests: Mapping[str, str]

    def read(self, tensor: TensorInfo, rows: range) -> bytearray:
        """Return rows of a tensor, of a part of one as they are in an artifact."""
        return output_rows(self.reader, tensor, rows.start, len(rows))

    def digest(self, tensor: TensorInfo, advanced: Callable[[int], None]) -> str:
        """Return the XXH3-128, read from the tensor unless it is known."""
        known = self.digests.get(tensor.name)
        if known is not None:
            return known
        hasher = xxh3_128()
        for rows in _slabs(*row_layout(tensor), _PIECE):
            piece = self.read(tensor, rows)
            hasher.update(piece)
            advanced(len(piece))
        return hasher.hexdigest()


def _slabs(rows: int, row_size: int, size: int) -> Iterator[range]:
    """Yield all rows, about ``size`` of what ``row_size`` counts at a time."""
    step = max(1, size // max(row_size, 1))
    for first in range(0, rows if row_size else 0, step):
        yield range(first, min(first + step, rows))


@dataclass(frozen=True, slots=True)
class PayloadCheck:
    """Compares tensors of two folders; one instance serves all threads.

    Attributes:
        a: The first folder's bytes.
        b: The second's.
        decode: The kernels.
        advanced: Told the bytes read.
    """

    a: Payload
    b: Payload
    decode: Decoder
    advanced: Callable[[int], None]

    def known(self, unit: Unit, other: Unit) -> bool:
        """Whether both digests of every part are known without reading."""
        return all(part.name in self.a.digests for part in unit.parts) and all(
            part.name in self.b.digests for part in other.parts
        )

    def equal(self, unit: Unit, other: Unit) -> bool:
        """Whether all parts have the same bytes; both units have the same form."""
        return all(map(self._equal, unit.parts, other.parts))

    def _equal(self, one: TensorInfo, other: TensorInfo) -> bool:
        if one.name in self.a.digests or other.name in self.b.digests:
            mine = self.a.digest(one, self.advanced)
            return mine == self.b.digest(other, self.advanced)
        for rows in _slabs(*row_layout(one), _PIECE):
            piece = self.a.read(one, rows)
            if piece != self.b.read(other, rows):
                return False
            self.advanced(2 * len(piece))
        return True

    def measure(self, unit: Unit, other: Unit) -> Sums | None:
        """Return the sums with the first's values as x, the second's as q.

        ``None`` if a dtype has no values here, or the shapes differ.
        """
        if unit.shape != other.shape or not (_has_values(unit) and _has_values(other)):
            return None
        total = Sums()
        grids = _grid(self.a, unit), _grid(self.b, other)
        columns = unit.shape[-1] if unit.shape else 1
        for rows in _slabs(num_elements(unit.shape[:-1]), columns, PIECE_ELEMENTS):
            x = self._values(self.a, unit, rows, grids[0])
            total += _sums(x, self._values(self.b, other, rows, grids[1]))
        return total

    def _values(
        self, side: Payload, unit: Unit, rows: range, grid: NDArray[np.float32] | None
    ) -> NDArray[np.float64]:
        stored = [side.read(part, rows) for part in unit.parts[: 2 if unit.packed else 1]]
        self.advanced(sum(map(len, stored)))
        tensor = unit.parts[0]
        if grid is not None:
            values = dequantize_rows(tensor, grid, rows.start, memoryview(stored[0]))
            return values.reshape(-1).astype(np.float64)
        if not unit.packed:
            return as_float64(stored[0], tensor.dtype)
        out = bytearray(len(stored[0]) * 8)
        self.decode(stored[0], stored[1], out)
        return as_float64(out, "F32")


def _grid(side: Payload, unit: Unit) -> NDArray[np.float32] | None:
    return None if unit.parts[0].scale is None else load_scales(side.reader, unit.parts[0]).grid


def _has_values(unit: Unit) -> bool:
    """Whether values can be compared; of scaled FP8 not if it is stored transposed."""
    tensor = unit.parts[0]
    scaled = tensor.scale is not None and not tensor.transposed
    return unit.packed or tensor.dtype in ITEM_SIZES or scaled


def _sums(x: NDArray[np.float64], q: NDArray[np.float64]) -> Sums:
    error = q - x
    return Sums(
        elements=x.size,
        sum_x2=float(np.square(x).sum()),
        sum_q2=float(np.square(q).sum()),
        sum_err2=float(np.square(error).sum()),
        max_abs_err=float(np.abs(error).max(initial=0.0)),
        flushed=int(np.count_nonzero((x != 0) & (q == 0))),
    )
