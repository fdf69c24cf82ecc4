"""Stores that speak S3 in their own way: tags, checksums, listings, limits, keys."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from mxconvert.errors import UsageError
from mxconvert.store import PartLimits
from mxconvert.transfer.parts import plan_parts
from tests.push_base import Site, assert_pulled
from tests.support import bf16_model, fail_cleanly, shell
from tests.support.faults import (
    ChangeETag,
    HideKeys,
    StripChecksums,
    WholeChecksum,
    etag_base64,
    etag_none,
    etag_of_parts,
    etag_random,
    no_checksums,
    with_checksum,
)
from tests.support.large import (
    MANIFEST,
    MIB,
    LargeArtifact,
    json_lines,
    large_model,
    make_large,
    notices,
    summary,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.faults import Headers

# ------------------------------------------------------------- OBJ-03: an ETag is no MD5

ETAGS = {"parts": etag_of_parts, "base64": etag_base64, "random": etag_random, "none": etag_none}
WHOLE = ("PutObject", "GetObject", "HeadObject", "CopyObject", "CompleteMultipartUpload")


@pytest.mark.parametrize("strip", [False, True], ids=["checksums", "no-checksums"])
@pytest.mark.parametrize("make", ETAGS.values(), ids=ETAGS)
def test_etags_of_any_form(
    site: Site,
    large: LargeArtifact,
    tmp_path: Path,
    make: Callable[[str], str | None],
    *,
    strip: bool,
) -> None:
    """OBJ-03: integrity rests on our digests, with the store's checksums and without."""
    site.proxy.add(ChangeETag(make), WHOLE)
    if strip:
        site.proxy.add(StripChecksums())
    tags = ("--no-latest",) if make is etag_none else ()
    site.push(large, *tags).ok()
    again = summary(site.push(large, *tags))
    assert again["present_files"] == len(large.files) + 1  # the manifest
    version = f"@{large.version}"
    site.pull(tmp_path / "target", version=version).ok()
    assert_pulled(tmp_path / "target", large)
    site.run("verify", site.url + version).ok()
    site.proxy.remove()
    site.assert_published(large, tag=None if tags else "latest")


def test_tags_of_a_store_without_etags(site: Site, large: LargeArtifact) -> None:
    """OBJ-03: they could not be moved safely, so they are not moved, and the user is told."""
    site.proxy.add(ChangeETag(etag_none), WHOLE)
    assert "no-tags" in notices(site.push(large).ok())
    fail_cleanly(site.push(large, "--tag", "v1"), 6, "does not honour conditional writes")
    assert site.s3.keys(site.bucket, f"{site.prefix}/refs/") == []


def test_parts_are_answered_without_a_tag(site: Site, large: LargeArtifact) -> None:
    """OBJ-03: a part's tag is looked up in the list of parts."""
    site.proxy.add(ChangeETag(etag_none), "UploadPart")
    site.push(large).ok()
    site.assert_published(large)


# ------------------------------------------------- OBJ-05: stores without the newer checksums

NEWER = ("x-amz-checksum-", "x-amz-sdk-checksum", "x-amz-trailer")


def newer_checksums(headers: Headers) -> list[str]:
    """Return the fields that only newer stores know."""
    names = [name.lower() for name, _ in headers]
    found = [name for name in names if name.startswith(NEWER) and not name.endswith("-mode")]
    if "aws-chunked" in (headers.get("content-encoding") or ""):
        found.append("aws-chunked")
    return found


@pytest.mark.parametrize("status", [400, 501])
def test_a_store_that_refuses_checksums(
    site: Site, large: LargeArtifact, tmp_path: Path, status: int
) -> None:
    """OBJ-05: works by itself; the user is told once, and how to prove what the store holds."""
    site.proxy.add(no_checksums(status), where=with_checksum)
    result = site.push(large).ok()
    [told] = [e for e in json_lines(result, "notice") if e["code"] == "no-store-checksums"]
    assert "mxconvert verify" in told["message"]
    site.proxy.settle()
    refused = [r for r in site.proxy.log if r.status == status]
    assert len(refused) == 1  # the first request: nothing large is sent in vain
    site.pull(tmp_path / "target").ok()
    assert_pulled(tmp_path / "target", large)
    site.run("verify", site.url).ok()
    site.assert_published(large)


@pytest.mark.parametrize("status", [400, 501])
def test_only_uploads_in_parts_refuse_checksums(
    site: Site, large: LargeArtifact, status: int
) -> None:
    """OBJ-05: found out where it happens first, whichever request that is."""
    ops = ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload")
    for op in ops:
        site.proxy.add(no_checksums(status), op, where=with_checksum)
    assert "no-store-checksums" in notices(site.push(large, "--no-latest").ok())
    site.assert_published(large, tag=None)


def test_a_store_that_refuses_checksums_of_parts_only(site: Site, large: LargeArtifact) -> None:
    """OBJ-05: the upload was begun with checksums; its parts are taken without."""
    site.proxy.add(no_checksums(), ("UploadPart", "CompleteMultipartUpload"), where=with_checksum)
    assert "no-store-checksums" in notices(site.push(large).ok())
    site.assert_published(large)


def test_checksums_that_the_user_insists_on(site: Site, large: LargeArtifact) -> None:
    """OBJ-05: the message names the one option to change."""
    site.proxy.add(no_checksums(), where=with_checksum)
    options = ("--checksum", "always")
    result = site.fails(large, 6, "x-amz-checksum is not supported", options=options)
    assert "--checksum when-required" in result.stderr
    assert "conditional" not in result.stderr


def test_no_checksums_where_none_are_wanted(site: Site, large: LargeArtifact) -> None:
    """OBJ-05: not one request has a field of the newer kinds; no notice, as it was asked for."""
    assert not notices(site.push(large, "--checksum", "when-required").ok())
    site.proxy.settle()
    assert [r.op for r in site.proxy.log if newer_checksums(r.headers)] == []
    bodies = [r for r in site.proxy.log if r.op in ("PutObject", "UploadPart")]
    assert all("content-md5" in r.headers for r in bodies)
    site.assert_published(large)


@pytest.mark.parametrize("checksum", [None, "AAAAAAAAAAA="], ids=["whole", "wrong"])
def test_checksum_of_the_whole_object_with_a_range(
    site: Site, published: LargeArtifact, tmp_path: Path, checksum: str | None
) -> None:
    """OBJ-05: it is not taken for one of the range."""
    rule = site.proxy.add(WholeChecksum(checksum), "GetObject")
    site.pull(tmp_path / "target").ok()
    assert rule.fired
    assert_pulled(tmp_path / "target", published)


# ------------------------------------------------------------------ OBJ-08: stale listings


def test_listings_that_lag_behind(site: Site, published: LargeArtifact, tmp_path: Path) -> None:
    """OBJ-08: push, pull and verify go by manifests; a longer sidecar arrives whole."""
    model = large_model()
    card = model.sidecars["README.md"] + b"longer than before\n" * 20
    longer = dataclasses.replace(model, sidecars=model.sidecars | {"README.md": card})
    second = make_large(tmp_path, longer)
    rule = site.proxy.add(HideKeys(newest=2), "ListObjectsV2", times=3)
    assert second.files["README.md"] > published.files["README.md"]
    site.push(second).ok()
    site.pull(tmp_path / "target").ok()
    assert_pulled(tmp_path / "target", second)
    report = site.run("verify", site.url, "--json")
    assert report.ok().json()["ok"]
    assert rule.fired
    site.proxy.remove()
    site.assert_published(second)
    site.assert_published(published, tag=None)


def test_nothing_depends_on_listings(site: Site, large: LargeArtifact, tmp_path: Path) -> None:
    """OBJ-08: even where they stay empty."""
    site.proxy.add(HideKeys(where=lambda _key: True), "ListObjectsV2")
    site.push(large).ok()
    site.pull(tmp_path / "target").ok()
    assert_pulled(tmp_path / "target", large)
    site.run("verify", site.url).ok()
    site.assert_published(large)


# --------------------------------------------------------------- OBJ-09: limits of parts

HUGE = 52_428_800_001
GIB = 2**30
S3_LIMITS = PartLimits(object_size=5 * 2**40)
CHUNKS = [MIB, 5 * MIB, 16 * MIB, 7_000_001]


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("asked", [None, 1, 5 * MIB, 100 * MIB, 5 * GIB])
@pytest.mark.parametrize(
    "size", [0, 1, 5 * MIB - 1, 5 * MIB, 5 * MIB + 1, HUGE, S3_LIMITS.object_size]
)
def test_parts_keep_to_the_limits(size: int, asked: int | None, chunk_size: int) -> None:
    """OBJ-09: every plan has parts of a size that the store takes, and not too many."""
    plan = plan_parts(size, chunk_size=chunk_size, limits=S3_LIMITS, asked=asked)
    assert 1 <= plan.count <= 10_000
    assert plan.part_size % chunk_size == 0
    ranges = [plan.range(number) for number in range(1, plan.count + 1)]
    sizes = [end - begin for begin, end in ranges]
    assert sum(sizes) == size
    assert ranges[0][0] == 0
    assert all(5 * MIB <= each <= 5 * GIB for each in sizes[:-1])
    assert sizes[-1] > 0 or size == 0
    assert max(sizes) >= min((asked or 0) - chunk_size, size)


@pytest.mark.parametrize("limit", [5 * 2**40, 50 * GIB, 5 * MIB])
def test_larger_than_the_store_takes(limit: int) -> None:
    """OBJ-09: the limit itself goes, one byte more does not; stores differ."""
    limits = dataclasses.replace(S3_LIMITS, object_size=limit)
    plan_parts(limit, chunk_size=16 * MIB, limits=limits)
    with pytest.raises(UsageError, match=str(limit)):
        plan_parts(limit + 1, chunk_size=16 * MIB, limits=limits)


def test_parts_larger_than_the_store_takes() -> None:
    """OBJ-09: refused rather than made smaller without a word."""
    with pytest.raises(UsageError, match="at most 5368709120"):
        plan_parts(1, chunk_size=MIB, limits=S3_LIMITS, asked=5 * GIB + 1)


def sparse(folder: Path, size: int) -> Path:
    """Return an artifact with a file of so many bytes that takes no space, digests made up."""
    shell("quantize", bf16_model().write(folder / "source"), folder / "artifact").ok()
    root = folder / "artifact"
    document: dict[str, Any] = json.loads((root / MANIFEST).read_text())
    [entry] = [e for e in document["files"] if e["path"].startswith("model-dense")]
    document["totals"]["file_bytes"] += size - entry["size"]
    count = -(-size // document["chunk_size"])
    entry["size"] = size
    entry["chunks"] = {"crc64nvme": ["0" * 16] * count, "xxh3_128": ["0" * 32] * count}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    (root / MANIFEST).write_text(text + "\n", encoding="utf-8")
    with (root / entry["path"]).open("r+b") as file:
        file.truncate(size)
    return root


def test_a_file_of_more_than_10000_parts(site: Site, tmp_path: Path) -> None:
    """OBJ-09: parts are made larger, with a notice; nothing is asked of the store."""
    root = sparse(tmp_path, HUGE)
    result = site.run("push", root, site.url, "--part-size", "5MiB", "--dry-run", "--json").ok()
    assert "at most 10000" in notices(result)["part-size-raised"]
    [plan] = json_lines(result, "plan")
    [huge] = [file for file in plan["files"] if file["size"] == HUGE]
    assert huge["parts"] <= 10_000
    assert 5 * MIB <= huge["part_size"] <= 5 * GIB
    assert huge["parts"] == -(-HUGE // huge["part_size"])
    text = site.run("push", root, site.url, "--part-size", "5MiB", "--dry-run").ok()
    assert f"{huge['parts']} parts of" in text.stdout
    assert "instead of 5242880" in text.stderr
    assert site.proxy.settle() == []


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["push", "dry"])
def test_a_file_larger_than_the_store_takes(
    site: Site, tmp_path: Path, dry: tuple[str, ...]
) -> None:
    """OBJ-09: refused before anything is sent, with what to do."""
    root = sparse(tmp_path, HUGE)
    limit = ("--store-option", f"max_object_size={HUGE - 1}")
    result = site.run("push", root, site.url, *limit, *dry)
    fail_cleanly(result, 2, str(HUGE), str(HUGE - 1), "--max-file-size", "max_object_size")
    assert site.proxy.settle() == []


# ------------------------------------------------------------------- OBJ-10: awkward keys

AWKWARD = "model v2 + test/ü😂#1%20@^(a)"
NAMES = ("tokenizer (1).json", "a+b.txt", "100%.md")


def test_awkward_keys(site: Site, tmp_path: Path) -> None:
    """OBJ-10: raw keys are the names; every request's path is what its signature covers."""
    model = large_model()
    extra = {name: f"of {name}".encode() for name in NAMES}
    first = make_large(tmp_path / "1", dataclasses.replace(model, sidecars=model.sidecars | extra))
    assert set(NAMES) <= set(first.files)
    site.prefix = AWKWARD
    site.push(first).ok()
    site.assert_published(first)
    assert set(site.s3.keys(site.bucket)) == {
        *(f"{AWKWARD}/{first.version}/{path}" for path in first.digests),
        f"{AWKWARD}/refs/latest.json",
    }
    site.pull(tmp_path / "target").ok()
    assert_pulled(tmp_path / "target", first)
    site.run("verify", site.url).ok()
    again = summary(site.push(first))
    assert again["present_files"] == len(first.digests)


def test_files_with_awkward_keys_are_copied_inside_the_store(site: Site, tmp_path: Path) -> None:
    """OBJ-10: the source of a copy is escaped as well."""
    model = large_model()
    extra = {name: f"of {name}".encode() for name in NAMES}
    named = dataclasses.replace(model, sidecars=model.sidecars | extra)
    other = dataclasses.replace(named, sidecars=named.sidecars | {"more.txt": b"more"})
    first, second = make_large(tmp_path / "1", named), make_large(tmp_path / "2", other)
    site.prefix = AWKWARD
    site.push(first).ok()
    result = summary(site.push(second))
    assert result["copied_files"] >= len(NAMES) + 3
    site.assert_published(second)
