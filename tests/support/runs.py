"""Runs that are stopped, killed or disturbed, and the clean run to compare them with."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.cli import Result, Running, run_cli, snapshot, start_cli
from tests.support.shell import shell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.models import Model

WORK_FOLDER = ".mxconvert"
MANIFEST = "mxconvert.manifest.json"
NO_OVERRIDE = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
"""Prefix that makes file modes count for root too."""


def arm(*points: str) -> dict[str, str]:
    """Return the environment that arms failpoints."""
    return {"MXCONVERT_FAILPOINTS": ",".join(points)}


def events(result: Result, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind of a ``--json`` run."""
    found = [json.loads(line) for line in result.stdout.splitlines()]
    return [event for event in found if event["type"] == kind]


def made(result: Result) -> set[str]:
    """Return the weight files that a ``--json`` run made."""
    return {event["path"] for event in events(result, "file")}


def codes(result: Result) -> set[str]:
    """Return the codes of the notices of a ``--json`` run."""
    return {event["code"] for event in events(result, "notice")}


def partials(folder: Path) -> list[str]:
    """Return every unfinished file below a folder, the journal's too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.partial"))


def final_names(folder: Path) -> set[str]:
    """Return the weight files under their final names."""
    return {path.name for path in folder.glob("*.safetensors")}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A source and what an undisturbed run makes of it.

    Attributes:
        source: The checkpoint; never change it.
        target: The artifact; never change it.
        files: SHA-256 of each of its files.
        artifact: Its id.
        weights: Names of its weight files.
        small: Files beside the weights, the journal and the records that a run writes.
        args: Options that it was made with.
    """

    source: Path
    target: Path
    files: dict[str, str]
    artifact: str
    weights: set[str]
    small: int
    args: tuple[str, ...]

    def assert_nothing_unfinished(self, target: Path) -> None:
        """Every file under a final name has its final bytes; ``verify`` passes on all only."""
        found = snapshot(target)
        for name, sha256 in found.items():
            if not name.startswith(WORK_FOLDER) and not name.endswith(".partial"):
                assert self.files[name] == sha256, f"{name} is under its final name"
        assert (shell("verify", target).status == 0) == (found == self.files)

    def rerun(self, target: Path, *options: object, source: Path | None = None) -> Result:
        """Run the same command again; it ends with the clean run's bytes and nothing else.

        Only files without a final name are made.
        """
        kept = final_names(target)
        arguments = (source or self.source, target, *self.args, "--json", *options)
        result = run_cli("quantize", *arguments).ok()
        assert made(result) == self.weights - kept
        self.assert_same(target, result)
        return result

    def assert_same(self, target: Path, result: Result) -> None:
        """A folder holds exactly the clean run's files, and a run said so."""
        assert snapshot(target) == self.files
        assert {path.name for path in target.iterdir() if path.is_dir()} == set()
        assert events(result, "summary")[0]["artifact"] == self.artifact
        shell("verify", target).ok()


def make_reference(model: Model, folder: Path, *args: str) -> Reference:
    """Write a model and quantize it, undisturbed."""
    source, target = model.write(folder / "source"), folder / "target"
    result = run_cli("quantize", source, target, "--json", *args).ok()
    files = snapshot(target)
    weights = final_names(target)
    assert made(result) == weights
    return Reference(
        source=source,
        target=target,
        files=files,
        artifact=events(result, "summary")[0]["artifact"],
        weights=weights,
        small=len(files) - len(weights),
        args=args,
    )


def wait_stopped(running: Running, timeout_s: float = 60.0) -> None:
    """Wait until a process has stopped itself (the failpoint action ``stop``)."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        assert running.process.poll() is None, running.stderr_so_far()
        stat = Path(f"/proc/{running.process.pid}/stat").read_text()
        if stat.rpartition(")")[2].split()[0] == "T":
            return
        time.sleep(0.005)
    raise AssertionError(f"not stopped after {timeout_s} s\n{running.stderr_so_far()}")


@contextlib.contextmanager
def stopped(*args: object, at: str, prefix: tuple[str, ...] = ()) -> Iterator[Running]:
    """Give a run that has stopped itself at a failpoint; ``go_on`` lets it continue."""
    with start_cli(*args, env=arm(f"{at}=stop"), prefix=prefix) as running:
        wait_stopped(running)
        yield running


def go_on(running: Running, timeout: float = 60.0) -> Result:
    """Let a stopped run continue to its end."""
    running.process.send_signal(signal.SIGCONT)
    return running.wait(timeout)


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """Mount something at a folder; skip the test where that is not allowed."""
    import subprocess

    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", *options, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
