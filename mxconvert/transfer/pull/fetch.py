"""One file on its way from the store."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mxconvert import failpoints
from mxconvert.digest import xxh3_128
from mxconvert.errors import StoreError, StoreFault
from mxconvert.events import Advanced, FileFinished
from mxconvert.transfer.pull.folder import open_partial, regular_size, write_at
from mxconvert.writer import PARTIAL_SUFFIX
from mxconvert.writer.atomic import local_error, sync_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from mxconvert.events import Reporter
    from mxconvert.manifest import FileEntry
    from mxconvert.remote import RemoteArtifact
    from mxconvert.store import Client
    from mxconvert.transfer.crew import Task
    from mxconvert.transfer.pull.journal import ChunkMap, PullJournal

SPAN_CHUNKS = 4
"""Chunks that one request fetches: 64 MiB."""

_TRIES = 4
_PIECE = 2**20


@dataclass(slots=True)
class PullTally:
    """What a pull has done; shared between threads."""

    files: int = 0
    resumed_bytes: int = 0
    refetched_chunks: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class PullContext:
    """What all files of a pull share.

    Attributes:
        client: At the URL.
        artifact: What is pulled.
        target: The folder.
        journal: Of the folder.
        sha256: Whether to compare each file's SHA-256 as well.
        report: Told about progress.
        tally: Counts what was done.
    """

    client: Client
    artifact: RemoteArtifact
    target: Path
    journal: PullJournal
    sha256: bool
    report: Reporter
    tally: PullTally

    @property
    def chunk_size(self) -> int:
        """Bytes of a digest chunk."""
        return self.artifact.manifest.chunk_size


class FilePull:
    """Fetches one file; its methods are tasks, see `Crew`."""

    def __init__(self, context: PullContext, entry: FileEntry) -> None:
        self._context = context
        self._entry = entry
        self._key = context.artifact.key(entry.path)
        self._path = context.target / entry.path
        self._partial = self._path.with_name(self._path.name + PARTIAL_SUFFIX)
        self._map: ChunkMap = context.journal.chunk_map(entry)
        self._lock = threading.Lock()
        self._fd = -1
        self._etag: str | None = None
        self._pins = 0
        self._is_claimed = False
        self._missing: set[int] = set()

    def begin(self) -> Iterable[Task]:
        """Find out what is missing and return the tasks that fetch it."""
        done = self._map.load()
        if self._is_finished(done):
            return self._finished(resumed=self._entry.size)
        self._pin()
        if regular_size(self._partial) != self._entry.size:
            done = set()
        self._fd = open_partial(self._context.target, self._entry.path, self._entry.size)
        if not self._context.journal.same_boot:
            done = {index for index in done if self._is_right_on_disk(index)}
        self._map.open(done)
        self._missing = set(range(len(self._entry.chunks))) - done
        kept = sum(end - begin for begin, end in map(self._range, done))
        self._resumed(kept)
        if not self._missing:
            return (self._finish,)
        return [functools.partial(self._fetch, span) for span in self._spans()]

    def _is_finished(self, done: set[int]) -> bool:
        """Whether the file has its final name from an earlier run, with nothing to do."""
        if regular_size(self._path) != self._entry.size:
            return False
        if len(done) == len(self._entry.chunks) and self._context.journal.same_boot:
            return True
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return all(map(self._is_right_on_disk, range(len(self._entry.chunks))))
        finally:
            os.close(self._fd)
            self._fd = -1

    def _spans(self) -> Iterator[range]:
        """Yield runs of missing chunks, each at most `SPAN_CHUNKS` long."""
        begin: int | None = None
        for index in range(len(self._entry.chunks) + 1):
            is_missing = index in self._missing
            if begin is not None and (not is_missing or index - begin == SPAN_CHUNKS):
                yield range(begin, index)
                begin = None
            if is_missing and begin is None:
                begin = index

    def _range(self, index: int) -> tuple[int, int]:
        begin = index * self._context.chunk_size
        return begin, min(begin + self._context.chunk_size, self._entry.size)

    def _is_right_on_disk(self, index: int) -> bool:
        position, end = self._range(index)
        hasher = xxh3_128()
        while position < end:
            piece = os.pread(self._fd, min(_PIECE, end - position), position)
            if not piece:
                return False
            hasher.update(piece)
            position += len(piece)
        return hasher.hexdigest() == self._entry.chunks[index].xxh3_128

    # ---------------------------------------------------------------------------- fetching

    def _pin(self) -> None:
        """Note which content of the object is fetched.

        Raises:
            StoreError: It is not there, has another size, or was replaced too often.
        """
        info = self._context.client.head(self._key)
        if info.size != self._entry.size:
            raise StoreError(
                StoreFault.CHANGED if self._pins else StoreFault.CORRUPT,
                f"{self._url}: the object has {info.size} bytes, expected {self._entry.size}",
                hint="it was replaced or damaged at the store; push the artifact again",
            )
        self._etag = info.etag
        self._pins += 1

    @property
    def _url(self) -> str:
        return self._context.client.store.url(self._key)

    def _fetch(self, span: range) -> Iterable[Task]:
        pending = list(span)
        etag, tries = self._etag, 0
        while pending:
            try:
                pending = self._fetch_run(pending, etag)
            except StoreError as error:
                if error.fault is not StoreFault.CHANGED:
                    raise
                etag = self._repin(etag, error)
                pending = [index for index in pending if index in self._missing]
                continue
            tries += 1
            if pending and tries >= _TRIES:
                raise self._wrong(pending[0])
        return (self._finish,) if self._claim() else ()

    def _claim(self) -> bool:
        """Whether nothing is missing any more, and this thread is the first to see it."""
        with self._lock:
            mine = not self._missing and not self._is_claimed
            self._is_claimed = self._is_claimed or mine
        return mine

    def _fetch_run(self, chunks: list[int], etag: str | None) -> list[int]:
        """Fetch chunks, neighbours in one request; return those that arrived wrong."""
        wrong: list[int] = []
        for run in _runs(chunks):
            begin, end = self._range(run[0])[0], self._range(run[-1])[1]
            pieces = self._context.client.pieces(self._key, begin, end, etag)
            wrong += self._take(pieces, run)
        return wrong

    def _take(self, pieces: Iterable[bytes | memoryview], run: range) -> list[int]:
        """Write the bytes of a run of chunks while checking them."""
        wrong = []
        index, (position, end) = run[0], self._range(run[0])
        hasher = xxh3_128()
        for piece in pieces:
            view = memoryview(piece)
            while view:
                part = view[: end - position]
                hasher.update(part)
                write_at(self._fd, part, position, self._path)
                position, view = position + len(part), view[len(part) :]
                if position < end:
                    continue
                if not self._accept(index, hasher.hexdigest()):
                    wrong.append(index)
                if index == run[-1]:
                    break
                index, hasher = index + 1, xxh3_128()
                position, end = self._range(index)
        return wrong

    def _accept(self, index: int, found: str) -> bool:
        """Note a chunk as done if its digest is right."""
        failpoints.hit("pull.chunk-written")
        begin, end = self._range(index)
        if found != self._entry.chunks[index].xxh3_128:
            with self._context.tally.lock:
                self._context.tally.refetched_chunks += 1
            return False
        self._map.set(index)
        failpoints.hit("pull.chunk-noted")
        with self._lock:
            self._missing.discard(index)
        self._context.report(Advanced(num_bytes=end - begin))
        return True

    def _repin(self, etag: str | None, error: StoreError) -> str | None:
        """Go on with the object's new content, once: its chunks may still be right."""
        with self._lock:
            if self._etag != etag:
                return self._etag
            if self._pins > 1:
                raise error
            self._pin()
            return self._etag

    def _wrong(self, index: int) -> StoreError:
        begin, end = self._range(index)
        return StoreError(
            StoreFault.CORRUPT,
            f"{self._url}: chunk {index} (bytes {begin} to {end}) arrived wrong {_TRIES} times: "
            f"XXH3-128: expected {self._entry.chunks[index].xxh3_128}, found others",
            hint="the object is damaged at the store: `mxconvert verify URL` tells which; push "
            "the artifact again",
        )

    # ---------------------------------------------------------------------------- the end

    def _finish(self) -> Iterable[Task]:
        partial = self._partial
        try:
            failpoints.hit("pull.before-sync", str(partial))
            os.fsync(self._fd)
            if self._context.sha256:
                self._compare_sha256()
            os.close(self._fd)
            self._fd = -1
            failpoints.hit("pull.before-rename", str(partial))
            partial.rename(self._path)
            sync_folder(self._path.parent)
        except OSError as error:
            raise local_error(error, self._path) from error
        self._map.close()
        failpoints.hit("pull.renamed")
        return self._finished()

    def _compare_sha256(self) -> None:
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self._entry.sha256:
            raise StoreError(
                StoreFault.CORRUPT,
                f"{self._url}: SHA-256: expected {self._entry.sha256}, found {found}, though "
                "every chunk has its XXH3-128",
                hint="the object was tampered with; do not use it",
            )

    def _resumed(self, num_bytes: int) -> None:
        with self._context.tally.lock:
            self._context.tally.resumed_bytes += num_bytes
        if num_bytes:
            self._context.report(Advanced(num_bytes=num_bytes))

    def _finished(self, resumed: int = 0) -> Iterable[Task]:
        self._resumed(resumed)
        if not resumed:
            with self._context.tally.lock:
                self._context.tally.files += 1
        self._context.report(FileFinished(path=self._entry.path, size_bytes=self._entry.size))
        return ()


def _runs(chunks: list[int]) -> Iterator[range]:
    """Yield ranges of consecutive numbers."""
    begin = 0
    for position in range(1, len(chunks) + 1):
        if position == len(chunks) or chunks[position] != chunks[position - 1] + 1:
            yield range(chunks[begin], chunks[position - 1] + 1)
            begin = position
