"""The kernels, every backend against the oracle bit for bit."""
