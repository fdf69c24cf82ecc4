"""Stores that throttle, break off or damage bytes, each for `push` and for `pull`.

See `test_cases_obj_credentials` for keys and clocks, `test_cases_obj_dialects` for stores
that speak S3 differently.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.push_base import Site, assert_not_finished, assert_pulled, gaps, most_at_once
from tests.support import fail_cleanly
from tests.support.faults import (
    CutBody,
    CutUpload,
    Delay,
    Flip,
    FlipUpload,
    LoseAnswer,
    Respond,
    internal_error,
    slow_down,
)
from tests.support.large import CHUNK, MANIFEST, MIB, PART, LargeArtifact, summary

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.faults import Action

WITHIN = PART // 2  # well within the first part

# ----------------------------------------------------------------- OBJ-01: throttling

THROTTLES = {
    "503": slow_down("0"),
    "500": internal_error(),
    "429": Respond(429, "TooManyRequests", headers={"Retry-After": "0"}),
}


@pytest.mark.parametrize("action", THROTTLES.values(), ids=THROTTLES)
def test_a_third_of_all_requests_fails_during_a_push(
    site: Site, large: LargeArtifact, action: Action
) -> None:
    """OBJ-01: repeated until they succeed; the user reads it in the summary."""
    rule = site.proxy.add(action, probability=0.3, seed=1)
    result = summary(site.push(large, retry="30s"))
    assert rule.fired > 5
    assert result["retries"] == rule.fired
    site.proxy.remove()
    site.assert_published(large)


@pytest.mark.parametrize("action", THROTTLES.values(), ids=THROTTLES)
def test_a_third_of_all_requests_fails_during_a_pull(
    site: Site, published: LargeArtifact, tmp_path: Path, action: Action
) -> None:
    """OBJ-01: as for a push."""
    rule = site.proxy.add(action, probability=0.3, seed=2)
    result = summary(site.pull(tmp_path / "target", retry="30s"))
    assert result["retries"] == rule.fired > 3
    assert_pulled(tmp_path / "target", published)


def test_fifty_failures_in_a_row(site: Site, large: LargeArtifact, tmp_path: Path) -> None:
    """OBJ-01: a burst that hits every request at once is waited out."""
    burst = site.proxy.add(slow_down(), times=50, key=site.base(large) + "*")
    summary(site.push(large, retry="60s"))
    assert burst.fired == 50
    site.assert_published(large)
    files = {"key": site.base(large) + "*", "where": lambda r: MANIFEST not in r.key}
    burst = site.proxy.add(slow_down(), ("GetObject", "HeadObject"), times=50, **files)
    summary(site.pull(tmp_path / "target", retry="60s"))
    assert burst.fired == 50
    assert_pulled(tmp_path / "target", large)


def test_waits_grow(site: Site, large: LargeArtifact) -> None:
    """OBJ-01: a request that keeps failing is repeated more and more slowly, not at once."""
    key = site.base(large) + "README.md"
    site.proxy.add(internal_error(), "PutObject", key=key, times=5)
    site.push(large, retry="30s").ok()
    site.proxy.settle()
    waits = gaps(site.proxy.requests("PutObject", key=key))
    assert len(waits) == 5
    for number, wait in enumerate(waits):
        assert wait >= 0.1 * 2**number, waits


def test_no_request_comes_before_the_store_wants_it(site: Site, large: LargeArtifact) -> None:
    """OBJ-01: Retry-After holds back all requests, not only the one that was refused."""
    site.proxy.add(slow_down("2"), "PutObject", times=1, key="*/README.md")
    site.push(large, retry="30s").ok()
    site.proxy.settle()
    [refused] = [r for r in site.proxy.log if r.status == 503]
    assert refused.ended
    early = [r for r in site.proxy.log if refused.ended + 0.5 < r.began < refused.ended + 1.9]
    assert early == []


def test_fewer_requests_at_once_after_throttling(site: Site, large: LargeArtifact) -> None:
    """OBJ-01: a store that has too much to do gets fewer requests from then on."""
    site.proxy.add(Delay(0.3))
    site.proxy.add(slow_down(), "HeadObject", times=8)
    site.push(large, "--jobs", "8", retry="30s").ok()
    site.proxy.settle()
    last = max(r.ended or 0 for r in site.proxy.log if r.status == 503)
    before = [r for r in site.proxy.log if r.began < last]
    after = [r for r in site.proxy.log if last + 0.1 < r.began < last + 0.9]
    assert most_at_once(before) == 8
    assert 1 <= most_at_once(after) <= 5


@pytest.mark.parametrize("action", [slow_down(), slow_down("60"), internal_error()])
def test_a_store_that_only_fails_is_given_up(
    site: Site, large: LargeArtifact, tmp_path: Path, action: Action
) -> None:
    """OBJ-01: after the time that the user allows, even if the store asks for more."""
    site.proxy.add(action)
    for result in (
        site.push(large, retry="1s"),
        site.pull(tmp_path / "target", retry="1s"),
    ):
        fail_cleanly(result, 6, "gave up after 1 s", "--retry-for", "run the same command again")
        assert result.seconds < 5
    site.proxy.remove()
    site.assert_unpublished(large)


# -------------------------------------------------------------- OBJ-02: early ends

CUTS = {
    "length": CutBody(0.6),
    "chunked": CutBody(0.6, chunked=True),
    "reset": CutBody(0.6, reset=True),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_answers_that_end_early_are_taken_up_where_they_broke(
    site: Site, published: LargeArtifact, tmp_path: Path, cut: CutBody
) -> None:
    """OBJ-02: pointer, manifest and weights; of the weights little comes twice."""
    for path in ("refs/latest.json", f"*/{MANIFEST}", "*.safetensors"):
        site.proxy.add(cut, "GetObject", key=f"{site.prefix}/{path}", times=1)
    site.pull(tmp_path / "target").ok()
    assert_pulled(tmp_path / "target", published)
    site.proxy.settle()
    broken = [r for r in site.proxy.log if r.cut]
    assert len(broken) == 3
    again = site.proxy.sent("GetObject", key="*.safetensors") - published.payload
    # A reset drops what is under way; without a length, the read that meets the end is lost.
    most = 3 * MIB if cut.reset else MIB if cut.chunked else MIB // 4
    assert again <= most


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_answers_to_a_push_that_end_early(site: Site, large: LargeArtifact, cut: CutBody) -> None:
    """OBJ-02: listings and results of uploads."""
    rules = [
        site.proxy.add(cut, op, times=1)
        for op in ("ListObjectsV2", "CreateMultipartUpload", "CompleteMultipartUpload")
    ]
    site.push(large).ok()
    assert [rule.fired for rule in rules] == [1, 1, 1]
    site.proxy.remove()
    keys = {upload.key for upload in site.s3.uploads(site.bucket)}
    assert keys <= {site.base(large) + large.largest}  # its id was in the answer that broke
    for upload in site.s3.uploads(site.bucket):
        assert site.s3.parts(site.bucket, upload) == []
        site.s3._client.abort_multipart_upload(
            Bucket=site.bucket, Key=upload.key, UploadId=upload.id
        )
    site.assert_published(large)


def test_answers_that_always_end_early(
    site: Site, published: LargeArtifact, tmp_path: Path
) -> None:
    """OBJ-02: ends with STORE once nothing more comes; the file never gets its name."""
    site.proxy.add(CutBody(0.6), "GetObject", key="*-dense-*")
    result = site.pull(tmp_path / "target", "--jobs", "1", retry="2s")
    fail_cleanly(result, 6, published.largest, "ended", "gave up")
    assert_not_finished(tmp_path / "target", published, published.largest)
    site.proxy.remove()
    site.pull(tmp_path / "target").ok()
    assert_pulled(tmp_path / "target", published)


@pytest.mark.parametrize("reset", [False, True])
def test_uploads_that_break(site: Site, large: LargeArtifact, *, reset: bool) -> None:
    """OBJ-02: a part whose connection dies is sent again, and no other."""
    site.proxy.add(CutUpload(WITHIN, reset=reset), "UploadPart", times=1)
    site.proxy.add(CutUpload(10, reset=reset), "PutObject", key="*/config.json", times=1)
    site.push(large).ok()
    assert site.sent(large) <= large.payload + WITHIN + MIB
    assert sorted(site.parts_done()) == [1, 2, 3]
    site.assert_published(large)


def test_uploads_that_always_break(site: Site, large: LargeArtifact) -> None:
    """OBJ-02: ends with STORE; the next push sends only what is missing."""
    site.proxy.add(CutUpload(WITHIN), "UploadPart", where=lambda r: r.query["partNumber"] == "2")
    site.fails(large, 6, large.largest, "gave up after", "run the same command again", retry="1s")
    site.proxy.remove()
    site.proxy.log.clear()
    site.push(large).ok()
    assert 2 in site.parts_done()
    site.assert_published(large)


@pytest.mark.parametrize("op", ["UploadPart", "PutObject", "CompleteMultipartUpload"])
def test_the_answer_is_lost_but_the_work_was_done(
    site: Site, large: LargeArtifact, op: str
) -> None:
    """OBJ-02: what was finished unseen is found to be there; nothing is damaged or left over."""
    rule = site.proxy.add(LoseAnswer(), op, key=site.base(large) + "*", times=1)
    result = summary(site.push(large))
    assert rule.fired == 1
    assert result["sent_files"] == len(large.digests)
    assert result["sent_bytes"] == result["bytes"]
    site.assert_published(large)


# ------------------------------------------------------- OBJ-04: right length, wrong bytes


def test_a_bit_that_flips_once_on_the_way_down(
    site: Site, published: LargeArtifact, tmp_path: Path
) -> None:
    """OBJ-04: that chunk is fetched again, and nothing else."""
    site.proxy.add(Flip(CHUNK + 5), "GetObject", key="*-dense-*", times=1)
    result = summary(site.pull(tmp_path / "target"))
    assert result["refetched_chunks"] == 1
    assert_pulled(tmp_path / "target", published)
    site.proxy.settle()
    assert site.proxy.sent("GetObject", key="*.safetensors") <= published.payload + CHUNK


def test_a_bit_that_always_flips_on_the_way_down(
    site: Site, published: LargeArtifact, tmp_path: Path
) -> None:
    """OBJ-04: the message names the key and both digests; bad bytes get no final name."""
    site.proxy.add(Flip(5), "GetObject", key="*-dense-*")
    result = site.pull(tmp_path / "target")
    key = site.base(published) + published.largest
    fail_cleanly(result, 6, key, "expected", "found", "push the artifact again")
    assert len(set(re.findall(r"\b[0-9a-f]{32}\b", result.stderr))) == 2
    assert_not_finished(tmp_path / "target", published, published.largest)


@pytest.mark.parametrize("path", [MANIFEST, "config.json"])
def test_a_flipped_bit_in_a_small_file(
    site: Site, published: LargeArtifact, tmp_path: Path, path: str
) -> None:
    """OBJ-04: once: the file is fetched again; always: refused, by name, and not kept."""
    once = site.proxy.add(Flip(20), "GetObject", key=f"*/{path}", times=1)
    result = site.pull(tmp_path / "once")
    if path == MANIFEST:  # its digest is the version's name: nothing else to compare with
        assert result.status in (0, 4)
    else:
        result.ok()
        assert_pulled(tmp_path / "once", published)
    site.proxy.remove(once)
    site.proxy.add(Flip(20), "GetObject", key=f"*/{path}")
    result = site.pull(tmp_path / "always")
    fail_cleanly(result, result.status, f"{site.base(published)}{path}", "expected", "found")
    assert result.status in (4, 6)
    if (tmp_path / "always").exists():
        assert_not_finished(tmp_path / "always", published, path)


@pytest.mark.parametrize("options", [(), ("--checksum", "when-required")], ids=["crc", "md5"])
def test_a_bit_that_flips_once_on_the_way_up(
    site: Site, large: LargeArtifact, options: tuple[str, ...]
) -> None:
    """OBJ-04: the store refuses it, with checksums and without, and it is sent again."""
    part = site.proxy.add(FlipUpload(WITHIN), "UploadPart", times=1)
    small = site.proxy.add(FlipUpload(3), "PutObject", key="*/README.md", times=1)
    site.push(large, *options).ok()
    assert part.fired == small.fired == 1
    site.assert_published(large)


@pytest.mark.parametrize("path", ["*-dense-*", "*/config.json", f"*/{MANIFEST}"])
def test_a_bit_that_always_flips_on_the_way_up(site: Site, large: LargeArtifact, path: str) -> None:
    """OBJ-04: given up after some tries, by name; nothing wrong is published."""
    flips = site.proxy.add(FlipUpload(3), ("UploadPart", "PutObject"), key=path)
    site.fails(large, 6, site.base(large), "the store answered 400")
    assert 2 <= flips.fired <= 12
    site.proxy.remove()
    site.push(large).ok()
    site.assert_published(large)
