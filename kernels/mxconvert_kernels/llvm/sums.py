"""The error sums that a quantization kernel collects (`ErrorSums`).

After each chunk of blocks, a second loop goes over it while it is in the first-level cache. Its
blocks depend on nothing but memory, which the processor uses better than if the same operations
waited for the scale and the codes in the first loop.

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
    ONE_SATURATED,
    RESULT_BYTES,
    ROW,
    SATURATED,
    SUMS,
    BlockAdder,
    Chunk,
    Result,
)
from mxconvert_kernels.spec import BLOCK_SIZE, FloatType

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CHUNK_BLOCKS: Final = 64
"""Blocks summed in float32. A lane rounds at most twice a block, so a sum of squares is wrong by
less than 128 * 2 ** -24, a relative error of 7.7e-6."""

_CODES_BYTES: Final = 2 * BLOCK_SIZE
SCRATCH_BYTES: Final = CHUNK_BLOCKS * _CODES_BYTES
"""Holds the codes of a chunk, unpacked, between the loops."""

_ALIGNMENT: Final = 64
_SATURATED_SHIFT: Final = ONE_SATURATED.bit_length() - 1


class Buffers(NamedTuple):
    """What the kernel reads and writes."""

    src: Value
    scales: Value
    result: Value
    """`sum_blocks.RESULT_BYTES` of zeros that receive the result."""
    scratch: Value
    """`SCRATCH_BYTES`, best aligned to 64."""


class SumsEmitter:
    """Emits the loops of a kernel that collects sums.

    Args:
        emitter: The function under construction, before any loop.
        dtype: The type of the elements.
        buffers: Where everything is.
        blocks: How many there are, i64.
        native: Use the instructions of `avx512_bf16` for BF16.
    """

    def __init__(
        self, emitter: Emitter, dtype: FloatType, buffers: Buffers, blocks: Value, *, native: bool
    ) -> None:
        self._emitter = emitter
        self._dtype = dtype
        self._buffers = buffers
        self._blocks = blocks
        self._result = Result(emitter, buffers.result)
        # No number of blocks is negative.
        self._adder = BlockAdder(emitter, dtype, self._result, blocks >> 63, native=native)

    def loop(
        self, initial: Sequence[Value], quantize: Callable[[Value, list[Value]], Sequence[Value]]
    ) -> Value:
        """Quantize and sum all blocks, chunk by chunk, and write the result.

        Args:
            initial: What `quantize` carries: a value to return, and the numbers of blocks below
                and above the floor exponent, i64.
            quantize: Emits the quantization of the block of an index. Returns its codes,
                `<32 x i16>`, before what it carries.
        """
        lane = self._adder.lane
        constant = self._emitter.constant

        def chunk(index: Value, values: list[Value]) -> list[Value]:
            first = index * CHUNK_BLOCKS
            count = (self._blocks - first).umin(CHUNK_BLOCKS)
            *carried, largest = values

            def quantize_one(in_chunk: Value, now: list[Value]) -> Sequence[Value]:
                codes, *after = quantize(first + in_chunk, now)
                self._emitter.store(codes, self._buffers.scratch, in_chunk * _CODES_BYTES)
                return after

            carried = self._emitter.loop(count, carried, quantize_one)
            summed = self._sum_chunk(first, count, self._adder.empty_chunk(largest))
            self._flush(summed)
            return [*carried, summed.largest]

        chunks = (self._blocks + (CHUNK_BLOCKS - 1)) >> (CHUNK_BLOCKS.bit_length() - 1)
        no_errors = constant(vector(lane, BLOCK_SIZE), 0)
        returned, below, above, largest = self._emitter.loop(chunks, [*initial, no_errors], chunk)
        self._result.increase(BELOW, below)
        self._result.increase(ABOVE, above)
        bits = largest.reduce_umax().resize(I32) << (32 - lane.width)
        self._result.raise_largest(bits.bitcast(F32).fpext(F64))
        return returned

    def _sum_chunk(self, first: Value, count: Value, empty: Chunk) -> Chunk:
        """Add the blocks of a chunk, without looking at each if it is whole and all are near."""

        def two(pair: Value, now: list[Value]) -> list[Value]:
            for block in (first + pair * 2, first + pair * 2 + 1):
                scale_byte = self._scale_byte(block)
                lanes = self._load(block, block - first)
                now = self._adder.add_near(Chunk.restore(now), *lanes, scale_byte).flatten()
            return now

        def one(in_chunk: Value, now: list[Value]) -> list[Value]:
            return self._add_any(first + in_chunk, in_chunk, now)

        def look_at_scales() -> list[Value]:
            scales = self._emitter.load(self._buffers.scales, first, vector(I8, CHUNK_BLOCKS))
            return [_is_near((scales - LOWEST_NEAR).reduce_umax())]

        loop, constant = self._emitter.loop, self._emitter.constant
        is_whole = count.compare("==", CHUNK_BLOCKS)
        no = constant(I1, 0)
        all_near = self._emitter.branch(is_whole, look_at_scales, lambda: [no], likely=True)
        pairs = constant(I64, CHUNK_BLOCKS // 2)
        values = self._emitter.branch(
            all_near[0],
            lambda: loop(pairs, empty.flatten(), two),
            lambda: loop(count, empty.flatten(), one),
            likely=True,
        )
        return Chunk.restore(values)

    def _add_any(self, block: Value, in_chunk: Value, now: list[Value]) -> list[Value]:
        scale_byte = self._scale_byte(block)
        magnitudes, codes = self._load(block, in_chunk)

        def near() -> list[Value]:
            chunk = Chunk.restore(now)
            return self._adder.add_near(chunk, magnitudes, codes, scale_byte).flatten()

        def far() -> list[Value]:
            # All-zero blocks add nothing, and those that are not finite do not count.
            amax = magnitudes.reduce_umax()
            is_number = (amax - 1).compare("u<", self._dtype.layout.infinity - 1)

            def add() -> list[Value]:
                self._adder.add_far(magnitudes, codes, scale_byte)
                return []

            self._emitter.branch(is_number, add, list)
            return now

        is_near = _is_near(scale_byte - LOWEST_NEAR)
        return self._emitter.branch(is_near, near, far, likely=True)

    def _scale_byte(self, block: Value) -> Value:
        return self._emitter.load(self._buffers.scales, block, I8).zext(I32)

    def _load(self, block: Value, in_chunk: Value) -> tuple[Value, Value]:
        """A block's magnitude bits and its codes with signs."""
        element = I32 if self._dtype is FloatType.F32 else I16
        offset = block * (BLOCK_SIZE * self._dtype.itemsize)
        bits = self._emitter.load(self._buffers.src, offset, vector(element, BLOCK_SIZE))
        codes = self._emitter.load(
            self._buffers.scratch, in_chunk * _CODES_BYTES, vector(I16, BLOCK_SIZE)
        )
        return bits & self._dtype.layout.magnitude_mask, codes

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
        flushed = chunk.counts & (ONE_SATURATED - 1)
        saturated = chunk.counts >> _SATURATED_SHIFT
        for offset, lanes in ((FLUSHED, flushed), (SATURATED, saturated)):
            self._result.increase(offset, lanes.reduce_add().zext(I64))


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
