"""`kill -9` at random moments of a larger conversion, again and again."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.support import Running, bf16_model, fail_cleanly, shell, snapshot, start_cli
from tests.support.runs import Reference, final_names, make_reference

pytestmark = pytest.mark.slow

KILLS = 20
SEED = 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """8 shards of about 8 MiB, 17 output files."""
    model = bf16_model(layers=4, experts=16, hidden=512, inner=320).split(8)
    sizes = [sum(len(t.data) for t in shard.values()) for shard in model.shards.values()]
    assert len(sizes) == 8
    assert all(7 << 20 < size < 10 << 20 for size in sizes)
    return make_reference(model, tmp_path_factory.mktemp("large"))


def _seconds(large: Reference, target: Path) -> float:
    """Return how long an undisturbed run takes here."""
    result = large.rerun(target)
    shutil.rmtree(target)
    return result.seconds


def _kill_after(delay: float, large: Reference, target: Path) -> bool:
    """Start a run and kill it after a while; return whether it was still at work."""
    with start_cli("quantize", large.source, target) as run:
        time.sleep(delay)
        run.process.kill()
        return run.process.wait() != 0


def test_each_of_twenty_kills_is_survived(large: Reference, tmp_path: Path) -> None:
    """After each: nothing unfinished has a final name, and one more run makes the same bytes."""
    rng = random.Random(SEED)
    whole = _seconds(large, tmp_path / "timing")
    cut_off = 0
    for number in range(KILLS):
        target = tmp_path / f"target{number}"
        if _kill_after(rng.uniform(0.1, whole), large, target):
            cut_off += 1
            if target.exists():
                large.assert_nothing_unfinished(target)
        large.rerun(target)
        shutil.rmtree(target)
    assert cut_off >= KILLS // 2


def test_twenty_kills_in_a_row_are_survived(large: Reference, tmp_path: Path) -> None:
    """On one output folder: finished files only ever get more, and the last run ends."""
    rng = random.Random(SEED + 1)
    whole = _seconds(large, tmp_path / "timing")
    target = tmp_path / "target"
    finished: set[str] = set()
    for _ in range(KILLS):
        killed = _kill_after(rng.uniform(0.4, 0.9) * whole, large, target)
        if not killed:
            break
        if target.exists():
            large.assert_nothing_unfinished(target)
            assert finished <= final_names(target)
            finished = final_names(target)
    large.rerun(target)
    assert snapshot(target) == large.files
    shell("verify", target, "--level", "numeric", "--source", large.source).ok()


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_a_verification(large: Reference, signum: signal.Signals, status: int) -> None:
    """Sent while it reads the first weights."""
    arguments = ("verify", large.target, "--level", "numeric", "--source", large.source)
    with start_cli(*arguments, "--jobs", "1") as run:
        _wait_for_open_file(run, ".safetensors")
        begin = time.monotonic()
        run.process.send_signal(signum)
        result = run.wait()
    assert time.monotonic() - begin < 10
    fail_cleanly(result, status, "interrupted")
    assert result.stdout == ""
    assert "resume" not in result.stderr
    assert snapshot(large.target) == large.files


def _wait_for_open_file(run: Running, suffix: str) -> None:
    while run.process.poll() is None:
        for link in Path(f"/proc/{run.process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if link.readlink().suffix == suffix:
                    return
    raise AssertionError(run.stderr_so_far())
