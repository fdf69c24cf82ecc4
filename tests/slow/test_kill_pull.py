"""`kill -9` at random moments of a larger pull, again and again."""

from __future__ import annotations

import random
import shutil
import time
from typing import TYPE_CHECKING

import pytest

from tests.pull_base import INDEX, Place, Published, noise, small_files
from tests.support import run_cli

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

KILLS = 20
SEED = 20
JOBS = 4
CHUNK = 64 * 1024
REQUEST = 4 * CHUNK
RATE = 12 * 2**20


@pytest.fixture
def large(place: Place) -> Published:
    """24 MiB in 12 weight files of many chunks, some small ones, from a slow store."""
    weights = {f"model-{n:02}.safetensors": noise(2**21 + n, seed=n) for n in range(12)}
    nested = {f"sub{n % 3}/{n}.json": noise(n) for n in range(20)}
    made = place.publish(small_files() | weights | nested, chunk_size=CHUNK)
    place.proxy.rate = RATE
    return made


def _kill_after(num_bytes: float, place: Place, rng: random.Random) -> bool:
    """Kill a pull soon after it was sent so many bytes; return whether it was still at work."""
    begin = place.sent()
    with place.start("-j", JOBS, env=place.proxy.environment()) as run:
        while run.process.poll() is None and place.sent() - begin < num_bytes:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.02))
        run.process.kill()
        return run.process.wait() != 0


def _finish(place: Place, made: Published) -> None:
    run_cli(*place.arguments("-j", JOBS), env=place.proxy.environment()).ok()
    made.assert_whole(place.target)


def _final(made: Published, target: Path) -> set[str]:
    return {path for path in made.files if (target / path).exists()}


def test_each_of_twenty_kills_is_survived(place: Place, large: Published) -> None:
    """One more run makes the right bytes, and fetches again at most what was under way."""
    rng = random.Random(SEED)
    cut_off = 0
    for _ in range(KILLS):
        cut_off += _kill_after(rng.uniform(0, 1) * large.payload, place, rng)
        large.assert_honest(place.target)
        _finish(place, large)
        assert large.payload <= place.fetched() <= large.payload + JOBS * REQUEST
        shutil.rmtree(place.target)
        place.proxy.log.clear()
    assert cut_off >= KILLS * 3 // 4


def test_twenty_kills_in_a_row_are_survived(place: Place, large: Published) -> None:
    """On one folder: finished files only ever get more, the index and the manifest come last."""
    rng = random.Random(SEED + 1)
    finished: set[str] = set()
    kills = 0
    while kills < KILLS:
        share = rng.uniform(0, 2 / KILLS) * large.payload
        if not _kill_after(share, place, rng):
            break
        kills += 1
        large.assert_honest(place.target)
        assert finished <= _final(large, place.target)
        finished = _final(large, place.target)
    _finish(place, large)
    assert kills >= KILLS // 2
    assert place.fetched() <= large.payload + kills * JOBS * REQUEST
    assert place.fetched(INDEX) <= 2 * len(large.files[INDEX])
