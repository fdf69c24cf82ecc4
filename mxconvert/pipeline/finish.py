"""Everything but the weights: sidecars, config, card, tensor list, index, manifest last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxconvert import __version__, failpoints
from mxconvert.errors import SourceError
from mxconvert.events import Notice
from mxconvert.manifest import (
    MANIFEST_NAME,
    TENSORS_NAME,
    FileEntry,
    TensorListWriter,
    artifact_id,
    build_manifest,
    encode_manifest,
    source_identity,
    tensor_records,
)
from mxconvert.model import FileRole
from mxconvert.pipeline.names import card_path, copied_sidecars
from mxconvert.statistics import REPORT_NAME, Header, assemble
from mxconvert.writer import copy_file, write_file, write_statistics
from mxconvert.writer.documents import (
    CARD_NAME,
    CONFIG_NAME,
    INDEX_NAME,
    config_json,
    index_json,
    model_card,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mxconvert.events import Reporter
    from mxconvert.manifest import Manifest
    from mxconvert.model import Checkpoint, Plan
    from mxconvert.pipeline.journal import Journal


def finish_artifact(
    checkpoint: Checkpoint, plan: Plan, journal: Journal, target: Path, report: Reporter
) -> str:
    """Write all files beside the weights; the index and then the manifest come last.

    Returns:
        The artifact's id.

    Raises:
        SourceError: A sidecar changed since preflight.
        LocalError: The operating system refuses.
    """
    entries = [*_weight_entries(plan, journal)]
    failpoints.hit("finish.before-sidecars")
    entries += _sidecar_entries(checkpoint, target)
    failpoints.hit("finish.before-documents")
    entries += _document_entries(checkpoint, plan, target, report)
    failpoints.hit("finish.before-tensors")
    tensors = write_file(target / TENSORS_NAME, _tensor_list(plan, journal))
    entries.append(FileEntry.from_digest(TENSORS_NAME, FileRole.TENSORS, tensors))
    failpoints.hit("finish.before-index")
    index = write_file(target / INDEX_NAME, index_json(plan))
    entries.append(FileEntry.from_digest(INDEX_NAME, FileRole.INDEX, index))
    manifest = build_manifest(
        plan=plan,
        source=source_identity(checkpoint.files, len(checkpoint.tensors)),
        files=entries,
        config=checkpoint.config,
    )
    raw = encode_manifest(manifest)
    _write_statistics(plan, manifest, artifact_id(raw), journal, target)
    failpoints.hit("finish.before-manifest", str(target / MANIFEST_NAME))
    write_file(target / MANIFEST_NAME, raw)
    failpoints.hit("finish.after-manifest")
    return artifact_id(raw)


def _write_statistics(
    plan: Plan, manifest: Manifest, artifact: str, journal: Journal, target: Path
) -> None:
    """Write what was measured beside the artifact; nothing unless every file was measured."""
    if any(journal.statistics(file) is None for file in plan.files):
        return
    header = Header(
        tool=f"{manifest.generator.name} {manifest.generator.version}",
        artifact=artifact,
        scale_rule=str(plan.options.scale_rule),
        source=manifest.source.digest,
    )
    fragments = (journal.statistics(file) or b"" for file in plan.files)
    write_statistics(target / REPORT_NAME, assemble(fragments, header))


def _weight_entries(plan: Plan, journal: Journal) -> Iterator[FileEntry]:
    for file in plan.files:
        digest = journal.load(file).digest
        yield FileEntry.from_digest(
            file.name, file.role, digest, experts=file.experts, layers=file.layers
        )


def _sidecar_entries(checkpoint: Checkpoint, target: Path) -> Iterator[FileEntry]:
    for sidecar in copied_sidecars(checkpoint):
        digest = copy_file(checkpoint.root / sidecar.path, target / sidecar.path, sidecar.sha256)
        yield FileEntry.from_digest(sidecar.path, FileRole.SIDECAR, digest)


def _document_entries(
    checkpoint: Checkpoint, plan: Plan, target: Path, report: Reporter
) -> Iterator[FileEntry]:
    made, notices = documents(checkpoint, plan)
    for code, message in notices:
        report(Notice(severity="warning", code=code, message=message))
    for name, data in made.items():
        role = FileRole.CONFIG if name == CONFIG_NAME else FileRole.SIDECAR
        yield FileEntry.from_digest(name, role, write_file(target / name, data))


def documents(checkpoint: Checkpoint, plan: Plan) -> tuple[dict[str, bytes], list[tuple[str, str]]]:
    """Return config and card by name, and the notices that come with them.

    Raises:
        SourceError: The source's card is gone.
    """
    config, notices = config_json(checkpoint.config, plan)
    card = model_card(
        _source_card(checkpoint),
        plan,
        version=__version__,
        base_model=plan.options.base_model,
    )
    return {CONFIG_NAME: config, CARD_NAME: card}, list(notices)


def _source_card(checkpoint: Checkpoint) -> str | None:
    path = card_path(checkpoint)
    if path is None:
        return None
    try:
        return (checkpoint.root / path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SourceError(
            f"{checkpoint.root / path}: changed during the run: {error.strerror}",
            code="source-changed",
        ) from error


def _tensor_list(plan: Plan, journal: Journal) -> bytes:
    writer = TensorListWriter(plan.num_tensors)
    for file in sorted(plan.files, key=lambda file: file.name):
        result = journal.load(file)
        for record in tensor_records(file, result.outputs, result.sources):
            writer.add(record)
    return writer.finish()
