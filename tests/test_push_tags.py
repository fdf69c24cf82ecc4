"""Tags: moved from the state that was seen, or not at all."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import pytest

from tests.push_base import WRITES, Site, changed_sidecar
from tests.support import fail_cleanly
from tests.support.faults import IgnoreConditions, LoseAnswer, conditional, not_implemented
from tests.support.large import LargeArtifact, notices, summary
from tests.support.runs import arm, wait_stopped

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.faults import Request


@pytest.fixture
def second(large: LargeArtifact, tmp_path: Path) -> LargeArtifact:
    """Another version of ``large``."""
    return changed_sidecar(large, tmp_path / "second")


def pointed(site: Site, tag: str = "latest") -> str:
    """Return the id that a tag points at."""
    return site.s3.get(site.bucket, f"{site.prefix}/refs/{tag}.json").decode().split('"')[3]


def test_tags_are_moved(site: Site, published: LargeArtifact, second: LargeArtifact) -> None:
    """Those that were asked for and `latest`; others stay."""
    site.push(published, "--tag", "v1", "--no-latest").ok()
    result = summary(site.push(second, "--tag", "v2", "--tag", "stable"))
    assert result["tags"] == ["v2", "stable", "latest"]
    found = {tag: pointed(site, tag) for tag in ("v1", "v2", "stable", "latest")}
    assert found == {"v1": published.id} | dict.fromkeys(("v2", "stable", "latest"), second.id)
    assert summary(site.push(published, "--tag", "stable", "--no-latest"))["tags"] == ["stable"]
    assert [pointed(site), pointed(site, "stable")] == [second.id, published.id]


def test_no_latest_touches_no_tag(site: Site, large: LargeArtifact) -> None:
    """Not even a probe is written."""
    assert summary(site.push(large, "--no-latest"))["tags"] == []
    assert [r for r in site.proxy.log if "/refs/" in r.key and r.op in WRITES] == []
    site.assert_published(large, tag=None)
    assert site.s3.keys(site.bucket, f"{site.prefix}/refs/") == []


@pytest.mark.parametrize("tag", ["a/b", "", "-x", "0123456789abcdef", "ü", "a" * 129, "a b"])
def test_bad_names_are_refused(site: Site, large: LargeArtifact, tag: str) -> None:
    """Before anything is sent; 16 hexadecimal digits would be read as an id."""
    fail_cleanly(site.push(large, f"--tag={tag}"), 2, "expected a letter or digit")
    assert site.proxy.settle() == []


def test_a_tag_that_was_moved_meanwhile(
    site: Site, large: LargeArtifact, second: LargeArtifact
) -> None:
    """A push that stops between reading and writing does not undo what others do then."""
    with site.start(large, env=arm("push.moving-tag=stop")) as run:
        wait_stopped(run)
        site.push(second).ok()
        assert pointed(site) == second.id
        run.process.send_signal(signal.SIGCONT)
        run.wait().ok()
    site.proxy.settle()
    writes = site.proxy.requests("PutObject", key="*/latest.json")
    assert [r.status for r in writes] == [200, 412, 200]
    assert all("if-match" in r.headers or "if-none-match" in r.headers for r in writes)
    site.assert_published(large)
    site.assert_published(second, tag=None)


def test_two_pushes_at_once(site: Site, large: LargeArtifact, second: LargeArtifact) -> None:
    """Both are published; the tag points at one of them."""
    with site.start(large, "--tag", "v1") as one, site.start(second, "--tag", "v1") as two:
        one.wait().ok()
        two.wait().ok()
    winner = pointed(site)
    assert winner in (large.id, second.id)
    assert pointed(site, "v1") in (large.id, second.id)
    site.assert_published(large, tag=None)
    site.assert_published(second, tag=None)


def test_the_same_push_twice_at_once(site: Site, large: LargeArtifact) -> None:
    """They may help each other, do not stand in each other's way, and leave no upload."""
    with site.start(large) as one, site.start(large) as two:
        one.wait().ok()
        two.wait().ok()
    site.assert_published(large)


def test_no_move_is_lost(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight that move one tag at once each replaces a pointer that it has seen."""
    from mxconvert.remote import move_ref
    from mxconvert.store import Client, ClientOptions, StoreOptions, open_store, parse_url

    for name, value in site.proxy.environment().items():
        monkeypatch.setenv(name, value)
    store = open_store(parse_url(site.url), StoreOptions(values={}))
    ids = [f"{number:064x}" for number in range(8)]
    before: list[str | None] = []
    barrier = threading.Barrier(len(ids))

    def move(artifact: str) -> None:
        client = Client(store, ClientOptions())
        barrier.wait()
        before.append(move_ref(client, "race", artifact))

    threads = [threading.Thread(target=move, args=(artifact,)) for artifact in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert sorted([*filter(None, before), pointed(site, "race")]) == ids
    assert before.count(None) == 1


def test_the_answer_to_a_move_is_lost(site: Site, large: LargeArtifact) -> None:
    """The repeated write fails since the first one was done: that is seen."""
    lost = site.proxy.add(LoseAnswer(), "PutObject", key="*/latest.json", times=1)
    assert summary(site.push(large))["tags"] == ["latest"]
    assert lost.fired == 1
    site.assert_published(large)


# ------------------------------------------------------- stores that ignore conditions


def _if_match_only(request: Request) -> bool:
    return "if-match" in request.headers


@pytest.fixture(params=["ignored", "if-match-ignored", "refused"])
def careless(request: pytest.FixtureRequest, site: Site) -> Site:
    """A store without conditional writes."""
    if request.param == "refused":
        site.proxy.add(not_implemented(), "PutObject", where=conditional)
    else:
        where = conditional if request.param == "ignored" else _if_match_only
        site.proxy.add(IgnoreConditions(), where=where)
    return site


def test_tags_are_refused_before_anything_is_sent(careless: Site, large: LargeArtifact) -> None:
    """They could be moved from a state that nobody has seen."""
    result = careless.push(large, "--tag", "v1")
    fail_cleanly(result, 6, "does not honour conditional writes", "without --tag", "URL@ID")
    assert [r.key for r in careless.done() if ".probe-" not in r.key] == []
    assert careless.s3.keys(careless.bucket) == []


def test_latest_is_left_with_a_warning(careless: Site, large: LargeArtifact, tmp_path) -> None:
    """It was not asked for; the version is published and can be pulled by its id."""
    result = careless.push(large).ok()
    assert set(notices(result)) == {"no-tags"}
    assert summary(result)["tags"] == []
    assert careless.s3.keys(careless.bucket, f"{careless.prefix}/refs/") == []
    careless.pull(tmp_path / "target", version=f"@{large.version}").ok()
    careless.assert_published(large, tag=None)
    assert not notices(careless.push(large, "--no-latest").ok())
