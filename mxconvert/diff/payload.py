"""Comparing the bytes and the values of two stored tensors, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mxconvert.digest import xxh3_128
from mxconvert.model import BLOCK_SIZE
from mxconvert.safetensors_format import num_elements
from mxconvert.statistics import ITEM_SIZES, PIECE_ELEMENTS, Place, StoredWeight, Sums, as_float64

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from mxconvert.diff.folder import Unit
    from mxconvert.model import TensorInfo
    from mxconvert.statistics import Decoder, RangeReader

_PIECE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Payload:
    """A folder's bytes: how to read them, and the digests that need no reading."""

    reader: RangeReader
    digests: Mapping[str, str]

    def read(self, tensor: TensorInfo, begin: int, count: int) -> bytearray:
        """Return ``count`` bytes of a tensor from byte ``begin`` on."""
        data = bytearray(count)
        self.reader.read_into(tensor.file, tensor.offset + begin, memoryview(data))
        return data

    def digest(self, tensor: TensorInfo, advanced: Callable[[int], None]) -> str:
        """Return the XXH3-128, read from the tensor unless it is known."""
        known = self.digests.get(tensor.name)
        if known is not None:
            return known
        hasher = xxh3_128()
        for begin in range(0, tensor.size, _PIECE):
            piece = self.read(tensor, begin, min(_PIECE, tensor.size - begin))
            hasher.update(piece)
            advanced(len(piece))
        return hasher.hexdigest()


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
        for begin in range(0, one.size, _PIECE):
            count = min(_PIECE, one.size - begin)
            if self.a.read(one, begin, count) != self.b.read(other, begin, count):
                return False
            self.advanced(2 * count)
        return True

    def measure(self, unit: Unit, other: Unit) -> Sums | None:
        """Return the sums with the first's values as x, the second's as q.

        ``None`` if a dtype has no values here, or the shapes differ.
        """
        if unit.shape != other.shape or not (_has_values(unit) and _has_values(other)):
            return None
        total = Sums()
        elements = num_elements(unit.shape)
        for begin in range(0, elements, PIECE_ELEMENTS):
            count = min(PIECE_ELEMENTS, elements - begin)
            x = self._values(self.a, unit, begin, count)
            total += _sums(x, self._values(self.b, other, begin, count))
        return total

    def _values(self, side: Payload, unit: Unit, begin: int, count: int) -> NDArray[np.float64]:
        if not unit.packed:
            tensor = unit.parts[0]
            item = ITEM_SIZES[tensor.dtype]
            self.advanced(count * item)
            return as_float64(side.read(tensor, begin * item, count * item), tensor.dtype)
        codes, scales = unit.parts
        stored = StoredWeight(Place(codes.file, codes.offset), Place(scales.file, scales.offset))
        parts = stored.read(side.reader, begin // BLOCK_SIZE, count // BLOCK_SIZE)
        out = bytearray(count * 4)
        self.decode(*parts, out)
        self.advanced(sum(map(len, parts)))
        return as_float64(out, "F32")


def _has_values(unit: Unit) -> bool:
    return unit.packed or unit.parts[0].dtype in ITEM_SIZES


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
