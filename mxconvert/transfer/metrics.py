"""Counters of a transfer in Prometheus' text format, for node_exporter's textfile collector."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING

from mxconvert.errors import LocalError
from mxconvert.events import Advanced, FileFinished, Started

if TYPE_CHECKING:
    from pathlib import Path

    from mxconvert.events import Event, Reporter
    from mxconvert.store import Counters

_EVERY_SECONDS = 5.0
_HELP = {
    "done_bytes": ("gauge", "Bytes that are done, those of earlier runs included."),
    "total_bytes": ("gauge", "Bytes in all."),
    "done_files": ("gauge", "Files that are done."),
    "total_files": ("gauge", "Files in all."),
    "received_bytes_total": ("counter", "Payload received from the store."),
    "sent_bytes_total": ("counter", "Payload sent to the store."),
    "requests_total": ("counter", "Requests made, repeated ones included."),
    "retries_total": ("counter", "Requests repeated."),
    "throttled_total": ("counter", "Requests that the store throttled or let wait."),
    "cpu_seconds_total": ("counter", "CPU time of the process."),
    "seconds": ("gauge", "Wall time since the start."),
    "success": ("gauge", "1 after a complete transfer, else 0."),
}


class MetricsFile:
    """A reporter that writes a file every few seconds and at the end, each time whole.

    The time comes from a thread: a transfer that stalls has no events, and shows as one.

    Raises:
        LocalError: The file cannot be written: when made, and later on too.
    """

    def __init__(self, path: Path, command: str, counters: Counters, following: Reporter) -> None:
        self._path = path
        self._labels = f'{{command="{command}"}}'
        self._counters = counters
        self._following = following
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._values = dict.fromkeys(_HELP, 0.0)
        self._ended = threading.Event()
        self._write()
        threading.Thread(target=self._keep_writing, name="metrics", daemon=True).start()

    def _keep_writing(self) -> None:
        while not self._ended.wait(_EVERY_SECONDS):
            with self._lock, contextlib.suppress(LocalError):
                if not self._ended.is_set():
                    self._write()

    def __call__(self, event: Event) -> None:
        """Take one event and pass it on."""
        self._following(event)
        with self._lock:
            self._count(event)

    def _count(self, event: Event) -> None:
        values = self._values
        if isinstance(event, Started):
            values["total_bytes"] = event.total_bytes
            values["total_files"] = event.total_files
            values["done_bytes"] = event.resumed_bytes
            values["done_files"] = event.resumed_files
        elif isinstance(event, Advanced):
            values["done_bytes"] += event.num_bytes
        elif isinstance(event, FileFinished):
            values["done_files"] += 1

    def finish(self, *, success: bool) -> None:
        """Write the last figures.

        Raises:
            LocalError: The file cannot be written, and all else went well.
        """
        self._ended.set()
        with self._lock:
            self._values["success"] = float(success)
            with contextlib.nullcontext() if success else contextlib.suppress(LocalError):
                self._write()

    def _write(self) -> None:
        counters, values = self._counters, self._values
        values["received_bytes_total"] = counters.bytes_in
        values["sent_bytes_total"] = counters.bytes_out
        values["requests_total"] = counters.requests
        values["retries_total"] = counters.retries
        values["throttled_total"] = counters.throttled
        values["cpu_seconds_total"] = time.process_time()
        values["seconds"] = time.monotonic() - self._began
        lines = []
        for name, (kind, text) in _HELP.items():
            full = f"mxconvert_transfer_{name}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
            lines.append(f"{full}{self._labels} {values[name]:.15g}")
        partial = self._path.with_name(self._path.name + ".partial")
        try:
            partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
            os.replace(partial, self._path)  # noqa: PTH105  (says that it replaces)
        except OSError as error:
            raise LocalError(
                f"--metrics-file {self._path}: {error.strerror}",
                hint="choose a file that can be written, in a folder that exists",
            ) from error
