"""Triton's interpreter, made to compute as GPUs do."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

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
