"""Our output, read by the libraries that read it in production.

Needs the ``interop`` extra and torch; run with ``scripts/test --interop``. Nothing here
reaches the network: every model is made from a small seeded config.
"""
