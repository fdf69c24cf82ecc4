"""`pull --watch`: `current` is always a whole version, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from mxconvert import failpoints
from mxconvert.errors import LocalError, StoreError, UsageError
from mxconvert.events import Notice
from mxconvert.manifest import MANIFEST_NAME
from mxconvert.stop import StopToken
from mxconvert.store import Client, ClientOptions, StoreOptions, open_store, parse_url
from mxconvert.transfer.pull import PullOptions
from mxconvert.transfer.watch import CURRENT, Watcher, WatchOptions, check_watching
from tests.pull_base import CHUNK, PREFIX, WEIGHTS, Place, Published, noise, small_files
from tests.rank_base import make, stored
from tests.support import bf16_model, fail_cleanly
from tests.support.faults import access_denied
from tests.support.publish import put_ref
from tests.support.runs import arm

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mxconvert.selection import Request


class Watch:
    """A watcher in this process, whose waits are steps of the test."""

    def __init__(self, place: Place, **options: Any) -> None:
        self.place, self.root = place, place.target
        self.notices: list[Notice] = []
        self.options = options
        self.steps: list[Callable[[], None]] = []
        self.waits: list[float] = []

    def run(self, *steps: Callable[[], None], request: Request | None = None) -> None:
        """Look once, then once more after each step."""
        url, pending = self.place.url(), list(steps)
        store = open_store(parse_url(url), StoreOptions(values={"read_timeout": "2"}))

        def wait(seconds: float) -> None:
            self.waits.append(seconds)
            pending.pop(0)()

        def report(event: object) -> None:
            if isinstance(event, Notice):
                self.notices.append(event)

        watching = WatchOptions(tag="latest", poll=10.0, rounds=len(steps) + 1, **self.options)
        pulling = PullOptions() if request is None else PullOptions(request=request)
        try:
            Watcher(
                lambda: Client(store, ClientOptions(jobs=4, retry_for=1.0), report),
                self.root,
                pulling,
                watching,
                report=report,
                stop=StopToken(),
                wait=wait,
            )()
        finally:
            store.close()

    @property
    def codes(self) -> list[str]:
        return [notice.code for notice in self.notices]

    def current(self) -> Path:
        """Return the folder that ``current`` points at."""
        return (self.root / CURRENT).resolve(strict=True)

    @property
    def versions(self) -> set[str]:
        return {p.name for p in self.root.iterdir() if p.is_dir() and not p.is_symlink()} - {
            ".mxconvert"
        }


def versions(place: Place, count: int) -> list[Published]:
    """Publish versions that differ in one file; `latest` points at the last."""
    files = {f"part-{n}.safetensors": noise(2 * CHUNK, n) for n in range(4)}
    return [
        place.publish(small_files() | files | {"part-0.safetensors": noise(2 * CHUNK, 100 + n)})
        for n in range(count)
    ]


def moved(place: Place, made: Published) -> Callable[[], None]:
    """Return a step that moves the tag."""
    return lambda: place.tag("latest", made.id)


def test_the_tag_is_followed(place: Place) -> None:
    """Each version in a folder of its own; the old one stays until it is one too many."""
    first, second, third = versions(place, 3)
    place.tag("latest", first.id)
    watch = Watch(place)
    seen: list[Path] = []

    def then(made: Published) -> Callable[[], None]:
        def step() -> None:
            seen.append(watch.current())
            place.tag("latest", made.id)

        return step

    watch.run(then(second), then(third), lambda: seen.append(watch.current()))
    assert [path.name for path in seen] == [m.id[:16] for m in (first, second, third)]
    third.assert_whole(watch.current())
    second.assert_whole(watch.root / second.id[:16])
    assert watch.versions == {second.id[:16], third.id[:16]}
    assert watch.codes == ["switched", "switched", "switched", "removed"]
    assert all(8 <= seconds <= 12 for seconds in watch.waits)


def test_only_what_differs_is_fetched(place: Place) -> None:
    """Files that both versions have get a second name; they are compared, not fetched."""
    first, second = versions(place, 2)
    place.tag("latest", first.id)
    watch = Watch(place)

    def step() -> None:
        place.proxy.settle()
        place.proxy.log.clear()
        place.tag("latest", second.id)

    watch.run(step)
    second.assert_whole(watch.current())
    first.assert_whole(watch.root / first.id[:16])
    assert place.fetched("*.safetensors") == 2 * CHUNK
    same = "part-3.safetensors"
    inodes = {(watch.root / m.id[:16] / same).stat().st_ino for m in (first, second)}
    assert len(inodes) == 1


def test_an_unmoved_tag_costs_one_request(place: Place) -> None:
    """No body: its ETag is asked for."""
    versions(place, 1)
    watch = Watch(place)
    watch.run(lambda: (place.proxy.settle(), place.proxy.log.clear()), lambda: None)
    place.proxy.settle()
    assert [record.op for record in place.proxy.log] == ["HeadObject"] * 2


def test_a_tag_that_moves_back_fetches_nothing(place: Place) -> None:
    first, second = versions(place, 2)
    watch = Watch(place)

    def back() -> None:
        place.proxy.settle()
        place.proxy.log.clear()
        place.tag("latest", first.id)

    place.tag("latest", first.id)
    watch.run(moved(place, second), back)
    assert watch.current().name == first.id[:16]
    assert place.fetched() == 0


@pytest.mark.parametrize("keep", [1, 3])
def test_so_many_are_kept(place: Place, keep: int) -> None:
    made = versions(place, 5)
    place.tag("latest", made[0].id)
    watch = Watch(place, keep=keep)
    watch.run(*(moved(place, each) for each in made[1:]))
    assert watch.versions == {each.id[:16] for each in made[-keep:]}


def test_a_part_is_followed(place: Place) -> None:
    """A rank's experts of each version."""
    from mxconvert.selection import Request

    one = make(place, bf16_model(layers=1, experts=4, seed=1))
    two = make(place, bf16_model(layers=1, experts=4, seed=2))
    put_ref(place.s3, place.bucket, PREFIX, "latest", one.id)
    watch = Watch(place)
    watch.run(
        lambda: put_ref(place.s3, place.bucket, PREFIX, "latest", two.id),
        request=Request(rank=1, world_size=2),
    )
    found = stored(watch.current())
    assert found.items() <= two.tensors.items()
    assert len(found) < len(two.tensors)


# ----------------------------------------------------------------------------- trouble


def test_a_store_that_fails_meanwhile(place: Place) -> None:
    """Said, waited for longer each time, and followed when it is back."""
    first, second = versions(place, 2)
    place.tag("latest", first.id)
    watch = Watch(place)
    rules = []

    def break_() -> None:
        place.tag("latest", second.id)
        rules.append(place.proxy.add(access_denied(), "GetObject", key="*/part-0.safetensors"))

    def still() -> None:
        first.assert_whole(watch.current())

    def mend() -> None:
        still()
        place.proxy.remove(rules[0])

    watch.run(break_, still, mend)
    assert watch.codes == ["switched", "watch-failed", "watch-failed", "switched"]
    second.assert_whole(watch.current())
    assert watch.waits[1] < watch.waits[2]


def test_a_damaged_pointer_or_a_full_disk_pass(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to start it again."""
    first, second = versions(place, 2)
    place.tag("latest", first.id)
    watch = Watch(place)

    def damage() -> None:
        place.s3.put(place.bucket, f"{PREFIX}/refs/latest.json", b"{")

    def fill() -> None:
        place.tag("latest", second.id)
        monkeypatch.setattr(failpoints, "_points", failpoints._parse("pull.before-sync=enospc"))
        monkeypatch.setattr(failpoints, "_hits", {})

    def mend() -> None:
        first.assert_whole(watch.current())
        monkeypatch.setattr(failpoints, "_points", {})

    watch.run(damage, fill, mend)
    assert watch.codes == ["switched", "watch-failed", "watch-failed", "switched"]
    assert "No space left" in watch.notices[2].message
    second.assert_whole(watch.current())


def test_without_a_first_version_it_ends(place: Place) -> None:
    """There is nothing that could stay: status 6, as of a pull."""
    with pytest.raises(StoreError, match="no tag 'latest'"):
        Watch(place).run()
    assert not (place.target / CURRENT).exists()


def test_current_that_is_something_else(place: Place) -> None:
    versions(place, 1)
    (place.target / CURRENT).mkdir(parents=True)
    with pytest.raises(LocalError, match="expected a link"):
        Watch(place).run()


@pytest.mark.parametrize(
    "point",
    ["pull.chunk-noted:1", "pull.before-manifest", "watch.pulling", "watch.linked",
     "watch.switched", "watch.removing"],
)  # fmt: skip
def test_killed_anywhere(place: Place, point: str) -> None:
    """`current` is the old version or the new one, whole; the next run goes on, and tidies up."""
    first, second = versions(place, 2)
    place.tag("latest", first.id)
    watch = Watch(place, keep=1)
    watch.run()
    place.tag("latest", second.id)
    killed = place.run("--watch", "--poll", "1s", "--keep", "1", env=arm(f"{point}=kill"))
    assert killed.status == -9, killed.stderr
    current = watch.current()
    {first.id[:16]: first, second.id[:16]: second}[current.name].assert_whole(current)
    watch.run()
    second.assert_whole(watch.current())
    assert {p.name for p in watch.root.iterdir()} == {".mxconvert", CURRENT, second.id[:16]}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it(place: Place, signum: int) -> None:
    """143 and 130; two in one folder exclude each other meanwhile."""
    (made,) = versions(place, 1)
    with place.start("--watch", "--poll", "1s", "--json") as running:
        end = time.monotonic() + 20
        while not (place.target / CURRENT).exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        fail_cleanly(place.run("--watch"), 7, "another run is working here")
        running.process.send_signal(signum)
        result = running.wait()
    assert result.status == 128 + signum
    made.assert_whole((place.target / CURRENT).resolve())


# ----------------------------------------------------------------------------- command


def test_the_command_is_told(place: Place, tmp_path: Path) -> None:
    """After each switch, with what it needs in its environment; not through a shell."""
    first, second = versions(place, 2)
    place.tag("latest", first.id)
    log = tmp_path / "log"
    code = (
        "import json, os, sys; "
        "json.dump({k: v for k, v in os.environ.items() if k.startswith('MXCONVERT_')}, "
        f"open({str(log)!r}, 'a')); open({str(log)!r}, 'a').write('\\n')"
    )
    watch = Watch(place, on_update=(sys.executable, "-c", code, "$HOME; false"))
    watch.run(moved(place, second), lambda: None)
    told = [json.loads(line) for line in log.read_text().splitlines()]
    assert [each["MXCONVERT_ID"] for each in told] == [first.id, second.id]
    assert told[1]["MXCONVERT_PATH"] == str(watch.root / second.id[:16])
    assert told[1]["MXCONVERT_PREVIOUS"] == str(watch.root / first.id[:16])
    assert told[0]["MXCONVERT_PREVIOUS"] == ""
    assert told[0]["MXCONVERT_TAG"] == "latest"
    assert "on-update-failed" not in watch.codes


@pytest.mark.parametrize("command", [(sys.executable, "-c", "raise SystemExit(3)"), ("/none",)])
def test_a_command_that_fails_is_reported(place: Place, command: tuple[str, ...]) -> None:
    (made,) = versions(place, 1)
    watch = Watch(place, on_update=command)
    watch.run(lambda: None)
    assert watch.codes == ["switched", "on-update-failed"]
    made.assert_whole(watch.current())


def test_ids_do_not_move() -> None:
    with pytest.raises(UsageError, match="never moves"):
        check_watching("a" * 64, ())
    with pytest.raises(UsageError, match="--include"):
        check_watching("v1", (("--include", True),))
    assert check_watching(None, ()) == "latest"


def test_the_current_version_can_be_read_meanwhile(place: Place) -> None:
    """Who opened a file of a version that is removed goes on reading it."""
    made = versions(place, 3)
    place.tag("latest", made[0].id)
    watch = Watch(place, keep=1)
    opened: list[int] = []

    def open_it() -> None:
        opened.append(os.open(watch.current() / WEIGHTS, os.O_RDONLY))
        place.tag("latest", made[1].id)

    watch.run(open_it, moved(place, made[2]))
    try:
        assert os.pread(opened[0], 1 << 20, 0) == made[0].files[WEIGHTS]
    finally:
        os.close(opened[0])
    assert (watch.current() / MANIFEST_NAME).exists()
