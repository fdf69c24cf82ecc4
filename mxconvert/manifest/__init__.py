"""What an artifact is: its manifest, its tensor list and its id.

The format is normative in ``docs/reference/manifest.md``. `build_manifest` and
`encode_tensors` write it, `parse_manifest` and `iter_tensors` read it strictly.
"""

from mxconvert.manifest.build import (
    GENERATOR,
    SCALES_OF_SOURCE,
    build_manifest,
    format_of,
    options_of,
    source_identity,
    tensor_records,
)
from mxconvert.manifest.canonical import encode_canonical
from mxconvert.manifest.codec import (
    SHA_DIGITS,
    artifact_id,
    encode_manifest,
    file_fields,
    file_json,
    parse_canonical,
    parse_manifest,
)
from mxconvert.manifest.fields import Fields
from mxconvert.manifest.paths import (
    MANIFEST_NAME,
    RECORD_NAME,
    TENSORS_NAME,
    WORK_FOLDER,
    path_fault,
    refuse_clashes,
    spelling_key,
)
from mxconvert.manifest.records import (
    PLAIN_FORMAT,
    SCHEMA_VERSION,
    ArtifactTotals,
    FileEntry,
    FormatSpec,
    Generator,
    Manifest,
    ModelFacts,
    SourceIdentity,
    SourceRecord,
    TensorRecord,
    Treatment,
)
from mxconvert.manifest.tensors import TensorListWriter, encode_tensors, iter_tensors

__all__ = [
    "GENERATOR",
    "MANIFEST_NAME",
    "PLAIN_FORMAT",
    "RECORD_NAME",
    "SCALES_OF_SOURCE",
    "SCHEMA_VERSION",
    "SHA_DIGITS",
    "TENSORS_NAME",
    "WORK_FOLDER",
    "ArtifactTotals",
    "Fields",
    "FileEntry",
    "FormatSpec",
    "Generator",
    "Manifest",
    "ModelFacts",
    "SourceIdentity",
    "SourceRecord",
    "TensorListWriter",
    "TensorRecord",
    "Treatment",
    "artifact_id",
    "build_manifest",
    "encode_canonical",
    "encode_manifest",
    "encode_tensors",
    "file_fields",
    "file_json",
    "format_of",
    "iter_tensors",
    "options_of",
    "parse_canonical",
    "parse_manifest",
    "path_fault",
    "refuse_clashes",
    "source_identity",
    "spelling_key",
    "tensor_records",
]
