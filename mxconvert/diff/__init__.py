"""How two model folders differ: artifacts of any tool, or checkpoints.

`compare_folders` finds the differences; `diff_document` shows them as JSON.
"""

from mxconvert.diff.compare import DiffOptions, compare_folders
from mxconvert.diff.document import diff_document
from mxconvert.diff.records import Change, Comparison, Difference, Side, Status

__all__ = [
    "Change",
    "Comparison",
    "DiffOptions",
    "Difference",
    "Side",
    "Status",
    "compare_folders",
    "diff_document",
]
