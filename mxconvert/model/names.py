"""Sizes, suffixes and names that every part agrees on."""

from __future__ import annotations

BLOCK_SIZE = 32
"""Elements that share one scale."""
REPORT_NAME = ".mxconvert-report.jsonl.zst"
"""The file of quantization errors; it lies beside an artifact and is no part of it."""
PACKED_SUFFIX = ".weight_packed"
SCALE_SUFFIX = ".weight_scale"
CODES_DTYPE = "F4"
"""What codes are called once they are a matrix of elements beside their scales."""
INT4_DTYPE = "I4"
"""What packed integers are called likewise; no stored tensor has this dtype."""
