"""Pulls past the page cache (``--direct``): the same bytes, the same resume, no cached pages."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from mxconvert.transfer.pull import output
from tests.pull_base import CHUNK, SPAN, WEIGHTS, Place, noise, small_files, summary
from tests.support.faults import Flip
from tests.support.runs import arm

if TYPE_CHECKING:
    from pathlib import Path

ALIGNED = output.ALIGNMENT
SIZES = (1, 511, ALIGNED - 1, ALIGNED, ALIGNED + 1, CHUNK, SPAN + ALIGNED, 10 * CHUNK + 77)


def _cached(path: Path) -> int | None:
    """Return how many bytes of a file are in the page cache; ``None`` if nobody says."""
    fd = os.open(path, os.O_RDONLY)
    try:
        count = 0
        for begin in range(0, path.stat().st_size, ALIGNED):
            try:
                count += os.preadv(fd, [bytearray(ALIGNED)], begin, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
    except OSError:
        return None
    finally:
        os.close(fd)
    return count


def test_bytes_of_every_size(place: Place) -> None:
    """Ends that are not aligned, and files smaller than a sector, arrive whole."""
    files = {f"data-{size:06}.safetensors": noise(size, size) for size in SIZES}
    made = place.publish(small_files() | files)
    place.pull(None, "--direct", "--sha256").ok()
    made.assert_whole(place.target)


def test_chunks_that_are_not_aligned(place: Place) -> None:
    """A manifest may have any chunk size: such chunks go through the page cache, and it says so."""
    made = place.publish(small_files(), chunk_size=CHUNK + 8)
    result = place.pull(None, "--direct").ok()
    assert result.stderr.count("--direct has no effect") == 1
    made.assert_whole(place.target)


def test_nothing_stays_in_the_page_cache(place: Place) -> None:
    """But for the last page, if it is not full: what the option is for."""
    place.publish(small_files())
    place.pull().ok()
    through = _cached(place.target / WEIGHTS)
    if not through:
        pytest.skip("this file system does not say what is cached")
    other = place.target.with_name("direct")
    result = place.pull(None, "--direct", target=other).ok()
    if "no effect" in result.stderr:
        pytest.skip("this file system takes no direct writes")
    assert _cached(other / WEIGHTS) == 77


@pytest.mark.parametrize(
    "point", ["pull.chunk-written:1", "pull.chunk-written:6", "pull.before-sync:2"]
)
def test_killed_pull_is_finished(place: Place, point: str) -> None:
    """Whole chunks are kept, whichever way the next run writes."""
    made = place.publish(small_files())
    killed = place.run("-j", "2", "--direct", env=arm(f"{point}=kill"))
    assert killed.status == -9, f"{point} was not reached\n{killed.stderr}"
    made.assert_unfinished(place.target)
    place.pull(None, "--direct").ok()
    made.assert_whole(place.target)


def test_noted_chunks_are_not_fetched_again(place: Place) -> None:
    """The journal says of a direct write no more and no less than of another one."""
    made = place.publish(small_files())
    killed = place.run("-j", "1", "--direct", env=arm("pull.chunk-noted:7=kill"))
    assert killed.status == -9, killed.stderr
    found = summary(place.pull(None, "--json"))
    assert found["resumed_bytes"] >= 4 * CHUNK
    made.assert_whole(place.target)


def test_wrong_bytes_are_fetched_again(place: Place) -> None:
    """A chunk between good ones is overwritten in place."""
    made = place.publish(small_files())
    place.proxy.add(Flip(CHUNK + 5), "GetObject", key=f"*/{WEIGHTS}", times=1)
    found = summary(place.pull(None, "--json", "--direct"))
    assert found["refetched_chunks"] == 1
    made.assert_whole(place.target)


@pytest.mark.parametrize("moment", ["open", "write"])
def test_file_systems_without_direct_writes(
    place: Place, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some refuse when the file is opened, some at the first write: said once, and it goes on."""
    made = place.publish(small_files() | {"b.safetensors": noise(3 * CHUNK, 9)})
    direct: set[int] = set()
    open_, pwrite = os.open, os.pwrite

    def refusing_open(path: str, flags: int, *more: int, **named: int) -> int:
        if moment == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fd = open_(path, flags, *more, **named)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def refusing_pwrite(fd: int, data: memoryview, offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "open", refusing_open)
    monkeypatch.setattr(os, "pwrite", refusing_pwrite)
    result = place.pull(None, "--direct").ok()
    assert result.stderr.count("--direct has no effect") == 1
    assert bool(direct) == (moment == "write")
    made.assert_whole(place.target)
