"""Pulls and the machine they run on: full disks, permissions, and two pulls at once."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mxconvert import failpoints
from tests.pull_base import (
    CHUNK,
    WEIGHTS,
    Place,
    Published,
    noise,
    small_files,
    summary,
)
from tests.support import fail_cleanly, shell
from tests.support.faults import Stall, access_denied
from tests.support.runs import NO_OVERRIDE, arm, mounted, partials, wait_stopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support import Running

LIMITED = shutil.which(NO_OVERRIDE[0]) is not None or os.geteuid() != 0


@pytest.fixture
def prefix() -> tuple[str, ...]:
    """What makes file modes count for the user of the tests."""
    if os.geteuid() != 0:
        return ()
    if not LIMITED:
        pytest.skip("root ignores file modes, and setpriv is not here")
    return NO_OVERRIDE


@pytest.fixture
def made(place: Place) -> Published:
    return place.publish(small_files() | {"sub/dir/file.json": b"{}"})


# -------------------------------------------------------------------------------- disks


PLACES = (
    "pull.chunk-written", "pull.chunk-noted", "pull.before-sync", "pull.before-rename",
    "pull.renamed", "pull.before-index", "pull.before-manifest", "writer.small-file",
    "pull.before-cleanup",
)  # fmt: skip


@contextlib.contextmanager
def armed(monkeypatch: pytest.MonkeyPatch, point: str, action: str):
    """Arm a failpoint in this process."""
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "_points", failpoints._parse(f"{point}={action}"))
        patch.setattr(failpoints, "_hits", {})
        yield


@pytest.mark.parametrize(
    ("point", "action"),
    [*((point, "enospc") for point in PLACES), ("pull.chunk-written", "eio")],
)
def test_no_space_at_every_place(
    place: Place, made: Published, point: str, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 7, the path and the next step; with space the same command goes on."""
    with armed(monkeypatch, point, action):
        text = os.strerror(errno.ENOSPC if action == "enospc" else errno.EIO)
        result = place.fails(7, str(place.target), text)
    assert "run the same command again" in result.stderr
    if point != "pull.before-cleanup":
        made.assert_unfinished(place.target)
    place.pull().ok()
    made.assert_whole(place.target)


def test_too_small_a_disk_is_seen_first(place: Place) -> None:
    """Nothing is fetched for nothing."""
    made = place.publish(small_files(2**20))
    with mounted(place.folder / "disk", "-t", "tmpfs", "-o", "size=512k", "none") as disk:
        result = place.pull(target=disk / "target")
        fail_cleanly(result, 7, str(disk), "are still to be written", "are free")
        assert place.fetched() == 0
        assert partials(disk) == []
        shutil.rmtree(disk / "target", ignore_errors=True)
        os.system(f"mount -o remount,size=4m {disk}")  # noqa: S605
        place.pull(target=disk / "target").ok()
        made.assert_whole(disk / "target")


def test_disk_fills_up_meanwhile(place: Place) -> None:
    """Somebody else fills it; what is there stays and is not fetched again."""
    made = place.publish(small_files(2**20) | {"b.safetensors": noise(2**20, 3)})
    with mounted(place.folder / "disk", "-t", "tmpfs", "-o", "size=4m", "none") as disk:
        env = arm("pull.before-rename=stop")
        place.target = disk / "target"
        with place.start("-j", "1", env=env) as running:
            wait_stopped(running)
            filler = disk / "filler"
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            running.process.send_signal(signal.SIGCONT)
            result = running.wait()
        fail_cleanly(result, 7, str(place.target), "No space left on device", "free space")
        made.assert_unfinished(place.target)
        filler.unlink()
        found = summary(place.pull(None, "--json"))
        made.assert_whole(place.target)
        assert found["resumed_bytes"] >= 2**20


@pytest.mark.parametrize("exists", [True, False])
def test_folder_that_cannot_be_written(
    place: Place, made: Published, prefix: tuple[str, ...], *, exists: bool
) -> None:
    """Found out before a file is fetched."""
    folder = place.folder / "locked"
    folder.mkdir(mode=0o555)
    place.target = folder if exists else folder / "target"
    result = place.run(prefix=prefix)
    fail_cleanly(result, 7, str(place.target), "Permission denied", "permissions")
    assert place.fetched() == 0
    assert list(folder.iterdir()) == []
    folder.chmod(0o755)
    place.pull().ok()
    made.assert_whole(place.target)


def test_finished_file_that_cannot_be_read(
    place: Place, made: Published, prefix: tuple[str, ...]
) -> None:
    place.leave_unfinished()
    (place.target / "config.json").chmod(0)
    os.utime(place.target / "config.json", (1, 1))
    result = place.run(prefix=prefix)
    fail_cleanly(result, 7, str(place.target / "config.json"), "Permission denied")


def test_nothing_stays_open(place: Place, made: Published) -> None:
    """Neither after a pull nor after one that failed: a program may pull many times."""

    def opened() -> list[str]:
        links = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        return [str(link.readlink()) for link in links if str(place.folder) in str(link.readlink())]

    place.proxy.add(access_denied(), "GetObject", key=f"*/{WEIGHTS}", skip=1, times=1)
    place.fails(6, WEIGHTS)
    assert opened() == []
    place.pull().ok()
    assert opened() == []


# --------------------------------------------------------------------- two pulls at once


@pytest.fixture
def first(place: Place, made: Published):
    """A pull under way: it has the lock and waits for the store, until released."""
    stall = Stall(CHUNK)
    rule = place.proxy.add(stall, "GetObject", key=f"*/{WEIGHTS}")
    with place.start("--retry-for", "60s", env=place.proxy.environment()) as running:
        _until(lambda: rule.fired > 0)
        running.release = stall.release
        yield running


def _until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_second_pull_fails_at_once(place: Place, made: Published, first) -> None:
    """And names the holder; the first one is not disturbed."""
    second = place.fails(7, "another run is working here", f"process {first.process.pid}", "--wait")
    assert second.seconds < 5
    first.release()
    first.wait().ok()
    made.assert_whole(place.target)


def _waiting(place: Place) -> Running:
    second = place.start("--wait", env=place.proxy.environment())
    _until(lambda: "another run is working here" in second.stderr_so_far())
    assert "waiting" in second.stderr_so_far()
    return second


def test_a_second_pull_waits_if_told(place: Place, made: Published, first) -> None:
    """Then it fetches nothing: the first one has."""
    with _waiting(place) as second:
        first.release()
        first.wait().ok()
        assert "everything, nothing to do" in second.wait().ok().stdout
    made.assert_whole(place.target)


def test_a_waiting_pull_takes_over(place: Place, made: Published, first) -> None:
    """When the first one dies, the second finishes what it began."""
    with _waiting(place) as second:
        first.process.kill()
        first.process.wait()
        first.release()
        assert "nothing to do" not in second.wait().ok().stdout
    made.assert_whole(place.target)


def test_quantize_and_pull_share_the_lock(
    place: Place, made: Published, first, shared_source: Path
) -> None:
    result = shell("quantize", shared_source, place.target)
    fail_cleanly(result, 7, "another run is working here")
    first.release()
    first.wait().ok()
    made.assert_whole(place.target)
