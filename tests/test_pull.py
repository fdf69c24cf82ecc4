"""`mxconvert pull`: which version is meant, what arrives, what is asked of the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mxconvert.manifest import MANIFEST_NAME
from tests.pull_base import (
    CHUNK,
    INDEX,
    PREFIX,
    SPAN,
    WEIGHTS,
    Place,
    noise,
    small_files,
    summary,
    with_sha256,
)
from tests.support import bf16_model, fail_cleanly, shell, snapshot
from tests.support.faults import Flip
from tests.support.publish import publish
from tests.support.runs import events

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import Reference

# ------------------------------------------------------------------------------- bytes


def test_a_pushed_model_comes_back(place: Place, reference: Reference) -> None:
    """Byte for byte what was pushed; it passes verification, and a later pull fetches nothing."""
    url = place.url()
    pushed = shell("push", reference.target, url, "--json", "--retry-for", "2s").ok()
    first = summary(place.pull(url, "--json"))
    assert snapshot(place.target) == reference.files
    assert first["artifact"] == summary(pushed)["artifact"] == reference.artifact
    shell("verify", place.target).ok()
    assert not first["was_complete"]
    assert first["files"] == first["fetched_files"] == len(reference.files)
    payload = sum((reference.target / name).stat().st_size for name in reference.files)
    assert first["bytes"] == payload
    assert first["fetched_bytes"] == payload - (reference.target / MANIFEST_NAME).stat().st_size
    place.proxy.log.clear()
    again = summary(place.pull(url, "--json"))
    assert again["was_complete"]
    assert again["fetched_bytes"] == again["fetched_files"] == place.fetched() == 0
    assert snapshot(place.target) == reference.files


def test_large_files_are_fetched_in_ranges(place: Place) -> None:
    """Each request asks for a few chunks, pinned to the object that was seen; each byte once."""
    made = place.publish()
    place.pull().ok()
    made.assert_whole(place.target)
    assert place.fetched() == made.payload
    ranges = place.proxy.requests("GetObject", key=f"*/{WEIGHTS}")
    etag = place.s3.head(place.bucket, made.base + WEIGHTS)["ETag"]
    assert {record.headers.get("if-match") for record in ranges} == {etag}
    size = len(made.files[WEIGHTS])
    begins = range(0, size, SPAN)
    expected = {f"bytes={begin}-{min(begin + SPAN, size) - 1}" for begin in begins}
    assert {record.range for record in ranges} == expected


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, SPAN, SPAN + 1])
def test_sizes_around_chunks_and_requests(place: Place, size: int) -> None:
    made = place.publish(small_files(size))
    place.pull().ok()
    made.assert_whole(place.target)


def test_empty_and_nested_files(place: Place) -> None:
    """Names in sub-folders, with spaces and signs, and empty files keep their place."""
    files = small_files() | {
        "sub/dir/file.json": b"{}",
        "sub/__init__.py": b"",
        "empty.txt": b"",
        "tok (1) a+b 100% #1 ü😂.json": b"[1]",
        "deep/" * 20 + "end.txt": b"end",
        "sub/" + "n" * 240 + ".txt": b"long",
    }
    made = place.publish(files)
    place.pull().ok()
    made.assert_whole(place.target)


def test_a_wrong_chunk_is_fetched_again(place: Place) -> None:
    """Only that chunk, and the summary says so."""
    made = place.publish()
    place.proxy.add(Flip(SPAN - 1), "GetObject", key=f"*/{WEIGHTS}", times=1)
    found = summary(place.pull(None, "--json", "-j", "1"))
    made.assert_whole(place.target)
    assert found["refetched_chunks"] == 1
    assert place.fetched() == made.payload + CHUNK


def test_order_of_files(place: Place) -> None:
    """Large files first, the index after all others, the manifest as the last to be written."""
    made = place.publish(small_files() | {"b.bin": noise(3 * SPAN), "a.txt": b"a"})
    result = place.pull(None, "--json", "-j", "1").ok()
    finished = [event["path"] for event in events(result, "file")]
    assert finished[:2] == ["b.bin", WEIGHTS]
    assert finished[-1] == INDEX
    assert set(finished) == made.files.keys() - {MANIFEST_NAME}
    at = {path: (place.target / path).stat().st_mtime_ns for path in made.files}
    assert max(at, key=at.__getitem__) == MANIFEST_NAME


def test_many_small_files(place: Place) -> None:
    """Every one of them arrives, with two requests each."""
    many = {f"sub{n % 7}/{n:04}.json": b"%d" % n for n in range(100)}
    made = place.publish(small_files() | many)
    place.pull().ok()
    made.assert_whole(place.target)
    assert len(place.proxy.settle()) <= 2 * len(made.files) + 3


def test_a_model_that_was_made_of_several_shards(place: Place, tmp_path: Path) -> None:
    """The layouts of `quantize` with several files, each of several chunks."""
    source = bf16_model(layers=1, experts=2).split(3).write(tmp_path / "source")
    shell("quantize", source, tmp_path / "artifact", "--layout", "source").ok()
    publish(place.s3, place.bucket, tmp_path / "artifact", PREFIX)
    place.pull().ok()
    assert snapshot(place.target) == snapshot(tmp_path / "artifact")
    shell("verify", place.target).ok()


def test_chunks_of_any_size(place: Place) -> None:
    """The manifest says how large they are."""
    for number, chunk_size in enumerate((1000, 2**24)):
        made = place.publish(prefix=f"p{number}", chunk_size=chunk_size)
        target = place.folder / f"t{number}"
        place.pull(made.url, target=target).ok()
        made.assert_whole(target)


# ---------------------------------------------------------------------------- versions


def test_names_of_versions(place: Place) -> None:
    """URL takes `latest`; URL@ takes a tag, an id or its first 16 digits."""
    old = place.publish(small_files(seed=1), tag="v1")
    new = place.publish(small_files(seed=2))
    for number, (version, made) in enumerate(
        (
            ("", new),
            ("@latest", new),
            ("@v1", old),
            (f"@{old.id}", old),
            (f"@{old.id[:16]}", old),
            (f"@{new.id[:40]}", new),
        )
    ):
        target = place.folder / f"target-{number}"
        place.pull(place.url() + version, target=target).ok()
        made.assert_whole(target)


def test_an_artifact_at_the_url_itself(place: Place) -> None:
    """Of a push with --flat: found before any tag."""
    flat = place.publish(small_files(seed=1), flat=True)
    versioned = place.publish(small_files(seed=2))
    place.pull().ok()
    flat.assert_whole(place.target)
    place.pull(place.url() + "@latest", target=place.folder / "other").ok()
    versioned.assert_whole(place.folder / "other")


def test_the_url_of_a_version_is_a_plain_folder(place: Place) -> None:
    """Engines read it as it is; so does pull."""
    made = place.publish()
    place.pull(f"s3://{place.bucket}/{made.base}").ok()
    made.assert_whole(place.target)


def test_no_such_version(place: Place) -> None:
    """The message names what was asked for, the hint what is there."""
    made = place.publish(tag="v1")
    there = f"{made.id[:16]} (v1)"
    for version, says in (
        ("", "no tag 'latest'"),
        ("@v2", "no tag 'v2'"),
        ("@" + "0" * 16, f"no version {'0' * 16}"),
    ):
        result = place.pull(place.url() + version)
        fail_cleanly(result, 6, place.url(), says, "versions there", there)
        assert not place.target.exists()
    empty = place.pull(place.url("nothing"))
    fail_cleanly(empty, 6, "nothing was pushed there")


def test_a_tag_whose_version_is_gone(place: Place) -> None:
    made = place.publish()
    place.tag("old", "1" * 64)
    fail_cleanly(place.pull(place.url() + "@old"), 6, "'old' points at " + "1" * 64, made.id[:16])


def test_a_version_that_is_not_finished_is_told_as_such(place: Place) -> None:
    """It is there for who lists it, and cannot be pulled."""
    made = place.publish()
    unfinished = "0123456789abcdef"
    place.s3.put(place.bucket, f"{PREFIX}/{unfinished}/config.json", b"{}")
    there = f"versions there: {unfinished} (unfinished), {made.id[:16]} (latest)"
    if made.id < unfinished:
        there = f"versions there: {made.id[:16]} (latest), {unfinished} (unfinished)"
    fail_cleanly(place.pull(f"{place.url()}@{unfinished}"), 6, f"no version {unfinished}", there)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"schema_version": 2, "id": "x"}', b"\xff"])
def test_a_damaged_tag(place: Place, data: bytes) -> None:
    """Is no version; the other versions can still be asked for, and are named."""
    made = place.publish(tag=None)
    place.s3.put(place.bucket, f"{PREFIX}/refs/latest.json", data)
    place.fails(4, "refs/latest.json")
    fail_cleanly(place.pull(place.url() + "@v9"), 6, "no tag 'v9'")
    place.pull(f"{place.url()}@{made.id}").ok()
    made.assert_whole(place.target)


def test_expected_id(place: Place) -> None:
    """Whatever the tag says: another artifact is refused before a file is fetched."""
    made = place.publish()
    wrong = "0" * 16
    place.fails(4, MANIFEST_NAME, f"expected {wrong}", made.id, options=("--expect-id", wrong))
    assert not place.target.exists()
    assert place.fetched() == 0
    place.fails(2, "--expect-id 'abc'", options=("--expect-id", "abc"))
    place.pull(None, "--expect-id", made.id[:20]).ok()
    made.assert_whole(place.target)


@pytest.mark.parametrize("flat", [False, True])
def test_a_changed_manifest_is_refused(place: Place, *, flat: bool) -> None:
    """By the id that names it; at the URL itself nothing but --expect-id can tell."""
    made = place.publish(flat=flat)
    changed = made.files[MANIFEST_NAME].replace(b'"version":"0"', b'"version":"1"')
    assert changed != made.files[MANIFEST_NAME]
    place.s3.put(place.bucket, made.base + MANIFEST_NAME, changed)
    options = ("--expect-id", made.id) if flat else ()
    place.fails(4, made.base + MANIFEST_NAME, made.id, options=options)
    assert not place.target.exists()


def test_a_manifest_that_is_none(place: Place) -> None:
    made = place.publish()
    place.s3.put(place.bucket, made.base + MANIFEST_NAME, b"{}")
    place.fails(4, made.base + MANIFEST_NAME)
    assert not place.target.exists()


# ---------------------------------------------------------------- a part, and the rest


def test_some_files_first(place: Place) -> None:
    """No manifest until the rest is there; what is there is not fetched again."""
    made = place.publish(small_files() | {"b.bin": noise(SPAN)})
    part = summary(place.pull(None, "--include", "*.json", "--include", "b.bin", "--json"))
    assert part["left_files"] == 3
    assert set(snapshot(place.target)) >= {"config.json", "b.bin"}
    assert not (place.target / INDEX).exists()
    made.assert_unfinished(place.target)
    result = place.pull(None, "--include", "config.json").ok()
    assert "pull without --include" in result.stdout
    assert "mxconvert verify" not in result.stdout
    rest = summary(place.pull(None, "--json"))
    made.assert_whole(place.target)
    assert rest["left_files"] == 0
    assert place.fetched() == made.payload
    assert rest["resumed_bytes"] == len(made.files["config.json"]) + SPAN


def test_parts_that_are_all(place: Place) -> None:
    """Globs that cover every file make a finished artifact."""
    made = place.publish()
    found = summary(place.pull(None, "--include", "m*", "--include", "*.json", "--json"))
    made.assert_whole(place.target)
    assert found["left_files"] == 0


def test_a_glob_that_matches_nothing(place: Place) -> None:
    """A typing error, not an empty success."""
    place.publish()
    place.fails(2, "--include *.bin", "matches no file", WEIGHTS, options=("--include", "*.bin"))
    assert not place.target.exists()


# ------------------------------------------------------------------------------ SHA-256


def test_sha256_is_compared_when_asked(place: Place) -> None:
    """XXH3 can be forged: a file with the right chunks and another SHA-256 gets no name."""
    made = place.publish(change=with_sha256(WEIGHTS, "ab" * 32))
    result = place.fails(4, WEIGHTS, "SHA-256: expected " + "ab" * 32, options=("--sha256",))
    assert "tampered" in result.stderr
    assert not (place.target / WEIGHTS).exists()
    made.assert_unfinished(place.target)
    place.pull().ok()
    made.assert_whole(place.target)


def test_sha256_of_what_is_there_already(place: Place) -> None:
    """A finished folder is no proof either: it is read, and a change is told."""
    made = place.publish()
    place.pull().ok()
    place.pull(None, "--sha256").ok()
    (place.target / WEIGHTS).write_bytes(noise(len(made.files[WEIGHTS]), seed=9))
    place.pull().ok()
    place.fails(4, str(place.target / WEIGHTS), "SHA-256", "--overwrite", options=("--sha256",))
    place.pull(None, "--sha256", "--overwrite").ok()
    made.assert_whole(place.target)


def test_sha256_of_what_an_earlier_run_finished(place: Place) -> None:
    """Files that a run without --sha256 has finished are compared as well."""
    place.publish(change=with_sha256("config.json", "ab" * 32))
    place.pull(None, "--include", "config.json").ok()
    place.fails(4, "config.json", "SHA-256", options=("--sha256",))
    assert not (place.target / MANIFEST_NAME).exists()
