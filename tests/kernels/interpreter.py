"""Triton's interpreter, made to compute as GPUs do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.kernels import ptx

if TYPE_CHECKING:
    import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process runs the GPU's kernels in Triton's interpreter, and no others."""


def fuse_multiply_add() -> None:
    """Let `tl.fma` round once.

    The interpreter multiplies, rounds and adds. In float64 the product of two float32 is exact, and
    so is the sum with zero, which is all that the kernels add; then one rounding is left.
    """
    from triton.runtime import interpreter

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        with np.errstate(all="ignore"):
            one, other, third = (tensor.data.astype(np.float64) for tensor in (x, y, z))
            fused = (one * other + third).astype(np.float32)
        return interpreter.TensorHandle(fused, z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma


def run_assembly(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter run inline assembly, by `ptx.run`; in itself it refuses to."""
    from triton.runtime import interpreter

    class Call:
        """What a call of inline assembly gives, which may have several results."""

        def __init__(self, words: Any, element_type: Any) -> None:
            self._result = interpreter.TensorHandle(words, element_type)

        def get_result(self, index: int) -> Any:
            assert index == 0
            return self._result

    def create_inline_asm(  # noqa: PLR0917  (the interpreter's own order)
        _: Any, text: str, constraints: str, values: Any, kinds: Any, is_pure: bool, pack: int
    ) -> Call:
        shape = np.broadcast(*(value.data for value in values)).shape
        flat = [np.broadcast_to(value.data, shape).reshape(-1) for value in values]
        inputs = [
            words[first::pack].copy().view(np.uint32) for words in flat for first in range(pack)
        ]
        assert constraints.split(",") == ["=r", *["r"] * len(inputs)]
        found = ptx.run(text, inputs)
        as_typed = found.view(np.uint8 if pack == 4 else np.int32)  # four bytes in a register
        return Call(as_typed.reshape(shape), kinds[0].scalar)

    def reduce_rows(self: Any, values: Any) -> tuple[Any]:
        """In the interpreter's order, but all rows at once: it would take each by itself."""
        (value,) = values if isinstance(values, tuple) else (values,)
        columns = np.moveaxis(value.handle.data, self.axis, 0)
        found = self.to_tensor(columns[0], value.dtype)
        for column in columns[1:]:
            found = self.combine_fn.fn(found, self.to_tensor(column, value.dtype))
        return (found,)

    patch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", create_inline_asm)
    patch.setattr(interpreter.ReduceOps, "generic_reduce", reduce_rows)
