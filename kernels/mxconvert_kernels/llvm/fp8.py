"""Blocks of FP8 and a factor, as float32: one rounding, whatever the thread's modes flush.

docs/explanation/cpu-kernels.md explains the steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mxconvert_kernels.lanes import FLOAT32_MANTISSA_BITS, lowest_factor_field
from mxconvert_kernels.llvm.emit import F32, F64, I8, I16, I32, I64, Emitter, Value, vector
from mxconvert_kernels.llvm.source import HALF, join_halves, split_bf16
from mxconvert_kernels.spec import BLOCK_SIZE, FACTOR_BYTES, SCALE_BIAS, FloatType
from mxconvert_kernels.units import UNIT_EXPONENT, quiet_nan

if TYPE_CHECKING:
    from llvmlite import ir

    from mxconvert_kernels.spec import FloatLayout

_WIDE: Final = FloatType.F32.layout
_BF16_MANTISSA_BITS: Final = FloatType.BF16.layout.mantissa_bits
GROUP: Final = 16
"""Blocks whose largest products are found together."""
_REGISTER_BYTES: Final = 64

_FLOAT64_BIAS: Final = 1023
_FLOAT64_MANTISSA_BITS: Final = 52
_FLOAT64_MAGNITUDE: Final = (1 << 63) - 1


class Elements(NamedTuple):
    """A block as it is stored."""

    bytes: Value
    """FP8, `<32 x i8>`."""
    lanes: Value
    """The same, `<32 x i16>`."""
    factor: Value
    """The bits of a float32, i32."""


class ScaledBlocks:
    """FP8 elements and factors in memory.

    Args:
        emitter: The function under construction, before any loop.
        elements: Points to FP8 bytes.
        dtype: Their type.
        factors: Points to float32, one for each block.
    """

    def __init__(self, emitter: Emitter, elements: Value, dtype: FloatType, factors: Value) -> None:
        self._emitter = emitter
        self._elements = elements
        self._factors = factors
        self._stored: FloatLayout = dtype.layout

    def load(self, block: Value) -> Elements:
        """Read a block."""
        elements = self._emitter.load(self._elements, block * BLOCK_SIZE, vector(I8, BLOCK_SIZE))
        factor = self._emitter.load(self._factors, block * FACTOR_BYTES, I32)
        return Elements(elements, elements.zext(I16), factor)

    def largest_products(self, first: Value) -> tuple[Value, Value]:
        """The largest magnitudes of `GROUP` blocks in a row.

        Returns:
            Float32 bits `<16 x i32>`, and whether the block is plain unless that is infinite.
        """
        largest = self._largest(first)
        factors = self._emitter.load(self._factors, first * FACTOR_BYTES, largest.type)
        bits = largest << (FLOAT32_MANTISSA_BITS - self._stored.mantissa_bits)
        rebias = (SCALE_BIAS - self._stored.bias) << FLOAT32_MANTISSA_BITS
        values = self._mend_subnormal((bits + rebias).bitcast_lanes(F32))
        is_plain = largest.compare("u<", self._stored.infinity) & self._is_plain_factor(factors)
        return values.fmul(factors.bitcast_lanes(F32)).bitcast_lanes(I32), is_plain

    def _largest(self, first: Value) -> Value:
        """The largest FP8 magnitudes of `GROUP` blocks, `<16 x i32>`.

        Pairs of vectors become one until there is one with four bytes of each block.
        """
        vectors = [
            self._emitter.load(
                self._elements, first * BLOCK_SIZE + offset, vector(I8, _REGISTER_BYTES)
            )
            & self._stored.magnitude_mask
            for offset in range(0, GROUP * BLOCK_SIZE, _REGISTER_BYTES)
        ]
        for lane in (I64, I64, I32):
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [_pairwise_max(one, other, lane) for one, other in pairs]
        words = vectors[0].bitcast(vector(I32, GROUP))
        for distance in (16, 8):
            both = vector(I8, _REGISTER_BYTES)
            words = words.bitcast(both).umax((words >> distance).bitcast(both)).bitcast(words.type)
        return words & 0xFF

    def is_plain(self, block: Elements) -> Value:
        """Whether all elements are finite, the factor is positive and no product is subnormal."""
        magnitudes = block.bytes & self._stored.magnitude_mask
        bad = magnitudes.compare("u>=", self._stored.infinity).bitcast(I32)
        return self._is_plain_factor(block.factor) & bad.compare("==", 0)

    def _is_plain_factor(self, factor: Value) -> Value:
        lowest = lowest_factor_field(self._stored) << FLOAT32_MANTISSA_BITS
        return (factor - lowest).compare("u<", _WIDE.infinity - lowest)

    def any_products(self, block: Elements) -> Value:
        """The products of any elements and factor, float32 bits `<32 x i32>`."""
        magnitudes = self._emitter.branch(
            self.is_plain(block),
            lambda: [join_halves(*_as_integers(self.products(block)))],
            lambda: [self._closely(block)],
            likely=True,
        )[0]
        signs = (block.lanes.zext(I32) << 24) ^ block.factor.splat(BLOCK_SIZE)
        return magnitudes | (signs & (1 << 31))

    def products(self, block: Elements) -> list[Value]:
        """The magnitudes of a plain block: those of even index and those of odd, `<16 x float>`."""
        factor = block.factor.bitcast(F32).splat(HALF)
        return [value.fmul(factor) for value in self._decode(block)]

    def _decode(self, block: Elements) -> list[Value]:
        """Elements without signs, in pairs as `products`; NaN and infinity become numbers."""
        layout = self._stored
        magnitudes = block.lanes & layout.magnitude_mask
        rebias = (SCALE_BIAS - layout.bias) << _BF16_MANTISSA_BITS
        normal = (magnitudes << (_BF16_MANTISSA_BITS - layout.mantissa_bits)) + rebias
        return [self._mend_subnormal(half) for half in split_bf16(normal)]

    def _mend_subnormal(self, values: Value) -> Value:
        """Floats that were decoded as if all of them were normal.

        What is subnormal in FP8 was given a hidden bit under half the exponent that it has, so it
        is twice that less the hidden bit: exactly. For others this difference is no smaller than
        the value itself. No step has a subnormal float32.
        """
        two = self._emitter.constant(values.type, 2.0)
        hidden = self._emitter.constant(values.type, -(2.0 ** (1 - self._stored.bias)))
        mended = values.fmuladd(two, hidden)
        one, other = _as_integers([values, mended])
        return one.umin(other).bitcast_lanes(F32)

    def _closely(self, block: Elements) -> Value:
        """Magnitude bits of the products of any block, in float64, where they are exact."""
        values = join_halves(*_as_integers(self._decode(block))).bitcast_lanes(F32)
        products = values.fpext(F64).fmul(_widen_factor(block.factor).splat(BLOCK_SIZE))
        bits = products.bitcast_lanes(I64) & _FLOAT64_MAGNITUDE
        # A subnormal's bits are its number of units; adding 2 ** 52 rounds them to a whole number.
        units = products.fmul(2.0**UNIT_EXPONENT).fadd(2.0**_FLOAT64_MANTISSA_BITS)
        smallest = (_FLOAT64_BIAS + 1 - _WIDE.bias) << _FLOAT64_MANTISSA_BITS
        is_small = bits.compare("u<", smallest)
        normal = products.fptrunc(F32).bitcast_lanes(I32) & _WIDE.magnitude_mask
        finite = is_small.select(units.bitcast_lanes(I64).trunc(I32), normal)
        return self._restore_nonfinite(block, finite)

    def _restore_nonfinite(self, block: Elements, products: Value) -> Value:
        """Put in what the elements that are not finite give."""
        stored = (block.lanes & self._stored.magnitude_mask).zext(I32)
        nan = self._emitter.constant(stored.type, quiet_nan(FloatType.F32))
        found = stored.compare("u>=", self._stored.infinity).select(nan, products)
        if not self._stored.has_infinity:
            return found
        is_zero = (block.factor & _WIDE.magnitude_mask).compare("==", 0)
        infinity = is_zero.select(nan.lane(0), _WIDE.infinity).splat(BLOCK_SIZE)
        return stored.compare("==", self._stored.infinity).select(infinity, found)


def _widen_factor(factor: Value) -> Value:
    """The magnitude of a factor in float64."""
    magnitude = factor & _WIDE.magnitude_mask
    units = magnitude.sitofp(F64).fmul(2.0**-UNIT_EXPONENT)
    is_subnormal = magnitude.compare("u<", 1 << FLOAT32_MANTISSA_BITS)
    return is_subnormal.select(units, magnitude.bitcast(F32).fpext(F64))


def _pairwise_max(one: Value, other: Value, lane: ir.IntType) -> Value:
    """The maxima, byte by byte, of lanes side by side: those of one vector, then of another."""
    lanes = 8 * _REGISTER_BYTES // lane.width
    first, second = (value.bitcast(vector(lane, lanes)) for value in (one, other))
    even, odd = (
        first.lanes_with(second, range(which, 2 * lanes, 2)).bitcast(one.type) for which in range(2)
    )
    return even.umax(odd)


def _as_integers(floats: list[Value]) -> list[Value]:
    return [lanes.bitcast_lanes(I32) for lanes in floats]
