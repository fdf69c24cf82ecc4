"""The records that travel between stages. Frozen, slotted, standard library only.

Offsets are in bytes, ranges are end-exclusive, shapes are row-major ``(out, in)``
for weights, names are those on disk.
"""

from mxconvert.model.names import (
    BLOCK_SIZE,
    CODES_DTYPE,
    INT4_DTYPE,
    PACKED_SUFFIX,
    REPORT_NAME,
    SCALE_SUFFIX,
)
from mxconvert.model.options import (
    Activations,
    Layout,
    Options,
    ScaleRule,
    Scope,
    Unindexed,
)
from mxconvert.model.plan import (
    Action,
    FileRole,
    Item,
    OutputFile,
    OutputTensor,
    Plan,
    Totals,
    output_size,
    quantized_names,
)
from mxconvert.model.source import (
    BlockScale,
    Checkpoint,
    Selection,
    Sidecar,
    Skipped,
    SourceFile,
    TensorInfo,
    View,
)

__all__ = [
    "BLOCK_SIZE",
    "CODES_DTYPE",
    "INT4_DTYPE",
    "PACKED_SUFFIX",
    "REPORT_NAME",
    "SCALE_SUFFIX",
    "Action",
    "Activations",
    "BlockScale",
    "Checkpoint",
    "FileRole",
    "Item",
    "Layout",
    "Options",
    "OutputFile",
    "OutputTensor",
    "Plan",
    "ScaleRule",
    "Scope",
    "Selection",
    "Sidecar",
    "Skipped",
    "SourceFile",
    "TensorInfo",
    "Totals",
    "Unindexed",
    "View",
    "output_size",
    "quantized_names",
]
