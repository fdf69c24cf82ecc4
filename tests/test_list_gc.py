"""`mxconvert list` and `mxconvert gc`: what lies at a store, and what nobody needs there."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import pytest

from mxconvert.manifest import MANIFEST_NAME
from tests.pull_base import PREFIX, QUICK, WEIGHTS, Place, Published, small_files, summary
from tests.support import fail_cleanly, shell, start_cli
from tests.support.faults import (
    Action,
    Call,
    EmptyPage,
    NeverAnswer,
    PageSize,
    StrangeTokens,
    access_denied,
    not_implemented,
)
from tests.support.faults.listing import edit
from tests.support.runs import events

if TYPE_CHECKING:
    from pathlib import Path
    from xml.etree import ElementTree as ET

    from tests.support import Result
    from tests.support.faults import Exchange, Response

UNFINISHED = "0123456789abcdef"
OTHER = "fedcba9876543210"
_SPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"


class Aged(Action):
    """Let listings and heads say that keys are hours old, unless written since."""

    def __init__(self, hours: dict[str, float]) -> None:
        self.hours = hours
        self.since = datetime.now(UTC)

    def response(self, exchange: Exchange, response: Response) -> None:
        if not exchange.request.key:
            edit(response, self._age)
            return
        written, then = response.headers.get("last-modified"), self._then(exchange.request.key)
        if written and then and parsedate_to_datetime(written) <= self.since:
            response.headers.set("last-modified", format_datetime(then, usegmt=True))

    def _then(self, key: str) -> datetime | None:
        hours = next((h for glob, h in self.hours.items() if fnmatchcase(key, glob)), None)
        return None if hours is None else datetime.now(UTC) - timedelta(hours=hours)

    def _age(self, root: ET.Element) -> None:
        for entry in (*root.iter(f"{_SPACE}Contents"), *root.iter(f"{_SPACE}Upload")):
            key = entry.findtext(f"{_SPACE}Key") or ""
            then = self._then(key)
            for name in ("LastModified", "Initiated"):
                time_of = entry.find(f"{_SPACE}{name}")
                if then is not None and time_of is not None:
                    time_of.text = then.strftime("%Y-%m-%dT%H:%M:%S.000Z")


def age(place: Place, **hours: float) -> Aged:
    """Make keys with these words in them hours old; ``rest`` is all others."""
    rest = {"*": hours.pop("rest")} if "rest" in hours else {}
    action = Aged({f"*{word}*": number for word, number in hours.items()} | rest)
    place.proxy.add(action, ("ListObjectsV2", "ListMultipartUploads", "HeadObject"))
    return action


def listed(place: Place, *options: object) -> list[dict[str, Any]]:
    """Return the versions that list shows."""
    document = shell("list", place.url(), *QUICK, "--json", *options).ok().json()
    assert document["type"] == "list"
    assert document["schema_version"] == 1
    assert document["url"] == place.url()
    return document["versions"]


def gc(place: Place, *options: object) -> Result:
    return shell("gc", place.url(), *QUICK, *options)


def leftovers(result: Result) -> dict[str, str]:
    """Return the keys of a ``--json`` run, and what they are."""
    return {item["key"]: item["kind"] for item in summary(result)["leftovers"]}


def upload(place: Place, key: str, data: bytes = b"part") -> str:
    """Leave an unfinished multipart upload; return its id."""
    client = place.s3.client()
    where = {"Bucket": place.bucket, "Key": f"{PREFIX}/{key}"}
    found = client.create_multipart_upload(**where)["UploadId"]
    client.upload_part(**where, UploadId=found, PartNumber=1, Body=data)
    return found


def put(place: Place, key: str, data: bytes = b"left") -> None:
    place.s3.put(place.bucket, f"{PREFIX}/{key}", data)


@pytest.fixture
def made(place: Place) -> Published:
    return place.publish()


@pytest.fixture
def littered(place: Place, made: Published) -> Published:
    """A finished version, an unfinished one with a file and an upload, a probe, an upload."""
    put(place, f"{UNFINISHED}/{WEIGHTS}")
    put(place, f"{UNFINISHED}/sub/file.json")
    upload(place, f"{UNFINISHED}/model-2.safetensors", b"12345")
    upload(place, f"{made.id[:16]}/{WEIGHTS}")
    put(place, "refs/.probe-123")
    put(place, "notes.txt", b"not ours")
    put(place, "elsewhere/notes.txt", b"not ours")
    return made


LEFT = {
    f"{UNFINISHED}/{WEIGHTS}": "object without a manifest",
    f"{UNFINISHED}/sub/file.json": "object without a manifest",
    f"{UNFINISHED}/model-2.safetensors": "unfinished upload",
    "refs/.probe-123": "probe",
}

# -------------------------------------------------------------------------------- list


def test_versions_are_listed(place: Place) -> None:
    """By folder, with their tags; size and files are the manifest's."""
    old = place.publish(small_files(seed=1), tag="v1")
    new = place.publish(small_files(seed=2))
    place.tag("v2", new.id)
    found = {version["id"]: version for version in listed(place)}
    assert set(found) == {old.id, new.id}
    assert found[old.id]["tags"] == ["v1"]
    assert found[new.id]["tags"] == ["latest", "v2"]
    assert found[new.id]["folder"] == new.id[:16]
    assert found[new.id]["files"] == len(new.files) - 1
    assert found[new.id]["file_bytes"] == new.payload
    assert found[new.id]["scale_rule"] == "mse"
    assert found[new.id]["fault"] is None
    text = shell("list", place.url(), *QUICK).ok().stdout
    row = next(line for line in text.splitlines() if new.id[:16] in line)
    assert row.split()[-2:] == ["latest,", "v2"]


def test_an_artifact_at_the_url_is_listed(place: Place) -> None:
    flat = place.publish(flat=True)
    assert [version["id"] for version in listed(place)] == [flat.id]
    assert listed(place)[0]["folder"] == ""
    assert flat.id[:16] in shell("list", place.url(), *QUICK).ok().stdout


def test_nothing_to_list(place: Place) -> None:
    """No versions is an answer; no bucket is an error."""
    assert listed(place) == []
    assert f"no versions at {place.url()}" in shell("list", place.url(), *QUICK).ok().stdout
    result = shell("list", "s3://no-such-bucket/m", *QUICK)
    fail_cleanly(result, 6, "no-such-bucket", "create the bucket")


def test_unfinished_and_damaged_versions(place: Place, made: Published) -> None:
    """Are shown as what they are, and do not hide the others."""
    put(place, f"{UNFINISHED}/{WEIGHTS}")
    put(place, f"{OTHER}/{MANIFEST_NAME}", b"{}")
    found = {version["folder"]: version for version in listed(place)}
    assert set(found) == {made.id[:16], UNFINISHED, OTHER}
    assert (found[UNFINISHED]["id"], found[UNFINISHED]["fault"]) == (None, None)
    assert found[OTHER]["id"] is None
    assert MANIFEST_NAME in found[OTHER]["fault"]
    text = shell("list", place.url(), *QUICK).ok().stdout
    rows = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert "unfinished" in rows[UNFINISHED]
    assert "damaged" in rows[OTHER]


def test_damaged_and_odd_tags(place: Place, made: Published) -> None:
    """A damaged pointer is told, what is no pointer is passed over, the versions are shown."""
    put(place, "refs/bad.json", b"{")
    put(place, "refs/sub/x.json", b"{")
    put(place, "refs/-odd.json", b"{")
    put(place, "refs/0123456789abcdef.json", b"{")
    put(place, "refs/notes.txt", b"{")
    put(place, "refs/", b"")
    put(place, "", b"")
    result = shell("list", place.url(), *QUICK).ok()
    assert made.id[:16] in result.stdout
    assert "warning: " in result.stderr
    assert "refs/bad.json" in result.stderr
    assert result.stderr.count("refs/") == 1


def test_a_tag_that_points_at_nothing(place: Place) -> None:
    """Its version is shown as unfinished, by the tag."""
    place.tag("old", "1" * 64)
    assert [(v["folder"], v["tags"], v["id"]) for v in listed(place)] == [("1" * 16, ["old"], None)]


def test_what_is_no_version(place: Place, made: Published) -> None:
    """Other folders below the URL, and neighbours of it."""
    place.publish(small_files(seed=5), prefix=PREFIX + "-other")
    for folder in ("0123456789ABCDEF", "0123456789abcde", "0123456789abcdef0", "notes"):
        put(place, f"{folder}/{MANIFEST_NAME}", b"{}")
    assert [version["id"] for version in listed(place)] == [made.id]


def test_a_version_in_the_url_is_refused(place: Place) -> None:
    for command in ("list", "gc"):
        result = shell(command, place.url() + "@v1", *QUICK)
        fail_cleanly(result, 2, "names a version", "leave @v1 out")


@pytest.mark.parametrize("action", [PageSize(2), EmptyPage(), StrangeTokens()])
def test_listings_in_pages(place: Place, littered: Published, action: Action) -> None:
    """All pages count: small ones, an empty one, one with a strange token."""
    if isinstance(action, StrangeTokens):
        place.proxy.add(PageSize(2), "ListObjectsV2")
    place.proxy.add(action, "ListObjectsV2")
    assert {v["folder"] for v in listed(place)} == {littered.id[:16], UNFINISHED}
    age(place, rest=48)
    assert set(LEFT) <= set(leftovers(gc(place, "--json")))


# ---------------------------------------------------------------------------------- gc


def test_gc_shows_and_leaves(place: Place, littered: Published) -> None:
    """Without --delete nothing changes."""
    age(place, rest=48)
    before = place.s3.keys(place.bucket), place.s3.uploads(place.bucket)
    result = gc(place, "--json")
    own = {f"{littered.id[:16]}/{WEIGHTS}": "unfinished upload"}
    assert leftovers(result) == LEFT | own
    found = summary(result)
    assert not found["deleted"]
    sizes = {item["key"]: item["size"] for item in found["leftovers"]}
    assert sizes[f"{UNFINISHED}/model-2.safetensors"] == 5
    assert found["bytes"] == sum(sizes.values()) == 4 + 4 + 5 + 4 + 4
    text = gc(place).ok().stdout
    assert "could be removed: pass --delete" in text
    assert f"{UNFINISHED}/{WEIGHTS}  (object without a manifest, 48 h" in text
    assert (place.s3.keys(place.bucket), place.s3.uploads(place.bucket)) == before


def test_gc_removes(place: Place, littered: Published) -> None:
    """Leftovers, and nothing else: the version still is what was pushed."""
    age(place, rest=48)
    keys = set(place.s3.keys(place.bucket))
    result = gc(place, "--delete", "--json")
    assert set(LEFT) <= set(leftovers(result))
    assert summary(result)["deleted"]
    assert {event["path"] for event in events(result, "file")} == set(leftovers(result))
    gone = {f"{PREFIX}/{key}" for key, kind in LEFT.items() if kind != "unfinished upload"}
    assert set(place.s3.keys(place.bucket)) == keys - gone
    assert place.s3.uploads(place.bucket) == []
    place.pull().ok()
    littered.assert_whole(place.target)
    assert "0 leftovers" in gc(place, "--delete").ok().stdout


def test_gc_spares_the_young(place: Place, littered: Published) -> None:
    """They may belong to a push under way; it says how many."""
    keys = place.s3.keys(place.bucket)
    result = gc(place, "--delete")
    assert "0 leftovers" in result.ok().stdout
    assert "5 leftovers may belong to a push under way" in result.stderr
    assert place.s3.keys(place.bucket) == keys
    assert len(place.s3.uploads(place.bucket)) == 2
    age(place, rest=2)
    assert leftovers(gc(place, "--json")) == {}
    assert set(LEFT) <= set(leftovers(gc(place, "--json", "--older-than", "1h30m")))
    fail_cleanly(gc(place, "--older-than", "5d"), 2, "5d")


@pytest.mark.parametrize("young", ["file", "model-2"])
def test_gc_spares_a_push_that_takes_days(place: Place, littered: Published, young: str) -> None:
    """What it sent first is old; what it sent last, or sends, tells that it is under way."""
    age(place, **{young: 1}, rest=48)
    kept = {key for key in LEFT if key.startswith(UNFINISHED)}
    found = set(leftovers(gc(place, "--delete", "--json")))
    assert found & kept == set()
    assert "refs/.probe-123" in found
    assert f"{PREFIX}/{UNFINISHED}/{WEIGHTS}" in place.s3.keys(place.bucket)
    assert len(place.s3.uploads(place.bucket)) == 1


def test_gc_never_touches_a_version(place: Place) -> None:
    """However old, without a tag, with a damaged manifest, or finished while gc lists."""
    made = [place.publish(small_files(seed=seed), tag=None) for seed in (1, 2)]
    put(place, f"{OTHER}/{MANIFEST_NAME}", b"damaged")
    put(place, f"{OTHER}/{WEIGHTS}")
    put(place, f"{UNFINISHED}/{WEIGHTS}")
    age(place, rest=10_000)
    finished = f"{PREFIX}/{UNFINISHED}/{MANIFEST_NAME}"

    def finish(exchange: Exchange) -> None:
        place.s3.put(place.bucket, finished, b"{}")

    place.proxy.add(Call(finish, after=True), "ListObjectsV2", times=1)
    keys = place.s3.keys(place.bucket)
    result = gc(place, "--delete", "--json")
    assert leftovers(result) == {}
    assert set(place.s3.keys(place.bucket)) == {*keys, finished}
    for each in made:
        place.pull(f"{place.url()}@{each.id}", target=place.folder / each.id).ok()


def test_gc_asks_again_before_it_removes(place: Place) -> None:
    """A push that ends between the listing and the removal keeps its version."""
    put(place, f"{UNFINISHED}/{WEIGHTS}")
    age(place, rest=48)
    manifest = f"{PREFIX}/{UNFINISHED}/{MANIFEST_NAME}"
    finish = Call(lambda _: place.s3.put(place.bucket, manifest, b"{}"), after=True)
    place.proxy.add(finish, "HeadObject", key=f"*/{MANIFEST_NAME}", times=1)
    assert leftovers(gc(place, "--delete", "--json")) == {}
    assert f"{PREFIX}/{UNFINISHED}/{WEIGHTS}" in place.s3.keys(place.bucket)


def test_gc_leaves_what_is_written_anew(place: Place) -> None:
    """A push that replaces what was listed has it for its own."""
    key = f"{UNFINISHED}/{WEIGHTS}"
    put(place, key)
    aged = age(place, rest=48)

    def write(_: object) -> None:
        put(place, key)
        aged.since = datetime.min.replace(tzinfo=UTC)  # what is asked for now is new

    place.proxy.add(Call(write), "HeadObject", key=f"*/{key}", times=1)
    assert leftovers(gc(place, "--delete", "--json")) == {}
    assert f"{PREFIX}/{key}" in place.s3.keys(place.bucket)


def test_gc_leaves_neighbours(place: Place) -> None:
    """Prefixes that only begin like the URL."""
    for prefix in (PREFIX + "-other", PREFIX + "2"):
        place.s3.put(place.bucket, f"{prefix}/{UNFINISHED}/x", b"1")
    age(place, rest=48)
    assert leftovers(gc(place, "--delete", "--json")) == {}
    assert len(place.s3.keys(place.bucket)) == 2


def test_gc_where_uploads_cannot_be_listed(place: Place, littered: Published) -> None:
    """Said; objects are looked for all the same."""
    age(place, rest=48)
    place.proxy.add(not_implemented(), "ListMultipartUploads")
    result = gc(place, "--json")
    assert [event["code"] for event in events(result, "notice")] == ["uploads-not-listed"]
    objects = {key: kind for key, kind in LEFT.items() if kind != "unfinished upload"}
    assert leftovers(result) == objects


def test_gc_where_an_upload_ends_meanwhile(place: Place, littered: Published) -> None:
    """Is no leftover any more, and no error."""
    age(place, rest=48)

    def end(exchange: Exchange) -> None:
        for each in place.s3.uploads(place.bucket):
            place.s3.client().abort_multipart_upload(
                Bucket=place.bucket, Key=each.key, UploadId=each.id
            )

    place.proxy.add(Call(end), "ListParts", times=1)
    assert "unfinished upload" not in leftovers(gc(place, "--delete", "--json")).values()


@pytest.mark.parametrize("operation", ["ListObjectsV2", "ListMultipartUploads"])
def test_gc_without_the_right_to_list(place: Place, littered: Published, operation: str) -> None:
    """An error: nothing found would be a lie."""
    place.proxy.add(access_denied(), operation)
    fail_cleanly(gc(place, "--delete"), 6, "AccessDenied")
    assert len(place.s3.uploads(place.bucket)) == 2


def test_gc_without_the_right_to_delete(place: Place, littered: Published) -> None:
    age(place, rest=48)
    place.proxy.add(access_denied(), ("DeleteObject", "AbortMultipartUpload"))
    fail_cleanly(gc(place, "--delete"), 6, "AccessDenied", UNFINISHED)


@pytest.mark.parametrize("command", ["list", "gc"])
def test_signal_while_the_store_is_silent(place: Place, command: str) -> None:
    rule = place.proxy.add(NeverAnswer())
    env = place.proxy.environment()
    with start_cli(command, place.url(), "--retry-for", "60s", env=env) as running:
        while not rule.fired:
            time.sleep(0.01)
        begin = time.monotonic()
        running.process.send_signal(signal.SIGINT)
        result = running.wait(20)
    assert time.monotonic() - begin < 5
    fail_cleanly(result, 130, "interrupted")


def test_json_of_gc_is_lines(place: Place, littered: Published) -> None:
    lines = gc(place, "--json").ok().stdout.splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["notice", "summary"]


# -------------------------------------------------------------------- stores that are folders


def _old(path: Path, data: bytes = b"12345") -> Path:
    """Write a file as a push that was killed two days ago would have left it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    then = time.time() - 48 * 3600
    os.utime(path, (then, then))
    return path


def test_gc_of_files_that_were_being_written(tmp_path: Path) -> None:
    """Those of a push are found; those of a pull or of somebody else are not touched."""
    left = _old(tmp_path / UNFINISHED / f"{WEIGHTS}.partial")
    ref = _old(tmp_path / "refs" / "latest.json.partial")
    others = [_old(tmp_path / "video.partial"), _old(tmp_path / "target" / "a.partial")]
    shown = shell("gc", tmp_path).ok().stdout
    assert f"{UNFINISHED}/{WEIGHTS}.partial  (unfinished file" in shown
    assert left.exists()
    found = summary(shell("gc", tmp_path, "--delete", "--json"))
    assert {item["kind"] for item in found["leftovers"]} == {"unfinished file"}
    assert found["bytes"] == 10
    assert not left.parent.exists()
    assert not ref.exists()
    assert all(path.exists() for path in others)


def test_gc_spares_a_file_that_is_being_written(tmp_path: Path) -> None:
    """However old it is: its writer holds a lock on it."""
    left = _old(tmp_path / UNFINISHED / f"{WEIGHTS}.partial")
    with left.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert summary(shell("gc", tmp_path, "--delete", "--json"))["leftovers"] == []
    assert left.exists()
