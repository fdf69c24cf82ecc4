"""The scan kernels: `count scan(src, elements)`, the number of NaN and infinite elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxconvert_kernels.llvm.emit import I8, I16, I32, I64, POINTER, Emitter, Value, vector

if TYPE_CHECKING:
    from mxconvert_kernels.spec import FloatType

VECTOR_BYTES = 256
"""Bytes looked at together: far more than one register, for one branch."""


def build(dtype: FloatType) -> str:
    """The kernel's module, for elements of `dtype` in any number."""
    emitter = Emitter("scan", [POINTER, I64])
    src, elements = emitter.arguments
    element = {1: I8, 2: I16, 4: I32}[dtype.itemsize]
    lanes = VECTOR_BYTES // dtype.itemsize
    layout = dtype.layout

    def count_vector(index: Value, counts: list[Value]) -> list[Value]:
        bits = emitter.load(src, index * VECTOR_BYTES, vector(element, lanes))
        magnitudes = bits & layout.magnitude_mask

        def some() -> list[Value]:
            bad = magnitudes.compare("u>=", layout.infinity)
            return [bad.count_true()]

        any_bad = magnitudes.reduce_umax().compare("u>=", layout.infinity)
        found = emitter.branch(any_bad, some, lambda: [emitter.constant(I64, 0)], likely=False)
        return [counts[0] + found[0]]

    vectors = elements >> (lanes.bit_length() - 1)
    in_vectors = emitter.loop(vectors, [emitter.constant(I64, 0)], count_vector)
    done = vectors * lanes

    def count_one(index: Value, counts: list[Value]) -> list[Value]:
        bits = emitter.load(src, (done + index) * dtype.itemsize, element)
        bad = (bits & layout.magnitude_mask).compare("u>=", layout.infinity)
        return [counts[0] + bad.zext(I64)]

    return emitter.finish(emitter.loop(elements - done, in_vectors, count_one)[0])
