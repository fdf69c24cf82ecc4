"""Run a command as a process of its own and say what it and its children took."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_SAMPLE_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a finished process took.

    Attributes:
        status: Exit status; negative: the signal that ended it.
        wall_s: From start to end, start-up included.
        cpu_s: User and system time of it and of all descendants that were waited for.
        user_s: The user time of that; system time swings with what pages cost.
        peak_bytes: Largest resident memory that any single process among them ever had, as
            the kernel keeps it (VmHWM), looked up every 20 ms: what a process gains in its
            last moment is missed. Not ``ru_maxrss``, which counts the parent's memory too.
        tree_peak_bytes: Largest sum over all of them at one time, of the same samples: pages
            that several share count several times. Never below ``peak_bytes``.
    """

    status: int
    wall_s: float
    cpu_s: float
    user_s: float
    peak_bytes: int
    tree_peak_bytes: int


def run_process(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    log: IO[bytes] | None = None,
) -> Usage:
    """Run to the end.

    Args:
        command: Program and arguments.
        env: The whole environment; default: this process's.
        cwd: Working folder.
        log: Takes stdout and stderr; default: stdout is dropped, stderr passes through.
    """
    begin = time.perf_counter()
    child = subprocess.Popen(  # noqa: S603  (the caller's own command)
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=log or subprocess.DEVNULL,
        stderr=log,
        env=env,
        cwd=cwd,
        start_new_session=True,
    )
    with _Watch(child.pid) as watch:
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
    wall = time.perf_counter() - begin
    child.returncode = os.waitstatus_to_exitcode(status)
    return Usage(
        status=child.returncode,
        wall_s=wall,
        cpu_s=usage.ru_utime + usage.ru_stime,
        user_s=usage.ru_utime,
        peak_bytes=watch.peak,
        tree_peak_bytes=max(watch.peak, watch.tree_peak),
    )


class _Watch:
    """Samples the resident memory of a process and its descendants from a thread."""

    def __init__(self, pid: int) -> None:
        self.peak = self.tree_peak = 0
        self._pid = pid
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(_SAMPLE_S):
            found = [_memory(pid) for pid in descendants(self._pid)]
            self.peak = max(self.peak, *(most for most, _ in found))
            self.tree_peak = max(self.tree_peak, sum(now for _, now in found))


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all that it started, as far as they still run."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text(encoding="ascii").split():
                yield from descendants(int(child))


def _memory(pid: int) -> tuple[int, int]:
    """Return the most and the current resident bytes of a process; 0 when it is gone."""
    found = {"VmHWM": 0, "VmRSS": 0}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key in found:
                found[key] = int(value.split()[0]) * 1024
    return found["VmHWM"], found["VmRSS"]
