"""What `push` and `pull` share on the command line: the metrics file and the summary."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mxconvert.cli import runtime
from mxconvert.cli.progress import open_display
from mxconvert.cli.store_options import open_client
from mxconvert.errors import LocalError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxconvert.events import Reporter
    from mxconvert.store import Client, StoreURL

MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics-file",
        metavar="FILE",
        help="Keep counters in this file, in Prometheus' text format.",
    ),
]
_GIGABYTE = 1e9
_TELLING = 10**7
"""Bytes below which the start of the program takes more CPU time than the transfer."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A command that moves bytes, under way."""

    url: StoreURL
    client: Client
    report: Reporter
    started: float
    cpu_started: float

    def figures(self, num_bytes: int) -> dict[str, Any]:
        """Return time, rate and counters, for the summary.

        Args:
            num_bytes: Payload that crossed the wire.
        """
        seconds = time.monotonic() - self.started
        cpu = time.process_time() - self.cpu_started
        counters = self.client.counters
        return {
            "seconds": round(seconds, 3),
            "bytes_per_second": round(num_bytes / seconds) if seconds else 0,
            "cpu_seconds": round(cpu, 3),
            "cpu_seconds_per_gb": round(cpu / num_bytes * _GIGABYTE, 3) if num_bytes else None,
            "requests": counters.requests,
            "retries": counters.retries,
            "throttled": counters.throttled,
            "waited_seconds": round(counters.waited_seconds, 3),
        }


@contextlib.contextmanager
def transfer(
    command: str, url: str, *, metrics_file: str | None, json: bool, quiet: bool, **store: Any
) -> Iterator[Transfer]:
    """Open the display, the store and the metrics file of a command."""
    from pathlib import Path

    from mxconvert.transfer.metrics import MetricsFile

    started, cpu_started, stop = time.monotonic(), time.process_time(), runtime.state.stop
    with (
        open_display(json_lines=json, quiet=quiet) as display,
        open_client(url, reporter=display, stop=stop, **store) as (place, client),
    ):
        if metrics_file is None:
            yield Transfer(place, client, display, started, cpu_started)
            return
        metrics = MetricsFile(Path(metrics_file), command, client.counters, display)
        try:
            yield Transfer(place, client, metrics, started, cpu_started)
        except BaseException:
            with contextlib.suppress(LocalError):  # the first error is the one to tell
                metrics.finish(success=False)
            raise
        metrics.finish(success=True)


def time_line(figures: dict[str, Any], num_bytes: int) -> tuple[str, str]:
    """Return the line of a summary for people that says how fast it went."""
    text = f"{runtime.duration(figures['seconds'])} for {runtime.size(num_bytes)}"
    if num_bytes:
        text += f", {runtime.size(figures['bytes_per_second'])}/s"
    if num_bytes >= _TELLING:
        text += f", {figures['cpu_seconds_per_gb']:.2f} CPU s/GB"
    return "time", f"{text}, {figures['retries']} retries"
