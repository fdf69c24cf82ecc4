"""Runs on their way from the store into memory: in parallel, bounded, every tensor checked."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.digest import xxh3_128_hex
from mxconvert.errors import StoreError, StoreFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mxconvert.manifest import TensorRecord
    from mxconvert.reading.runs import Run
    from mxconvert.store import Client

    Allocate = Callable[[int], memoryview]

_TRIES = 4


@dataclass(frozen=True, slots=True)
class Filled:
    """A run whose tensors are all right.

    Attributes:
        run: The run.
        data: Its bytes, from the first one on.
    """

    run: Run
    data: memoryview


class Fetcher:
    """Fetches runs with some threads; at most ``max_bytes`` are fetched and not handed over.

    Args:
        client: At the URL.
        key: Returns the key of a file.
        allocate: Returns memory for a run.
        max_bytes: Of runs under way or waiting; a larger run goes alone.
        in_order: Whether runs are handed over in their order, or as they arrive.
    """

    def __init__(
        self,
        client: Client,
        key: Callable[[str], str],
        allocate: Allocate,
        *,
        max_bytes: int,
        in_order: bool,
    ) -> None:
        self._client = client
        self._key = key
        self._allocate = allocate
        self._max_bytes = max_bytes
        self._in_order = in_order
        self._changed = threading.Condition()
        self._pending: deque[Run] = deque()
        self._done: dict[int, Filled] = {}
        self._held = 0
        self._error: BaseException | None = None
        self._closed = False

    def __call__(self, runs: Sequence[Run]) -> Iterator[Filled]:
        """Yield the runs; each may be used until the next one is asked for.

        Raises:
            StoreError: The store, after retries; a tensor that arrives wrong each time.
        """
        self._pending.extend(runs)
        count = min(self._client.options.jobs, len(runs))
        threads = [
            threading.Thread(target=self._work, name=f"mxconvert-read-{n}", daemon=True)
            for n in range(count)
        ]
        for thread in threads:
            thread.start()
        try:
            for number in range(len(runs)):
                filled = self._next(number)
                yield filled
                self._release(filled.run.size)
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            for thread in threads:
                thread.join()

    def _next(self, number: int) -> Filled:
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                if self._done and (not self._in_order or number in self._done):
                    return self._done.pop(number if self._in_order else next(iter(self._done)))
                self._changed.wait()

    def _release(self, size: int) -> None:
        with self._changed:
            self._held -= size
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            while (run := self._take()) is not None:
                filled = Filled(run, self._fetch(run))
                with self._changed:
                    self._done[run.number] = filled
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  (raised again by `_next`)
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _take(self) -> Run | None:
        """Return the next run once there is room for it: in their order, so that none starves."""
        with self._changed:
            while True:
                if self._closed or self._error is not None or not self._pending:
                    return None
                size = self._pending[0].size
                if not self._held or self._held + size <= self._max_bytes:
                    self._held += size
                    return self._pending.popleft()
                self._changed.wait()

    # ---------------------------------------------------------------------------- one run

    def _fetch(self, run: Run) -> memoryview:
        data = self._allocate(run.size)
        wrong = self._read(run, data, run.begin, run.end)
        for _ in range(_TRIES - 1):
            if not wrong:
                return data
            wrong = [r for w in wrong for r in self._read(run, data, w.begin, w.end)]
        if wrong:
            raise self._wrong(wrong[0])
        return data

    def _read(self, run: Run, data: memoryview, begin: int, end: int) -> list[TensorRecord]:
        """Read bytes of the file; return the tensors among them that are not right."""
        at = begin - run.begin
        for piece in self._client.pieces(self._key(run.file), begin, end):
            data[at : at + len(piece)] = piece
            at += len(piece)
            if self._closed:
                raise ReadingStopped
        records = (record for unit in run.units for record in unit.records)
        return [
            record
            for record in records
            if begin <= record.begin
            and record.end <= end
            and xxh3_128_hex(data[record.begin - run.begin : record.end - run.begin])
            != record.xxh3_128
        ]

    def _wrong(self, record: TensorRecord) -> StoreError:
        return StoreError(
            StoreFault.CORRUPT,
            f"{self._client.store.url(self._key(record.file))}: tensor {record.name!r} (bytes "
            f"{record.begin} to {record.end}) arrived wrong {_TRIES} times: XXH3-128 is not "
            f"{record.xxh3_128}",
            hint="`mxconvert verify URL` tells what is damaged; push the artifact again",
        )


class ReadingStopped(Exception):  # noqa: N818  (nobody sees it)
    """The reader went away while a run was being fetched."""
