"""Quantization error, tensor by tensor: what a conversion measured, as records and as a file.

The file lies beside an artifact and is no part of it; `docs/reference/report.md` describes it.
A run writes a fragment per output file with `encode_fragment` and joins them with `assemble`;
`read_records` reads the result strictly.
"""

from mxconvert.model import REPORT_NAME
from mxconvert.statistics.figures import Sums
from mxconvert.statistics.measure import (
    ITEM_SIZES,
    PIECE_ELEMENTS,
    Counts,
    Decoder,
    Original,
    Place,
    RangeReader,
    StoredWeight,
    Window,
    as_float64,
    measure_weight,
)
from mxconvert.statistics.records import (
    SCHEMA_VERSION,
    Header,
    Histograms,
    Record,
    TensorStats,
    encode,
    parse,
)
from mxconvert.statistics.stream import (
    assemble,
    encode_fragment,
    encode_lines,
    parse_fragment,
    read_records,
)

__all__ = [
    "ITEM_SIZES",
    "PIECE_ELEMENTS",
    "REPORT_NAME",
    "SCHEMA_VERSION",
    "Counts",
    "Decoder",
    "Header",
    "Histograms",
    "Original",
    "Place",
    "RangeReader",
    "Record",
    "StoredWeight",
    "Sums",
    "TensorStats",
    "Window",
    "as_float64",
    "assemble",
    "encode",
    "encode_fragment",
    "encode_lines",
    "measure_weight",
    "parse",
    "parse_fragment",
    "read_records",
]
