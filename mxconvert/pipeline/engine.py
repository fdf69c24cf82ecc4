"""Threads that make the planned files.

Every worker takes the next piece of a file, converts it and hands it to the file's
lanes; whichever worker completes the order commits. A piece is dispatched together
with its buffers, in file order, so the piece that a lane waits for always has them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING

from mxconvert import failpoints
from mxconvert.errors import Interrupted, LocalError, MxConvertError, SourceError
from mxconvert.events import Advanced, FileFinished
from mxconvert.pipeline.convert import Converter
from mxconvert.pipeline.devices.handover import Handover
from mxconvert.pipeline.job import FileJob, FileResult
from mxconvert.pipeline.slots import Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from mxconvert.events import Reporter
    from mxconvert.model import OutputFile
    from mxconvert.pipeline.devices import Devices
    from mxconvert.pipeline.devices.launches import Launch
    from mxconvert.pipeline.devices.ring import Outcome
    from mxconvert.pipeline.lane import Continuation
    from mxconvert.pipeline.pieces import Piece
    from mxconvert.pipeline.slots import Budget
    from mxconvert.quantize import Quantizer
    from mxconvert.source import SourceReader
    from mxconvert.stop import StopToken

    Task = Callable[[], None]

_POLL_SECONDS = 0.2  # how soon the main thread notices a signal
_GRACE_SECONDS = 4.0  # how long threads that hang may delay the end after a signal, twice
_CLOSERS = 2
MOST_CLOSING = 16
"""Files that may wait for the disk; each holds a descriptor."""


class Engine:
    """Makes files; see `make_files`."""

    def __init__(
        self,
        files: Iterable[OutputFile],
        folder: Path,
        *,
        budget: Budget,
        reader: SourceReader,
        quantizer: Quantizer,
        record: Callable[[OutputFile, FileResult], None],
        report: Reporter,
        measure: bool = False,
        devices: Devices | None = None,
    ) -> None:
        self._pending = deque(files)
        self._folder = folder
        self._budget = budget
        self._reader = reader
        self._converter = Converter(reader, quantizer)
        self._record = record
        self._report = report
        self._measure = measure
        self._changed = threading.Condition()
        self._active: list[FileJob] = []
        self._free = deque(Slot(budget.piece_size) for _ in range(budget.slots))
        self._devices = devices
        self._handover = (
            None if devices is None else Handover(devices, self._converter, measure=measure)
        )
        self._away = 0
        self._back: deque[Task] = deque()
        self._abandoned: list[Slot] = []
        self._stopping = False
        self._fatal: BaseException | None = None
        self._failed: list[tuple[OutputFile, MxConvertError]] = []
        self._unclosed: list[FileJob] = []
        self._closing: SimpleQueue[FileJob | None] = SimpleQueue()

    def run(self, stop: StopToken) -> list[tuple[OutputFile, MxConvertError]]:
        """Work until every file is made or has failed.

        Returns:
            The files that failed, with their errors.

        Raises:
            MxConvertError: An error that ends the whole run (disk, source changed).
            Interrupted: ``stop`` was set.
        """
        with stop.watched():  # before the first thread starts: none may be left behind
            self._pin_slots()
            workers = [_start(self._work, f"mxconvert-{n}") for n in range(self._budget.jobs)]
            # With one job files are also closed one by one, in their order.
            count = 1 if self._budget.jobs == 1 else max(_CLOSERS, self._budget.jobs // 2)
            closers = [_start(self._close_jobs, f"mxconvert-close-{n}") for n in range(count)]
            self._wait(workers, stop)
            if self._devices is not None:
                self._devices.close()
            with self._changed:
                self._retire_all()
            for _ in closers:
                self._closing.put(None)
            self._wait(closers, stop)
            if not any(thread.is_alive() for thread in (*workers, *closers)):
                for job in self._unclosed:
                    with contextlib.suppress(OSError):
                        job.discard()
        if stop.signum is not None:
            self._halt(Interrupted(stop.signum))
        if self._fatal is not None:
            raise self._fatal
        return self._failed

    def _pin_slots(self) -> None:
        if self._devices is not None:
            self._devices.pin(self._free)

    def _wait(self, threads: Iterable[threading.Thread], stop: StopToken) -> None:
        """Wait for threads to end; after a signal no longer than the grace period."""
        deadline = None
        for thread in threads:
            while thread.is_alive() and (deadline is None or time.monotonic() < deadline):
                thread.join(_POLL_SECONDS)
                if stop.signum is not None and deadline is None:
                    self._halt(Interrupted(stop.signum))
                    deadline = time.monotonic() + _GRACE_SECONDS

    def _halt(self, error: BaseException) -> None:
        with self._changed:
            self._stopping = True
            self._fatal = self._fatal or error
            for job in self._active:
                job.fail(LocalError("the run was stopped"))
            self._changed.notify_all()
        if self._devices is not None:
            self._devices.wake()

    # ------------------------------------------------------------------ dispatching

    def _next(self) -> Task | None:
        with self._changed:
            while True:
                if self._back and not self._stopping:
                    return self._back.popleft()
                self._open_files()
                if self._stopping or not (self._active or self._pending or self._away):
                    self._retire_all()
                    return None
                job = self._choose() if self._free else None
                if job is None:
                    self._changed.wait()
                elif (task := self._dispatch(job)) is not None:
                    return task

    def _open_files(self) -> None:
        most = self._budget.active_files
        while (
            not self._stopping
            and self._pending
            and len(self._active) < most
            and len(self._unclosed) < most + MOST_CLOSING
        ):
            job = FileJob(
                self._pending.popleft(),
                self._folder,
                self._budget.piece_size,
                measure=self._measure,
            )
            self._active.append(job)
            self._unclosed.append(job)

    def _choose(self) -> FileJob | None:
        """Return the file to go on with, ``None`` if each would hold back too much output.

        A tensor that is cut begins a piece of its own, so the rest of those that are held
        back is never what waits here.
        """
        held = sum(job.held for job in self._unclosed)
        fit = [
            job
            for job in self._active
            if not (held and job.next_held and held + job.next_held > self._budget.held)
            or job.error
        ]
        return min(fit, key=lambda job: job.outstanding, default=None)

    def _dispatch(self, job: FileJob) -> Task | None:
        piece = None if job.error else job.next_piece()
        if piece is None:
            self._active.remove(job)
            job.all_dispatched = True
            self._finish_if_done(job)
            return None
        job.outstanding += 1
        slot = self._free.popleft()
        if self._free:
            self._changed.notify()  # what follows may fit where this did not
        return lambda: self._convert(job, piece, slot)

    def _retire_all(self) -> None:
        for job in self._active:
            job.all_dispatched = True
            self._finish_if_done(job)
        self._active.clear()
        self._changed.notify_all()

    # ------------------------------------------------------------------ working

    def _work(self) -> None:
        try:
            while (task := self._next()) is not None:
                task()
        except BaseException as error:  # noqa: BLE001  (a bug must not hang the run)
            self._halt(error)

    def _convert(self, job: FileJob, piece: Piece, slot: Slot) -> None:
        def convert() -> bool:
            failpoints.hit("engine.convert")
            if self._handover is None:
                job.convert(piece, slot, self._converter)
                return True
            job.read(piece, slot, self._converter)
            return self._make(job, piece, slot)

        if self._attempt(job, convert):
            job.commit_lane.submit(piece.index, lambda: self._commit(job, piece, slot))

    def _attempt(self, job: FileJob, step: Callable[[], bool]) -> bool:
        """Take a step of a file unless it failed; return whether its piece is to be committed."""
        if job.error is None:
            try:
                return step()
            except MxConvertError as error:
                self._fail(job, error)
            except BaseException as error:  # noqa: BLE001  (see _work)
                self._crash(job, error)
        return True

    # ------------------------------------------------------------------ with GPUs

    def _make(self, job: FileJob, piece: Piece, slot: Slot) -> bool:
        """Give a piece that was read to a device, or make it; return whether it is made."""

        def back(launches: tuple[Launch, ...], outcome: Outcome) -> None:
            with self._changed:
                self._back.append(lambda: self._take(job, piece, slot, launches, outcome))
                self._changed.notify()

        with self._changed:
            self._away += 1
        given = False
        try:
            given = self._handover is not None and self._handover.offer(piece, slot, back)
        finally:
            if not given:
                self._one_less_away()
        if given:
            return False
        job.make(piece, slot, self._converter)
        return True

    def _one_less_away(self) -> None:
        with self._changed:
            self._away -= 1
            if not self._away:
                self._changed.notify_all()  # there may be nothing left to wait for

    def _take(
        self,
        job: FileJob,
        piece: Piece,
        slot: Slot,
        launches: tuple[Launch, ...],
        outcome: Outcome,
    ) -> None:
        """Go on with a piece that comes back from a device."""
        kept = slot
        if outcome.error is not None:
            kept = slot.copy()
            self._abandoned.append(slot)

        def take() -> bool:
            if outcome.error is not None:
                return self._make(job, piece, kept)
            job.take(piece, slot, launches, outcome, self._converter)
            return True

        try:
            if self._attempt(job, take):
                job.commit_lane.submit(piece.index, lambda: self._commit(job, piece, kept))
        finally:
            self._one_less_away()

    def _commit(self, job: FileJob, piece: Piece, slot: Slot) -> Continuation:
        views: list[memoryview] = []
        if job.error is None:
            try:
                views = job.commit(piece, slot, self._report)
            except MxConvertError as error:
                self._fail(job, error)
            except BaseException as error:  # noqa: BLE001  (see _work)
                self._crash(job, error)
        return lambda: job.sha_lane.submit(piece.index, lambda: self._hash(job, piece, slot, views))

    def _hash(
        self, job: FileJob, piece: Piece, slot: Slot, views: list[memoryview]
    ) -> Continuation:
        if job.error is None:
            job.hash_sha256(views)
        return lambda: self._release(job, piece, slot)

    def _release(self, job: FileJob, piece: Piece, slot: Slot) -> None:
        self._report(Advanced(num_bytes=piece.source_bytes))
        with self._changed:
            self._free.append(slot)
            job.outstanding -= 1
            before = job.held
            job.let_go(piece)
            self._finish_if_done(job)
            self._changed.notify(1 if job.held == before else self._budget.jobs)

    def _fail(self, job: FileJob, error: MxConvertError) -> None:
        job.fail(error)
        if ends_run(error):
            self._halt(error)

    def _crash(self, job: FileJob, error: BaseException) -> None:
        job.fail(LocalError("the run was stopped"))
        self._halt(error)

    # ------------------------------------------------------------------ finishing

    def _finish_if_done(self, job: FileJob) -> None:
        if job.all_dispatched and job.outstanding == 0:
            self._closing.put(job)

    def _close_jobs(self) -> None:
        while (job := self._closing.get()) is not None:
            self._close(job)

    def _close(self, job: FileJob) -> None:
        try:
            if job.error is None:
                self._publish(job)
        except MxConvertError as error:
            self._fail(job, error)
        except BaseException as error:  # noqa: BLE001  (see _work)
            self._crash(job, error)
        if job.error is not None:
            with contextlib.suppress(OSError):  # the next run removes it
                job.discard()
        with self._changed:
            self._unclosed.remove(job)
            if job.error is not None:
                self._failed.append((job.file, job.error))
            self._changed.notify_all()

    def _publish(self, job: FileJob) -> None:
        result = job.flush()
        used = {tensor.file for item in job.file.items for tensor in item.source_tensors}
        self._reader.check_unchanged(sorted(used))
        # The record comes first: a final name without a record would be unexplained.
        failpoints.hit("engine.before-record", job.file.name)
        self._record(job.file, result)
        job.publish()
        self._report(FileFinished(path=job.file.name, size_bytes=job.file.size))


def _start(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that does not keep the process alive should it hang."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def ends_run(error: MxConvertError) -> bool:
    """Whether an error concerns the whole run and not one file."""
    if isinstance(error, SourceError):
        return error.code == "source-changed"
    return not (isinstance(error, LocalError) and error.code == "read-error")
