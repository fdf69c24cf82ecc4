"""The digest level: one pass over every file, everything computed on the way."""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mxconvert.digest import ChunkHasher, FileDigest, xxh3_128
from mxconvert.events import Advanced, FileFinished
from mxconvert.verify.report import Check, Collector
from mxconvert.verify.structure import SCALE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mxconvert.digest import StreamingHash
    from mxconvert.events import Reporter
    from mxconvert.folder import Folder
    from mxconvert.manifest import FileEntry, TensorRecord

PIECE_SIZE = 4 * 1024 * 1024
_NAN_SCALE = b"\xff"
_SHOWN = 4


@dataclass(slots=True)
class _Span:
    """One tensor of the file under way."""

    record: TensorRecord
    hasher: StreamingHash
    nan_at: int | None = None


@dataclass(slots=True)
class TensorPass:
    """Hashes each tensor of a file while its bytes go by, and looks at scale bytes.

    Records must be sorted by their begin and must not overlap.
    """

    records: Sequence[TensorRecord]
    spans: list[_Span] = field(default_factory=list)
    _next: int = 0

    def update(self, offset: int, buffer: bytearray, count: int) -> None:
        """Take ``count`` bytes of the file that begin at ``offset``."""
        stop = offset + count
        view = memoryview(buffer)
        while self._next < len(self.records):
            record = self.records[self._next]
            if record.begin >= stop and record.end > record.begin:
                return
            if len(self.spans) == self._next:
                self.spans.append(_Span(record, xxh3_128()))
            span = self.spans[self._next]
            first, last = max(record.begin, offset) - offset, min(record.end, stop) - offset
            if first < last:
                span.hasher.update(view[first:last])
                self._look_for_nan(span, buffer, offset, first, last)
            if record.end > stop:
                return
            self._next += 1

    @staticmethod
    def _look_for_nan(span: _Span, buffer: bytearray, offset: int, first: int, last: int) -> None:
        if span.nan_at is None and span.record.name.endswith(SCALE):
            at = buffer.find(_NAN_SCALE, first, last)
            if at >= 0:
                span.nan_at = offset + at - span.record.begin


@dataclass(frozen=True, slots=True)
class DigestTask:
    """A file to check, and the tensors that the tensor list places in it."""

    entry: FileEntry
    records: Sequence[TensorRecord]


class DigestCheck:
    """Checks whole files; one instance serves all threads."""

    def __init__(
        self, folder: Folder, chunk_size: int, collector: Collector, reporter: Reporter
    ) -> None:
        self._folder = folder
        self._chunk_size = chunk_size
        self._collector = collector
        self._report = reporter
        self._local = threading.local()

    def check(self, task: DigestTask) -> None:
        """Read one file and compare every digest."""
        entry = task.entry
        tensors = TensorPass(task.records)
        self._collector.look(entry.path, Check.DIGEST)
        try:
            digest = self._read(entry, tensors)
        except OSError as error:
            message = f"{entry.path}: cannot be read: {error.strerror}"
            self._collector.fail(Check.DIGEST, "unreadable", message, path=entry.path)
            self._report(FileFinished(path=entry.path, size_bytes=entry.size, ok=False))
            return
        self._collector.count("files_read")
        self._collector.count("bytes_read", digest.size_bytes)
        good = self._compare(entry, digest, task.records)
        good = self._compare_tensors(entry, tensors) and good
        self._report(FileFinished(path=entry.path, size_bytes=entry.size, ok=good))

    def _buffer(self) -> bytearray:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = bytearray(PIECE_SIZE)
        buffer: bytearray = self._local.buffer
        return buffer

    def _read(self, entry: FileEntry, tensors: TensorPass) -> FileDigest:
        buffer = self._buffer()
        sha, chunks, offset = hashlib.sha256(), ChunkHasher(self._chunk_size), 0
        fd = self._folder.open(entry.path)
        try:
            while offset < entry.size:
                count = os.preadv(fd, [memoryview(buffer)], offset)
                if count == 0:
                    raise OSError(0, f"it ended at byte {offset} while it was read")
                view = memoryview(buffer)[:count]
                sha.update(view)
                chunks.update(view)
                tensors.update(offset, buffer, count)
                offset += count
                self._report(Advanced(num_bytes=count))
        finally:
            os.close(fd)
        return chunks.finish(sha.hexdigest())

    # --------------------------------------------------------------------- comparing

    def _compare(
        self, entry: FileEntry, digest: FileDigest, records: Sequence[TensorRecord]
    ) -> bool:
        bad = [
            i
            for i, pair in enumerate(zip(entry.chunks, digest.chunks, strict=False))
            if pair[0] != pair[1]
        ]
        if bad:
            self._collector.count("chunks_differing", len(bad))
        if entry.sha256 != digest.sha256:
            self._fail(
                entry, self._where(entry, bad, records), "SHA-256", entry.sha256, digest.sha256
            )
        elif bad:
            self._fail(
                entry,
                f"the SHA-256 agrees, but chunk {bad[0]}",
                "XXH3-128",
                entry.chunks[bad[0]].xxh3_128,
                digest.chunks[bad[0]].xxh3_128,
            )
        elif entry.crc64nvme != digest.crc64nvme:
            self._fail(
                entry, "the SHA-256 agrees, but", "CRC64-NVME", entry.crc64nvme, digest.crc64nvme
            )
        else:
            return True
        return False

    def _fail(self, entry: FileEntry, what: str, kind: str, expected: str, found: str) -> None:
        message = f"{entry.path}: {what} {kind}"
        self._collector.fail(
            Check.DIGEST, "digest", message, path=entry.path, expected=expected, found=found
        )

    def _where(self, entry: FileEntry, bad: list[int], records: Sequence[TensorRecord]) -> str:
        """Say which part of the file differs."""
        if not bad:
            return "every chunk agrees, but the"
        begin = bad[0] * self._chunk_size
        end = min(begin + self._chunk_size, entry.size)
        text = (
            f"{len(bad)} of {len(entry.chunks)} chunks differ, the first is chunk {bad[0]} "
            f"(bytes {begin} to {end})"
        )
        names = [record.name for record in records if record.begin < end and record.end > begin]
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            text += f", which holds {', '.join(names[:_SHOWN])}{more}"
        return f"{text};"

    def _compare_tensors(self, entry: FileEntry, tensors: TensorPass) -> bool:
        good = len(tensors.spans) == len(tensors.records)
        for span in tensors.spans:
            record, found = span.record, span.hasher.hexdigest()
            self._collector.count("tensors_hashed")
            if found != record.xxh3_128:
                good = False
                self._collector.fail(
                    Check.DIGEST,
                    "tensor-digest",
                    f"{entry.path}: tensor {record.name!r}: XXH3-128",
                    path=entry.path,
                    tensor=record.name,
                    expected=record.xxh3_128,
                    found=found,
                )
            if span.nan_at is not None:
                good = False
                message = (
                    f"{entry.path}: tensor {record.name!r}: scale {span.nan_at} is 255, which "
                    "is NaN"
                )
                self._collector.fail(
                    Check.STRUCTURE, "nan-scale", message, path=entry.path, tensor=record.name
                )
        return good
