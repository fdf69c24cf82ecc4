"""A folder that holds a part of an artifact: what it should be, from its record."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from mxconvert.errors import VerificationError
from mxconvert.manifest import RECORD_NAME, TENSORS_NAME
from mxconvert.selection import effective, parse_record
from mxconvert.verify.report import Check

if TYPE_CHECKING:
    from mxconvert.manifest import Manifest
    from mxconvert.selection import SelectionRecord
    from mxconvert.verify.identity import Identity
    from mxconvert.verify.place import Place
    from mxconvert.verify.report import Collector


def find_part(
    place: Place, identity: Identity, collector: Collector
) -> tuple[Manifest, bytes] | None:
    """Return manifest and tensor list of the part that a folder says it holds.

    What is wrong with the record is a finding; nothing is returned then.

    Args:
        place: The folder, which has a record.
        identity: Of the artifact.
        collector: Receives findings.
    """
    collector.look(RECORD_NAME, Check.MANIFEST)
    try:
        record = parse_record(place.read(RECORD_NAME), RECORD_NAME)
        _check_artifact(record, identity)
        manifest, listed = effective(identity.manifest, record, _tensors(place, identity))
    except OSError as error:
        message = f"{RECORD_NAME} or {TENSORS_NAME}: cannot be read: {error.strerror}"
        collector.fail(Check.MANIFEST, "unreadable", message, path=RECORD_NAME)
        return None
    except VerificationError as error:
        collector.fail(Check.MANIFEST, error.code, error.message, path=RECORD_NAME)
        return None
    collector.note("part", f"holds a part: {record.selection.describe()}", RECORD_NAME)
    return manifest, listed


def _check_artifact(record: SelectionRecord, identity: Identity) -> None:
    if record.artifact != identity.id:
        raise VerificationError(
            f"{RECORD_NAME}: is of another artifact: expected {identity.id}, found "
            f"{record.artifact}",
            code="bad-selection",
        )


def _tensors(place: Place, identity: Identity) -> bytes:
    """Return the artifact's tensor list, by which derived files are judged."""
    entry = next(entry for entry in identity.manifest.files if entry.path == TENSORS_NAME)
    data = place.read(TENSORS_NAME)
    found = hashlib.sha256(data).hexdigest()
    if found != entry.sha256:
        raise VerificationError(
            f"{TENSORS_NAME}: SHA-256: expected {entry.sha256}, found {found}", code="digest"
        )
    return data
