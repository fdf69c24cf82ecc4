"""Two instructions of x86-64 processors with AVX512-BF16 that LLVM does not find by itself."""

from __future__ import annotations

from typing import Final

from llvmlite import ir

from mxconvert_kernels.llvm.emit import F32, I16, Emitter, Value, vector

FEATURES: Final = ("avx512f", "avx512bw", "avx512bf16")
"""What the processor must have, as LLVM names it."""

LANES: Final = 32
"""Of 16 bits in a register."""


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's type for BF16, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def look_up(emitter: Emitter, table: Value, indices: Value) -> Value:
    """`table[index]` for 32 indices below 32 (VPERMW); all `<32 x i16>`."""
    kind = vector(I16, LANES)
    function = emitter.declare("llvm.x86.avx512.permvar.hi.512", kind, [kind, kind])
    return Value(emitter, emitter.builder.call(function, [table.raw, indices.raw]))


def add_products(emitter: Emitter, total: Value, lanes: Value, others: Value) -> Value:
    """Add the products of `<32 x i16>` BF16 values, two to each float lane (VDPBF16PS).

    Rounds to nearest; what is subnormal counts as zero, whatever the thread's modes are.
    """
    bfloats, floats = vector(_BFloat(), LANES), vector(F32, LANES // 2)
    function = emitter.declare(
        "llvm.x86.avx512bf16.dpbf16ps.512", floats, [floats, bfloats, bfloats]
    )
    factors = [emitter.builder.bitcast(value.raw, bfloats) for value in (lanes, others)]
    return Value(emitter, emitter.builder.call(function, [total.raw, *factors]))
