"""`--base`: take files from an earlier artifact whose source tensors have not changed.

A file is taken if the base has one of its name that is made of the same tensors in the same
way, every source tensor has the digest that the base's tensor list states, and the base's
file has its SHA-256. So what is taken has the bytes that would be made.
"""

from __future__ import annotations

import contextlib
import hashlib
import stat
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from mxconvert import failpoints
from mxconvert.digest import CHUNK_SIZE, FileDigest, xxh3_128
from mxconvert.errors import Interrupted, VerificationError
from mxconvert.events import Advanced, FileFinished, Notice, Started
from mxconvert.fp8 import FP8_DTYPES
from mxconvert.manifest import (
    GENERATOR,
    MANIFEST_NAME,
    TENSORS_NAME,
    format_of,
    iter_tensors,
    parse_manifest,
    tensor_records,
)
from mxconvert.pipeline.job import FileResult
from mxconvert.safetensors_format import num_elements
from mxconvert.source.gather import tensor_pieces
from mxconvert.workers import map_bounded
from mxconvert.writer import take_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from mxconvert.events import Reporter
    from mxconvert.manifest import FileEntry, Manifest, TensorRecord
    from mxconvert.model import OutputFile, Plan, TensorInfo
    from mxconvert.source import SourceReader
    from mxconvert.stop import StopToken

_PIECE = 4 * 1024 * 1024


class _UnfitError(Exception):
    """The base cannot be used; says why."""


@dataclass(frozen=True, slots=True)
class Base:
    """An artifact that files may be taken from.

    Attributes:
        folder: Where it lies.
        entries: What its manifest says about its weight files, by name.
        tensors: The bytes of its tensor list.
    """

    folder: Path
    entries: Mapping[str, FileEntry]
    tensors: bytes


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A planned file, and the one of the base that is made of the same tensors."""

    file: OutputFile
    entry: FileEntry
    records: Mapping[str, TensorRecord]


def open_base(folder: Path, plan: Plan, report: Reporter) -> Base | None:
    """Read what a base is; ``None`` after a notice if no file of it can be taken."""
    try:
        manifest, raw = _read(folder, MANIFEST_NAME), _read(folder, TENSORS_NAME)
        parsed = parse_manifest(manifest, str(folder / MANIFEST_NAME))
        _check(parsed, raw, plan)
    except (_UnfitError, VerificationError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        message = f"--base {folder}: {reason}; every file is made"
        report(Notice(severity="warning", code="base-unfit", message=message))
        return None
    return Base(folder, {entry.path: entry for entry in parsed.files}, raw)


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError as error:
        raise _UnfitError(f"no {name}: not a complete artifact") from error


def _check(manifest: Manifest, tensors: bytes, plan: Plan) -> None:
    wanted, made_by = format_of(plan), manifest.generator
    if made_by != GENERATOR:
        raise _UnfitError(
            f"it was made by {made_by.name} {made_by.version}, this is {GENERATOR.version}"
        )
    if manifest.format != wanted:
        raise _UnfitError(
            f"it has the format {manifest.format.name} with --scale-rule "
            f"{manifest.format.scale_rule}, not {wanted.name} with {wanted.scale_rule}"
        )
    entry = next(entry for entry in manifest.files if entry.path == TENSORS_NAME)
    if hashlib.sha256(tensors).hexdigest() != entry.sha256:
        raise _UnfitError(f"{TENSORS_NAME} is damaged")
    if manifest.chunk_size != CHUNK_SIZE:
        raise _UnfitError(f"its digest chunks have {manifest.chunk_size} bytes")


class Taking:
    """Takes files from a base, on several threads."""

    def __init__(
        self,
        base: Base,
        target: Path,
        reader: SourceReader,
        record: Callable[[OutputFile, FileResult], None],
        report: Reporter,
    ) -> None:
        self._base = base
        self._target = target
        self._reader = reader
        self._record = record
        self._report = report
        self._stop: StopToken | None = None

    def run(self, files: Sequence[OutputFile], jobs: int, stop: StopToken) -> list[OutputFile]:
        """Take what can be taken of ``files``; return it.

        Raises:
            SourceError: The source changes while it is read.
            LocalError: Something cannot be read or written.
            Interrupted: ``stop`` was set.
        """
        self._stop = stop
        wanted = {file.name: file for file in files if not _is_ambiguous(file)}
        size = sum(file.source_size for file in wanted.values())
        self._report(Started(what="compare with the base", total_bytes=size, total_files=0))
        with stop.watched():
            taken = list(map_bounded(self._take, self._candidates(wanted), jobs))
        return [file for file in taken if file is not None]

    def _candidates(self, wanted: Mapping[str, OutputFile]) -> Iterator[_Candidate]:
        for name, group in groupby(iter_tensors(self._base.tensors), key=lambda r: r.file):
            file, entry, records = wanted.get(name), self._base.entries.get(name), list(group)
            if file is not None and entry is not None and _is_alike(file, entry, records):
                yield _Candidate(file, entry, {record.name: record for record in records})

    def _take(self, candidate: _Candidate) -> OutputFile | None:
        file, entry = candidate.file, candidate.entry
        sources = self._compare(candidate)
        if sources is None:
            return None
        path = self._base.folder / entry.path
        if not self._is_whole(path, entry):
            message = f"--base: {path} is damaged; the file is made"
            self._report(Notice(severity="warning", code="base-damaged", message=message))
            return None
        digest = FileDigest(entry.size, entry.sha256, entry.crc64nvme, entry.chunks)
        outputs = {name: record.xxh3_128 for name, record in candidate.records.items()}
        failpoints.hit("base.before-take", file.name)
        with take_file(path, self._target / file.name, entry.sha256):
            self._record(file, FileResult(digest, outputs, sources))
        self._report(FileFinished(path=file.name, size_bytes=file.size))
        return file

    def _compare(self, candidate: _Candidate) -> dict[str, str] | None:
        """Return the digests of what a file is made from, ``None`` if one has changed."""
        found: dict[str, str] = {}
        for item in candidate.file.items:
            expected = candidate.records[item.outputs[0].name].sources
            for tensor, source in zip(item.source_tensors, expected, strict=True):
                found[tensor.name] = self._digest(tensor)
                if found[tensor.name] != source.xxh3_128:
                    return None
        used = {t.file for item in candidate.file.items for t in item.source_tensors}
        self._reader.check_unchanged(sorted(used))
        return found

    def _digest(self, tensor: TensorInfo) -> str:
        digest = xxh3_128()
        for data in tensor_pieces(self._reader, tensor):
            self._look()
            digest.update(data)
            self._report(Advanced(num_bytes=len(data)))
        return digest.hexdigest()

    def _is_whole(self, path: Path, entry: FileEntry) -> bool:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(min(_PIECE, max(entry.size, 1))))
        with contextlib.suppress(OSError):
            info = path.lstat()
            if not stat.S_ISREG(info.st_mode) or info.st_size != entry.size:
                return False
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    self._look()
                    digest.update(buffer[:count])
            return digest.hexdigest() == entry.sha256
        return False

    def _look(self) -> None:
        if self._stop is not None and self._stop.signum is not None:
            raise Interrupted(self._stop.signum)


def _is_alike(file: OutputFile, entry: FileEntry, records: list[TensorRecord]) -> bool:
    """Whether a base's file is made of the same tensors in the same way, by all but content."""
    unknown: defaultdict[str, str] = defaultdict(str)
    if entry.size != file.size or len(records) != file.num_tensors:
        return False
    return all(
        planned == _without_content(record)
        for planned, record in zip(tensor_records(file, unknown, unknown), records, strict=True)
    )


def _without_content(record: TensorRecord) -> TensorRecord:
    sources = tuple(replace(source, xxh3_128="") for source in record.sources)
    return replace(record, xxh3_128="", sources=sources)


def _is_ambiguous(file: OutputFile) -> bool:
    """Whether what becomes of a file's tensors depends on more than a tensor list says.

    Which elements share an FP8 scale follows from config.json, too.
    """
    return any(_has_blocks(item.source) for item in file.items)


def _has_blocks(tensor: TensorInfo) -> bool:
    if tensor.scale is None or tensor.dtype not in FP8_DTYPES:
        return False
    one_each = tensor.scale.rows == 1 or num_elements(tensor.scale.tensor.shape) == 1
    return not one_each
