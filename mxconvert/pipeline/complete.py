"""Is the artifact in the output folder the very one that a run would make?"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.errors import VerificationError
from mxconvert.events import Notice
from mxconvert.manifest import (
    GENERATOR,
    MANIFEST_NAME,
    TENSORS_NAME,
    Manifest,
    artifact_id,
    format_of,
    iter_tensors,
    options_of,
    parse_manifest,
    source_identity,
)
from mxconvert.model import FileRole
from mxconvert.pipeline.finish import documents
from mxconvert.pipeline.names import copied_sidecars
from mxconvert.pipeline.recheck import compare_sources
from mxconvert.provenance import Origins, UnknownOriginError
from mxconvert.source import SourceReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mxconvert.events import Reporter
    from mxconvert.model import Checkpoint, Plan, TensorInfo


@dataclass(frozen=True, slots=True)
class Found:
    """The artifact in an output folder.

    Attributes:
        artifact: Its id, if it is the one to be made.
        differences: Otherwise, how it differs.
    """

    artifact: str | None
    differences: tuple[str, ...] = ()


def find_artifact(
    checkpoint: Checkpoint, plan: Plan, target: Path, report: Reporter, *, recheck: bool
) -> Found | None:
    """Compare the artifact in ``target``, if there is one, with what is to be made.

    The source's content is read and compared if asked for, or if a source file is newer
    than the artifact.

    Raises:
        SourceError: A source tensor has changed since; names it.
    """
    path = target / MANIFEST_NAME
    try:
        raw, made_ns = path.read_bytes(), path.stat().st_mtime_ns
        manifest = parse_manifest(raw, str(path))
    except (OSError, VerificationError):
        return None
    differences = tuple(_differences(manifest, checkpoint, plan, target))
    if differences:
        return Found(None, differences)
    newer = [file.path for file in checkpoint.files if file.mtime_ns > made_ns]
    if newer:
        message = f"{newer[0]} is newer than the artifact: comparing the source's content"
        report(Notice(severity="info", code="comparing", message=message))
    if newer or recheck:
        try:
            raw_list = (target / TENSORS_NAME).read_bytes()
            expected = list(_expected(raw_list, checkpoint))
        except (OSError, VerificationError, UnknownOriginError):
            return Found(None, (f"{TENSORS_NAME} is damaged",))
        with SourceReader(checkpoint.root, checkpoint.files) as reader:
            compare_sources(expected, reader)
    return Found(artifact_id(raw))


def _expected(raw: bytes, checkpoint: Checkpoint) -> Iterator[tuple[TensorInfo, str, str]]:
    origins = Origins(checkpoint.tensors, checkpoint.config)
    for record in iter_tensors(raw):
        if not record.name.endswith(".weight_scale"):  # made from what its codes are made from
            for source in record.sources:
                yield origins.part(source), record.file, source.xxh3_128


def _differences(
    manifest: Manifest, checkpoint: Checkpoint, plan: Plan, target: Path
) -> Iterator[str]:
    if manifest.generator != GENERATOR:
        made_by = f"{manifest.generator.name} {manifest.generator.version}"
        yield f"it was made by {made_by}, this is {GENERATOR.version}"
    if manifest.source != source_identity(checkpoint.files, len(checkpoint.tensors)):
        yield "it was made from another source"
    if manifest.format != format_of(plan):
        yield f"its weights are {manifest.format.name}, not {format_of(plan).name}"
    for name, value in options_of(plan).items():
        before = manifest.options.get(name)
        if before != value:
            yield f"--{name.replace('_', '-')} was {before}, is {value}"
    yield from _changed_files(manifest, checkpoint, plan)
    for entry in manifest.files:
        if not _has_size(target / entry.path, entry.size):
            yield f"{entry.path} is damaged"


def _changed_files(manifest: Manifest, checkpoint: Checkpoint, plan: Plan) -> Iterator[str]:
    """Compare the files beside the weights."""
    before = {
        entry.path: entry.sha256
        for entry in manifest.files
        if entry.role in (FileRole.SIDECAR, FileRole.CONFIG)
    }
    made, _ = documents(checkpoint, plan)
    now = {path: hashlib.sha256(data).hexdigest() for path, data in made.items()}
    now |= {sidecar.path: sidecar.sha256 for sidecar in copied_sidecars(checkpoint)}
    for path in sorted(before.keys() | now.keys()):
        if before.get(path) != now.get(path):
            yield f"{path} has changed"


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.lstat().st_size == size
    except OSError:
        return False
