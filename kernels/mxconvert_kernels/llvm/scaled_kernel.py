"""The steps of the quantization kernels for FP8 whose blocks have factors.

Elements are quantized in 32 lanes of 16 bits, like BF16, though products have 24 bits: codes depend
on comparisons with numbers of few bits, for which `odd_bits` of a product do. The search's squared
errors take all bits.

A block's scale is long in coming: its elements' maximum, a product, an exponent. So the scales of a
chunk are chosen before, for 16 blocks at once. Chunks that have a block of tiny or non-finite
values, and what is left behind the last whole chunk, go the way of F32 block by block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mxconvert_kernels.lanes import FLOAT32_MANTISSA_BITS, LIFT_BELOW_FIELD
from mxconvert_kernels.llvm.emit import F32, I1, I8, I16, I32, I64, Emitter, Value
from mxconvert_kernels.llvm.fp8 import GROUP
from mxconvert_kernels.llvm.kept import KeptProducts, odd_bits
from mxconvert_kernels.llvm.quantize import (
    Block,
    Kernel,
    choose_scale,
    encode_from,
    may_move_scale,
    quarter_bits,
)
from mxconvert_kernels.llvm.sums import ABOVE_SHIFT, CHUNK_BLOCKS
from mxconvert_kernels.spec import BLOCK_SIZE, FloatType

if TYPE_CHECKING:
    from mxconvert_kernels.llvm.fp8 import Elements, ScaledBlocks

_WIDE: Final = FloatType.F32.layout
_LOWEST: Final = LIFT_BELOW_FIELD << FLOAT32_MANTISSA_BITS
_NARROW_BITS: Final = FloatType.BF16.layout.mantissa_bits


class _Prepared(NamedTuple):
    """What is known of the blocks of a chunk, in memory."""

    scales: Value
    """Scale bytes, i8."""
    quarters: Value
    """The bits of quarters of the scales in BF16, i16."""
    maxima: Value
    """`odd_bits` of the largest products, i16; for the search alone, as is the next."""
    is_open: Value
    """i8."""


class ScaledKernel(Kernel):
    """A kernel for FP8.

    Args:
        emitter: The function under construction, before any loop.
        source: The elements.
        bias: Of the rule, for float32's mantissa.
        kept: Receives the products, if the sums are to be taken.
        zero: An i64 that is zero, which the compiler must not know.
        search: Build rule `mse`.
    """

    def __init__(
        self,
        emitter: Emitter,
        source: ScaledBlocks,
        bias: Value,
        kept: KeptProducts | None,
        zero: Value,
        *,
        search: bool,
    ) -> None:
        super().__init__(emitter, FloatType.F32, bias, search=search)
        self._blocks = source
        self._kept = kept
        self._one = zero.trunc(I16).splat(BLOCK_SIZE) + 1
        self._prepared = _Prepared(*(emitter.stack(size * CHUNK_BLOCKS) for size in (1, 2, 2, 1)))
        self.in_chunks = True
        self.defers = search

    def begin(self, first: Value, count: Value) -> Value:
        """See `passes.Kernel`."""
        no, none = self.emitter.constant(I1, 0), self.emitter.constant(I64, 0)
        self._is_ready, moves = self.emitter.branch(
            count.compare("==", CHUNK_BLOCKS),
            lambda: self._prepare(first),
            lambda: [no, none],
            likely=True,
        )
        return self._is_ready.select(moves, none)

    def quantize(self, block: Value, in_chunk: Value) -> list[Value]:
        """See `passes.Kernel`."""
        elements = self._blocks.load(block)
        return self.emitter.branch(
            self._is_ready,
            lambda: self._quantize_prepared(block, elements, in_chunk),
            lambda: self._quantize_any(block, elements),
            likely=True,
        )

    def settle(self, block: Value, amax: Value) -> list[Value]:
        """See `passes.Kernel`."""
        elements = self._blocks.load(block)
        products = self._blocks.products(elements)
        no_lift = self.emitter.constant(I32, 0)
        magnitudes = odd_bits(products, self._one)
        found = Block(magnitudes, amax, no_lift, _NARROW_BITS, products)
        return self._settle(found, _signs(elements))

    def _quantize_prepared(self, block: Value, elements: Elements, in_chunk: Value) -> list[Value]:
        products = self._blocks.products(elements)
        narrow = odd_bits(products, self._one)
        if self._kept is not None:
            self._kept.keep(block, products, narrow)
        load, prepared = self.emitter.load, self._prepared
        quarter = load(prepared.quarters, in_chunk * 2, I16)
        codes = encode_from(quarter, narrow, _NARROW_BITS, self._one) | _signs(elements)
        scale_byte = load(prepared.scales, in_chunk, I8).zext(I32)
        none = self.emitter.constant(I64, 0)
        result = [scale_byte, codes, none, none]
        if not self.search:
            return [*result, self.emitter.constant(I1, 0), self.emitter.constant(I32, 0)]
        is_open = load(prepared.is_open, in_chunk, I8).trunc(I1)
        amax = load(prepared.maxima, in_chunk * 2, I16).zext(I32)
        return [*result, is_open, amax]

    def _quantize_any(self, block: Value, elements: Elements) -> list[Value]:
        products = self._blocks.any_products(elements)
        if self._kept is not None:
            magnitudes = products & _WIDE.magnitude_mask
            floats = [
                magnitudes.lanes(range(which, BLOCK_SIZE, 2)).bitcast_lanes(F32)
                for which in range(2)
            ]
            self._kept.keep(block, floats, odd_bits(floats, self._one))
        return self._quantize_bits(products)

    def _prepare(self, first: Value) -> list[Value]:
        """Choose the scales of a whole chunk; returns whether that is all, i1, and moves."""
        emitter, none = self.emitter, self.emitter.constant(I64, 0)

        def choose(group: Value, carried: list[Value]) -> list[Value]:
            ready, moves = self._choose_scales(first, group * GROUP)
            return [carried[0] + ready, carried[1] + moves]

        groups = emitter.constant(I64, CHUNK_BLOCKS // GROUP)
        ready, moves = emitter.loop(groups, [none, none], choose)
        return [ready.compare("==", CHUNK_BLOCKS), moves]

    def _choose_scales(self, first: Value, in_chunk: Value) -> tuple[Value, Value]:
        """Choose the scales of a group; returns how many are as they should be, and moves."""
        emitter, prepared = self.emitter, self._prepared
        amax, is_plain = self._blocks.largest_products(first + in_chunk)
        is_normal = (amax - _LOWEST).compare("u<", _WIDE.infinity - _LOWEST)
        is_ready = is_plain & (is_normal | amax.compare("==", 0))
        scales, floor = choose_scale(amax, self.bias.splat(GROUP), FLOAT32_MANTISSA_BITS)
        emitter.store(scales.trunc(I8), prepared.scales, in_chunk)
        quarters = quarter_bits(scales, _NARROW_BITS).trunc(I16)
        emitter.store(quarters, prepared.quarters, in_chunk * 2)
        if self.search:
            is_open = may_move_scale(amax, FLOAT32_MANTISSA_BITS) & is_normal
            emitter.store(is_open.zext(I8), prepared.is_open, in_chunk)
            maxima = ((amax >> 16) | (amax & 0xFFFF).umin(1)).trunc(I16)
            emitter.store(maxima, prepared.maxima, in_chunk * 2)
        below, above = scales.compare("u<", floor), floor.compare("u<", scales)
        moves = below.count_true() + (above.count_true() << ABOVE_SHIFT)
        return is_ready.count_true(), moves


def _signs(elements: Elements) -> Value:
    """Bit 3 of each code of a plain block, where no product is zero but that of zero."""
    return ((elements.lanes + 0x7F) >> 5) & 8
