"""Reporters: a bar on a terminal, a line now and then elsewhere, JSON lines, or silence."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, Self

from mxconvert.cli.runtime import duration, size
from mxconvert.events import Advanced, Event, FileFinished, Notice, Started

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

SCHEMA_VERSION = 1
NO_PROGRESS_VARIABLE = "MXCONVERT_NO_PROGRESS"
_LINE_EVERY_SECONDS = 30.0
_JSON_EVERY_SECONDS = 1.0


class Display(Protocol):
    """A reporter that is open for the length of a command."""

    def __call__(self, event: Event) -> None:
        """Take one event."""

    def __enter__(self) -> Self:
        """Start."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End."""


def open_display(*, json_lines: bool, quiet: bool) -> Display:
    """Return the reporter that fits the options and the streams."""
    if json_lines:
        return JsonLines()
    if quiet:
        return Plain(every_s=None)
    if sys.stderr.isatty() and not os.environ.get(NO_PROGRESS_VARIABLE):
        return Bar()
    return Plain(every_s=_LINE_EVERY_SECONDS)


class _Base:
    """Counts bytes; subclasses show them. Events may come from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started_at = time.monotonic()
        self._what = ""
        self._total = self._done = self._resumed = 0
        self._files = self._files_done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._count(event)
            self._show(event)

    def _count(self, event: Event) -> None:
        if isinstance(event, Started):
            self._started_at = time.monotonic()
            self._what = event.what
            self._total, self._done = event.total_bytes, event.resumed_bytes
            self._resumed = event.resumed_bytes
            self._files, self._files_done = event.total_files, event.resumed_files
        elif isinstance(event, Advanced):
            self._done += event.num_bytes
        elif isinstance(event, FileFinished):
            self._files_done += 1

    def _show(self, event: Event) -> None:
        raise NotImplementedError

    @property
    def _rate(self) -> float:
        elapsed = time.monotonic() - self._started_at
        return (self._done - self._resumed) / elapsed if elapsed > 0 else 0.0

    @property
    def _eta_s(self) -> float | None:
        rate = self._rate
        return (self._total - self._done) / rate if rate > 0 else None


def _notice_text(event: Notice) -> str:
    return f"{'warning' if event.severity == 'warning' else 'note'}: {event.message}"


class Plain(_Base):
    """Notices as they come and a line of progress every so often, on stderr."""

    def __init__(self, every_s: float | None) -> None:
        super().__init__()
        self._every_s = every_s
        self._next_line = time.monotonic() + (every_s or 0)

    def _show(self, event: Event) -> None:
        if isinstance(event, Notice):
            if self._every_s is not None or event.severity == "warning":
                print(_notice_text(event), file=sys.stderr, flush=True)
            return
        if self._every_s is None or time.monotonic() < self._next_line:
            return
        self._next_line = time.monotonic() + self._every_s
        eta = self._eta_s
        print(
            f"{self._what}: {size(self._done)} of {size(self._total)}, "
            f"{self._files_done} of {self._files} files, {size(self._rate)}/s, "
            f"{'ETA ' + duration(eta) if eta is not None else 'starting'}",
            file=sys.stderr,
            flush=True,
        )


class JsonLines(_Base):
    """One JSON object per event on stdout; progress at most once a second."""

    def __init__(self) -> None:
        super().__init__()
        self._next_line = 0.0

    def _show(self, event: Event) -> None:
        if isinstance(event, Advanced):
            if time.monotonic() < self._next_line:
                return
            self._next_line = time.monotonic() + _JSON_EVERY_SECONDS
            eta = self._eta_s
            emit(
                "progress",
                bytes_done=self._done,
                bytes_total=self._total,
                files_done=self._files_done,
                files_total=self._files,
                bytes_per_second=round(self._rate),
                eta_seconds=None if eta is None else round(eta, 1),
            )
            return
        kinds = {Started: "started", FileFinished: "file", Notice: "notice"}
        emit(kinds[type(event)], **asdict(event))


def emit(kind: str, **fields: Any) -> None:
    """Write one JSON line to stdout."""
    line = json.dumps({"type": kind, "schema_version": SCHEMA_VERSION, **fields})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Bar(_Base):
    """A progress bar in bytes on stderr; notices scroll above it."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._progress: RichProgress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TextColumn("{task.fields[files]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def _show(self, event: Event) -> None:
        if isinstance(event, Notice):
            self._progress.console.print(_notice_text(event), markup=False, highlight=False)
        elif isinstance(event, Started):
            self._task = self._progress.add_task(
                self._what, total=self._total, completed=self._done, files=self._files_text()
            )
        elif self._task is not None:
            self._progress.update(self._task, completed=self._done, files=self._files_text())

    def _files_text(self) -> str:
        return f"{self._files_done}/{self._files} files"
