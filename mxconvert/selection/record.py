"""The selection record: what part of an artifact a folder holds.

``mxconvert.selection.json`` lies beside the artifact's own manifest, which stays as it is:
canonical JSON with the selection and, for each file that the artifact does not have so, an
entry as in a manifest. See ``docs/reference/manifest.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mxconvert.errors import UsageError, VerificationError
from mxconvert.manifest import (
    SHA_DIGITS,
    FileEntry,
    encode_canonical,
    file_fields,
    file_json,
    parse_canonical,
)
from mxconvert.placement import format_experts, parse_experts
from mxconvert.selection.selection import Selection

if TYPE_CHECKING:
    from mxconvert.manifest import Fields

RECORD_TYPE = "mxconvert-selection"
SCHEMA_VERSION = 1
MOST_EXPERTS = 1 << 16
"""Of a layer; more is no model, and a range of them no text to expand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRecord:
    """What a folder holds of an artifact.

    Attributes:
        artifact: The artifact's id.
        selection: The part.
        derived: The filtered index and the files with some tensors of the artifact's, by path.
        chunk_size: Bytes of their digest chunks.
    """

    artifact: str
    selection: Selection
    derived: tuple[FileEntry, ...]
    chunk_size: int


def encode_record(record: SelectionRecord) -> bytes:
    """Return the record's bytes."""
    return encode_canonical(
        {
            "type": RECORD_TYPE,
            "schema_version": SCHEMA_VERSION,
            "artifact": record.artifact,
            "chunk_size": record.chunk_size,
            "selection": selection_json(record.selection),
            "derived": [file_json(entry) for entry in record.derived],
        }
    )


def selection_json(selection: Selection) -> dict[str, Any]:
    """Return a selection as JSON."""
    part = selection.dense_slice
    return {
        "experts": format_experts(selection.experts),
        "num_experts": selection.num_experts,
        "dense_slice": None if part is None else list(part),
    }


def parse_record(data: bytes, where: str) -> SelectionRecord:
    """Parse and check a record.

    Args:
        data: Its bytes.
        where: What messages call it.

    Raises:
        VerificationError: Not a record of a known version, in canonical form.
    """
    fields = parse_canonical(data, where)
    kind, version = fields.text("type"), fields.count("schema_version")
    if (kind, version) != (RECORD_TYPE, SCHEMA_VERSION):
        raise VerificationError(
            f"{where}: type {kind!r} version {version}, expected {RECORD_TYPE!r} version "
            f"{SCHEMA_VERSION}",
            hint="use a version of mxconvert that knows it",
            code="unknown-schema",
        )
    chunk_size = fields.count("chunk_size", minimum=1)
    entries = fields.objects("derived", label="path")
    return fields.end(
        SelectionRecord(
            artifact=fields.hex("artifact", SHA_DIGITS),
            selection=parse_selection(fields.sub("selection")),
            derived=tuple(file_fields(entry, chunk_size) for entry in entries),
            chunk_size=chunk_size,
        )
    )


def parse_selection(fields: Fields) -> Selection:
    """Read what `selection_json` wrote.

    Raises:
        VerificationError: It is not that.
    """
    text, count = fields.text("experts"), fields.count("num_experts")
    if count > MOST_EXPERTS:
        raise VerificationError(
            f"{fields.where}: num_experts {count}, expected at most {MOST_EXPERTS}",
            code="bad-manifest",
        )
    try:
        experts = parse_experts(text, count, f"{fields.where}: experts") if text else ()
    except UsageError as error:
        raise VerificationError(error.message, code="bad-manifest") from error
    part = fields.span("dense_slice")
    if part is not None and not part[0] < part[1]:
        raise VerificationError(f"{fields.where}: dense_slice {part}", code="bad-manifest")
    return fields.end(Selection(experts=experts, num_experts=count, dense_slice=part))
