"""Reading from stores: markers, many files, objects replaced meanwhile, ranges, stalls."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from mxconvert.manifest import MANIFEST_NAME
from tests.pull_base import (
    CHUNK,
    COMMANDS,
    PREFIX,
    QUICK,
    SPAN,
    WEIGHTS,
    Place,
    Published,
    command,
    contents,
    manifest_of,
    noise,
    small_files,
    summary,
    write_folder,
)
from tests.support import fail_cleanly, shell
from tests.support.faults import (
    Action,
    Call,
    CutBody,
    EmptyPage,
    Flip,
    IgnoreConditions,
    IgnoreRange,
    NeverAnswer,
    PageSize,
    SetHeaders,
    SilentListener,
    Stall,
    StrangeTokens,
    access_denied,
    closed_endpoint,
    invalid_range,
)
from tests.support.publish import artifact_id, publish, put_ref
from tests.support.runs import arm, events

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.faults import Exchange
    from tests.support.runs import Reference

SIZE = 8 * SPAN


@pytest.fixture
def made(place: Place) -> Published:
    """Weights of eight requests."""
    return place.publish(small_files(SIZE))


# ------------------------------------------------- OBJ-11: markers and empty objects


def test_folder_markers_are_ignored(place: Place) -> None:
    """Zero-byte keys that end in a slash are no files; real empty files are."""
    files = small_files() | {"__init__.py": b"", "sub/x.json": b"{}", "sub/empty.txt": b""}
    made = place.publish(files)
    for key in ("", "sub/", "other/", made.id[:16] + "/"):
        place.s3.put(place.bucket, f"{PREFIX}/{key}", b"")
        if not key.startswith(made.id[:16]):
            place.s3.put(place.bucket, made.base + key, b"")
    place.pull().ok()
    made.assert_whole(place.target)
    assert (place.target / "__init__.py").stat().st_size == 0
    versions = shell("list", place.url(), "--json", *QUICK).ok().json()["versions"]
    assert [version["files"] for version in versions] == [len(files)]
    assert summary(shell("gc", place.url(), "--json", *QUICK))["leftovers"] == []


def test_empty_files_are_pushed(place: Place, reference: Reference, tmp_path: Path) -> None:
    """Sent, listed with size 0, and fetched back."""
    made = place.publish(small_files() | {"empty.txt": b"", "sub/__init__.py": b""}, tag=None)
    folder = place.folder / "artifact-1"
    shell("push", folder, place.url("pushed"), *QUICK).ok()
    sizes = {
        key: place.s3.head(place.bucket, f"pushed/{made.id[:16]}/{key}")["ContentLength"]
        for key in ("empty.txt", "sub/__init__.py")
    }
    assert set(sizes.values()) == {0}
    place.pull(place.url("pushed")).ok()
    made.assert_whole(place.target)


def test_a_file_that_is_also_a_folder(place: Place) -> None:
    """A store can hold `sub` and `sub/x.json`; a folder cannot: told before a byte comes."""
    files = small_files() | {"sub/x.json": b"{}"}
    manifest = manifest_of(files | {"sub": b""})
    folder = write_folder(place.folder / "clash", files, manifest)
    publish(place.s3, place.bucket, folder, PREFIX)
    place.fails(4, "'sub'", "'sub/x.json'")
    assert not place.target.exists()
    assert place.fetched() == 0


# -------------------------------------------------------------- OBJ-16: more than a page


def test_more_files_than_a_page(place: Place) -> None:
    """Pages of 10, one of them empty, strange tokens, a neighbour that begins alike."""
    many = {f"experts/{n:03}.json": b"%d" % n for n in range(45)}
    made = place.publish(small_files() | many)
    place.publish(small_files() | {"stranger.json": b"{}"}, prefix=PREFIX + "-other")
    for action in (PageSize(10), StrangeTokens(), EmptyPage()):
        place.proxy.add(action, "ListObjectsV2")
    place.pull().ok()
    made.assert_whole(place.target)
    assert place.proxy.requests("ListObjectsV2") == []
    place.s3.delete(place.bucket, made.base + MANIFEST_NAME)
    assert [(v["folder"], v["id"]) for v in versions(place)] == [(made.id[:16], None)]
    older = ("--older-than", "0.001s")
    found = summary(shell("gc", place.url(), "--json", *older, *QUICK))["leftovers"]
    assert len(found) == len(made.files) - 1
    assert len(place.proxy.requests("ListObjectsV2")) >= 2 * 5


def versions(place: Place) -> list[dict]:
    return shell("list", place.url(), "--json", *QUICK).ok().json()["versions"]


@pytest.mark.slow
def test_2350_files(place: Place) -> None:
    """At the server's own page size."""
    many = {f"experts/{n:04}.json": b"%d" % n for n in range(2350)}
    files = small_files() | many
    folder = write_folder(place.folder / "many", files, manifest_of(files))
    found = artifact_id(folder)
    paths = [path for path in folder.rglob("*") if path.is_file()]

    def put(path: Path) -> None:
        key = f"{PREFIX}/{found[:16]}/{path.relative_to(folder).as_posix()}"
        place.s3.put(place.bucket, key, path.read_bytes())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, paths))
    put_ref(place.s3, place.bucket, PREFIX, "latest", found)
    place.publish(small_files() | {"stranger.json": b"{}"}, prefix=PREFIX + "-other")
    place.proxy.add(EmptyPage(), "ListObjectsV2")
    place.proxy.add(StrangeTokens(), "ListObjectsV2")
    place.pull().ok()
    assert contents(place.target) == contents(folder)
    place.s3.delete(place.bucket, f"{PREFIX}/{found[:16]}/{MANIFEST_NAME}")
    older = ("--older-than", "0.001s")
    left = summary(shell("gc", place.url(), "--json", *older, *QUICK))["leftovers"]
    assert len(left) == len(files)


# ---------------------------------------------------------- OBJ-17: replaced meanwhile


def replace_after(place: Place, made: Published, ranges: int, data: bytes) -> Action:
    """Replace the weights once so many of their ranges have been answered."""
    key = made.base + WEIGHTS
    swap = Call(lambda _: place.s3.put(place.bucket, key, data))
    place.proxy.add(swap, "GetObject", key=f"*/{WEIGHTS}", skip=ranges, times=1)
    return swap


def assert_never_mixed(place: Place, made: Published) -> None:
    """No final name; once the object is back, the same command ends well."""
    made.assert_unfinished(place.target)
    assert not (place.target / WEIGHTS).exists()
    place.proxy.remove()
    place.s3.put(place.bucket, made.base + WEIGHTS, made.files[WEIGHTS])
    found = summary(place.pull(None, "--json"))
    made.assert_whole(place.target)
    assert found["resumed_bytes"] >= 3 * SPAN


@pytest.mark.parametrize("jobs", [1, 4])
def test_replaced_by_other_bytes(place: Place, made: Published, jobs: int) -> None:
    """If-Match tells: 412. The new object is tried, once."""
    replace_after(place, made, 3, noise(SIZE, seed=9))
    place.fails(6, made.base + WEIGHTS, "was replaced during the pull", options=("-j", jobs))
    assert place.proxy.requests("GetObject", where=lambda r: "if-match" in r.headers)
    assert_never_mixed(place, made)


def test_replaced_by_another_size(place: Place, made: Published) -> None:
    replace_after(place, made, 3, noise(SIZE + 5, seed=9))
    place.fails(6, made.base + WEIGHTS, "replaced during the pull", f"{SIZE + 5} bytes")
    assert_never_mixed(place, made)


def test_replaced_again_and_again(place: Place, made: Published) -> None:
    """Is given up."""
    data = [noise(SIZE, seed) for seed in (8, 9)]
    swap = Call(
        lambda _: place.s3.put(place.bucket, made.base + WEIGHTS, data.pop() if data else b"")
    )
    place.proxy.add(swap, "GetObject", key=f"*/{WEIGHTS}", skip=3, times=2)
    place.fails(6, made.base + WEIGHTS, "replaced", options=("-j", 1))
    assert_never_mixed(place, made)


def test_replaced_by_the_same_bytes(place: Place, made: Published) -> None:
    """As by a second push in parts: another tag, the right bytes. Goes on, and loses nothing."""

    def send_in_parts(_: Exchange) -> None:
        client = place.s3.client()
        where = {"Bucket": place.bucket, "Key": made.base + WEIGHTS}
        upload = client.create_multipart_upload(**where)["UploadId"]
        data = made.files[WEIGHTS]
        part = client.upload_part(**where, UploadId=upload, PartNumber=1, Body=data)
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload=parts)

    place.proxy.add(Call(send_in_parts), "GetObject", key=f"*/{WEIGHTS}", skip=3, times=1)
    place.pull(None, "-j", 1).ok()
    made.assert_whole(place.target)
    tags = {
        r.headers.get("if-match") for r in place.proxy.requests("GetObject", key=f"*/{WEIGHTS}")
    }
    assert len(tags) == 2
    assert place.fetched(WEIGHTS) < SIZE + 2 * SPAN


def test_store_that_ignores_if_match(place: Place, made: Published) -> None:
    """The new tag in the answer tells."""
    place.proxy.add(IgnoreConditions(), "GetObject")
    replace_after(place, made, 3, noise(SIZE, seed=9))
    place.fails(6, made.base + WEIGHTS, "was replaced during the pull")
    assert_never_mixed(place, made)


def test_store_that_tells_nothing(place: Place, made: Published) -> None:
    """The same tag for other bytes: the digests of the chunks tell."""
    etag = place.s3.head(place.bucket, made.base + WEIGHTS)["ETag"]
    place.proxy.add(IgnoreConditions(), "GetObject")
    place.proxy.add(SetHeaders(ETag=etag), ("GetObject", "HeadObject"), key=f"*/{WEIGHTS}")
    replace_after(place, made, 3, noise(SIZE, seed=9))
    place.fails(6, made.base + WEIGHTS, "XXH3-128: expected", "found")
    assert_never_mixed(place, made)


# ---------------------------------------------------------- OBJ-18: Range is ignored


@pytest.mark.parametrize("begun", [False, True])
def test_store_that_ignores_ranges(place: Place, made: Published, *, begun: bool) -> None:
    """200 with all bytes to a request for some: nothing is appended or misplaced."""
    if begun:
        rule = place.proxy.add(access_denied(), "GetObject", key=f"*/{WEIGHTS}", skip=3)
        place.fails(6, WEIGHTS, options=("-j", 1))
        place.proxy.remove(rule)
    rule = place.proxy.add(IgnoreRange(), "GetObject", header="range")
    place.pull().ok()
    made.assert_whole(place.target)
    assert rule.fired > 1


@pytest.mark.parametrize("jobs", [1, 8])
def test_files_come_in_one_stream_where_ranges_are_ignored(place: Place, jobs: int) -> None:
    """Or each of many requests would have the store send the file from its first byte."""
    others = {f"model-{number}.bin": noise(9 * CHUNK, number) for number in range(2)}
    made = place.publish(small_files(80 * CHUNK + 77) | others)
    place.proxy.add(IgnoreRange(), "GetObject", header="range")
    place.pull(None, "-j", jobs).ok()
    made.assert_whole(place.target)
    asked = place.proxy.requests("GetObject", key=f"*/{WEIGHTS}")
    assert len(asked) <= jobs + 2  # the first one, those under way when one showed it, the stream
    if jobs == 1:  # what is known by then holds for the files that follow
        assert len(place.proxy.requests("GetObject", key="*.bin")) == 2


def test_one_stream_that_breaks_off(place: Place) -> None:
    """Goes on at the byte where it broke; what is dropped on the way is no progress."""
    made = place.publish(small_files(20 * CHUNK + 77))
    place.proxy.add(IgnoreRange(), "GetObject", header="range")
    place.proxy.add(CutBody(), "GetObject", key=f"*/{WEIGHTS}", skip=2, times=1)
    place.pull(None, "-j", 1, "--retry-for", "20s").ok()
    made.assert_whole(place.target)


def test_one_stream_with_a_flipped_bit(place: Place) -> None:
    """Only the chunk is written again."""
    made = place.publish(small_files(20 * CHUNK + 77))
    place.proxy.add(IgnoreRange(), "GetObject", header="range")
    place.proxy.add(Flip(10 * CHUNK), "GetObject", key=f"*/{WEIGHTS}", skip=2, times=1)
    found = summary(place.pull(None, "--json", "-j", 1))
    made.assert_whole(place.target)
    assert found["refetched_chunks"] == 1


def test_complete_partial_file(place: Place, made: Published) -> None:
    """Asks for nothing: there is no range behind the end, no 416."""
    assert place.run("-j", "1", env=arm("pull.before-sync=kill")).status == -9
    place.proxy.log.clear()
    place.proxy.add(invalid_range(), "GetObject", key=f"*/{WEIGHTS}")
    place.pull().ok()
    made.assert_whole(place.target)
    assert place.proxy.requests(key=f"*/{WEIGHTS}") == []


def test_unsatisfiable_ranges(place: Place, made: Published) -> None:
    """A store that answers 416 to what it has: an error, no empty file."""
    place.proxy.add(invalid_range(), "GetObject", key=f"*/{WEIGHTS}")
    place.fails(6, made.base + WEIGHTS, "416")
    made.assert_unfinished(place.target)
    assert not (place.target / WEIGHTS).exists()


# -------------------------------------------------------------------- OBJ-19: stalls


def test_body_that_stalls(place: Place) -> None:
    """A head and 1 MiB, then nothing: a new connection goes on where it stopped."""
    made = place.publish(small_files(2**21), chunk_size=2**19)
    rule = place.proxy.add(Stall(2**20), "GetObject", key=f"*/{WEIGHTS}", times=1)
    begin = time.monotonic()
    found = summary(place.pull(None, "--json", "--retry-for", "20s"))
    made.assert_whole(place.target)
    assert rule.fired == 1
    assert 2 <= time.monotonic() - begin < 20
    assert found["retries"] == 1
    ranges = [r.range for r in place.proxy.requests("GetObject", key=f"*/{WEIGHTS}")]
    assert f"bytes={2**20}-{2**21 - 1}" in ranges
    assert place.fetched(WEIGHTS) == 2**21


def test_body_that_always_stalls(place: Place, made: Published) -> None:
    """Ends with the time that was waited; no progress is shown where there is none."""
    place.proxy.add(Stall(0), "GetObject", key=f"*/{WEIGHTS}")
    begin = time.monotonic()
    result = place.pull(None, "--json", "--retry-for", "3s")
    fail_cleanly(result, 6)
    error = result.stderr + result.stdout  # in a process of its own: stderr
    assert "no byte came in time" in error
    assert "s without progress" in error
    assert time.monotonic() - begin < 20
    done = [event["bytes_done"] for event in events(result, "progress")]
    assert max(done, default=0) <= made.payload - SIZE
    made.assert_unfinished(place.target)


@pytest.mark.parametrize("op", ["HeadObject", "GetObject"])
def test_request_that_is_never_answered(place: Place, made: Published, op: str) -> None:
    rule = place.proxy.add(NeverAnswer(), op, key=f"*/{WEIGHTS}", times=1)
    place.pull(None, "--retry-for", "20s").ok()
    assert rule.fired == 1
    made.assert_whole(place.target)


@pytest.mark.parametrize("times", [1, None])
def test_upload_that_is_never_answered(
    place: Place, reference: Reference, times: int | None
) -> None:
    """The bytes are taken, and then silence."""
    place.proxy.add(NeverAnswer(), "PutObject", key="*.safetensors", times=times)
    result = shell("push", reference.target, place.url(), *QUICK, "--retry-for", "5s")
    if times:
        result.ok()
        place.pull().ok()
        return
    fail_cleanly(result, 6, "no byte came in time", "s without progress")
    assert {version["id"] for version in versions(place)} <= {None}


@pytest.mark.parametrize("name", ["pull", "push", "list"])
def test_tls_that_never_completes(place: Place, reference: Reference, name: str) -> None:
    with SilentListener() as silent:
        options = [f"--store-option=endpoint={silent.endpoint}", "--store-option=connect_timeout=1"]
        result = command(name, place, reference.target, place.url(), *options)
        fail_cleanly(result, 6, silent.endpoint, "s without progress")
        assert silent.accepted > 1
    assert result.seconds < 15


@pytest.mark.parametrize("name", COMMANDS)
def test_server_that_is_not_there(place: Place, reference: Reference, name: str) -> None:
    endpoint = closed_endpoint()
    options = (f"--store-option=endpoint={endpoint}", "--retry-for", "3s")
    begin = time.monotonic()
    result = command(name, place, reference.target, place.url(), *options)
    fail_cleanly(result, 6, endpoint, "refused", "s without progress")
    assert time.monotonic() - begin < 2 * 3  # not once more for each probe that is removed
