"""One file on its way from the store."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from typing import TYPE_CHECKING

from mxconvert import failpoints
from mxconvert.digest import xxh3_128
from mxconvert.errors import StoreError, StoreFault
from mxconvert.events import Advanced, FileFinished
from mxconvert.store import RangeIgnored
from mxconvert.transfer.pull.check import compare_sha256, is_chunk_right
from mxconvert.transfer.pull.folder import (
    open_partial,
    open_plain,
    partial_path,
    plain_size,
    plain_stat,
)
from mxconvert.transfer.pull.journal import stamp_of
from mxconvert.transfer.pull.output import ALIGNMENT, CachedOutput, DirectOutput, open_direct
from mxconvert.writer.atomic import local_error, sync_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mxconvert.manifest import FileEntry
    from mxconvert.transfer.crew import Task
    from mxconvert.transfer.pull.context import PullContext
    from mxconvert.transfer.pull.output import Output

    Fetch = Callable[[dict[int, str], str | None], None]

SPAN_CHUNKS = 4
"""Chunks that one request fetches: 64 MiB."""

_TRIES = 4
_TAMPERED = "every chunk has its XXH3-128: the artifact was tampered with, do not use it"


def is_finished(context: PullContext, entry: FileEntry) -> bool:
    """Whether a file has its name, and is the one that was checked before it got it."""
    info = plain_stat(context.target, entry.path)
    if info is None or info.st_size != entry.size:
        return False
    _, stamp = context.journal.chunk_map(entry).load()
    return stamp in {stamp_of(info, sha256=sha256) for sha256 in (context.sha256, True)}


class FilePull:
    """Fetches one file; its methods are tasks, see `Crew`."""

    def __init__(self, context: PullContext, entry: FileEntry) -> None:
        self._context = context
        self._entry = entry
        self._key = context.artifact.key(entry.path)
        self._path = context.target / entry.path
        self._partial = context.target / partial_path(entry.path)
        self._map = context.journal.chunk_map(entry)
        self._lock = threading.Lock()
        self._fd = -1
        self._direct: int | None = None
        self._etag: str | None = None
        self._pins = 0
        self._at_work = 0
        self._is_streaming = False
        self._is_claimed = False
        self._noted: set[int] = set()
        self._missing = set(range(len(entry.chunks)))

    def begin(self) -> Iterable[Task]:
        """Find out what is there and return the tasks that see to the rest."""
        if self._is_finished():
            self._advance(self._entry.size, resumed=True)
            return self._finished()
        if plain_size(self._context.target, partial_path(self._entry.path)) == self._entry.size:
            self._noted, _ = self._map.load()
        if len(self._noted) < len(self._entry.chunks):
            self._pin()
        self._fd = open_partial(self._context.target, self._entry.path, self._entry.size)
        self._map.open(self._noted)
        if self._context.direct:
            self._open_direct()
        if not self._missing:
            return (self._finish,)
        if self._context.client.ignores_ranges:
            return (self._stream,)
        count = len(self._entry.chunks)
        begins = range(0, count, SPAN_CHUNKS)
        spans = [range(begin, min(begin + SPAN_CHUNKS, count)) for begin in begins]
        return [functools.partial(self._see_to, span) for span in spans]

    def close(self) -> None:
        """Close what is open; only once no task runs any more."""
        self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None

    def _open_direct(self) -> None:
        if self._context.chunk_size % ALIGNMENT == 0:
            self._direct = open_direct(self._context.target, self._entry.path)
        if self._direct is None:
            self._context.tell_not_direct()

    def _output(self) -> Output:
        if self._direct is None:
            return CachedOutput(self._fd, self._partial)
        told = self._context.tell_not_direct
        return DirectOutput(self._direct, self._fd, self._partial, told)

    def _is_finished(self) -> bool:
        """Whether the file has its name already; one that is not known is read."""
        if is_finished(self._context, self._entry):
            return True
        if plain_size(self._context.target, self._entry.path) != self._entry.size:
            return False
        self._fd = open_plain(self._context.target, self._entry.path)
        is_right = all(map(self._is_right_on_disk, range(len(self._entry.chunks))))
        if is_right:
            self._compare_sha256()
            self._map.open(set(range(len(self._entry.chunks))))
            self._map.finish(stamp_of(os.fstat(self._fd), sha256=self._context.sha256))
        self.close()
        return is_right

    def _is_right_on_disk(self, index: int) -> bool:
        self._context.client.check()
        try:
            return is_chunk_right(self._fd, self._entry, index, self._context.chunk_size)
        except OSError as error:
            raise local_error(error, self._path) from error

    def _range(self, index: int) -> tuple[int, int]:
        return self._entry.chunk_range(index, self._context.chunk_size)

    @property
    def _url(self) -> str:
        return self._context.client.store.url(self._key)

    # ---------------------------------------------------------------------------- fetching

    def _see_to(self, span: range) -> Iterable[Task]:
        """Keep the chunks of a span that are there and right, fetch the others."""
        if self._context.client.ignores_ranges:
            return (self._stream,)
        with self._working():
            pending = [index for index in span if not self._keeps(index)]
            try:
                self._fetch(pending, self._in_runs)
            except RangeIgnored:
                return (self._stream,)
        return self._after_work()

    def _stream(self) -> Iterable[Task]:
        """Fetch what is missing in one request: the store sends the whole file each time."""
        with self._lock:
            mine, self._is_streaming = not self._is_streaming, True
            left = sorted(self._missing)
        if not mine:
            return self._after_work()
        with self._working():
            self._fetch([index for index in left if not self._keeps(index)], self._at_once)
        return self._after_work()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Count who may still write to the file."""
        with self._lock:
            self._at_work += 1
        try:
            yield
        finally:
            with self._lock:
                self._at_work -= 1

    def _after_work(self) -> Iterable[Task]:
        return (self._finish,) if self._claim() else ()

    def _keeps(self, index: int) -> bool:
        if index not in self._noted or not self._is_right_on_disk(index):
            return False
        self._done(index, resumed=True)
        return True

    def _claim(self) -> bool:
        """Whether all is done, nobody is at work, and this thread is the first to see it."""
        with self._lock:
            mine = not (self._missing or self._at_work or self._is_claimed)
            self._is_claimed = self._is_claimed or mine
        return mine

    def _pin(self) -> str | None:
        """Note, unless that is done, which content of the object is fetched.

        Raises:
            StoreError: It is not there, or has another size.
        """
        with self._lock:
            if not self._pins:
                self._pin_anew()
            return self._etag

    def _pin_anew(self) -> None:
        info = self._context.client.head(self._key)
        if info.size != self._entry.size:
            what = "was replaced during the pull: it has" if self._pins else "has"
            raise StoreError(
                StoreFault.CHANGED if self._pins else StoreFault.CORRUPT,
                f"{self._url}: the object {what} {info.size} bytes, expected {self._entry.size}",
                hint="it was replaced or damaged at the store; push the artifact again",
            )
        self._etag = info.etag
        self._pins += 1

    def _repin(self, etag: str | None, error: StoreError) -> str | None:
        """Go on with the object's new content, once: its chunks may still be right."""
        with self._lock:
            if self._etag != etag:
                return self._etag
            if self._pins > 1:
                raise StoreError(
                    StoreFault.CHANGED,
                    f"{self._url}: the object keeps being replaced during the pull "
                    f"({error.message})",
                    hint="let nothing write to the artifact, then run the same command again",
                )
            self._pin_anew()
            return self._etag

    def _fetch(self, chunks: Iterable[int], fetch: Fetch) -> None:
        """Fetch chunks until each is right.

        What counts is what this thread has written: another one may write the same chunk.
        """
        left = dict.fromkeys(chunks, "")
        etag, tries = self._pin() if left else None, 0
        while left:
            try:
                fetch(left, etag)
            except StoreError as error:
                if error.fault is not StoreFault.CHANGED:
                    raise
                etag = self._repin(etag, error)
                continue
            tries += 1
            if left and tries >= _TRIES:
                raise self._wrong(*next(iter(left.items())))

    def _in_runs(self, left: dict[int, str], etag: str | None) -> None:
        """Fetch chunks, neighbours in one request.

        Args:
            left: The chunks. Those that arrive right are removed; of the others the value
                becomes the digest that they had.
            etag: Of the object.

        Raises:
            RangeIgnored: The store sends the whole file instead.
        """
        for run in _runs(sorted(left)):
            begin, end = self._range(run[0])[0], self._range(run[-1])[1]
            pieces = self._context.client.pieces(self._key, begin, end, etag, in_ranges=True)
            self._take(pieces, run, left)

    def _at_once(self, left: dict[int, str], etag: str | None) -> None:
        """Fetch chunks, and what lies between them, in one request; as `_in_runs`."""
        run = range(min(left), max(left) + 1)
        begin, end = self._range(run[0])[0], self._range(run[-1])[1]
        self._take(self._context.client.pieces(self._key, begin, end, etag), run, left)

    def _take(self, pieces: Iterable[bytes | memoryview], run: range, left: dict[int, str]) -> None:
        """Write those bytes of a run of chunks that are wanted while checking them."""
        index, (position, end) = run[0], self._range(run[0])
        hasher, output = xxh3_128(), self._output()
        for piece in pieces:
            view = memoryview(piece)
            while view:
                part = view[: end - position]
                if index in left:
                    hasher.update(part)
                    output.write(part, position)
                position, view = position + len(part), view[len(part) :]
                if position < end:
                    continue
                if index in left:
                    output.flush()
                    left[index] = hasher.hexdigest()
                    if self._accept(index, left[index], output):
                        del left[index]
                if index == run[-1]:
                    break
                index, hasher = index + 1, xxh3_128()
                position, end = self._range(index)

    def _accept(self, index: int, found: str, output: Output) -> bool:
        """Note a chunk as done if its digest is right."""
        failpoints.hit("pull.chunk-written", str(self._partial))
        if found != self._entry.chunks[index].xxh3_128:
            self._context.tally.add(refetched_chunks=1)
            return False
        self._map.set(index)
        failpoints.hit("pull.chunk-noted", str(self._partial))
        begin, end = self._range(index)
        output.start_writeback(begin, end - begin)
        self._done(index)
        return True

    def _done(self, index: int, *, resumed: bool = False) -> None:
        begin, end = self._range(index)
        with self._lock:
            is_first = index in self._missing
            self._missing.discard(index)
        if is_first:
            self._advance(end - begin, resumed=resumed)

    def _wrong(self, index: int, found: str) -> StoreError:
        begin, end = self._range(index)
        replaced = "the object was replaced during the pull: " if self._pins > 1 else ""
        return StoreError(
            StoreFault.CORRUPT,
            f"{self._url}: {replaced}chunk {index} (bytes {begin} to {end}) arrived wrong {_TRIES} "
            f"times: XXH3-128: expected {self._entry.chunks[index].xxh3_128}, found {found}",
            hint="the object is damaged at the store: `mxconvert verify URL` tells which; push "
            "the artifact again",
        )

    # ---------------------------------------------------------------------------- the end

    def _finish(self) -> Iterable[Task]:
        partial = self._partial
        try:
            failpoints.hit("pull.before-sync", str(partial))
            os.fsync(self._fd)
            self._compare_sha256()
            stamp = stamp_of(os.fstat(self._fd), sha256=self._context.sha256)
            failpoints.hit("pull.before-rename", str(partial))
            partial.rename(self._path)
            failpoints.hit("pull.renamed", str(self._path))
            sync_folder(self._path.parent)
        except OSError as error:
            raise local_error(error, self._path) from error
        self._map.finish(stamp)
        self.close()
        self._context.tally.add(files=1)
        return self._finished()

    def _compare_sha256(self) -> None:
        if not self._context.sha256:
            return
        where = f"{self._url} as {self._path}"
        try:
            compare_sha256(self._fd, self._entry, where, self._context.client.check, _TAMPERED)
        except OSError as error:
            raise local_error(error, self._path) from error

    def _advance(self, num_bytes: int, *, resumed: bool = False) -> None:
        if resumed:
            self._context.tally.add(resumed_bytes=num_bytes)
        if num_bytes:
            self._context.report(Advanced(num_bytes=num_bytes))

    def _finished(self) -> Iterable[Task]:
        self._context.report(FileFinished(path=self._entry.path, size_bytes=self._entry.size))
        return ()


def _runs(chunks: Sequence[int]) -> Iterator[range]:
    """Yield ranges of consecutive numbers."""
    begin = 0
    for position in range(1, len(chunks) + 1):
        if position == len(chunks) or chunks[position] != chunks[position - 1] + 1:
            yield range(chunks[begin], chunks[position - 1] + 1)
            begin = position
