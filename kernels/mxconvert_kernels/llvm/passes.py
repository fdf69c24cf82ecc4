"""The loops of the quantization kernels over a tensor.

Whether a block's scale may move in the search is hard to predict, and a branch on it costs more
than what it saves. So kernels of rule `mse` may leave such blocks open, and settle those of a chunk
together in a loop of their own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from mxconvert_kernels.llvm.emit import I8, I32, I64, Emitter, Value, vector
from mxconvert_kernels.llvm.sums import CHUNK_BLOCKS
from mxconvert_kernels.spec import PACKED_BLOCK_BYTES

if TYPE_CHECKING:
    from mxconvert_kernels.llvm.sums import SumsEmitter

_OPEN_BYTES: Final = 4
"""An open block: its index in the chunk above its largest magnitude bits."""
_INDEX_SHIFT: Final = 16


class Kernel(Protocol):
    """What is done to a block."""

    emitter: Emitter
    defers: bool
    """Whether blocks may be left open, for `settle`."""
    in_chunks: bool
    """Whether `begin` has to be called."""

    def begin(self, first: Value, count: Value) -> Value:
        """Begin with a chunk of `count` blocks from the block `first` on.

        Returns:
            Moves of its blocks that `quantize` does not count.
        """

    def quantize(self, block: Value, in_chunk: Value) -> list[Value]:
        """Quantize the block of this index, i64, and this one in the chunk.

        Returns:
            The scale byte i32, signed codes `<32 x i16>`, i64 1 if the block is not finite, moves
            and whether it is open as in `quantize.Quantized`, and the largest magnitude bits i32,
            of which no more than 16 are set if the block is open.
        """

    def settle(self, block: Value, amax: Value) -> list[Value]:
        """Try the neighbour of the scale of an open block.

        Returns:
            The scale byte i32, signed codes `<32 x i16>`, and moves.
        """


class Passes:
    """The loops over a tensor.

    Kernels that return to a block go through the tensor chunk by chunk, so that it is in the
    first-level cache: once over all blocks, once over those that are open, once for the sums.

    Args:
        kernel: What to do to each block.
        packed: Receives the codes.
        scales: Receives the scale bytes.
        collector: Sums what that did, if it is not None.
    """

    def __init__(
        self, kernel: Kernel, packed: Value, scales: Value, collector: SumsEmitter | None
    ) -> None:
        self._kernel = kernel
        self._emitter = kernel.emitter
        self._packed = packed
        self._scales = scales
        self._collector = collector
        self._open = self._emitter.stack(CHUNK_BLOCKS * _OPEN_BYTES) if kernel.defers else None

    def run(self, blocks: Value) -> Value:
        """Quantize all blocks; returns how many are not finite, i64."""
        none = self._emitter.constant(I64, 0)
        collector = self._collector
        if collector is None and not self._kernel.in_chunks:
            return self._emitter.loop(blocks, [none] * 3, partial(self._quantize, none))[0]
        behind = [] if collector is None else collector.initial

        def chunk(index: Value, values: list[Value]) -> list[Value]:
            bad, moves, *behind = values
            first = index * CHUNK_BLOCKS
            count = blocks.usub_sat(first).umin(CHUNK_BLOCKS)
            summed = [] if collector is None else collector.begin(index, behind)
            moves += self._kernel.begin(first, count)

            def step(in_chunk: Value, values: list[Value]) -> list[Value]:
                carried, summed = values[:3], values[3:]
                if collector is not None:
                    summed = collector.add(in_chunk, summed)
                return [*self._quantize(first, in_chunk, carried), *summed]

            bad, moves, found, *summed = self._emitter.loop(
                count, [bad, moves, none, *summed], step
            )
            if self._open is not None:
                (moves,) = self._emitter.loop(found, [moves], partial(self._settle, first))
            if collector is not None:
                behind = collector.end(count, summed)
            return [bad, moves, *behind]

        chunks = (blocks + (CHUNK_BLOCKS - 1)) >> (CHUNK_BLOCKS.bit_length() - 1)
        if collector is not None:
            chunks += 1
        bad, moves, *behind = self._emitter.loop(chunks, [none, none, *behind], chunk)
        if collector is not None:
            collector.finish(moves, behind)
        return bad

    def _quantize(self, first: Value, in_chunk: Value, carried: list[Value]) -> list[Value]:
        block = first + in_chunk
        scale_byte, codes, bad, moves, is_open, amax = self._kernel.quantize(block, in_chunk)
        self._store(block, in_chunk, scale_byte, codes)
        bad_blocks, all_moves, found = carried
        if self._open is not None:
            # Written in any case and passed over in most: a branch would be hard to predict.
            entry = (in_chunk.trunc(I32) << _INDEX_SHIFT) | amax
            self._emitter.store(entry, self._open, found * _OPEN_BYTES)
            found += is_open.zext(I64)
        return [bad_blocks + bad, all_moves + moves, found]

    def _settle(self, first: Value, index: Value, carried: list[Value]) -> list[Value]:
        assert self._open is not None  # noqa: S101
        entry = self._emitter.load(self._open, index * _OPEN_BYTES, I32)
        in_chunk = (entry >> _INDEX_SHIFT).zext(I64)
        block = first + in_chunk
        amax = entry & ((1 << _INDEX_SHIFT) - 1)
        scale_byte, codes, moves = self._kernel.settle(block, amax)
        self._store(block, in_chunk, scale_byte, codes)
        return [carried[0] + moves]

    def _store(self, block: Value, in_chunk: Value, scale_byte: Value, codes: Value) -> None:
        self._emitter.store(_pack(codes), self._packed, block * PACKED_BLOCK_BYTES)
        self._emitter.store(scale_byte.trunc(I8), self._scales, block)
        if self._collector is not None:
            self._collector.keep(codes, in_chunk)


def _pack(codes: Value) -> Value:
    """Two codes to a byte, the even element in the low nibble: `<16 x i8>`."""
    pairs = codes.bitcast(vector(I32, PACKED_BLOCK_BYTES))
    return (pairs | (pairs >> 12)).trunc(I8)
