"""Pushes that are killed or stopped: what readers see then, and what the next push does."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.push_base import copy_of
from tests.support import Running, fail_cleanly
from tests.support.faults import Call, NeverAnswer, Stall, internal_error
from tests.support.large import MIB, PART, LargeArtifact, json_lines, summary
from tests.support.runs import arm, go_on, wait_stopped

if TYPE_CHECKING:
    from pathlib import Path

    from tests.push_base import Site
    from tests.support.faults import Action, Rule

WITHIN = ["push.upload-begun", "push.part-sent:2", "push.before-complete", "push.file-finished:3"]
BETWEEN = ["push.before-index", "push.before-manifest"]
AFTER = ["push.before-tags", "push.moving-tag"]
ENDS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
IN_TIME = 10.0


def killed(site: Site, artifact: LargeArtifact, point: str, *options: str) -> None:
    """Run a push that is killed at a failpoint."""
    result = site.process(artifact, *options, env=arm(f"{point}=kill"))
    assert result.status == -9, result.stderr
    site.proxy.settle(30)  # what was under way may still be done


def leftovers(site: Site, *options: str) -> list[dict]:
    """Return what gc lists, whatever its age."""
    time.sleep(1.1)  # a server's clock has whole seconds
    result = site.run("gc", site.url, "--json", "--older-than", "0.01s", *options)
    [found] = json_lines(result.ok(), "summary")
    return found["leftovers"]


@pytest.mark.parametrize("point", [*WITHIN, *BETWEEN, *AFTER])
def test_a_killed_push_is_completed_by_the_next(
    site: Site, large: LargeArtifact, tmp_path: Path, point: str
) -> None:
    """Readers see nothing of the first, all of the second; little is sent twice."""
    killed(site, large, point)
    if point in AFTER:
        site.assert_published(large, tag=None)
    else:
        site.assert_unpublished(large)
    result = site.pull(tmp_path / "early")
    fail_cleanly(result, 6, "no tag 'latest'")
    first = site.sent(large)
    site.push(large).ok()
    site.assert_published(large)
    assert site.sent(large) <= large.payload + 2 * PART + MIB
    if point in (*BETWEEN, *AFTER, "push.before-complete"):
        assert site.sent(large) - first < MIB
    site.pull(tmp_path / "target").ok()
    assert leftovers(site) == []


@pytest.mark.parametrize("point", [*WITHIN, *BETWEEN])
def test_what_a_killed_push_leaves_can_be_collected(
    site: Site, large: LargeArtifact, point: str
) -> None:
    """gc lists all of it, removes it when told, and nothing else."""
    killed(site, large, point)
    prefix = site.base(large)
    there = {key.removeprefix(f"{site.prefix}/") for key in site.s3.keys(site.bucket, prefix)}
    there |= {u.key.removeprefix(f"{site.prefix}/") for u in site.s3.uploads(site.bucket)}
    assert there
    assert {item["key"] for item in leftovers(site)} == there
    assert leftovers(site, "--delete")
    assert site.s3.keys(site.bucket, prefix) == []
    assert site.s3.uploads(site.bucket) == []
    site.push(large).ok()
    site.assert_published(large)


def test_the_same_failure_again_and_again(site: Site, large: LargeArtifact) -> None:
    """Each push gets one part further than the one before; no part is sent twice."""
    for number in range(1, 4):
        killed(site, large, "push.part-sent:1", "--jobs", "1")
        assert site.parts_done() == list(range(1, number + 1))
    site.push(large).ok()
    assert site.sent(large, "*-dense-*") == large.files[large.largest]
    site.assert_published(large)


@pytest.mark.parametrize(("signum", "status"), ENDS)
@pytest.mark.parametrize("point", ["push.part-sent:1", "push.before-manifest", "push.moving-tag"])
def test_a_signal_ends_a_push(
    site: Site, large: LargeArtifact, point: str, signum: signal.Signals, status: int
) -> None:
    """At work in threads or not; a rerun goes on."""
    action = {signal.SIGINT: "int", signal.SIGTERM: "term"}[signum]
    result = site.process(large, env=arm(f"{point}={action}"))
    fail_cleanly(result, status, "interrupted")
    if point != "push.moving-tag":
        site.assert_unpublished(large)
    summary(site.push(large))
    site.assert_published(large)


def test_a_file_that_is_replaced_during_the_push(
    site: Site, large: LargeArtifact, tmp_path: Path
) -> None:
    """Before its parts are read: by its name it is another file."""
    changed = copy_of(large, tmp_path / "copy")
    path = tmp_path / "copy" / changed.largest
    with site.start(changed, env=arm("push.upload-begun=stop")) as running:
        wait_stopped(running)
        path.rename(tmp_path / "old")  # keeps its inode, so that the new file has another
        path.write_bytes((tmp_path / "old").read_bytes())
        result = go_on(running)
    fail_cleanly(result, 4, changed.largest, "was replaced or resized during the push")
    site.assert_unpublished(large)


@pytest.mark.parametrize("checksum", ["auto", "when-required"])
def test_a_file_that_shrinks_while_it_is_sent(
    site: Site, large: LargeArtifact, tmp_path: Path, checksum: str
) -> None:
    """No half-read file, no SIGBUS, no retries: the file is named at once."""
    changed = copy_of(large, tmp_path / "copy")
    path = tmp_path / "copy" / changed.largest
    cut = Call(lambda _exchange: os.truncate(path, 2 * PART + 100))
    site.proxy.add(cut, "UploadPart", where=lambda r: r.query["partNumber"] == "3")
    result = site.fails(
        changed, 4, changed.largest, options=("--checksum", checksum, "--jobs", "3"), retry="60s"
    )
    assert result.seconds < 30
    site.assert_unpublished(large)


STALLS: dict[str, tuple[Action, str | tuple[str, ...], str]] = {
    "part": (NeverAnswer(), "UploadPart", "*"),
    "small file": (NeverAnswer(), "PutObject", "*/config.json"),
    "head": (NeverAnswer(), "HeadObject", "*-dense-*"),
    "completion": (NeverAnswer(), "CompleteMultipartUpload", "*"),
    "probe": (NeverAnswer(), "PutObject", "*.probe-*"),
    "listing": (Stall(100), "ListObjectsV2", "*"),
    "manifest": (NeverAnswer(), "PutObject", "*/mxconvert.manifest.json"),
    "tag": (NeverAnswer(), "GetObject", "*/latest.json"),
    "anything": (NeverAnswer(), (), "*"),
}


def ends_at(running: Running, rule: Rule, signum: signal.Signals, status: int) -> None:
    """Send a signal while a request stalls; it ends the command within seconds."""
    end = time.monotonic() + 60
    while not rule.fired:
        assert running.process.poll() is None, running.stderr_so_far()
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.2)
    begin = time.monotonic()
    running.process.send_signal(signum)
    result = running.wait()
    assert time.monotonic() - begin < IN_TIME
    fail_cleanly(result, status, "interrupted")


@pytest.mark.parametrize("where", STALLS)
def test_a_signal_ends_a_push_whose_request_stalls(
    site: Site, large: LargeArtifact, where: str
) -> None:
    """Wherever it is: nobody waits half a minute for a connection that is dead."""
    action, op, key = STALLS[where]
    signum, status = ENDS[list(STALLS).index(where) % 2]
    rule = site.proxy.add(action, op, key=key if key != "*" else None)
    with site.start(large) as running:
        ends_at(running, rule, signum, status)
    site.proxy.remove()


@pytest.mark.parametrize("key", ["*/latest.json", "*/mxconvert.manifest.json", "*-dense-*"])
def test_a_signal_ends_a_pull_whose_request_stalls(
    site: Site, published: LargeArtifact, tmp_path: Path, key: str
) -> None:
    from tests.support import start_cli

    rule = site.proxy.add(Stall(10), "GetObject", key=key)
    arguments = ("pull", site.url, tmp_path / "target")
    with start_cli(*arguments, env=site.proxy.environment()) as running:
        ends_at(running, rule, *ENDS[1])
    site.proxy.remove()
    site.pull(tmp_path / "target").ok()


def test_a_signal_ends_the_wait_for_the_next_try(site: Site, large: LargeArtifact) -> None:
    """Also where the store asks for an hour."""
    rule = site.proxy.add(internal_error(), "UploadPart")
    rule.action.headers.set("Retry-After", "3600")
    with site.start(large, "--retry-for", "2h") as running:
        ends_at(running, rule, *ENDS[1])


def test_a_request_that_stalls_is_repeated(
    site: Site, large: LargeArtifact, tmp_path: Path
) -> None:
    """After the time that the user sets; a part, a completion and a body are done once more."""
    quick = ("--store-option", "read_timeout=2", "--jobs", "4")
    part = site.proxy.add(NeverAnswer(), "UploadPart", times=1)
    whole = site.proxy.add(NeverAnswer(forward=True), "CompleteMultipartUpload", times=1)
    site.push(large, *quick, retry="60s").ok()
    site.assert_published(large)
    body = site.proxy.add(Stall(1000), "GetObject", key="*-dense-*", times=1)
    site.pull(tmp_path / "target", *quick, retry="60s").ok()
    assert part.fired == whole.fired == body.fired == 1
