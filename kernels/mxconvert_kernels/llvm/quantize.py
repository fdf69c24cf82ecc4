"""The quantization kernels: `blocks_with_nonfinite quantize(src, packed, scales, blocks, bias)`.

One kernel serves the rules `even`, `floor` and `rceil`, which differ only in `bias`
(`lanes.rule_bias` for float32's mantissa); rule `mse` has its own, called with the bias of `floor`.
Every block goes through `_quantize_lanes`: BF16 in 32 lanes of 16 bits, F32 and F16 in 32 lanes of
32 bits. BF16 blocks of tiny values are widened to 32 bits first.

Whether a block's scale may move in the search is hard to predict, and a branch on it costs more
than what it saves. So the BF16 kernel of rule `mse` leaves such blocks open, and settles those of
a chunk together in a loop of their own.
docs/explanation/cpu-kernels.md derives the arithmetic.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mxconvert_kernels.lanes import (
    CAPPED_SCALE_BYTE,
    FLOAT32_MANTISSA_BITS,
    LIFT_BELOW_FIELD,
    LIFT_EXPONENT,
    cap_bits,
    lower_gate,
    raise_gate,
)
from mxconvert_kernels.llvm.emit import F32, I1, I8, I16, I32, I64, POINTER, Emitter, Value, vector
from mxconvert_kernels.llvm.sums import ABOVE_SHIFT, CHUNK_BLOCKS, Buffers, SumsEmitter
from mxconvert_kernels.llvm.widen import lift_lanes, widen
from mxconvert_kernels.spec import (
    BLOCK_SIZE,
    E2M1_HALVES,
    ELEMENT_EMAX,
    ERROR_FRACTION_BITS,
    NAN_SCALE_BYTE,
    PACKED_BLOCK_BYTES,
    SCALE_BIAS,
    FloatType,
)

if TYPE_CHECKING:
    from mxconvert_kernels.spec import FloatLayout

MAX_CODE = len(E2M1_HALVES) - 1

_OPEN_BYTES: Final = 4
"""An open block: its index in the chunk above its largest magnitude bits."""
_INDEX_SHIFT: Final = 16


class Block(NamedTuple):
    """A block on its way through the kernel; magnitude bits are described in `lanes`."""

    magnitudes: Value
    """Magnitude bits, `<32 x i16>` or `<32 x i32>`."""
    amax: Value
    """The largest of them before any lift, i32."""
    lift: Value
    """The power of two the magnitudes were multiplied by, i32: 0 or `LIFT_EXPONENT`."""
    mantissa_bits: int


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
    src, packed, scales, blocks, bias, *extra = emitter.arguments
    kernel = _Kernel(emitter, dtype, bias, search=search)
    collector = None
    if sums:
        buffers = Buffers(src, packed, scales, *extra)
        collector = SumsEmitter(emitter, dtype, buffers, blocks, native=native)
    passes = _Passes(kernel, _Tensor(src, packed, scales), collector)
    return emitter.finish(passes.run(blocks))


class _Tensor(NamedTuple):
    src: Value
    packed: Value
    scales: Value


class _Passes:
    """The loops over a tensor.

    Kernels that return to a block go through the tensor chunk by chunk, so that it is in the
    first-level cache: once over all blocks, once over those that are open, once for the sums.
    """

    def __init__(self, kernel: _Kernel, tensor: _Tensor, collector: SumsEmitter | None) -> None:
        self._kernel = kernel
        self._emitter = kernel.emitter
        self._tensor = tensor
        self._collector = collector
        self._open = self._emitter.stack(CHUNK_BLOCKS * _OPEN_BYTES) if kernel.defers else None

    def run(self, blocks: Value) -> Value:
        """Quantize all blocks; returns how many are not finite, i64."""
        none = self._emitter.constant(I64, 0)
        collector = self._collector
        if collector is None and self._open is None:
            return self._emitter.loop(blocks, [none] * 3, partial(self._quantize, none))[0]
        behind = [] if collector is None else collector.initial

        def chunk(index: Value, values: list[Value]) -> list[Value]:
            bad, moves, *behind = values
            first = index * CHUNK_BLOCKS
            count = blocks.usub_sat(first).umin(CHUNK_BLOCKS)
            summed = [] if collector is None else collector.begin(index, behind)

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
        bits = self._load(block)
        scale_byte, codes, bad, moves, is_open, amax = self._kernel.quantize(bits)
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
        scale_byte, codes, moves = self._kernel.settle(self._load(block), amax)
        self._store(block, in_chunk, scale_byte, codes)
        return [carried[0] + moves]

    def _load(self, block: Value) -> Value:
        dtype = self._kernel.dtype
        element = I32 if dtype is FloatType.F32 else I16
        offset = block * (BLOCK_SIZE * dtype.itemsize)
        return self._emitter.load(self._tensor.src, offset, vector(element, BLOCK_SIZE))

    def _store(self, block: Value, in_chunk: Value, scale_byte: Value, codes: Value) -> None:
        self._emitter.store(_pack(codes), self._tensor.packed, block * PACKED_BLOCK_BYTES)
        self._emitter.store(scale_byte.trunc(I8), self._tensor.scales, block)
        if self._collector is not None:
            self._collector.keep(codes, in_chunk)


class _Kernel:
    """What the steps of one kernel have in common."""

    def __init__(self, emitter: Emitter, dtype: FloatType, bias: Value, *, search: bool) -> None:
        self.emitter = emitter
        self.dtype = dtype
        self.layout: FloatLayout = dtype.layout
        self.bias = bias
        self.search = search
        self.defers = search and dtype is FloatType.BF16
        """Whether blocks may be left open, for `settle`."""

    def quantize(self, bits: Value) -> list[Value]:
        """Quantize a block.

        Returns:
            The scale byte i32, signed codes `<32 x i16>`, i64 1 if the block is not finite, moves
            and whether it is open as in `Quantized`, and the largest magnitude bits i32.
        """
        magnitudes = bits & self.layout.magnitude_mask
        amax = magnitudes.reduce_umax().resize(I32)
        constant = self.emitter.constant
        none, no = constant(I64, 0), constant(I1, 0)

        def finite() -> list[Value]:
            wide, wide_amax = (widen(lanes, self.dtype) for lanes in (magnitudes, amax))
            return signed(self._quantize_wide(wide, wide_amax))

        def fast_bf16() -> list[Value]:
            return signed(self._quantize_lanes(self._bf16(magnitudes, amax), defer=self.defers))

        def signed(result: Quantized) -> list[Value]:
            codes = result.codes.resize(I16) | _signs(bits)
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

    def settle(self, bits: Value, amax: Value) -> list[Value]:
        """Try the neighbour of the scale of an open block.

        Returns:
            The scale byte i32, signed codes `<32 x i16>`, and moves.
        """
        block = self._bf16(bits & self.layout.magnitude_mask, amax)
        floor = (amax >> block.mantissa_bits) - ELEMENT_EMAX
        scale_byte, codes, moves = self._try_neighbour(block, floor, _encode(block, floor))
        return [scale_byte, codes | _signs(bits), moves]

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
        exponent = (block.amax + bias) >> block.mantissa_bits
        scale_byte = exponent.usub_sat(ELEMENT_EMAX)
        no = self.emitter.constant(I1, 0)
        if self.search:
            return self._search(block, scale_byte, defer=defer)
        overflows = block.amax.compare("u>=", cap_bits(block.mantissa_bits)).zext(I32)
        at_cap = scale_byte.compare("==", CAPPED_SCALE_BYTE).zext(I32)
        scale_byte -= at_cap & overflows
        floor = (block.amax >> block.mantissa_bits).usub_sat(ELEMENT_EMAX)
        is_below, is_above = scale_byte.compare("u<", floor), floor.compare("u<", scale_byte)
        moves = is_below.zext(I64) + (is_above.zext(I64) << ABOVE_SHIFT)
        return Quantized(scale_byte, _encode(block, scale_byte + block.lift), moves, no)

    def _search(self, block: Block, floor: Value, *, defer: bool) -> Quantized:
        """Move to the exponent above or below if it has less squared error."""
        codes = _encode(block, floor + block.lift)
        mantissa = block.amax & ((1 << block.mantissa_bits) - 1)
        low, high = lower_gate(block.mantissa_bits), raise_gate(block.mantissa_bits)
        # One comparison, for this branch is hard to predict: outside low < mantissa <= high.
        may_move = (mantissa - (low + 1)).compare("u>=", high - low)
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


def _encode(block: Block, scale_byte: Value) -> Value:
    """Magnitude codes under a scale byte that includes the lift.

    `distance` is the float's bits counted from a quarter of the scale, above which codes are not
    zero. From one scale on, rounding it to one mantissa bit gives the code; `below_one` has the
    codes of what is smaller and never exceeds the code of what is larger.
    """
    lane = block.magnitudes.type.element
    shift = block.mantissa_bits - 1
    quarter = ((scale_byte - 2) << block.mantissa_bits).resize(lane).splat(BLOCK_SIZE)
    distance = block.magnitudes.usub_sat(quarter)
    odd = (distance >> shift) & 1
    rounded = distance + odd + ((1 << (shift - 1)) - 1 - (2 << shift))
    below_one = distance.umin(1) + ((distance + (1 << shift)) >> (block.mantissa_bits + 1))
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
    inverse_unit = (exponent << FLOAT32_MANTISSA_BITS).bitcast(F32).splat(BLOCK_SIZE)
    bits = block.magnitudes.resize(I32) << (FLOAT32_MANTISSA_BITS - block.mantissa_bits)
    scaled = bits.bitcast_lanes(F32).fmul(inverse_unit)
    return scaled.fadd(float(1 << FLOAT32_MANTISSA_BITS)).bitcast_lanes(I32).trunc(I16)


def _halves(codes: Value) -> Value:
    """`E2M1_HALVES[code]`: twice the magnitude of each code, `<32 x i16>`."""
    return codes + codes.usub_sat(4) + (codes.usub_sat(6) << 1)


def _signs(bits: Value) -> Value:
    """Bit 3 of each code, `<32 x i16>`; a negative zero has no sign."""
    sign_shift: int = bits.type.element.width - 4
    return ((bits.usub_sat(1) >> sign_shift) & 8).resize(I16)


def _pack(codes: Value) -> Value:
    """Two codes to a byte, the even element in the low nibble: `<16 x i8>`."""
    pairs = codes.bitcast(vector(I32, PACKED_BLOCK_BYTES))
    return (pairs | (pairs >> 12)).trunc(I8)
