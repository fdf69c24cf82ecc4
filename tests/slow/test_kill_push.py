"""`kill -9` at random moments of a push, again and again."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

from tests.pull_base import manifest_of, small_files, write_folder
from tests.support import fail_cleanly
from tests.support.large import MIB, PART, LargeArtifact, describe, json_lines

if TYPE_CHECKING:
    from pathlib import Path

    from tests.push_base import Site

pytestmark = pytest.mark.slow

KILLS = 20
SEED = 21
JOBS = ("--jobs", "4")
RATE = 40e6


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> LargeArtifact:
    """An artifact of three files of four parts each, and some that go whole."""
    files = small_files(3 * PART + 77)
    for number, size in enumerate((3 * PART + MIB, 4 * PART, 3 * MIB, 2 * MIB)):
        files[f"model-{number:05d}.safetensors"] = random.Random(number).randbytes(size)
    folder = tmp_path_factory.mktemp("heavy") / "artifact"
    return describe(write_folder(folder, files, manifest_of(files, MIB)))


def seconds(site: Site, heavy: LargeArtifact) -> float:
    """Return how long an undisturbed push takes here; leave nothing of it."""
    result = site.process(heavy, *JOBS).ok()
    site.assert_published(heavy)
    empty(site)
    return result.seconds


def empty(site: Site) -> None:
    """Remove everything from the bucket and the log."""
    for key in site.s3.keys(site.bucket):
        site.s3.delete(site.bucket, key)
    assert site.s3.uploads(site.bucket) == []
    site.proxy.settle()
    site.proxy.log.clear()


def kill_after(delay: float, site: Site, heavy: LargeArtifact) -> bool:
    """Start a push and kill it after a while; return whether it was still at work."""
    with site.start(heavy, *JOBS) as run:
        time.sleep(delay)
        run.process.kill()
        was_at_work = run.process.wait() != 0
    site.proxy.settle(30)  # what was under way may still be done
    return was_at_work


def assert_reader_sees_all_or_nothing(site: Site, heavy: LargeArtifact, target: Path) -> None:
    result = site.pull(target, *JOBS)
    if result.status == 0:
        site.assert_whole(heavy)
    else:
        fail_cleanly(result, 6, "no tag 'latest'")


def test_each_of_twenty_kills_is_survived(site: Site, heavy: LargeArtifact, tmp_path: Path) -> None:
    """One more push completes it; what was sent twice is what was under way."""
    rng = random.Random(SEED)
    site.proxy.rate = RATE
    whole = seconds(site, heavy)
    cut_off = 0
    for number in range(KILLS):
        if kill_after(rng.uniform(0.2, whole), site, heavy):
            cut_off += 1
            assert_reader_sees_all_or_nothing(site, heavy, tmp_path / f"target{number}")
        site.process(heavy, *JOBS).ok()
        again = site.sent(heavy) - heavy.payload
        assert again <= 4 * PART + MIB, f"kill {number}"  # four parts were under way
        probes = [key for key in site.s3.keys(site.bucket) if ".probe-" in key]
        for key in probes:  # gc's, see the test below
            site.s3.delete(site.bucket, key)
        site.assert_published(heavy)
        empty(site)
    assert cut_off >= KILLS // 2


def test_twenty_kills_in_a_row_are_survived(
    site: Site, heavy: LargeArtifact, tmp_path: Path
) -> None:
    """At one URL: each gets further, the last push ends, gc removes what is left."""
    rng = random.Random(SEED + 1)
    site.proxy.rate = RATE
    whole = seconds(site, heavy)
    kills = 0
    for number in range(KILLS):
        if not kill_after(rng.uniform(0.3, 0.8) * whole, site, heavy):
            break
        kills += 1
        assert_reader_sees_all_or_nothing(site, heavy, tmp_path / f"target{number}")
    site.process(heavy, *JOBS).ok()
    assert site.sent(heavy) - heavy.payload <= kills * (4 * PART + MIB)
    time.sleep(1.1)
    found = site.run("gc", site.url, "--json", "--older-than", "0.01s", "--delete").ok()
    [listed] = json_lines(found, "summary")
    assert {item["kind"] for item in listed["leftovers"]} <= {"probe", "unfinished upload"}
    site.assert_published(heavy)
    site.pull(tmp_path / "target").ok()
