"""`mxconvert pull`: what is asked of the store, what is told about it, figures and limits."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from mxconvert.manifest import MANIFEST_NAME
from tests.pull_base import CHUNK, SPAN, WEIGHTS, Place, small_files, summary
from tests.support import fail_cleanly
from tests.support.faults import Action, Call, Flip, Respond, StripChecksums, access_denied
from tests.support.runs import events

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.faults import Exchange, Response

# ----------------------------------------------------------------- what the store is asked


class HideAbsence(Action):
    """Answer 403 for a key that is not there, as Amazon does without the right to list."""

    def response(self, exchange: Exchange, response: Response) -> None:
        if response.status == 404:
            b"".join(response.body)
            response.status = 403
            response.replace_body(access_denied().body)


@pytest.mark.parametrize("flat", [False, True])
def test_no_listing_is_needed(place: Place, *, flat: bool) -> None:
    """Nor the right to list, without which Amazon answers 403 for keys that are not there."""
    made = place.publish(flat=flat)
    place.proxy.add(access_denied(), ("ListObjectsV2", "ListObjects", "ListMultipartUploads"))
    place.proxy.add(HideAbsence())
    place.pull().ok()
    made.assert_whole(place.target)
    assert not [record for record in place.proxy.log if record.op.startswith("List")]


def test_denied_reading_is_said(place: Place) -> None:
    place.publish()
    place.proxy.add(access_denied())
    place.fails(6, place.url(), "AccessDenied", "credentials")
    asked = [(record.op, record.key) for record in place.proxy.log]
    assert len(asked) == len(set(asked)), "a denial is not repeated"


def test_only_reads(place: Place) -> None:
    """A reader's key is enough."""
    place.publish()
    place.pull().ok()
    assert {record.method for record in place.proxy.log} == {"GET", "HEAD"}


def test_an_object_that_is_missing(place: Place) -> None:
    """A half-deleted version: named, and no final name for it."""
    made = place.publish()
    place.s3.delete(place.bucket, made.base + "config.json")
    place.fails(6, made.base + "config.json", "404")
    made.assert_unfinished(place.target)


def test_an_object_of_another_size(place: Place) -> None:
    """Is not fetched at all."""
    made = place.publish()
    place.s3.put(place.bucket, made.base + WEIGHTS, b"short")
    place.fails(6, made.base + WEIGHTS, "5 bytes", f"expected {len(made.files[WEIGHTS])}")
    assert place.fetched(WEIGHTS) == 0
    made.assert_unfinished(place.target)


def test_an_object_that_is_damaged(place: Place) -> None:
    """Its chunk, both digests and the key are named; the other files are kept for later."""
    made = place.publish()
    data = bytearray(made.files[WEIGHTS])
    data[5 * CHUNK] ^= 1
    place.s3.put(place.bucket, made.base + WEIGHTS, bytes(data))
    expected = entry_of(made.files[MANIFEST_NAME], WEIGHTS)["chunks"]["xxh3_128"][5]
    result = place.fails(6, made.base + WEIGHTS, "chunk 5", f"expected {expected}, found ")
    assert not re.search(rf"found {expected}", result.stderr)
    assert not (place.target / WEIGHTS).exists()
    made.assert_unfinished(place.target)
    place.s3.put(place.bucket, made.base + WEIGHTS, made.files[WEIGHTS])
    place.proxy.log.clear()
    place.pull().ok()
    made.assert_whole(place.target)
    assert place.fetched(WEIGHTS) <= SPAN


def entry_of(manifest: bytes, path: str) -> dict[str, Any]:
    return next(each for each in json.loads(manifest)["files"] if each["path"] == path)


# ------------------------------------------------------------------- bits that flip on the way


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize(
    ("version", "flat"), [("", False), ("@ID", False), ("@v1", False), ("", True)]
)
def test_a_bit_of_the_manifest_that_flips(
    place: Place, version: str, *, flat: bool, checksums: bool
) -> None:
    """It is fetched again: the store's checksum tells, the id, or that no two agree."""
    made = place.publish(flat=flat)
    place.tag("v1", made.id)
    if not checksums:
        place.proxy.add(StripChecksums())
    # A digit of a digest: the manifest can be read all the same.
    at = made.files[MANIFEST_NAME].index(b'"sha256":"') + 12
    bad = place.proxy.add(Flip(at), "GetObject", key=f"*/{MANIFEST_NAME}", times=1)
    place.pull(place.url() + version.replace("ID", made.id)).ok()
    assert bad.fired == 1
    made.assert_whole(place.target)


def test_a_manifest_that_is_wrong_at_the_store(place: Place) -> None:
    """The same bytes twice: read no more than that, and told as the store's."""
    made = place.publish()
    place.tag("v1", made.id)
    damaged = made.files[MANIFEST_NAME].replace(b'"sha256":"', b'"sha256":"0', 1)
    place.s3.put(place.bucket, made.base + MANIFEST_NAME, damaged)
    fail_cleanly(place.pull(place.url() + "@v1"), 4, made.base + MANIFEST_NAME)
    assert len(place.proxy.requests("GetObject", key=f"*/{MANIFEST_NAME}")) == 2
    assert not place.target.exists()


def test_a_manifest_that_comes_different_each_time(place: Place) -> None:
    made = place.publish()
    place.proxy.add(StripChecksums())
    for at in range(4):
        bad = Flip(at + 2)
        place.proxy.add(bad, "GetObject", key=f"*/{MANIFEST_NAME}", skip=at, times=1)
    place.fails(6, made.base + MANIFEST_NAME, "arrived 4 times", f"expected id {made.id}")


def test_a_bit_of_a_tag_that_flips(place: Place) -> None:
    made = place.publish()
    place.tag("v1", made.id)
    bad = place.proxy.add(Flip(12), "GetObject", key="*/refs/v1.json", times=1)
    place.pull(place.url() + "@v1").ok()
    assert bad.fired == 1


# ------------------------------------------------------------------ figures, limits, words


def test_metrics(place: Place) -> None:
    """Counters of the transfer, whole at every moment; success only in the end."""
    made = place.publish()
    file = place.folder / "node" / "pull.prom"
    fail_cleanly(place.pull(None, "--metrics-file", file), 7, str(file), "No such file")
    assert not place.target.exists()
    file.parent.mkdir()
    options = ("--metrics-file", file)
    place.proxy.add(Respond(404, "NoSuchKey"), "GetObject", key="*/config.json", times=1)
    place.fails(6, "config.json", options=options)
    assert metrics(file)["success"] == 0
    place.proxy.remove()
    place.pull(None, *options).ok()
    found = metrics(file)
    assert found["success"] == 1
    assert found["done_bytes"] == found["total_bytes"] == made.payload
    assert found["done_files"] == found["total_files"] == len(made.files) - 1
    assert found["requests_total"] > 0
    assert found["cpu_seconds_total"] > 0
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def metrics(file: Path) -> dict[str, float]:
    """Read the text format: a HELP and a TYPE line before each value."""
    lines = file.read_text().splitlines()
    found = {}
    for about, kind, line in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        match = re.fullmatch(r'mxconvert_transfer_(\w+)\{command="pull"\} (\S+)', line)
        assert match, line
        assert about.startswith(f"# HELP mxconvert_transfer_{match[1]} ")
        assert kind.split()[:3] == ["#", "TYPE", f"mxconvert_transfer_{match[1]}"]
        found[match[1]] = float(match[2])
    return found


def test_a_failure_is_told_even_if_metrics_cannot_be_written(place: Place) -> None:
    """The first trouble is the one that matters."""
    made = place.publish()
    folder = place.folder / "node"
    folder.mkdir()

    def remove(exchange: Exchange) -> None:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()

    place.proxy.add(Call(remove), "GetObject", key="*/config.json", times=1)
    place.proxy.add(Respond(404, "NoSuchKey"), "GetObject", key="*/config.json")
    place.fails(6, made.base + "config.json", options=("--metrics-file", folder / "m"))


def test_events_of_json(place: Place) -> None:
    """One object a line: the start, progress, files, a summary with figures."""
    made = place.publish()
    result = place.run("--json", env=place.proxy.environment()).ok()
    assert result.stderr == ""
    started = events(result, "started")[0]
    assert (started["total_bytes"], started["total_files"]) == (made.payload, len(made.files) - 1)
    found = summary(result)
    assert found["seconds"] > 0
    assert found["bytes_per_second"] > 0
    assert found["cpu_seconds_per_gb"] > 0
    assert found["requests"] == len(place.proxy.settle())
    assert found["retries"] == found["throttled"] == 0


def test_quiet(place: Place) -> None:
    place.publish()
    result = place.pull(None, "--quiet").ok()
    assert (result.stdout, result.stderr) == ("", "")


def test_rate_limit(place: Place) -> None:
    """Never faster than asked for, over all files together."""
    made = place.publish(small_files(2**21))
    begin = time.monotonic()
    found = summary(place.pull(None, "--limit-rate", "2MiB", "--json"))
    # What the last pieces take is waited for by nobody: a piece for each connection.
    assert time.monotonic() - begin > 0.4
    assert found["bytes_per_second"] < 2.5 * 2**21
    made.assert_whole(place.target)


def test_credentials_stay_secret(place: Place) -> None:
    """Neither key nor signature in any message, with --debug too."""
    place.publish()
    secret, token = "s3cr3t-of-the-tests", "t0k3n"
    env = place.proxy.environment(AWS_SECRET_ACCESS_KEY=secret, AWS_SESSION_TOKEN=token)
    result = place.run("--json", "--debug", env=env)
    assert result.status == 6
    for word in (secret, token, "Signature=", "X-Amz-Signature", "Authorization"):
        assert word not in result.stdout + result.stderr


def test_help_of_a_failure_names_the_endpoint(place: Place) -> None:
    """Which of several S3 servers refused."""
    place.fails(6, place.proxy.endpoint)


def test_where_a_folder_cannot_be_made(place: Place) -> None:
    """Before the store is asked."""
    target = place.folder / "no" / "target"
    fail_cleanly(place.pull(target=target), 7, "does not exist", "mkdir -p")
    target = place.folder / "file"
    target.write_text("mine")
    fail_cleanly(place.pull(target=target), 2, str(target), "is a file")
    assert target.read_text() == "mine"
    assert place.proxy.log == []
