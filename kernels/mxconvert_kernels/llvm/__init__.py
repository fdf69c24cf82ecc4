"""The kernels as LLVM vector IR, compiled for the processor at hand when first used.

`emit` is the language the kernels are written in, `quantize`, `dequantize` and `scan` are the
kernels, `jit` compiles them and `backend` calls them.
"""
