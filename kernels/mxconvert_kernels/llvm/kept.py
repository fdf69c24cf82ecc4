"""Products that are kept for the sums, which take a chunk after it was quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mxconvert_kernels.llvm.emit import F32, I16, I32, Emitter, Value, vector
from mxconvert_kernels.llvm.source import HALF, Near, join_halves, join_high_pairs, join_pairs
from mxconvert_kernels.llvm.sums import CHUNK_BLOCKS
from mxconvert_kernels.spec import BLOCK_SIZE, FloatType

if TYPE_CHECKING:
    from collections.abc import Sequence

_HALF_BYTES: Final = 4 * HALF
_SLOT_BYTES: Final = 3 * _HALF_BYTES
"""Of a block: its even elements, its odd elements, and `odd_bits` of all."""
_SLOTS: Final = 2 * CHUNK_BLOCKS


class KeptProducts:
    """Magnitudes of the blocks of two chunks in memory, a `Source`."""

    dtype = FloatType.F32
    near_dtype = FloatType.BF16

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._memory = emitter.stack(_SLOTS * _SLOT_BYTES)

    def keep(self, block: Value, floats: Sequence[Value], narrow: Value) -> None:
        """Keep a block: even and odd elements, and `odd_bits` of them."""
        for place, value in enumerate((*floats, narrow)):
            self._emitter.store(value, self._memory, self._slot(block) + place * _HALF_BYTES)

    def bits(self, block: Value) -> Value:
        """See `Source`."""
        even, odd = (half.bitcast_lanes(I32) for half in self._floats(block))
        return join_halves(even, odd)

    def near(self, block: Value) -> Near:
        """See `Source`."""
        narrow = vector(I16, BLOCK_SIZE)
        offset = self._slot(block) + 2 * _HALF_BYTES
        return Near(self._emitter.load(self._memory, offset, narrow), self._floats(block))

    def _floats(self, block: Value) -> list[Value]:
        offsets = (self._slot(block) + place * _HALF_BYTES for place in range(2))
        return [self._emitter.load(self._memory, offset, vector(F32, HALF)) for offset in offsets]

    def _slot(self, block: Value) -> Value:
        return (block & (_SLOTS - 1)) * _SLOT_BYTES


def odd_bits(floats: Sequence[Value], one: Value | int) -> Value:
    """The high halves of float32 magnitudes in pairs, `<32 x i16>`, odd if they are not all.

    Nothing that has a shorter mantissa lies between a value and this: it compares the same.

    Args:
        floats: The even and the odd ones, `<16 x float>`.
        one: 1, which LLVM had better not know: it would write the minimum in four instructions.
    """
    even, odd = (half.bitcast_lanes(I32) for half in floats)
    return join_high_pairs(even, odd) | join_pairs(even, odd).umin(one)
