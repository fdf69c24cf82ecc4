"""How one block adds to the error sums."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

from mxconvert_kernels.lanes import FLOAT32_MANTISSA_BITS, LIFT_BELOW_FIELD, LIFT_EXPONENT
from mxconvert_kernels.llvm.avx512_bf16 import add_products, look_up
from mxconvert_kernels.llvm.emit import F32, F64, I16, I32, I64, Emitter, Value, vector
from mxconvert_kernels.llvm.widen import lift_lanes, widen
from mxconvert_kernels.spec import BLOCK_SIZE, E2M1_HALVES, SCALE_BIAS, SIGN_BIT, FloatType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llvmlite import ir

    from mxconvert_kernels.llvm.source import Near

SUMS: Final = 3
"""Of x * x, q * q and err * err."""

HALF: Final = BLOCK_SIZE // 2
"""Lanes of a sum."""

FARTHEST_EXPONENT: Final = 40
"""Blocks whose scale is within 2 ** -40 ... 2 ** 40 are near: float32 holds their squares."""

LOWEST_NEAR: Final = SCALE_BIAS - FARTHEST_EXPONENT
"""The smallest scale byte of a near block."""

ROW: Final = 8 * HALF
"""Bytes of a sum's lanes in the result; what follows the three sums has 8 bytes each."""

LARGEST, FLUSHED, SATURATED, BELOW, ABOVE = range(SUMS * ROW, SUMS * ROW + 40, 8)
RESULT_BYTES: Final = SUMS * ROW + 40

_MAX_CODE: Final = len(E2M1_HALVES) - 1
_FLOAT64_BIAS: Final = 1023
_FLOAT64_MANTISSA_BITS: Final = 52
_F32_BITS: Final = 32
_BF16_SIGN: Final = 1 << 15
_TABLE_ROW: Final = 2 * 2 * BLOCK_SIZE
_MINUS: Final = 0xBF803F80
"""1 and -1 in BF16, which turn a pair of values into their difference."""

_GROUP: Final = 8
"""Lanes of 16 bits in 128 bits, within which x86 interleaves vectors."""


def _interleave(half: int) -> list[int]:
    """Lanes of x and q in turn, from one half of each group of both."""
    first = half * _GROUP // 2
    return [
        lane + which
        for group in range(0, BLOCK_SIZE, _GROUP)
        for lane in range(group + first, group + first + _GROUP // 2)
        for which in (0, BLOCK_SIZE)
    ]


_INTERLEAVED: Final = _interleave(0), _interleave(1)


class Chunk(NamedTuple):
    """What the near blocks of a chunk add up to, in registers."""

    squares: Sequence[Value]
    """`<16 x float>`: x * x, q * q and err * err, each in as many vectors."""
    saturated: Value
    """How many in each lane, `<32 x i16>`."""
    smallest: Value
    """The smallest magnitudes, bits in the elements' lanes."""
    largest: Value
    """The bits of the largest errors, in lanes of their own."""

    def flatten(self) -> list[Value]:
        """All values in a row, as loops carry them."""
        return [*self.squares, self.saturated, self.smallest, self.largest]

    @classmethod
    def restore(cls, values: Sequence[Value]) -> Chunk:
        """The inverse of `flatten`."""
        return cls(values[:-3], *values[-3:])


class Result:
    """The result in memory, `RESULT_BYTES`.

    The lanes of three sums and the largest error, all in float64, then four counts in i64.
    """

    def __init__(self, emitter: Emitter, pointer: Value) -> None:
        self._emitter = emitter
        self._pointer = pointer

    def increase(self, offset: int, amount: Value) -> None:
        """Add to a number or to the lanes of one."""
        at = self._emitter.constant(I64, offset)
        before = self._emitter.load(self._pointer, at, amount.type)
        after = before + amount if amount.type == I64 else before.fadd(amount)
        self._emitter.store(after, self._pointer, at)

    def raise_largest(self, number: Value) -> None:
        """Raise the largest error; floats without a sign are ordered as their bits are."""
        at = self._emitter.constant(I64, LARGEST)
        before = self._emitter.load(self._pointer, at, I64)
        self._emitter.store(before.umax(number.bitcast(I64)), self._pointer, at)


class BlockAdder:
    """Emits the addition of a block.

    Args:
        emitter: The function under construction, before any loop.
        dtype: The type of the elements.
        near_dtype: The type of the bits of near blocks.
        result: Receives the far blocks.
        zero: An i64 that is zero, which the compiler must not know.
        native: Use the instructions of `avx512_bf16` for near blocks in BF16.
    """

    def __init__(
        self,
        emitter: Emitter,
        dtype: FloatType,
        near_dtype: FloatType,
        result: Result,
        zero: Value,
        *,
        native: bool,
    ) -> None:
        self._emitter = emitter
        self._dtype = dtype
        self._result = result
        self._zero = zero
        self._near_dtype = near_dtype
        is_wide = near_dtype is not FloatType.BF16
        self.lane: ir.IntType = I32 if is_wide else I16
        self.error_lane: ir.IntType = I16 if dtype is FloatType.BF16 else I32
        self._mantissa_bits = FLOAT32_MANTISSA_BITS if is_wide else near_dtype.layout.mantissa_bits
        self._native = native and not is_wide
        self._magnitude_bits, self._error_bits = (
            self._pin(vector(lane, BLOCK_SIZE), (1 << lane.width - 1) - 1)
            for lane in (self.lane, self.error_lane)
        )
        self._high_half = self._pin(vector(I32, HALF), 0xFFFF0000)
        self._one = self._pin(vector(I16, BLOCK_SIZE), 1)
        self._minus = self._pin(vector(I32, HALF), _MINUS)
        self._rows = self._rows_of_scales() if self._native else None

    def empty_chunk(self, largest: Value) -> Chunk:
        """A chunk before its first block; `largest` goes on."""
        constant = self._emitter.constant
        vectors = SUMS if self._native and self._dtype is FloatType.BF16 else 2 * SUMS
        squares = [constant(vector(F32, HALF), 0)] * vectors
        return Chunk(
            squares,
            constant(vector(I16, BLOCK_SIZE), 0),
            constant(vector(self.lane, BLOCK_SIZE), (1 << self.lane.width) - 1),
            largest,
        )

    def add_near(self, chunk: Chunk, near: Near, codes: Value, scale_byte: Value) -> Chunk:
        """Add a block whose scale is near.

        Args:
            chunk: What there is.
            near: The elements.
            codes: With signs, `<32 x i16>`.
            scale_byte: i32.
        """
        if self._rows is None or near.floats:
            return self._add_floats(chunk, near, codes, scale_byte)
        magnitudes = near.bits & self._magnitude_bits
        decoded, largest = self._look_up(self._rows, codes, scale_byte)
        none = self._emitter.constant(vector(F32, HALF), 0)
        pairs = (near.bits.lanes_with(decoded, indices) for indices in _INTERLEAVED)
        errors = [add_products(self._emitter, none, pair, self._minus) for pair in pairs]
        joined = _join(errors, self.error_lane)
        terms = zip(chunk.squares, (near.bits, decoded, joined), strict=True)
        squares = [add_products(self._emitter, total, lanes, lanes) for total, lanes in terms]
        return self._count(chunk, squares, magnitudes, largest, joined)

    def _add_floats(self, chunk: Chunk, near: Near, codes: Value, scale_byte: Value) -> Chunk:
        magnitudes = near.bits & self._near_dtype.layout.magnitude_mask
        if self._near_dtype is FloatType.F16:
            magnitudes = widen(magnitudes, self._near_dtype)
        decoded, largest = self._decode(codes, scale_byte)
        x, q = near.floats or self._floats(magnitudes), self._floats(decoded)
        errors = [one.fsub(other) for one, other in zip(x, q, strict=True)]
        terms = zip([*x, *q, *errors], chunk.squares, strict=True)
        squares = [value.fmuladd(value, total) for value, total in terms]
        return self._count(chunk, squares, magnitudes, largest, _join(errors, self.error_lane))

    def _decode(self, codes: Value, scale_byte: Value) -> tuple[Value, Value]:
        """The magnitude bits of the codes' values and those of 6 scales, in the near type."""
        if self._rows is not None:
            decoded, largest = self._look_up(self._rows, codes, scale_byte)
            return decoded & self._magnitude_bits, largest
        half_scale = ((scale_byte - 1) << self._mantissa_bits).resize(self.lane).splat(BLOCK_SIZE)
        decoded = _decode(codes.resize(self.lane) & _MAX_CODE, half_scale, self._mantissa_bits)
        return decoded, half_scale + _offset(_MAX_CODE, self._mantissa_bits)

    def _count(
        self, chunk: Chunk, squares: list[Value], magnitudes: Value, largest: Value, errors: Value
    ) -> Chunk:
        saturated = magnitudes.compare("u>", largest).select(self._one, 0)
        return Chunk(
            squares,
            chunk.saturated + saturated,
            chunk.smallest.umin(magnitudes),
            chunk.largest.umax(errors & self._error_bits),
        )

    def add_far(self, magnitudes: Value, codes: Value, scale_byte: Value) -> None:
        """Add any block of numbers, in float64 and to memory.

        Args:
            magnitudes: Magnitude bits in the elements' type.
            codes: With signs, `<32 x i16>`.
            scale_byte: i32.
        """
        constant = self._emitter.constant
        magnitudes = widen(magnitudes, self._dtype)
        lifted, inverse = self._emitter.branch(
            scale_byte.compare("u<", LIFT_BELOW_FIELD),
            lambda: [lift_lanes(magnitudes), constant(F64, 2.0**-LIFT_EXPONENT)],
            lambda: [magnitudes, constant(F64, 1.0)],
        )
        field = (scale_byte + (_FLOAT64_BIAS - SCALE_BIAS)).zext(I64)
        scale = (field << _FLOAT64_MANTISSA_BITS).bitcast(F64)
        half = constant(magnitudes.type, (SCALE_BIAS - 1) << FLOAT32_MANTISSA_BITS)
        codes = codes.resize(I32) & _MAX_CODE
        multiples = _decode(codes, half, FLOAT32_MANTISSA_BITS).bitcast_lanes(F32).fpext(F64)
        q = multiples.fmul(scale.splat(BLOCK_SIZE))
        x = lifted.bitcast_lanes(F32).fpext(F64).fmul(inverse.splat(BLOCK_SIZE))
        error = x.fsub(q)
        for row, value in enumerate((x, q, error)):
            squares = value.fmul(value)
            one, other = (squares.lanes(range(at, at + HALF)) for at in (0, HALF))
            self._result.increase(row * ROW, one.fadd(other))
        sizes = error.bitcast_lanes(I64) & ((1 << 63) - 1)
        self._result.raise_largest(sizes.reduce_umax())
        limit = scale.fmul(E2M1_HALVES[-1] / 2).bitcast(I64).splat(BLOCK_SIZE)
        self._result.increase(SATURATED, x.bitcast_lanes(I64).compare("u>", limit).count_true())

    def _pin(self, kind: ir.VectorType, number: int) -> Value:
        """A constant that stays in its register.

        LLVM reads constants from memory wherever they are used, and the loop's reads are what takes
        longest. It cannot do so with what it does not know to be constant.
        """
        return self._emitter.constant(kind, number) + self._zero.resize(kind.element).splat(
            kind.count
        )

    def _rows_of_scales(self) -> Value:
        """For each near scale: the bits of 16 codes, twice, and the magnitude bits of 6 scales."""
        rows = array("H")
        for scale_byte in range(LOWEST_NEAR, LOWEST_NEAR + 2 * FARTHEST_EXPONENT + 1):
            half = (scale_byte - 1) << self._mantissa_bits
            offsets = [_offset(code, self._mantissa_bits) for code in range(2, SIGN_BIT)]
            positive = [0, half, *(half + offset for offset in offsets)]
            negative = [_BF16_SIGN | bits for bits in positive]
            rows.extend([*(positive + negative) * 2, *[positive[_MAX_CODE]] * BLOCK_SIZE])
        return self._emitter.data("scales", rows.tobytes())

    def _look_up(self, rows: Value, codes: Value, scale_byte: Value) -> tuple[Value, Value]:
        """The bits of the codes' values and those of 6 scales, `<32 x i16>`."""
        at = (scale_byte.zext(I64) - LOWEST_NEAR) * _TABLE_ROW
        table, largest = (
            self._emitter.load(rows, at + part * 2 * BLOCK_SIZE, vector(I16, BLOCK_SIZE))
            for part in range(2)
        )
        return look_up(self._emitter, table, codes), largest

    def _floats(self, magnitudes: Value) -> list[Value]:
        """Magnitudes in two vectors `<16 x float>`; which is where does not matter."""
        if self.lane is I32:
            halves = [magnitudes.lanes(range(at, at + HALF)) for at in (0, HALF)]
        else:
            pairs = magnitudes.bitcast(vector(I32, HALF))
            halves = [pairs << 16, pairs & self._high_half]
        return [half.bitcast_lanes(F32) for half in halves]


def _offset(code: int, mantissa_bits: int) -> int:
    """What to add to the bits of half the scale for those of a code's value, from code 2 on.

    Such a code is an exponent and a mantissa bit, which count from half the scale.
    """
    return code << (mantissa_bits - 1)


def _decode(codes: Value, half_scale: Value, mantissa_bits: int) -> Value:
    """Magnitude bits of the values of codes without signs, in lanes like the codes."""
    offset = codes << (mantissa_bits - 1)
    from_half = codes.compare("u>=", 2).select(offset, 0) + half_scale
    return codes.compare("==", 0).select(codes, from_half)


def _join(halves: Sequence[Value], lane: ir.IntType) -> Value:
    """The highest bits of two vectors of floats, in one vector."""
    step = _F32_BITS // lane.width
    one, other = (half.bitcast(vector(lane, HALF * step)) for half in halves)
    return one.lanes_with(other, range(step - 1, BLOCK_SIZE * step, step))
