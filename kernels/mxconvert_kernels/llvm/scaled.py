"""The kernels for FP8 whose blocks have factors.

* `blocks_with_nonfinite quantize_scaled(elements, packed, scales, blocks, bias, factors)`
* `nonfinite scan_scaled(elements, factors, blocks)`: the products that are not finite
* `any_nonfinite widen_scaled(elements, factors, out, blocks)`
"""

from __future__ import annotations

from typing import Final

from mxconvert_kernels.llvm.emit import I16, I32, I64, POINTER, Emitter, Value, vector
from mxconvert_kernels.llvm.fp8 import Elements, ScaledBlocks
from mxconvert_kernels.llvm.kept import KeptProducts
from mxconvert_kernels.llvm.passes import Passes
from mxconvert_kernels.llvm.scaled_kernel import ScaledKernel
from mxconvert_kernels.llvm.source import join_high_pairs
from mxconvert_kernels.llvm.sums import Buffers, SumsEmitter
from mxconvert_kernels.spec import BLOCK_SIZE, FloatType

_NARROW: Final = FloatType.BF16.layout
_WIDE: Final = FloatType.F32.layout


def build(dtype: FloatType, *, search: bool, sums: bool = False, native: bool = False) -> str:
    """The quantization kernel's module; arguments as of `quantize.build`."""
    parameters = [*[POINTER] * 3, I64, I32, POINTER, *([POINTER, POINTER] if sums else [])]
    emitter = Emitter("quantize_scaled", parameters)
    elements, packed, scales, blocks, bias, factors, *memory = emitter.arguments
    source = ScaledBlocks(emitter, elements, dtype, factors)
    kept = collector = None
    if sums:
        kept = KeptProducts(emitter)
        buffers = Buffers(packed, scales, *memory)
        collector = SumsEmitter(emitter, kept, buffers, blocks, native=native)
    # No number of blocks is negative.
    kernel = ScaledKernel(emitter, source, bias, kept, blocks >> 63, search=search)
    return emitter.finish(Passes(kernel, packed, scales, collector).run(blocks))


def build_scan(dtype: FloatType) -> str:
    """The module that counts products that are not finite."""
    emitter = Emitter("scan_scaled", [POINTER, POINTER, I64])
    elements, factors, blocks = emitter.arguments
    source = ScaledBlocks(emitter, elements, dtype, factors)

    def count(block: Value, counts: list[Value]) -> list[Value]:
        magnitudes = source.any_products(source.load(block)) & _WIDE.magnitude_mask
        return [counts[0] + magnitudes.compare("u>=", _WIDE.infinity).count_true()]

    return emitter.finish(emitter.loop(blocks, [emitter.constant(I64, 0)], count)[0])


def build_widen(dtype: FloatType) -> str:
    """The module that turns FP8 into BF16."""
    emitter = Emitter("widen_scaled", [POINTER, POINTER, POINTER, I64])
    elements, factors, out, blocks = emitter.arguments
    source = ScaledBlocks(emitter, elements, dtype, factors)

    def widen(block: Value, largest: list[Value]) -> list[Value]:
        stored = source.load(block)
        lanes = emitter.branch(
            source.is_plain(stored),
            lambda: [_round_pairs(source, stored)],
            lambda: [(_round(source.any_products(stored)) >> 16).trunc(I16)],
            likely=True,
        )[0]
        emitter.store(lanes, out, block * (BLOCK_SIZE * FloatType.BF16.itemsize))
        return [largest[0].umax(lanes & _NARROW.magnitude_mask)]

    none = emitter.constant(vector(I16, BLOCK_SIZE), 0)
    largest = emitter.loop(blocks, [none], widen)[0].reduce_umax()
    return emitter.finish(largest.compare("u>=", _NARROW.infinity).zext(I64))


def _round_pairs(source: ScaledBlocks, block: Elements) -> Value:
    """A plain block in BF16."""
    even, odd = (_round(half.bitcast_lanes(I32)) for half in source.products(block))
    return join_high_pairs(even, odd) | ((block.lanes & 0x80) << 8)


def _round(bits: Value) -> Value:
    """Float32 bits whose high half is BF16, rounded to nearest, ties to even."""
    return bits + 0x7FFF + ((bits >> 16) & 1)
