"""MXFP4 kernels: quantize, dequantize and scan tensors, bit-identically on every backend.

`get_backend` returns the implementation to use; `spec` defines the format; the rules are argued in
docs/explanation/numerics.md. Importing this package loads neither numpy nor LLVM.
"""

from mxconvert_kernels.backend import BackendUnavailableError, explain_backend, get_backend
from mxconvert_kernels.error_sums import ErrorSums
from mxconvert_kernels.spec import BLOCK_SIZE, Backend, FloatType, NonFinite, ScaleRule

__all__ = [
    "BLOCK_SIZE",
    "Backend",
    "BackendUnavailableError",
    "ErrorSums",
    "FloatType",
    "NonFinite",
    "ScaleRule",
    "explain_backend",
    "get_backend",
]
