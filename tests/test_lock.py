"""Two runs never work on one output folder at once."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.support import fail_cleanly, run_cli, shell, start_cli
from tests.support.cli import environment
from tests.support.runs import (
    MANIFEST,
    WORK_FOLDER,
    Reference,
    arm,
    codes,
    events,
    final_names,
    go_on,
    made,
    stopped,
    wait_stopped,
)

if TYPE_CHECKING:
    from pathlib import Path

LOCK = f"{WORK_FOLDER}/lock"
STARTED = r"started \d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2} UTC"


def _half_done(reference: Reference, target: Path) -> None:
    killed = run_cli("quantize", reference.source, target, env=arm("writer.after-rename:3=kill"))
    assert killed.status == -9
    assert (target / LOCK).exists()


def _rewrite_lock(target: Path, **changes: object) -> None:
    lock = target / LOCK
    lock.write_text(json.dumps(json.loads(lock.read_text()) | changes))


def test_second_of_two_simultaneous_runs_fails_at_once(
    reference: Reference, tmp_path: Path
) -> None:
    """Both start together; the one that got the lock waits until the other has ended."""
    target = tmp_path / "target"
    arguments = ("quantize", reference.source, target, "--json")
    environment = arm("engine.convert=stop")
    with (
        start_cli(*arguments, env=environment) as one,
        start_cli(*arguments, env=environment) as two,
    ):
        while one.process.poll() is None and two.process.poll() is None:
            time.sleep(0.005)
        loser, winner = (one, two) if one.process.poll() is not None else (two, one)
        refused = loser.wait()
        fail_cleanly(refused, 7, f"process {winner.process.pid}", socket.gethostname())
        assert re.search(STARTED, refused.stderr)
        assert refused.seconds < 10
        wait_stopped(winner)
        result = go_on(winner).ok()
    assert made(result) == reference.weights
    reference.assert_same(target, result)


def test_verify_during_a_run_does_not_pass(reference: Reference, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with stopped("quantize", reference.source, target, at="writer.before-rename:4") as run:
        checked = shell("verify", target)
        assert checked.status == 4
        assert MANIFEST in checked.stderr
        go_on(run).ok()
    shell("verify", target).ok()


def test_second_run_on_an_artifact_about_to_be_done(reference: Reference, tmp_path: Path) -> None:
    """The manifest is there, the first run is not gone: locked, not complete, not occupied."""
    target = tmp_path / "target"
    arguments = ("quantize", reference.source, target, "--json")
    with stopped(*arguments, at="finish.after-manifest") as run:
        fail_cleanly(run_cli(*arguments), 7, f"process {run.process.pid}")
        result = go_on(run).ok()
    reference.assert_same(target, result)


def test_overwriting_run_respects_the_lock(reference: Reference, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with stopped("quantize", reference.source, target, "--json", at="engine.convert:5") as run:
        kept = final_names(target)
        second = run_cli("quantize", reference.source, target, "--overwrite", "--scale-rule=even")
        fail_cleanly(second, 7, f"process {run.process.pid}")
        assert final_names(target) == kept
        reference.assert_same(target, go_on(run).ok())


def test_lock_of_a_killed_run_is_taken_over(reference: Reference, tmp_path: Path) -> None:
    target = tmp_path / "target"
    _half_done(reference, target)
    holder = json.loads((target / LOCK).read_text())
    result = reference.rerun(target)
    (notice,) = [e for e in events(result, "notice") if e["code"] == "lock-taken-over"]
    assert f"process {holder['pid']}" in notice["message"]


def test_reused_process_id_is_not_the_holder(reference: Reference, tmp_path: Path) -> None:
    """A living process has the dead holder's number, but started at another time."""
    target = tmp_path / "target"
    _half_done(reference, target)
    _rewrite_lock(target, pid=os.getpid())
    assert "lock-taken-over" in codes(reference.rerun(target))


def test_lock_of_another_host_holds_until_broken(reference: Reference, tmp_path: Path) -> None:
    """Whether its process still lives cannot be seen from here."""
    target = tmp_path / "target"
    _half_done(reference, target)
    _rewrite_lock(target, host="node-17.example")
    refused = run_cli("quantize", reference.source, target)
    fail_cleanly(refused, 7, "node-17.example", "--break-lock")
    assert re.search(STARTED, refused.stderr)
    assert "lock-taken-over" in codes(reference.rerun(target, "--break-lock"))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_unreadable_lock_holds_until_broken(
    reference: Reference, tmp_path: Path, content: str
) -> None:
    target = tmp_path / "target"
    (target / WORK_FOLDER).mkdir(parents=True)
    (target / LOCK).write_text(content)
    refused = shell("quantize", reference.source, target)
    fail_cleanly(refused, 7, "unreadable lock", "--break-lock")
    broken = shell("quantize", reference.source, target, "--break-lock", "--json").ok()
    reference.assert_same(target, broken)


def test_broken_lock_is_not_given_back_by_its_first_holder(tmp_path: Path) -> None:
    """A run whose lock was broken leaves the new holder's alone when it ends."""
    from mxconvert.events import ignore
    from mxconvert.lock import Lock

    first, second = Lock(tmp_path), Lock(tmp_path)
    first._text = first._text.replace(socket.gethostname(), "node-17.example")
    first.acquire(ignore)
    second.acquire(ignore, break_lock=True)
    taken = (tmp_path / "lock").read_text()
    first.release()
    assert (tmp_path / "lock").read_text() == taken
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_lock_of_a_living_run_cannot_be_broken(reference: Reference, tmp_path: Path) -> None:
    """--break-lock is for holders that cannot be seen, not for a run on this host."""
    target = tmp_path / "target"
    with stopped("quantize", reference.source, target, "--json", at="engine.convert:5") as run:
        refused = run_cli("quantize", reference.source, target, "--break-lock")
        fail_cleanly(refused, 7, f"process {run.process.pid}", "wait for it to end")
        assert "--break-lock" not in refused.stderr
        reference.assert_same(target, go_on(run).ok())


def test_living_run_in_another_container_is_not_dead(reference: Reference, tmp_path: Path) -> None:
    """Containers may share host name and folder, and not see each other's processes."""
    target = tmp_path / "target"
    _half_done(reference, target)
    with (target / LOCK).open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = run_cli("quantize", reference.source, target)
        fail_cleanly(refused, 7, "another run is working here", "--break-lock")
    assert "lock-taken-over" in codes(reference.rerun(target))


def test_run_keeps_its_flock_until_it_ends(reference: Reference, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with stopped("quantize", reference.source, target, at="engine.convert:5") as run:
        with (target / LOCK).open("r+b") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        go_on(run).ok()


def test_remains_of_a_run_with_the_same_process_number(tmp_path: Path) -> None:
    """Killed between linking its file to the lock and removing it; containers reuse numbers."""
    from mxconvert.events import ignore
    from mxconvert.lock import Lock

    mine = tmp_path / f"lock.{socket.gethostname()}.{os.getpid()}"
    dead = {"pid": os.getpid(), "host": socket.gethostname(), "started": 1, "ticks": 1}
    mine.write_text(json.dumps(dead))
    os.link(mine, tmp_path / "lock")
    lock = Lock(tmp_path)
    lock.acquire(ignore)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert json.loads((tmp_path / "lock").read_text())["ticks"] != 1


def test_lock_where_its_folder_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends removes the folder that the next one is about to lock."""
    from mxconvert import lock as module
    from mxconvert.events import ignore

    folder = tmp_path / WORK_FOLDER
    lock = module.Lock(folder)
    link = os.link
    removed = []

    def vanish(source: Path, target: Path) -> None:
        if not removed:
            removed.append(source)
            source.unlink()
            folder.rmdir()
        link(source, target)

    monkeypatch.setattr(module.os, "link", vanish)
    lock.acquire(ignore)
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_lock_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network and user-space file systems have none."""
    import errno

    from mxconvert import lock as module
    from mxconvert.errors import LocalError
    from mxconvert.events import ignore

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(module.os, "link", refuse)
    lock = module.Lock(tmp_path)
    lock.acquire(ignore)
    with pytest.raises(LocalError, match=f"process {os.getpid()}"):
        module.Lock(tmp_path).acquire(ignore)
    lock.release()
    module.Lock(tmp_path).acquire(ignore)


CONTENDER = """
import pathlib, sys, time
from mxconvert.errors import LocalError
from mxconvert.events import ignore
from mxconvert.lock import Lock
for line in sys.stdin:
    lock = Lock(pathlib.Path(line.strip()))
    try:
        lock.acquire(ignore)
        print("mine", flush=True)
    except LocalError as error:
        print(error.code, flush=True)
"""


def test_dead_lock_is_taken_over_by_one_of_many(tmp_path: Path) -> None:
    """Several runs see it at the same moment; each names the one that was first."""
    dead = {"pid": 2**22 + 1, "host": socket.gethostname(), "started": 1, "ticks": 1}
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for _ in range(4)
    ]
    try:
        for number in range(30):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "lock").write_text(json.dumps(dead))
            for contender in contenders:
                assert contender.stdin
                contender.stdin.write(f"{folder}\n")
                contender.stdin.flush()
            answers = sorted(c.stdout.readline().strip() for c in contenders if c.stdout)
            assert answers == ["locked", "locked", "locked", "mine"]
            assert [path.name for path in folder.iterdir()] == ["lock"]
    finally:
        for contender in contenders:
            contender.communicate()
