"""A pull that was cut off, at whatever moment, is finished by the same command."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mxconvert.manifest import MANIFEST_NAME, TENSORS_NAME
from tests.pull_base import (
    CHUNK,
    INDEX,
    SPAN,
    WEIGHTS,
    Place,
    Published,
    noise,
    small_files,
    summary,
)
from tests.support import fail_cleanly
from tests.support.faults import NeverAnswer, Stall, access_denied
from tests.support.runs import WORK_FOLDER, arm

if TYPE_CHECKING:
    from collections.abc import Callable

PARTIAL = WEIGHTS + ".partial"
CHUNKS = f"{WORK_FOLDER}/chunks/{WEIGHTS}"
KILLED = -9
SIZE = 10 * CHUNK + 77


@pytest.fixture
def made(place: Place) -> Published:
    """An artifact whose weights take three requests."""
    return place.publish(small_files(SIZE))


@pytest.fixture
def begun(place: Place, made: Published) -> Published:
    """A pull that ended after the first request for the weights; nothing else was fetched."""
    rule = place.proxy.add(access_denied(), "GetObject", key=f"*/{WEIGHTS}", skip=1)
    place.fails(6, WEIGHTS, "AccessDenied", options=("-j", "1"))
    place.proxy.remove(rule)
    place.proxy.settle()
    place.proxy.log.clear()
    assert (place.target / CHUNKS).read_bytes() == b"\x01" * 4 + b"\x00" * 7
    assert place.fetched() == 0
    made.assert_unfinished(place.target)
    return made


# ----------------------------------------------------------------------------- kills

POINTS = (
    "pull.chunk-written:1",
    "pull.chunk-written:6",
    "pull.chunk-noted:1",
    "pull.chunk-noted:7",
    "pull.before-sync:1",
    "pull.before-rename:2",
    "pull.before-index",
    "pull.renamed:4",  # the index
    "pull.before-manifest",
    "writer.small-written:2",  # the manifest, after the journal
)


@pytest.mark.parametrize("point", POINTS)
def test_killed_pull_is_finished(place: Place, made: Published, point: str) -> None:
    """With the right bytes, and no more fetched again than was under way."""
    killed = place.run("-j", "2", env=arm(f"{point}=kill"))
    assert killed.status == KILLED, f"{point} was not reached\n{killed.stderr}"
    made.assert_unfinished(place.target)
    found = summary(place.pull(None, "-j", "2", "--json"))
    made.assert_whole(place.target)
    assert found["resumed_bytes"] + found["fetched_bytes"] == made.payload
    assert place.fetched() <= made.payload + 2 * SPAN


def test_pull_killed_after_its_manifest_is_complete(place: Place, made: Published) -> None:
    """What is left of the journal is cleared away; the files are not asked for."""
    killed = place.run(env=arm("pull.before-cleanup=kill"))
    assert killed.status == KILLED
    assert (place.target / MANIFEST_NAME).read_bytes() == made.files[MANIFEST_NAME]
    assert (place.target / WORK_FOLDER).exists()
    found = summary(place.pull(None, "--json"))
    assert found["was_complete"]
    made.assert_whole(place.target)
    assert place.fetched() == made.payload


def test_no_manifest_before_all_files(place: Place, made: Published) -> None:
    """Killed wherever: who finds a manifest finds every file; who finds an index, every shard."""
    for number in (1, 2, 1):
        killed = place.run(env=arm(f"pull.renamed:{number}=kill"))
        assert killed.status == KILLED
        made.assert_unfinished(place.target)
    place.pull().ok()
    made.assert_whole(place.target)


# ---------------------------------------------------------------------------- signals

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
STALLED = ("manifest", "body", "head")


def _stall(place: Place, where: str) -> None:
    if where == "manifest":
        place.proxy.add(NeverAnswer(), "GetObject", key=f"*/{MANIFEST_NAME}")
    elif where == "body":
        place.proxy.add(Stall(CHUNK + 5), "GetObject", key=f"*/{WEIGHTS}")
    else:
        place.proxy.add(NeverAnswer(), "HeadObject", key=f"*/{WEIGHTS}")


@pytest.mark.parametrize(("signum", "status"), SIGNALS)
@pytest.mark.parametrize("where", STALLED)
def test_signal_while_the_store_is_silent(
    place: Place, made: Published, where: str, signum: signal.Signals, status: int
) -> None:
    """Ends within seconds, whatever is waited for; what has come is kept."""
    _stall(place, where)
    patient = ("--retry-for", "60s", "--store-option", "connect_timeout=30")
    with place.start(*patient, env=place.proxy.environment()) as running:
        _wait_for(lambda: bool(place.proxy.rules[0].fired))
        time.sleep(0.1)
        begin = time.monotonic()
        running.process.send_signal(signum)
        result = running.wait(30)
    assert time.monotonic() - begin < 8
    fail_cleanly(result, status, "interrupted")
    if place.target.exists():
        made.assert_unfinished(place.target)
        assert not (place.target / WORK_FOLDER / "lock").exists()
    place.proxy.remove()
    place.pull().ok()
    made.assert_whole(place.target)


def _wait_for(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_second_signal_ends_at_once(place: Place, made: Published) -> None:
    _stall(place, "body")
    with place.start("--retry-for", "60s", env=place.proxy.environment()) as running:
        _wait_for(lambda: bool(place.proxy.rules[0].fired))
        for _ in range(2):
            running.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        begin = time.monotonic()
        assert running.process.wait(10) == 130
    assert time.monotonic() - begin < 2
    place.proxy.remove()
    place.pull().ok()
    made.assert_whole(place.target)


# ------------------------------------------------------------------- what was changed


def _rewrite(change: Callable[[bytes], bytes], *, keep_times: bool = False):
    def act(path: Path) -> None:
        info = path.stat()
        path.write_bytes(change(path.read_bytes()))
        if keep_times:
            os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))

    return act


def _flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


CHANGES = {
    "untouched": (lambda _: None, SPAN),
    "deleted": (Path.unlink, 0),
    "truncated": (_rewrite(lambda data: data[: 2 * CHUNK]), 0),
    "longer": (_rewrite(lambda data: data + b"more"), 0),
    "of another version": (_rewrite(lambda _: noise(SIZE, seed=7)), 0),
    "one bit": (_rewrite(_flip), SPAN - CHUNK),
    "one bit, at the same time": (_rewrite(_flip, keep_times=True), SPAN - CHUNK),
    "lost by a crash": (_rewrite(lambda data: bytes(len(data))), 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_partial_file_is_read_before_it_counts(place: Place, begun: Published, name: str) -> None:
    """What of it is right is kept, all else fetched again, and nothing is appended."""
    change, kept = CHANGES[name]
    change(place.target / PARTIAL)
    found = summary(place.pull(None, "--json"))
    begun.assert_whole(place.target)
    assert found["resumed_bytes"] == kept
    assert place.fetched(WEIGHTS) == SIZE - kept


@pytest.mark.parametrize(
    "change",
    [
        Path.unlink,
        _rewrite(lambda _: b""),
        _rewrite(lambda _: b"\x01" * 11),
        _rewrite(lambda _: b"\x01" * 11 + b"163917 1 1 1 1"),
        _rewrite(lambda _: noise(500)),
    ],
)
def test_notes_of_chunks_prove_nothing(
    place: Place, begun: Published, change: Callable[[Path], None]
) -> None:
    """A journal that lies costs time only."""
    change(place.target / CHUNKS)
    place.pull().ok()
    begun.assert_whole(place.target)


@pytest.mark.parametrize(
    "change",
    [
        Path.unlink,
        _rewrite(_flip),
        _rewrite(lambda data: data[:-1]),
        _rewrite(lambda data: data + b"x"),
        _rewrite(lambda data: noise(len(data), seed=5)),
    ],
)
def test_damaged_file_of_an_unfinished_pull(
    place: Place, made: Published, change: Callable[[Path], None]
) -> None:
    """A file that had its name and was changed since is fetched again, and only that."""
    place.pull(None, "--include", WEIGHTS, "--include", "config.json").ok()
    place.proxy.log.clear()
    change(place.target / WEIGHTS)
    place.pull().ok()
    made.assert_whole(place.target)
    assert place.fetched(WEIGHTS) == SIZE
    assert place.fetched("config.json") == 0


def test_damaged_file_that_is_left_out(place: Place, made: Published) -> None:
    """No manifest over files that were not looked at, even if every size is right."""
    place.pull(None, "--include", WEIGHTS).ok()
    _rewrite(_flip)(place.target / WEIGHTS)
    rest = [f"--include={path}" for path in (INDEX, "config.json", TENSORS_NAME)]
    found = summary(place.pull(None, *rest, "--json"))
    assert found["left_files"] == 2  # the weights, and the index that comes after them
    assert not (place.target / MANIFEST_NAME).exists()
    place.pull().ok()
    made.assert_whole(place.target)


def test_touched_file_is_read_not_fetched(place: Place, made: Published) -> None:
    """A copy of the folder, say, to another disk."""
    place.pull(None, "--include", WEIGHTS).ok()
    os.utime(place.target / WEIGHTS)
    place.proxy.log.clear()
    found = summary(place.pull(None, "--json"))
    made.assert_whole(place.target)
    assert found["resumed_bytes"] == SIZE
    assert place.fetched(WEIGHTS) == 0


# ------------------------------------------------------------------- another artifact


def test_journal_belongs_to_one_artifact(place: Place, begun: Published) -> None:
    """Halves of two versions are never put together; the hint says how to go on."""
    other = place.publish(small_files(SIZE, seed=3) | {"other.json": b"{}"})
    before = (place.target / PARTIAL).read_bytes()
    place.fails(2, begun.id, other.id, f"@{begun.id[:16]}", "--overwrite")
    assert (place.target / PARTIAL).read_bytes() == before
    place.pull(f"{place.url()}@{begun.id[:16]}").ok()
    begun.assert_whole(place.target)


def test_overwrite_takes_another_artifact(place: Place, begun: Published) -> None:
    other = place.publish(small_files(SIZE, seed=3))
    assert other.id != begun.id
    place.pull(None, "--overwrite").ok()
    other.assert_whole(place.target)


def test_overwrite_goes_on_with_the_same_artifact(place: Place, begun: Published) -> None:
    """The option in a script that is started again does not throw away what was fetched."""
    found = summary(place.pull(None, "--overwrite", "--json"))
    begun.assert_whole(place.target)
    assert found["resumed_bytes"] == SPAN


def test_manifest_replaced_between_runs(place: Place) -> None:
    """At a URL that is overwritten in place: a resume sees it and says so."""
    first = place.publish(small_files(SIZE), flat=True)
    rule = place.proxy.add(access_denied(), "GetObject", key=f"*/{WEIGHTS}", skip=1)
    place.fails(6, WEIGHTS)
    place.proxy.remove(rule)
    second = place.publish(small_files(SIZE, seed=4), flat=True)
    place.fails(2, first.id, second.id, "--overwrite")
    place.pull(None, "--overwrite").ok()
    second.assert_whole(place.target)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema_version": 9, "artifact": "x"}', '{"schema_version": 1']
)
def test_journal_that_cannot_be_read(place: Place, begun: Published, text: str) -> None:
    journal = place.target / WORK_FOLDER / "pull.json"
    assert json.loads(journal.read_bytes())["artifact"] == begun.id
    journal.write_text(text)
    place.fails(7, str(journal), "--overwrite")
    place.pull(None, "--overwrite").ok()
    begun.assert_whole(place.target)


def test_chunk_written_before_a_signal_is_kept(place: Place, begun: Published) -> None:
    """Two cuts in a row: each run keeps what the others have fetched."""
    rule = place.proxy.add(access_denied(), "GetObject", key=f"*/{WEIGHTS}", skip=1)
    place.fails(6, WEIGHTS, options=("-j", "1"))
    place.proxy.remove(rule)
    assert (place.target / CHUNKS).read_bytes() == b"\x01" * 8 + b"\x00" * 3
    found = summary(place.pull(None, "--json"))
    begun.assert_whole(place.target)
    assert found["resumed_bytes"] == 2 * SPAN
