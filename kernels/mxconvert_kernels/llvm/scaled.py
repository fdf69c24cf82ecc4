"""The kernels for FP8 whose blocks have factors.

* `blocks_with_nonfinite quantize_scaled(elements, packed, scales, blocks, bias, factors)`
* `nonfinite scan_scaled(elements, factors, blocks)`: the products that are not finite
* `any_nonfinite widen_scaled(elements, factors, out, blocks)`

Blocks are quantized in 32 lanes of 16 bits, like BF16, though products have 24 bits: scale and
codes depend on comparisons with numbers of few bits, for which the high half of a product does if
its last bit tells whether the low half is zero. The search's squared errors take all bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxconvert_kernels.lanes import LIFT_BELOW_FIELD
from mxconvert_kernels.llvm.emit import I16, I32, I64, POINTER, Emitter, Value, vector
from mxconvert_kernels.llvm.fp8 import Elements, ScaledSource, bf16_to_odd
from mxconvert_kernels.llvm.passes import Passes
from mxconvert_kernels.llvm.quantize import Block, Kernel, signs
from mxconvert_kernels.llvm.source import join_high_pairs
from mxconvert_kernels.llvm.sums import Buffers, SumsEmitter
from mxconvert_kernels.spec import BLOCK_SIZE, FloatType

if TYPE_CHECKING:
    from mxconvert_kernels.spec import FloatLayout

_NARROW: FloatLayout = FloatType.BF16.layout
_LOWEST = LIFT_BELOW_FIELD << _NARROW.mantissa_bits


def build(dtype: FloatType, *, search: bool, sums: bool = False, native: bool = False) -> str:
    """The quantization kernel's module; arguments as of `quantize.build`."""
    parameters = [*[POINTER] * 3, I64, I32, POINTER, *([POINTER, POINTER] if sums else [])]
    emitter = Emitter("quantize_scaled", parameters)
    elements, packed, scales, blocks, bias, factors, *memory = emitter.arguments
    source = ScaledSource(emitter, elements, dtype, factors)
    collector = None
    if sums:
        buffers = Buffers(packed, scales, *memory)
        collector = SumsEmitter(emitter, source, buffers, blocks, native=native)
    kernel = ScaledKernel(emitter, source, bias, search=search)
    return emitter.finish(Passes(kernel, packed, scales, collector).run(blocks))


class ScaledKernel(Kernel):
    """The steps of a kernel for FP8; what is not plain goes the way of F32."""

    def __init__(
        self, emitter: Emitter, source: ScaledSource, bias: Value, *, search: bool
    ) -> None:
        super().__init__(emitter, source, bias, search=search)
        self._scaled = source
        self.defers = search

    def quantize(self, block: Value) -> list[Value]:
        """See `passes.Kernel`."""
        elements = self._scaled.load(block)
        narrow = self._block(elements)
        is_normal = (narrow.amax - _LOWEST).compare("u<", _NARROW.infinity - _LOWEST)

        def plain() -> list[Value]:
            result = self._quantize_lanes(narrow, defer=self.defers)
            codes = result.codes | _signs(elements)
            none = self.emitter.constant(I64, 0)
            return [result.scale_byte, codes, none, result.moves, result.is_open, narrow.amax]

        def any_block() -> list[Value]:
            return self._quantize_bits(self._scaled.any_products(elements))

        return self.emitter.branch(elements.is_plain & is_normal, plain, any_block, likely=True)

    def settle(self, block: Value, amax: Value) -> list[Value]:
        """See `passes.Kernel`."""
        elements = self._scaled.load(block)
        return self._settle(self._block(elements)._replace(amax=amax), _signs(elements))

    def _block(self, elements: Elements) -> Block:
        """A plain block in lanes of 16 bits."""
        products = self._scaled.products(elements)
        magnitudes = bf16_to_odd(products)
        amax = magnitudes.reduce_umax().resize(I32)
        no_lift = self.emitter.constant(I32, 0)
        return Block(magnitudes, amax, no_lift, _NARROW.mantissa_bits, products)


def build_scan(dtype: FloatType) -> str:
    """The module that counts products that are not finite."""
    emitter = Emitter("scan_scaled", [POINTER, POINTER, I64])
    elements, factors, blocks = emitter.arguments
    source = ScaledSource(emitter, elements, dtype, factors)
    layout = source.dtype.layout

    def count(block: Value, counts: list[Value]) -> list[Value]:
        magnitudes = source.bits(block) & layout.magnitude_mask
        return [counts[0] + magnitudes.compare("u>=", layout.infinity).count_true()]

    return emitter.finish(emitter.loop(blocks, [emitter.constant(I64, 0)], count)[0])


def build_widen(dtype: FloatType) -> str:
    """The module that turns FP8 into BF16."""
    emitter = Emitter("widen_scaled", [POINTER, POINTER, POINTER, I64])
    elements, factors, out, blocks = emitter.arguments
    source = ScaledSource(emitter, elements, dtype, factors)

    def widen(block: Value, largest: list[Value]) -> list[Value]:
        stored = source.load(block)
        lanes = emitter.branch(
            stored.is_plain,
            lambda: [_round_pairs(source, stored)],
            lambda: [(_round(source.any_products(stored)) >> 16).trunc(I16)],
            likely=True,
        )[0]
        emitter.store(lanes, out, block * (BLOCK_SIZE * FloatType.BF16.itemsize))
        return [largest[0].umax(lanes & _NARROW.magnitude_mask)]

    none = emitter.constant(vector(I16, BLOCK_SIZE), 0)
    largest = emitter.loop(blocks, [none], widen)[0].reduce_umax()
    return emitter.finish(largest.compare("u>=", _NARROW.infinity).zext(I64))


def _round_pairs(source: ScaledSource, block: Elements) -> Value:
    """A plain block in BF16."""
    even, odd = (_round(half.bitcast_lanes(I32)) for half in source.products(block))
    return join_high_pairs(even, odd) | ((block.lanes & 0x80) << 8)


def _round(bits: Value) -> Value:
    """Float32 bits whose high half is BF16, rounded to nearest, ties to even."""
    return bits + 0x7FFF + ((bits >> 16) & 1)


def _signs(elements: Elements) -> Value:
    """Bit 3 of each code of a plain block."""
    return signs(elements.lanes << 8)
