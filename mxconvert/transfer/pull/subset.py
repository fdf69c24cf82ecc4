"""Which part of an artifact a folder holds, and shall hold."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mxconvert import failpoints
from mxconvert.digest import ChunkHasher
from mxconvert.errors import UsageError, VerificationError
from mxconvert.events import Notice
from mxconvert.manifest import (
    MANIFEST_NAME,
    RECORD_NAME,
    TENSORS_NAME,
    Fields,
    FileEntry,
    artifact_id,
    encode_canonical,
    iter_tensors,
)
from mxconvert.model import FileRole
from mxconvert.remote import read_document
from mxconvert.safetensors_format import PREFIX_SIZE
from mxconvert.selection import (
    Selection,
    SelectionRecord,
    encode_record,
    parse_record,
    parse_selection,
    plan_selection,
    selection_json,
)
from mxconvert.transfer.pull.folder import open_plain, plain_size, read_plain
from mxconvert.writer import write_file
from mxconvert.writer.atomic import remove_quietly, sync_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from mxconvert.events import Reporter
    from mxconvert.manifest import Manifest, TensorRecord
    from mxconvert.remote import RemoteArtifact
    from mxconvert.selection import PartFile, Request, SelectionPlan
    from mxconvert.store import Client
    from mxconvert.transfer.pull.journal import PullJournal

INDEX_NAME = "model.safetensors.index.json"


class TensorList:
    """An artifact's tensor list, read or fetched when it is first needed.

    Attributes:
        artifact: The artifact.
    """

    def __init__(self, client: Client, artifact: RemoteArtifact, target: Path) -> None:
        self.artifact = artifact
        self._client, self._target = client, target

    @cached_property
    def _data(self) -> bytes:
        files = self.artifact.manifest.files
        entry = next(entry for entry in files if entry.path == TENSORS_NAME)
        try:
            data = read_plain(self._target, TENSORS_NAME)
        except OSError:
            data = b""
        if hashlib.sha256(data).hexdigest() == entry.sha256:
            return data
        return read_document(self._client, self.artifact, entry)

    def __call__(self) -> Iterator[TensorRecord]:
        """Yield its records."""
        return iter_tensors(self._data)


@dataclass(frozen=True)
class Wanted:
    """What a folder shall hold.

    Attributes:
        files: The artifact's files that it shall hold as they are.
        plan: How a part is made; ``None``: all.
        held: What it held before, if that was a part of the same artifact.
        record: Of what it held.
    """

    files: tuple[FileEntry, ...]
    plan: SelectionPlan | None = None
    held: SelectionPlan | None = None
    record: SelectionRecord | None = None

    @property
    def parts(self) -> tuple[PartFile, ...]:
        """New files that it shall hold."""
        return () if self.plan is None else self.plan.parts

    @property
    def selection(self) -> Selection | None:
        """The part, ``None``: all."""
        return None if self.plan is None else self.plan.selection

    @property
    def names(self) -> set[str]:
        """Names of files that come and go with parts."""
        old = () if self.held is None else self.held.parts
        return {RECORD_NAME, INDEX_NAME, *(part.path for part in (*self.parts, *old))}

    @property
    def doomed(self) -> list[str]:
        """Names of derived files that are not wanted any more."""
        old = () if self.held is None else self.held.parts
        return sorted({part.path for part in old} - {part.path for part in self.parts})


def find_wanted(
    request: Request,
    target: Path,
    journal: PullJournal,
    tensors: TensorList,
    *,
    overwrite: bool,
    report: Reporter,
) -> Wanted:
    """Return what the folder shall hold: what is asked for and, of a part, what it has.

    Raises:
        UsageError: A part that does not exist, or one of an unfinished pull of everything.
    """
    artifact, manifest = tensors.artifact, tensors.artifact.manifest
    asked = request.resolve(manifest) if request else None
    if asked is not None and asked.is_everything:
        asked = None
    record = None if overwrite else read_record(target, artifact.id)
    held = None
    if record is not None:
        held = plan_selection(manifest, record.selection, tensors)
    if asked is None:
        return Wanted(manifest.files, None, held, record)
    wanted = asked if record is None else asked | record.selection
    if not overwrite and _holds_everything(target, artifact.id):
        message = f"{target}: holds the whole artifact already"
        report(Notice(severity="info", code="holds-everything", message=message))
        return Wanted(manifest.files)
    if not overwrite:
        wanted = _with_unfinished(wanted, journal, artifact.id, target)
    if wanted != asked:
        message = f"{target}: holds another part already: it becomes {wanted.describe()}"
        report(Notice(severity="info", code="selection-widened", message=message))
    if wanted.is_everything:
        return Wanted(manifest.files, None, held, record)
    plan = plan_selection(manifest, wanted, tensors)
    _tell_joint(plan, report)
    _refuse_clash(plan, manifest)
    return Wanted(plan.files, plan, held, record)


def _holds_everything(target: Path, artifact: str) -> bool:
    """Whether a folder has the artifact's manifest and no record of a part."""
    try:
        data = read_plain(target, MANIFEST_NAME)
    except OSError:
        return False
    return artifact_id(data) == artifact and plain_size(target, RECORD_NAME) is None


def _with_unfinished(
    wanted: Selection, journal: PullJournal, artifact: str, target: Path
) -> Selection:
    if not journal.exists or not journal.is_of(artifact):
        return wanted
    unfinished = journal.selection
    if unfinished is None:
        raise UsageError(
            f"{target}: an unfinished pull of the whole artifact is here",
            hint="finish it without naming a part, choose another folder, or pass --overwrite",
            code="resume-mismatch",
        )
    return wanted | parse_selection(Fields(unfinished, f"{target}: journal"))


def _tell_joint(plan: SelectionPlan, report: Reporter) -> None:
    if plan.joint_bytes:
        message = (
            f"{plan.joint_bytes} bytes are of tensors that hold several experts and cannot be "
            f"divided: they are fetched whole ({plan.num_bytes} bytes in all)"
        )
        report(Notice(severity="warning", code="joint-experts", message=message))


def _refuse_clash(plan: SelectionPlan, manifest: Manifest) -> None:
    clashes = {part.path for part in plan.parts} & {entry.path for entry in manifest.files}
    if clashes:
        raise UsageError(f"{min(clashes)}: the artifact has a file of this name already")


def read_record(target: Path, artifact: str) -> SelectionRecord | None:
    """Return the record of the part of an artifact that a folder holds, if it does.

    One that cannot be read, or is of another artifact, counts as none.
    """
    try:
        record = parse_record(read_plain(target, RECORD_NAME), str(target / RECORD_NAME))
    except (OSError, VerificationError):
        return None
    return record if record.artifact == artifact else None


def is_part_there(target: Path, wanted: Wanted) -> bool:
    """Whether a folder's record, and the sizes of its derived files, are those wanted."""
    if wanted.record is None or wanted.selection is None:
        return (wanted.record is None) == (wanted.selection is None)
    return wanted.record.selection == wanted.selection and all(
        plain_size(target, entry.path) == entry.size for entry in wanted.record.derived
    )


# ----------------------------------------------------------------------------- the end


def write_documents(
    client: Client,
    artifact: RemoteArtifact,
    target: Path,
    plan: SelectionPlan,
    made: Iterable[FileEntry],
) -> None:
    """Write the filtered index, then the record.

    Args:
        client: At the URL.
        artifact: The artifact.
        target: The folder, which holds everything else.
        plan: Of the part.
        made: The entries of the new files.
    """
    chunk_size = artifact.manifest.chunk_size
    failpoints.hit("pull.before-index", str(target))
    name = INDEX_NAME if plan.index is None else plan.index.path
    data = _index(client, artifact, target, plan)
    write_file(target / name, data)
    hasher = ChunkHasher(chunk_size)
    hasher.update(data)
    index = FileEntry.from_digest(
        name, FileRole.INDEX, hasher.finish(hashlib.sha256(data).hexdigest())
    )
    record = SelectionRecord(
        artifact=artifact.id,
        selection=plan.selection,
        derived=tuple(sorted((*made, index), key=lambda entry: entry.path)),
        chunk_size=chunk_size,
    )
    failpoints.hit("pull.before-record", str(target))
    write_file(target / RECORD_NAME, encode_record(record))


def _index(client: Client, artifact: RemoteArtifact, target: Path, plan: SelectionPlan) -> bytes:
    """Return an index of exactly the tensors that the folder holds."""
    weights = {entry.path for entry in plan.files if entry.role in _WEIGHTS}
    names: dict[str, str] = {}
    if plan.index is not None:
        whole = json.loads(read_document(client, artifact, plan.index))["weight_map"]
        names = {name: file for name, file in whole.items() if file in weights}
    for part in plan.parts:
        names |= {record.name: part.path for record in part.records}
    size = sum(_tensor_bytes(target, path) for path in weights)
    size += sum(part.num_bytes for part in plan.parts)
    return encode_canonical(
        {"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}
    )


_WEIGHTS = frozenset({FileRole.DENSE, FileRole.EXPERTS, FileRole.MIXED})


def _tensor_bytes(target: Path, path: str) -> int:
    """Return the bytes of a weight file behind its header."""
    fd = open_plain(target, path)
    try:
        length = int.from_bytes(os.pread(fd, PREFIX_SIZE, 0), "little")
        return os.fstat(fd).st_size - PREFIX_SIZE - length
    finally:
        os.close(fd)


def remove_old(target: Path, wanted: Wanted) -> None:
    """Remove what an earlier part left, the record too if all is there now."""
    doomed = wanted.doomed
    if wanted.plan is None and wanted.record is not None:
        doomed.append(RECORD_NAME)
    for name in doomed:
        remove_quietly(target / name)
    if doomed:
        sync_folder(target)


def journal_of(selection: Selection | None) -> dict[str, object] | None:
    """Return what the journal keeps of a selection."""
    return None if selection is None else selection_json(selection)
