"""The quantization kernels: `blocks_with_nonfinite quantize(src, packed, scales, blocks, bias)`.

One kernel serves the rules `even`, `floor` and `rceil`, which differ only in `bias`
(`lanes.rule_bias` for float32's mantissa); rule `mse` has its own, called with the bias of `floor`.
Every block goes through `_quantize_lanes`: BF16 in 32 lanes of 16 bits, F32 and F16 in 32 lanes of
32 bits. BF16 blocks of tiny values are widened to 32 bits first.

docs/explanation/cpu-kernels.md derives the arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mxconvert_kernels.lanes import (
    CAPPED_SCALE_BYTE,
    FLOAT32_MANTISSA_BITS,
    LIFT_BELOW_FIELD,
    LIFT_EXPONENT,
    cap_bits,
    lower_gate,
    raise_gate,
)
from mxconvert_kernels.llvm.emit import F32, I1, I16, I32, I64, POINTER, Emitter, Value, vector
from mxconvert_kernels.llvm.passes import Passes
from mxconvert_kernels.llvm.source import Stored, join_pairs
from mxconvert_kernels.llvm.sums import ABOVE_SHIFT, Buffers, SumsEmitter
from mxconvert_kernels.llvm.widen import lift_lanes, widen
from mxconvert_kernels.spec import (
    BLOCK_SIZE,
    E2M1_HALVES,
    ELEMENT_EMAX,
    ERROR_FRACTION_BITS,
    NAN_SCALE_BYTE,
    SCALE_BIAS,
    FloatType,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mxconvert_kernels.spec import FloatLayout

MAX_CODE = len(E2M1_HALVES) - 1


class Block(NamedTuple):
    """A block on its way through the kernel; magnitude bits are described in `lanes`."""

    magnitudes: Value
    """Magnitude bits, `<32 x i16>` or `<32 x i32>`."""
    amax: Value
    """The largest of them before any lift, i32."""
    lift: Value
    """The power of two the magnitudes were multiplied by, i32: 0 or `LIFT_EXPONENT`."""
    mantissa_bits: int
    exact: Sequence[Value] = ()
    """The magnitudes in float32 if the bits above are not all: even and odd, `<16 x float>`."""


class Quantized(NamedTuple):
    """A block's result."""

    scale_byte: Value
    """i32."""
    codes: Value
    """Magnitude codes 0 ... 7, in as many bits as the magnitudes."""
    moves: Value
    """`ONE_BELOW` or `ONE_ABOVE` if the scale is not that of the floor exponent, i64."""
    is_open: Value
    """i1: whether a neighbour of the scale is still to be tried."""


def build(dtype: FloatType, *, search: bool, sums: bool = False, native: bool = False) -> str:
    """The kernel's module.

    Args:
        dtype: The type of the elements of `src`.
        search: Build rule `mse` rather than the three others.
        sums: Add up `ErrorSums` too; two further parameters point to the buffers `result` and
            `scratch` of `sums.Buffers`.
        native: Use the instructions of `avx512_bf16` in the sums of BF16.
    """
    parameters = [POINTER, POINTER, POINTER, I64, I32, *([POINTER, POINTER] if sums else [])]
    emitter = Emitter("quantize", parameters)
    src, packed, scales, blocks, bias, *memory = emitter.arguments
    source = Stored(emitter, src, dtype)
    collector = None
    if sums:
        buffers = Buffers(packed, scales, *memory)
        collector = SumsEmitter(emitter, source, buffers, blocks, native=native)
    kernel = _StoredKernel(emitter, source, bias, search=search)
    return emitter.finish(Passes(kernel, packed, scales, collector).run(blocks))


class Kernel:
    """What the steps of all kernels have in common."""

    def __init__(self, emitter: Emitter, dtype: FloatType, bias: Value, *, search: bool) -> None:
        self.emitter = emitter
        self.dtype = dtype
        self.layout: FloatLayout = dtype.layout
        self.bias = bias
        self.search = search

    def _quantize_bits(self, bits: Value) -> list[Value]:
        magnitudes = bits & self.layout.magnitude_mask
        amax = magnitudes.reduce_umax().resize(I32)
        constant = self.emitter.constant
        none, no = constant(I64, 0), constant(I1, 0)

        def finite() -> list[Value]:
            wide, wide_amax = (widen(lanes, self.dtype) for lanes in (magnitudes, amax))
            return signed(self._quantize_wide(wide, wide_amax))

        def fast_bf16() -> list[Value]:
            return signed(self._quantize_lanes(self._bf16(magnitudes, amax), defer=self.search))

        def signed(result: Quantized) -> list[Value]:
            codes = result.codes.resize(I16) | signs(bits)
            return [result.scale_byte, codes, none, result.moves, result.is_open]

        def zero_or_not_finite() -> list[Value]:
            no_codes = constant(vector(I16, BLOCK_SIZE), 0)
            is_zero = amax.compare("==", 0)
            scale_byte = is_zero.select(constant(I32, 0), NAN_SCALE_BYTE)
            return [scale_byte, no_codes, is_zero.select(none, 1), none, no]

        def any_block() -> list[Value]:
            is_number = (amax - 1).compare("u<", self.layout.infinity - 1)
            return self.emitter.branch(is_number, finite, zero_or_not_finite, likely=True)

        if self.dtype is not FloatType.BF16:
            return [*any_block(), amax]
        lowest = LIFT_BELOW_FIELD << self.layout.mantissa_bits
        is_normal = (amax - lowest).compare("u<", self.layout.infinity - lowest)
        return [*self.emitter.branch(is_normal, fast_bf16, any_block, likely=True), amax]

    def _settle(self, block: Block, sign_bits: Value) -> list[Value]:
        """Try the neighbour of an open block's scale."""
        floor = (block.amax >> block.mantissa_bits) - ELEMENT_EMAX
        scale_byte, codes, moves = self._try_neighbour(block, floor, _encode(block, floor))
        return [scale_byte, codes | sign_bits, moves]

    def _bf16(self, magnitudes: Value, amax: Value) -> Block:
        no_lift = self.emitter.constant(I32, 0)
        return Block(magnitudes, amax, no_lift, self.layout.mantissa_bits)

    def _quantize_wide(self, magnitudes: Value, amax: Value) -> Quantized:
        """Quantize 32-bit lanes, lifting tiny ones first."""
        constant = self.emitter.constant
        lifted, lift = self.emitter.branch(
            amax.compare("u<", LIFT_BELOW_FIELD << FLOAT32_MANTISSA_BITS),
            lambda: [lift_lanes(magnitudes), constant(I32, LIFT_EXPONENT)],
            lambda: [magnitudes, constant(I32, 0)],
            likely=False,
        )
        return self._quantize_lanes(Block(lifted, amax, lift, FLOAT32_MANTISSA_BITS))

    def _quantize_lanes(self, block: Block, *, defer: bool = False) -> Quantized:
        """Choose the scale and encode."""
        bias = self.bias >> (FLOAT32_MANTISSA_BITS - block.mantissa_bits)
        no = self.emitter.constant(I1, 0)
        if self.search:
            return self._search(block, floor_exponent(block.amax, block.mantissa_bits), defer=defer)
        scale_byte, floor = choose_scale(block.amax, bias, block.mantissa_bits)
        is_below, is_above = scale_byte.compare("u<", floor), floor.compare("u<", scale_byte)
        moves = is_below.zext(I64) + (is_above.zext(I64) << ABOVE_SHIFT)
        return Quantized(scale_byte, _encode(block, scale_byte + block.lift), moves, no)

    def _search(self, block: Block, floor: Value, *, defer: bool) -> Quantized:
        """Move to the exponent above or below if it has less squared error."""
        codes = _encode(block, floor + block.lift)
        may_move = may_move_scale(block.amax, block.mantissa_bits)
        stay, no = self.emitter.constant(I64, 0), self.emitter.constant(I1, 0)
        if defer:
            return Quantized(floor, codes, stay, may_move)
        scale_byte, codes, moves = self.emitter.branch(
            may_move,
            lambda: self._try_neighbour(block, floor, codes),
            lambda: [floor, codes, stay],
        )
        return Quantized(scale_byte, codes, moves, no)

    def _try_neighbour(self, block: Block, floor: Value, codes: Value) -> list[Value]:
        """Compare the codes under the floor exponent with those under a neighbour.

        Returns:
            The better scale byte i32, its codes, and moves.
        """
        constant = self.emitter.constant
        mantissa = block.amax & ((1 << block.mantissa_bits) - 1)
        rising = mantissa.compare("u>", raise_gate(block.mantissa_bits))
        step = rising.select(constant(I32, 1), -1)
        other = _encode(block, floor + step + block.lift)
        gain = _error_difference(block, floor + block.lift, step, codes, other)
        # Ties go to the smaller exponent: no gain is enough to fall, but not to rise.
        limit = rising.select(constant(I32, 0), 1)
        allowed = (floor + step).compare("u<", CAPPED_SCALE_BYTE)
        better = gain.compare("s<", limit) & allowed
        # Selecting between vectors by a scalar would be a branch, and a badly predicted one.
        mask = better.sext(codes.type.element).splat(BLOCK_SIZE)
        chosen = codes + ((other - codes) & mask)
        move = rising.select(constant(I64, 1 << ABOVE_SHIFT), 1)
        return [better.select(floor + step, floor), chosen, better.select(move, 0)]


class _StoredKernel(Kernel):
    """A kernel for elements that are in memory as they are quantized."""

    def __init__(self, emitter: Emitter, source: Stored, bias: Value, *, search: bool) -> None:
        super().__init__(emitter, source.dtype, bias, search=search)
        self._source = source
        self.defers = self.in_chunks = search and source.dtype is FloatType.BF16

    def begin(self, first: Value, count: Value) -> Value:  # noqa: ARG002
        """See `passes.Kernel`."""
        return self.emitter.constant(I64, 0)

    def quantize(self, block: Value, in_chunk: Value) -> list[Value]:  # noqa: ARG002
        """See `passes.Kernel`."""
        return self._quantize_bits(self._source.bits(block))

    def settle(self, block: Value, amax: Value) -> list[Value]:
        """See `passes.Kernel`."""
        bits = self._source.bits(block)
        return self._settle(self._bf16(bits & self.layout.magnitude_mask, amax), signs(bits))


def choose_scale(amax: Value, bias: Value, mantissa_bits: int) -> tuple[Value, Value]:
    """The scale byte by the rule of `bias` and the floor exponent, i32 each or vectors thereof."""
    scale_byte = floor_exponent(amax + bias, mantissa_bits)
    overflows = amax.compare("u>=", cap_bits(mantissa_bits)).zext(I32)
    at_cap = scale_byte.compare("==", CAPPED_SCALE_BYTE).zext(I32)
    return scale_byte - (at_cap & overflows), floor_exponent(amax, mantissa_bits)


def floor_exponent(amax: Value, mantissa_bits: int) -> Value:
    """The scale byte of rule `floor`, i32 or a vector thereof."""
    return (amax >> mantissa_bits).usub_sat(ELEMENT_EMAX)


def may_move_scale(amax: Value, mantissa_bits: int) -> Value:
    """Whether the search may leave the floor exponent."""
    mantissa = amax & ((1 << mantissa_bits) - 1)
    low, high = lower_gate(mantissa_bits), raise_gate(mantissa_bits)
    # One comparison, for a branch on this is hard to predict: outside low < mantissa <= high.
    return (mantissa - (low + 1)).compare("u>=", high - low)


def quarter_bits(scale_byte: Value, mantissa_bits: int) -> Value:
    """The float bits of a quarter of the scale."""
    return (scale_byte - 2) << mantissa_bits


def _encode(block: Block, scale_byte: Value) -> Value:
    """Magnitude codes under a scale byte that includes the lift."""
    lane = block.magnitudes.type.element
    quarter = quarter_bits(scale_byte, block.mantissa_bits).resize(lane)
    return encode_from(quarter, block.magnitudes, block.mantissa_bits)


def encode_from(
    quarter: Value, magnitudes: Value, mantissa_bits: int, one: Value | int = 1
) -> Value:
    """Magnitude codes, given a quarter of the scale as wide as the lanes.

    `distance` is the float's bits counted from a quarter of the scale, above which codes are not
    zero. From one scale on, rounding it to one mantissa bit gives the code; `below_one` has the
    codes of what is smaller and never exceeds the code of what is larger.
    """
    shift = mantissa_bits - 1
    distance = magnitudes.usub_sat(quarter.splat(BLOCK_SIZE))
    odd = (distance >> shift) & 1
    rounded = distance + odd + ((1 << (shift - 1)) - 1 - (2 << shift))
    below_one = distance.umin(one) + ((distance + (1 << shift)) >> (mantissa_bits + 1))
    return rounded.ashr(shift).smax(below_one).smin(MAX_CODE)


def _error_difference(block: Block, floor: Value, step: Value, codes: Value, other: Value) -> Value:
    """Squared error of `other` codes (scale `floor + step`) less that of `codes`, i32.

    Each lane adds (wanted - there) ** 2 - (wanted - here) ** 2, written as a product.
    """
    half_scale = ERROR_FRACTION_BITS - 1
    wanted = _fixed_point(block, floor)
    here = _halves(codes.resize(I16)) << half_scale
    there = _halves(other.resize(I16)) << (step + half_scale).trunc(I16).splat(BLOCK_SIZE)
    left = here - there
    right = wanted + wanted - here - there
    return (left.sext(I32) * right.sext(I32)).reduce_add()


def _fixed_point(block: Block, floor: Value) -> Value:
    """Magnitudes rounded to whole error units, `<32 x i16>`, at most 8192.

    The product with a power of two is exact or far below half a unit; adding 2 ** 23 rounds it to
    an integer, ties to even, which the low mantissa bits then hold.
    """
    exponent = (2 * SCALE_BIAS + ERROR_FRACTION_BITS) - floor
    inverse_unit = (exponent << FLOAT32_MANTISSA_BITS).bitcast(F32)

    def rounded(values: Value) -> Value:
        scaled = values.fmul(inverse_unit.splat(values.type.count))
        return scaled.fadd(float(1 << FLOAT32_MANTISSA_BITS)).bitcast_lanes(I32)

    if block.exact:
        return join_pairs(*(rounded(half) for half in block.exact))
    bits = block.magnitudes.resize(I32) << (FLOAT32_MANTISSA_BITS - block.mantissa_bits)
    return rounded(bits.bitcast_lanes(F32)).trunc(I16)


def _halves(codes: Value) -> Value:
    """`E2M1_HALVES[code]`: twice the magnitude of each code, `<32 x i16>`."""
    return codes + codes.usub_sat(4) + (codes.usub_sat(6) << 1)


def signs(bits: Value) -> Value:
    """Bit 3 of each code, `<32 x i16>`; a negative zero has no sign."""
    sign_shift: int = bits.type.element.width - 4
    return ((bits.usub_sat(1) >> sign_shift) & 8).resize(I16)
