"""The kernels on GPUs, in Triton. Without it and torch only `kinds` and `ptx` can be imported."""
