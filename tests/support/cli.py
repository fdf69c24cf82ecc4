"""Run the command line in a process of its own, as users do."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_TIMEOUT_S = 120.0
_POLL_S = 0.01
_WIDE = "400"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a finished command left.

    ``max_rss`` and ``max_anon`` are bytes of the process itself, sampled every 10 ms: all
    resident memory, and the anonymous part (without pages of mapped files).
    """

    status: int
    stdout: str
    stderr: str
    seconds: float
    max_rss: int
    max_anon: int

    def json(self) -> Any:
        """Parse stdout as one JSON document."""
        return json.loads(self.stdout)

    def ok(self) -> Result:
        """Return itself; fail with the command's own words unless the status is 0."""
        assert self.status == 0, f"status {self.status}\n{self.stdout}\n{self.stderr}"
        return self


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment that commands run in: ours, plain, with this checkout first."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MXCONVERT_")}
    paths = [str(ROOT), str(ROOT / "kernels"), kept.get("PYTHONPATH", "")]
    plain = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": _WIDE, "PYTHONUNBUFFERED": "1"}
    return kept | plain | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | dict(extra or {})


def _memory(pid: int) -> tuple[int, int]:
    """Return peak resident and current anonymous bytes of a process (0 when it is gone)."""
    wanted = {"VmHWM": 0, "RssAnon": 0}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            key, _, value = line.partition(":")
            if key in wanted:
                wanted[key] = int(value.split()[0]) * 1024
    return wanted["VmHWM"], wanted["RssAnon"]


class Running:
    """A command under way. Use as a context manager; leaving it ends the process."""

    def __init__(
        self,
        args: tuple[str, ...],
        env: Mapping[str, str] | None,
        cwd: Path | None,
        prefix: tuple[str, ...] = (),
    ) -> None:
        self._out: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed on exit)
        self._err: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed on exit)
        self._begin = time.monotonic()
        self._peak = (0, 0)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "mxconvert", *args],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            env=environment(env),
            cwd=cwd,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._out.close()
        self._err.close()

    def _text(self, stream: IO[bytes]) -> str:
        stream.seek(0)
        return stream.read().decode("utf-8", "replace")

    def stderr_so_far(self) -> str:
        """Return what was written to stderr until now."""
        return os.pread(self._err.fileno(), 1 << 24, 0).decode("utf-8", "replace")

    def wait(self, timeout: float = DEFAULT_TIMEOUT_S) -> Result:
        """Wait for the end and return what was left; a timeout fails the test."""
        while self.process.poll() is None:
            rss, anon = _memory(self.process.pid)
            self._peak = max(self._peak[0], rss), max(self._peak[1], anon)
            if time.monotonic() - self._begin > timeout:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"no end after {timeout} s\n{self._text(self._err)}")
            time.sleep(_POLL_S)
        return Result(
            status=self.process.returncode,
            stdout=self._text(self._out),
            stderr=self._text(self._err),
            seconds=time.monotonic() - self._begin,
            max_rss=self._peak[0],
            max_anon=self._peak[1],
        )


def start_cli(
    *args: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    prefix: tuple[str, ...] = (),
) -> Running:
    """Start ``PREFIX python -m mxconvert ARGS`` and return at once (to signal or kill it)."""
    return Running(tuple(map(str, args)), env, cwd, prefix)


def run_cli(
    *args: object,
    env: Mapping[str, str] | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    cwd: Path | None = None,
    prefix: tuple[str, ...] = (),
) -> Result:
    """Run ``PREFIX python -m mxconvert ARGS`` to its end.

    A process that died of a signal has the negative signal number as status.
    """
    with start_cli(*args, env=env, cwd=cwd, prefix=prefix) as running:
        return running.wait(timeout)


def fail_cleanly(result: Result, status: int, *mentions: str) -> None:
    """Assert what every failing case must hold: status, words on stderr, no traceback."""
    assert result.status == status, (
        f"status {result.status}, expected {status}\n{result.stdout}\n{result.stderr}"
    )
    assert "Traceback" not in result.stderr + result.stdout, result.stderr
    for mention in mentions:
        assert mention in result.stderr, f"{mention!r} is missing in:\n{result.stderr}"


REPORT = ".mxconvert-report.jsonl.zst"


def snapshot(folder: Path | str) -> dict[str, str]:
    """Return SHA-256 by relative path of every file below a folder, links followed.

    The report of quantization errors is left out: it is no part of an artifact, and its sums
    round differently with other kernels or pieces.
    """
    root = Path(folder)
    paths = (path for path in sorted(root.rglob("*")) if path.name != REPORT)
    files = (path for path in paths if path.is_file())
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
