"""Where a quantization kernel's blocks come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from mxconvert_kernels.llvm.emit import F32, I16, I32, Emitter, Value, vector
from mxconvert_kernels.spec import BLOCK_SIZE, FloatType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llvmlite import ir

HALF: Final = BLOCK_SIZE // 2
"""Lanes of a vector of half as many elements, of twice the width."""


class Near(NamedTuple):
    """A block whose scale is near, as the sums take it."""

    bits: Value
    """In the type `near_dtype`, with or without signs."""
    floats: Sequence[Value] = ()
    """Magnitudes in full if the bits are not: of even index and of odd, `<16 x float>`."""


class Source(Protocol):
    """A tensor to quantize."""

    dtype: FloatType
    """Of the bits that `bits` gives."""
    near_dtype: FloatType
    """Of the bits that `near` gives."""

    def bits(self, block: Value) -> Value:
        """The elements of a block, `<32 x i16>` or `<32 x i32>`."""

    def near(self, block: Value) -> Near:
        """The elements of a block for the sums, if its scale is near."""


class Stored:
    """Elements that are in memory as they are quantized."""

    def __init__(self, emitter: Emitter, pointer: Value, dtype: FloatType) -> None:
        self.dtype = self.near_dtype = dtype
        self._emitter = emitter
        self._pointer = pointer

    def bits(self, block: Value) -> Value:
        """See `Source`."""
        element = I32 if self.dtype is FloatType.F32 else I16
        offset = block * (BLOCK_SIZE * self.dtype.itemsize)
        return self._emitter.load(self._pointer, offset, vector(element, BLOCK_SIZE))

    def near(self, block: Value) -> Near:
        """See `Source`."""
        return Near(self.bits(block))


def split_bf16(lanes: Value) -> list[Value]:
    """BF16 lanes `<32 x i16>` as floats: those of even index and those of odd, `<16 x float>`."""
    pairs = lanes.bitcast(vector(I32, HALF))
    return [half.bitcast_lanes(F32) for half in (pairs << 16, pairs & 0xFFFF0000)]


def join_pairs(even: Value, odd: Value) -> Value:
    """The low 16 bits of two vectors `<16 x i32>`, turn by turn: `<32 x i16>`."""
    return ((even & 0xFFFF) | (odd << 16)).bitcast(_lanes16())


def join_high_pairs(even: Value, odd: Value) -> Value:
    """The high 16 bits of two vectors `<16 x i32>`, turn by turn: `<32 x i16>`."""
    return ((even >> 16) | (odd & 0xFFFF0000)).bitcast(_lanes16())


def join_halves(even: Value, odd: Value) -> Value:
    """Two vectors `<16 x i32>`, turn by turn: `<32 x i32>`."""
    return even.lanes_with(odd, [lane + which for lane in range(HALF) for which in (0, HALF)])


def _lanes16() -> ir.VectorType:
    return vector(I16, BLOCK_SIZE)
