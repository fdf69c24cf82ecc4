"""A part of an artifact: the experts of a rank, a share of the dense files."""

from mxconvert.selection.effective import effective, held_tensors
from mxconvert.selection.plan import PartFile, SelectionPlan, plan_selection
from mxconvert.selection.record import (
    SelectionRecord,
    encode_record,
    parse_record,
    parse_selection,
    selection_json,
)
from mxconvert.selection.selection import Request, Selection

__all__ = [
    "PartFile",
    "Request",
    "Selection",
    "SelectionPlan",
    "SelectionRecord",
    "effective",
    "encode_record",
    "held_tensors",
    "parse_record",
    "parse_selection",
    "plan_selection",
    "selection_json",
]
