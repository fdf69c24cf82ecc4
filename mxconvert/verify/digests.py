"""The digest level: one pass over every file, everything computed on the way."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.digest import ChunkHasher
from mxconvert.events import Advanced, FileFinished
from mxconvert.verify.passes import FilePass
from mxconvert.verify.report import Check, Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mxconvert.digest import ChunkDigest, FileDigest
    from mxconvert.events import Reporter
    from mxconvert.manifest import FileEntry, TensorRecord
    from mxconvert.verify.passes import TensorPass
    from mxconvert.verify.place import Place

_SHOWN = 4


@dataclass(frozen=True, slots=True)
class DigestTask:
    """A file to check, and the tensors that the tensor list places in it.

    ``chunks`` are the only ones to read; ``None`` reads the whole file.
    """

    entry: FileEntry
    records: Sequence[TensorRecord]
    chunks: range | None = None


class DigestCheck:
    """Checks whole files, or chunks of them; one instance serves all threads.

    What is not right is read once more before it is called wrong.
    """

    def __init__(
        self, place: Place, chunk_size: int, collector: Collector, reporter: Reporter
    ) -> None:
        self._place = place
        self._chunk_size = chunk_size
        self._collector = collector
        self._report = reporter

    def check(self, task: DigestTask) -> None:
        """Read what the task asks for of one file and compare every digest."""
        entry, chunks = task.entry, task.chunks
        size = entry.size if chunks is None else sum(self._length(entry, i) for i in chunks)
        self._collector.look(entry.path, Check.DIGEST)
        try:
            good = self._check_whole(task) if chunks is None else self._check_chunks(task, chunks)
        except OSError as error:
            message = f"{entry.path}: cannot be read: {error.strerror}"
            self._collector.fail(Check.DIGEST, "unreadable", message, path=entry.path)
            good = False
        self._report(FileFinished(path=entry.path, size_bytes=size, ok=good))

    # ----------------------------------------------------------------------- reading

    def _check_whole(self, task: DigestTask) -> bool:
        entry = task.entry
        state = FilePass(entry, self._chunk_size, task.records)
        furthest = 0
        while state.offset < entry.size:
            for _ in self._feed(state, entry):
                self._report(Advanced(num_bytes=max(0, state.offset - furthest)))
                furthest = max(furthest, state.offset)
        for index in state.mended:
            self._note_mended(entry, index)
        digest = state.finish()
        self._collector.count("files_read")
        self._collector.count("bytes_read", digest.size_bytes)
        good = self._compare(entry, digest, task.records)
        return self._compare_tensors(entry, state.tensors) and good

    def _feed(self, state: FilePass, entry: FileEntry) -> Iterator[None]:
        """Read on until the end of the file, or until bytes have to come again."""
        pieces = self._place.pieces(entry.path, state.offset, entry.size)
        with contextlib.closing(pieces):
            for piece in pieces:
                wanted = state.update(piece)
                yield
                if not wanted:
                    return

    def _check_chunks(self, task: DigestTask, chunks: range) -> bool:
        good = True
        for index in chunks:
            expected, found = task.entry.chunks[index], self._read_chunk(task.entry, index)
            length = self._length(task.entry, index)
            self._report(Advanced(num_bytes=length))
            self._collector.count("chunks_read")
            self._collector.count("bytes_read", length)
            if found != expected:
                found = self._read_chunk(task.entry, index)
                if found == expected:
                    self._note_mended(task.entry, index)
            good = self._compare_chunk(task, index, found) and good
        return good

    def _read_chunk(self, entry: FileEntry, index: int) -> ChunkDigest:
        hasher = ChunkHasher(self._chunk_size)
        begin, end = entry.chunk_range(index, self._chunk_size)
        for piece in self._place.pieces(entry.path, begin, end):
            hasher.update(piece)
            self._report(Advanced(num_bytes=0))  # a place to stop
        return hasher.end_chunk()

    def _length(self, entry: FileEntry, index: int) -> int:
        begin, end = entry.chunk_range(index, self._chunk_size)
        return end - begin

    def _note_mended(self, entry: FileEntry, index: int) -> None:
        message = f"{entry.path}: chunk {index} was wrong when it was first read, and right again"
        self._collector.note("read-again", message, entry.path)

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

    def _compare_chunk(self, task: DigestTask, index: int, found: ChunkDigest) -> bool:
        expected = task.entry.chunks[index]
        if found == expected:
            return True
        self._collector.count("chunks_differing")
        where = f"chunk {index} {self._describe(task.entry, index, task.records)};"
        if found.xxh3_128 != expected.xxh3_128:
            self._fail(task.entry, where, "XXH3-128", expected.xxh3_128, found.xxh3_128)
        else:
            self._fail(task.entry, where, "CRC64-NVME", expected.crc64nvme, found.crc64nvme)
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
        return (
            f"{len(bad)} of {len(entry.chunks)} chunks differ, the first is chunk {bad[0]} "
            f"{self._describe(entry, bad[0], records)};"
        )

    def _describe(self, entry: FileEntry, index: int, records: Sequence[TensorRecord]) -> str:
        begin, end = entry.chunk_range(index, self._chunk_size)
        text = f"(bytes {begin} to {end})"
        names = [record.name for record in records if record.begin < end and record.end > begin]
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            text += f", which holds {', '.join(names[:_SHOWN])}{more}"
        return text

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
