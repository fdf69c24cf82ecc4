"""A new file with some tensors of one of the artifact's, on its way from the store.

Each tensor is compared with the tensor list's XXH3-128 as it lands. What an earlier
selection left on the disk is copied from there.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from typing import TYPE_CHECKING

from mxconvert import failpoints
from mxconvert.digest import ChunkHasher, xxh3_128
from mxconvert.errors import StoreError, StoreFault
from mxconvert.events import Advanced, FileFinished
from mxconvert.manifest import FileEntry
from mxconvert.transfer.pull.folder import (
    open_partial,
    open_plain,
    partial_path,
    plain_size,
    write_at,
)
from mxconvert.transfer.pull.journal import ChunkMap, stamp_of
from mxconvert.writer.atomic import local_error, sync_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mxconvert.selection import PartFile
    from mxconvert.transfer.crew import Task
    from mxconvert.transfer.pull.context import PullContext
    from mxconvert.transfer.pull.local import LocalTensors

RUN_BYTES = 64 * 2**20
"""Bytes that one request fetches, unless a single tensor has more."""

_TRIES = 4
_PIECE = 2**20


class PartPull:
    """Makes one file of tensors; its methods are tasks, see `Crew`.

    Attributes:
        entry: The file's digests, once it has its name.
    """

    def __init__(self, context: PullContext, part: PartFile, local: LocalTensors) -> None:
        self.entry: FileEntry | None = None
        self._context = context
        self._part = part
        self._local = local
        self._key = context.artifact.key(part.source.path)
        self._path = context.target / part.path
        self._partial = context.target / partial_path(part.path)
        self._pairs = list(zip(part.records, part.moved, strict=True))
        self._map: ChunkMap = context.journal.map_of(part.path, len(self._pairs))
        self._lock = threading.Lock()
        self._missing = set(range(len(self._pairs)))
        self._is_claimed = False
        self._noted: set[int] = set()
        self._etag: str | None = None
        self._fd = -1

    def begin(self) -> Iterable[Task]:
        """Find out what is there and return the tasks that see to the rest."""
        if plain_size(self._context.target, self._part.path) == self._part.size and self._adopt():
            return self._finished()
        if plain_size(self._context.target, partial_path(self._part.path)) == self._part.size:
            self._noted, _ = self._map.load()
        self._fd = open_partial(self._context.target, self._part.path, self._part.size)
        self._map.open(self._noted)
        write_at(self._fd, self._part.header, 0, self._partial)
        return [functools.partial(self._see_to, run) for run in self._runs()]

    def _runs(self) -> Iterator[Sequence[int]]:
        """Yield numbers of tensors that lie side by side in the artifact's file."""
        run: list[int] = []
        for number, (record, _) in enumerate(self._pairs):
            if run:
                first, last = self._pairs[run[0]][0], self._pairs[run[-1]][0]
                if record.begin != last.end or record.end - first.begin > RUN_BYTES:
                    yield run
                    run = []
            run.append(number)
        if run:
            yield run

    def close(self) -> None:
        """Close what is open; only once no task runs any more."""
        self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # ---------------------------------------------------------------------------- tensors

    def _see_to(self, run: Sequence[int]) -> Iterable[Task]:
        pending = [number for number in run if not (self._keeps(number) or self._copies(number))]
        for some in _neighbours(pending):
            self._fetch(some)
        with self._lock:
            mine = not (self._missing or self._is_claimed)
            self._is_claimed = self._is_claimed or mine
        return (self._finish,) if mine else ()

    def _keeps(self, number: int) -> bool:
        """Whether a tensor was written by an earlier run, and is right."""
        record, moved = self._pairs[number]
        if number not in self._noted:
            return False
        hasher = xxh3_128()
        for piece in _pieces(self._fd, moved.begin, moved.end, self._path):
            hasher.update(piece)
        if hasher.hexdigest() != record.xxh3_128:
            return False
        self._done(number, resumed=True)
        return True

    def _copies(self, number: int) -> bool:
        """Whether a tensor lies in another file of the folder; it is copied then."""
        record, moved = self._pairs[number]
        if not self._local.copy(record, self._fd, moved.begin, self._partial):
            return False
        self._map.set(number)
        self._done(number, resumed=True)
        return True

    def _fetch(self, run: Sequence[int]) -> None:
        """Fetch neighbouring tensors until each is right."""
        tries, changed = 0, False
        while left := [number for number in run if number in self._missing]:
            if tries >= _TRIES:
                raise self._wrong(left[0])
            try:
                for some in _neighbours(left):
                    self._take(some)
            except StoreError as error:
                if error.fault is not StoreFault.CHANGED or changed:
                    raise
                changed = True
                with self._lock:
                    self._etag = None
            else:
                tries += 1

    def _pin(self) -> str | None:
        """Note which content of the object is fetched."""
        with self._lock:
            if self._etag is None:
                info, size = self._context.client.head(self._key), self._part.source.size
                if info.size != size:
                    raise StoreError(
                        StoreFault.CORRUPT,
                        f"{self._url}: the object has {info.size} bytes, expected {size}",
                        hint="it was replaced or damaged at the store; push the artifact again",
                    )
                self._etag = info.etag
            return self._etag

    def _take(self, run: Sequence[int]) -> None:
        """Fetch neighbouring tensors in one request; those that arrive right are noted."""
        numbers = iter(run)
        number = next(numbers)
        record, moved = self._pairs[number]
        hasher, at = xxh3_128(), moved.begin
        begin, end = record.begin, self._pairs[run[-1]][0].end
        pieces = self._context.client.pieces(self._key, begin, end, self._pin())
        for piece in _with_end(pieces):
            view = memoryview(piece)
            while True:
                some = view[: moved.end - at]
                hasher.update(some)
                write_at(self._fd, some, at, self._partial)
                at, view = at + len(some), view[len(some) :]
                if at < moved.end:
                    break
                self._accept(number, hasher.hexdigest())
                number = next(numbers, -1)
                if number < 0:
                    return
                record, moved = self._pairs[number]
                hasher, at = xxh3_128(), moved.begin

    def _accept(self, number: int, found: str) -> None:
        failpoints.hit("pull.tensor-written", str(self._partial))
        if found != self._pairs[number][0].xxh3_128:
            self._context.tally.add(refetched_chunks=1)
            return
        self._map.set(number)
        self._done(number)

    def _done(self, number: int, *, resumed: bool = False) -> None:
        record = self._pairs[number][0]
        with self._lock:
            self._missing.discard(number)
        size = record.end - record.begin
        if resumed:
            self._context.tally.add(resumed_bytes=size)
        self._context.report(Advanced(num_bytes=size))

    @property
    def _url(self) -> str:
        return self._context.client.store.url(self._key)

    def _wrong(self, number: int) -> StoreError:
        record = self._pairs[number][0]
        return StoreError(
            StoreFault.CORRUPT,
            f"{self._url}: tensor {record.name!r} (bytes {record.begin} to {record.end}) arrived "
            f"wrong {_TRIES} times: XXH3-128 is not {record.xxh3_128}",
            hint="the object is damaged at the store: `mxconvert verify URL` tells which; push "
            "the artifact again",
        )

    # ---------------------------------------------------------------------------- the end

    def _finish(self) -> Iterable[Task]:
        try:
            failpoints.hit("pull.before-sync", str(self._partial))
            os.fsync(self._fd)
            self.entry = self._digest(self._fd)
            stamp = stamp_of(os.fstat(self._fd), sha256=True)
            failpoints.hit("pull.before-rename", str(self._partial))
            self._partial.rename(self._path)
            failpoints.hit("pull.renamed", str(self._path))
            sync_folder(self._path.parent)
        except OSError as error:
            raise local_error(error, self._path) from error
        self._map.finish(stamp)
        self.close()
        self._context.tally.add(files=1)
        return self._finished()

    def _adopt(self) -> bool:
        """Take a finished file of an earlier run, if it holds what it should."""
        fd = open_plain(self._context.target, self._part.path)
        try:
            if os.pread(fd, len(self._part.header), 0) != self._part.header:
                return False
            for record, moved in self._pairs:
                hasher = xxh3_128()
                for piece in _pieces(fd, moved.begin, moved.end, self._path):
                    hasher.update(piece)
                    self._context.client.check()
                if hasher.hexdigest() != record.xxh3_128:
                    return False
            self.entry = self._digest(fd)
        finally:
            os.close(fd)
        size = self._part.num_bytes
        self._context.tally.add(resumed_bytes=size)
        self._context.report(Advanced(num_bytes=size))
        return True

    def _digest(self, fd: int) -> FileEntry:
        """Read a finished file for the digests of its entry."""
        chunks, sha256 = ChunkHasher(self._context.chunk_size), hashlib.sha256()
        for piece in _pieces(fd, 0, self._part.size, self._path):
            chunks.update(piece)
            sha256.update(piece)
        source = self._part.source
        return FileEntry.from_digest(
            self._part.path,
            source.role,
            chunks.finish(sha256.hexdigest()),
            experts=source.experts,
            layers=source.layers,
        )

    def _finished(self) -> Iterable[Task]:
        self._context.report(FileFinished(path=self._part.path, size_bytes=self._part.size))
        return ()


def _with_end(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield pieces, and nothing once more: tensors of no bytes may come last."""
    yield from pieces
    yield b""


def _neighbours(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield runs of numbers that follow one another."""
    run: list[int] = []
    for number in numbers:
        if run and number != run[-1] + 1:
            yield run
            run = []
        run.append(number)
    if run:
        yield run


def _pieces(fd: int, begin: int, end: int, path: object) -> Iterator[bytes]:
    while begin < end:
        piece = os.pread(fd, min(_PIECE, end - begin), begin)
        if not piece:
            raise OSError(5, f"ends early, at {begin} of {end}", str(path))
        begin += len(piece)
        yield piece
