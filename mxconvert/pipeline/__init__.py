"""The quantize run: composes source, plan, kernels, writer and manifest."""

from mxconvert.pipeline.run import RunOptions, RunResult, quantize_checkpoint
from mxconvert.pipeline.slots import DEFAULT_MAX_MEMORY

__all__ = [
    "DEFAULT_MAX_MEMORY",
    "RunOptions",
    "RunResult",
    "quantize_checkpoint",
]
