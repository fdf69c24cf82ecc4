"""The error sums that a quantization kernel collects (`ErrorSums`).

While the blocks of a chunk are quantized, those of the chunk before are summed, in the same loop.
Everything that they need lies in the first-level cache by then, so they fill the processor's units
while the quantization of a block waits for its scale and its codes.

Near blocks, that is nearly all, are summed in registers: squares in float32, in lanes that are
emptied into float64 after the chunk, before they lose digits. See `sum_blocks`.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Final, NamedTuple

from mxconvert_kernels.error_sums import ErrorSums
from mxconvert_kernels.llvm.emit import F32, F64, I1, I8, I16, I32, I64, Emitter, Value, vector
from mxconvert_kernels.llvm.sum_blocks import (
    ABOVE,
    BELOW,
    FARTHEST_EXPONENT,
    FLUSHED,
    HALF,
    LOWEST_NEAR,
    RESULT_BYTES,
    ROW,
    SATURATED,
    SUMS,
    BlockAdder,
    Chunk,
    Result,
)
from mxconvert_kernels.spec import BLOCK_SIZE, E2M1_HALVES, PACKED_BLOCK_BYTES

if TYPE_CHECKING:
    from mxconvert_kernels.llvm.source import Source

CHUNK_BLOCKS: Final = 64
"""Blocks summed in float32. A lane rounds at most twice a block, so a sum of squares is wrong by
less than 128 * 2 ** -24, a relative error of 7.7e-6."""

ABOVE_SHIFT: Final = 32
"""Where the count of scales above the floor exponent begins in a number of moves; those below it
are counted in the bits before."""

_CODES_BYTES: Final = 2 * BLOCK_SIZE
_CHUNK_BYTES: Final = CHUNK_BLOCKS * _CODES_BYTES
SCRATCH_BYTES: Final = 2 * _CHUNK_BYTES
"""Holds the codes of two chunks, unpacked: of the one that is quantized and the one before."""

_ALIGNMENT: Final = 64
_MAX_CODE: Final = len(E2M1_HALVES) - 1
_STRIDE: Final = 64
"""Bytes of codes looked at together."""


class Buffers(NamedTuple):
    """What the kernel reads and writes."""

    packed: Value
    scales: Value
    result: Value
    """`sum_blocks.RESULT_BYTES` of zeros that receive the result."""
    scratch: Value
    """`SCRATCH_BYTES`, best aligned to 64."""


class SumsEmitter:
    """Emits the sums of a kernel, one chunk behind the chunk that it quantizes.

    Args:
        emitter: The function under construction, before any loop.
        source: The elements.
        buffers: Where everything is.
        blocks: How many there are, i64.
        native: Use the instructions of `avx512_bf16` for BF16.
    """

    def __init__(
        self, emitter: Emitter, source: Source, buffers: Buffers, blocks: Value, *, native: bool
    ) -> None:
        self._emitter = emitter
        self._source = source
        self._dtype = dtype = source.dtype
        self._buffers = buffers
        self._blocks = blocks
        self._result = Result(emitter, buffers.result)
        # No number of blocks is negative.
        types = dtype, source.near_dtype
        self._adder = BlockAdder(emitter, *types, self._result, blocks >> 63, native=native)
        none = emitter.constant(vector(self._adder.error_lane, BLOCK_SIZE), 0)
        self.initial = [emitter.constant(I1, 0), none]
        """What a loop over chunks carries."""

    def begin(self, index: Value, carried: list[Value]) -> list[Value]:
        """Begin with a chunk; returns what the loop over its blocks carries.

        Args:
            index: Of the chunk, up to one behind the last.
            carried: What `initial` is before the first.
        """
        self._near, largest = carried
        self._first = index * CHUNK_BLOCKS
        here = (index & 1) * _CHUNK_BYTES
        self._here, self._there = here, _CHUNK_BYTES - here
        return self._adder.empty_chunk(largest).flatten()

    def keep(self, codes: Value, in_chunk: Value) -> None:
        """Keep a block's codes with signs, `<32 x i16>`, for when the next chunk is quantized."""
        self._emitter.store(codes, self._buffers.scratch, self._here + in_chunk * _CODES_BYTES)

    def add(self, in_chunk: Value, now: list[Value]) -> list[Value]:
        """Add a block of the chunk before, unless that needs a closer look."""
        return self._emitter.branch(
            self._near, lambda: self._add_near(in_chunk, now), lambda: now, likely=True
        )

    def end(self, count: Value, now: list[Value]) -> list[Value]:
        """Finish the chunk before, after so many calls of `add`; returns what is carried."""
        none = self._emitter.constant(I64, 0)
        before = self._first - CHUNK_BLOCKS
        exists = self._first.compare("==", 0).select(none, CHUNK_BLOCKS)
        there = (self._blocks - before).umin(exists)
        done = self._near.select(count, none)
        now = self._emitter.loop(
            there - done, now, lambda index, now: self._add_any(done + index, now)
        )
        summed = Chunk.restore(now)
        self._flush(summed)
        flushed = self._emitter.branch(
            self._near,
            lambda: [self._count_flushed(summed.smallest)],
            lambda: self._emitter.loop(there, [none], self._count_flushed_in_any),
            likely=True,
        )
        self._result.increase(FLUSHED, flushed[0])
        return [self._is_near_chunk(count), summed.largest]

    def finish(self, moves: Value, carried: list[Value]) -> None:
        """Write what was carried: the moves of the scales and the largest errors."""
        self._result.increase(BELOW, moves & ((1 << ABOVE_SHIFT) - 1))
        self._result.increase(ABOVE, moves >> ABOVE_SHIFT)
        bits = carried[-1].reduce_umax().resize(I32) << (32 - self._adder.error_lane.width)
        self._result.raise_largest(bits.bitcast(F32).fpext(F64))

    def _is_near_chunk(self, count: Value) -> Value:
        """Whether the chunk just quantized is whole and needs no look at each block."""

        def look_at_scales() -> list[Value]:
            scales = self._emitter.load(self._buffers.scales, self._first, vector(I8, CHUNK_BLOCKS))
            return [_is_near((scales - LOWEST_NEAR).reduce_umax())]

        no = self._emitter.constant(I1, 0)
        is_whole = count.compare("==", CHUNK_BLOCKS)
        return self._emitter.branch(is_whole, look_at_scales, lambda: [no], likely=True)[0]

    def _add_near(self, in_chunk: Value, now: list[Value]) -> list[Value]:
        near = self._source.near(self._first - CHUNK_BLOCKS + in_chunk)
        loaded = near, self._codes(in_chunk), self._scale_byte(in_chunk)
        return self._adder.add_near(Chunk.restore(now), *loaded).flatten()

    def _add_any(self, in_chunk: Value, now: list[Value]) -> list[Value]:
        def far() -> list[Value]:
            # All-zero blocks add nothing, and those that are not finite do not count.
            magnitudes = self._bits(in_chunk) & self._dtype.layout.magnitude_mask

            def add() -> list[Value]:
                codes, scale_byte = self._codes(in_chunk), self._scale_byte(in_chunk)
                self._adder.add_far(magnitudes, codes, scale_byte)
                return []

            self._emitter.branch(self._is_number(magnitudes), add, list)
            return now

        is_near = _is_near(self._scale_byte(in_chunk) - LOWEST_NEAR)
        return self._emitter.branch(
            is_near, lambda: self._add_near(in_chunk, now), far, likely=True
        )

    def _is_number(self, magnitudes: Value) -> Value:
        """Whether a block is finite and not all zero."""
        return (magnitudes.reduce_umax().resize(I32) - 1).compare(
            "u<", self._dtype.layout.infinity - 1
        )

    def _count_flushed(self, smallest: Value) -> Value:
        """Elements other than zero with code 0 in a near chunk: codes 0 less elements 0."""
        loop, none = self._emitter.loop, self._emitter.constant(I64, 0)
        packed_bytes = CHUNK_BLOCKS * PACKED_BLOCK_BYTES
        start = (self._first - CHUNK_BLOCKS) * PACKED_BLOCK_BYTES

        def zero_codes(index: Value, counted: list[Value]) -> list[Value]:
            offset = start + index * _STRIDE
            pairs = self._emitter.load(self._buffers.packed, offset, vector(I8, _STRIDE))
            low, high = ((pairs & mask).compare("==", 0).count_true() for mask in (0x07, 0x70))
            return [counted[0] + low + high]

        def zero_elements(in_chunk: Value, counted: list[Value]) -> list[Value]:
            magnitudes = self._bits(in_chunk) & self._dtype.layout.magnitude_mask
            return [counted[0] + magnitudes.compare("==", 0).count_true()]

        (codes,) = loop(self._emitter.constant(I64, packed_bytes // _STRIDE), [none], zero_codes)
        (elements,) = self._emitter.branch(
            smallest.compare("==", 0).count_true().compare("==", 0),
            lambda: [none],
            lambda: loop(self._emitter.constant(I64, CHUNK_BLOCKS), [none], zero_elements),
            likely=True,
        )
        return codes - elements

    def _count_flushed_in_any(self, in_chunk: Value, counted: list[Value]) -> list[Value]:
        magnitudes = self._bits(in_chunk) & self._dtype.layout.magnitude_mask
        no_code = (self._codes(in_chunk) & _MAX_CODE).compare("==", 0)
        flushed = (no_code & magnitudes.compare("u>", 0)).count_true()
        none = self._emitter.constant(I64, 0)
        return [counted[0] + self._is_number(magnitudes).select(flushed, none)]

    # Blocks of the chunk before the one that is quantized.

    def _scale_byte(self, in_chunk: Value) -> Value:
        offset = self._first - CHUNK_BLOCKS + in_chunk
        return self._emitter.load(self._buffers.scales, offset, I8).zext(I32)

    def _bits(self, in_chunk: Value) -> Value:
        return self._source.bits(self._first - CHUNK_BLOCKS + in_chunk)

    def _codes(self, in_chunk: Value) -> Value:
        """With signs."""
        offset = self._there + in_chunk * _CODES_BYTES
        return self._emitter.load(self._buffers.scratch, offset, vector(I16, BLOCK_SIZE))

    def _flush(self, chunk: Chunk) -> None:
        """Add a chunk to memory, except the largest errors."""
        vectors = len(chunk.squares) // SUMS
        for row in range(SUMS):
            first, *others = (
                lanes.fpext(F64) for lanes in chunk.squares[row * vectors :][:vectors]
            )
            for other in others:
                first = first.fadd(other)
            self._result.increase(row * ROW, first)
        self._result.increase(SATURATED, chunk.saturated.reduce_add().zext(I64))


class SumsMemory:
    """The memory of one call, outside the function under construction."""

    def __init__(self) -> None:
        self._bytes = (ctypes.c_char * (SCRATCH_BYTES + RESULT_BYTES + _ALIGNMENT))()
        address = ctypes.addressof(self._bytes)
        self.scratch = address + -address % _ALIGNMENT
        self.result = self.scratch + SCRATCH_BYTES

    def read(self, blocks: int) -> ErrorSums:
        """What a kernel that summed so many blocks has left."""
        floats = (ctypes.c_double * (FLUSHED // 8)).from_address(self.result)
        x2, q2, err2 = (math.fsum(floats[row : row + HALF]) for row in range(0, SUMS * HALF, HALF))
        counts = (ctypes.c_int64 * 4).from_address(self.result + FLUSHED)
        flushed, saturated, below, above = counts
        return ErrorSums(
            elements=blocks * BLOCK_SIZE,
            blocks=blocks,
            sum_x2=x2,
            sum_q2=q2,
            sum_err2=err2,
            max_abs_err=floats[-1],
            flushed=flushed,
            saturated=saturated,
            exponents=(below, blocks - below - above, above),
        )


def _is_near(above_lowest: Value) -> Value:
    return above_lowest.compare("u<=", 2 * FARTHEST_EXPONENT)
