"""`mxconvert push`: URLs, options, and what the user reads."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.push_base import WRITES, Site, changed_sidecar, gaps, manifest_size, most_at_once
from tests.support import fail_cleanly, run_cli, shell, snapshot, start_cli
from tests.support.cli import environment
from tests.support.faults import Respond, access_denied, closed_endpoint, expired_token
from tests.support.large import INDEX, PART, LargeArtifact, json_lines, metrics, summary

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import Reference

# ---------------------------------------------------------------------------------- URLs


def test_a_version_in_the_url_is_refused(site: Site, large: LargeArtifact) -> None:
    """A push makes the version itself; the hint says how to get that tag."""
    result = site.run("push", large.folder, f"{site.url}@v1")
    fail_cleanly(result, 2, "a push makes its version itself", f"push to {site.url}", "--tag v1")
    assert site.proxy.settle() == []


def test_flat_puts_the_files_at_the_url(site: Site, large: LargeArtifact, tmp_path: Path) -> None:
    result = summary(site.push(large, "--flat"))
    assert result["url"] == site.url
    assert result["tags"] == []
    keys = site.s3.keys(site.bucket)
    assert keys == sorted(f"{site.prefix}/{path}" for path in large.digests)
    site.pull(tmp_path / "target").ok()
    site.proxy.log.clear()
    summary(site.push(large, "--flat"))
    assert site.proxy.received(("PutObject", "UploadPart")) == 0


def test_flat_does_not_replace_another_artifact(
    site: Site, large: LargeArtifact, tmp_path: Path
) -> None:
    site.push(large, "--flat").ok()
    before = site.s3.objects(site.bucket)
    second = changed_sidecar(large, tmp_path / "second")
    result = site.push(second, "--flat")
    fail_cleanly(result, 2, "holds another artifact", large.id, second.id, "without --flat")
    assert site.s3.objects(site.bucket) == before


def test_flat_does_not_replace_files_of_something_else(site: Site, large: LargeArtifact) -> None:
    """A model that another program has put there: nothing says that it may be lost."""
    key = f"{site.prefix}/config.json"
    site.s3.put(site.bucket, key, b'{"mine": true}')
    result = site.push(large, "--flat")
    fail_cleanly(result, 2, "config.json", "choose another URL")
    assert site.s3.objects(site.bucket) == {key: b'{"mine": true}'}


def test_flat_goes_on_after_a_failure(site: Site, large: LargeArtifact) -> None:
    """What an earlier run has written itself is no reason to refuse."""
    site.proxy.add(access_denied(), WRITES, key=f"*/{INDEX}")
    fail_cleanly(site.push(large, "--flat"), 6)
    site.proxy.remove()
    site.push(large, "--flat").ok()
    assert len(site.s3.keys(site.bucket)) == len(large.digests)


def test_flat_with_a_tag_is_refused(site: Site, large: LargeArtifact) -> None:
    """Tags point at folders named by the id."""
    fail_cleanly(site.push(large, "--flat", "--tag", "v1"), 2, "--flat and --tag")
    assert site.proxy.settle() == []


# ------------------------------------------------------------------------ pace and options


def test_limit_rate(site: Site, large: LargeArtifact) -> None:
    """12 MB at 8 MB/s; the first part goes at once."""
    begin = time.monotonic()
    site.push(large, "--limit-rate", "8MB", "--no-latest").ok()
    rest = large.payload - PART - PART
    assert time.monotonic() - begin >= rest / 8e6


def test_limit_rate_of_a_file_sent_as_a_whole(large: LargeArtifact, tmp_path: Path) -> None:
    """To a folder: the bytes of a file are spread over time, and shown as they go."""
    begin = time.monotonic()
    options = ("--limit-rate", "8MB", "--jobs", "1", "--json")
    result = shell("push", large.folder, tmp_path / "store", *options).ok()
    assert time.monotonic() - begin >= (large.payload - 2**20) / 8e6 - 0.1
    first = json_lines(result, "progress")[0]
    assert first["bytes_done"] == 2**20 < large.files[large.largest]
    assert summary(result)["sent_bytes"] == sum(large.files.values()) + manifest_size(large)


def test_one_job(site: Site, large: LargeArtifact) -> None:
    """One request at a time."""
    site.push(large, "--jobs", "1").ok()
    site.proxy.settle()
    assert most_at_once(site.proxy.log) == 1
    assert min(gaps(site.proxy.log)) >= 0
    site.assert_published(large)


def test_options_of_new_objects(site: Site, large: LargeArtifact) -> None:
    """Every object is created with them, parts and tags included."""
    given = {
        "storage_class": ("x-amz-storage-class", "STANDARD_IA"),
        "acl": ("x-amz-acl", "bucket-owner-full-control"),
        "requester_pays": ("x-amz-request-payer", "requester"),
    }
    values = {
        key: "true" if key == "requester_pays" else value for key, (_, value) in given.items()
    }
    options = [
        part for key, value in values.items() for part in ("--store-option", f"{key}={value}")
    ]
    site.push(large, *options).ok()
    created = site.done(("PutObject", "CreateMultipartUpload"))
    assert len(created) > len(large.digests)
    for record in created:
        for header, value in given.values():
            assert record.headers.get(header) == value, (record.op, record.key)
    for record in site.done("UploadPart"):
        assert record.headers.get("x-amz-request-payer") == "requester"


def test_encryption_options(site: Site, large: LargeArtifact) -> None:
    """What the server at hand cannot do is asked for all the same."""
    site.proxy.add(Respond(400, "InvalidRequest", "no keys here"), ("PutObject",))
    options = ("--store-option", "sse=aws:kms", "--store-option", "sse_kms_key_id=key-1")
    fail_cleanly(site.push(large, *options), 6, "no keys here")
    [first] = site.proxy.requests("PutObject")
    assert first.headers.get("x-amz-server-side-encryption") == "aws:kms"
    assert first.headers.get("x-amz-server-side-encryption-aws-kms-key-id") == "key-1"


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--limit-rate", "0", "--limit-rate '0' is not a size"),
        ("--limit-rate", "", "--limit-rate '' is not a size"),
        ("--part-size", "", "--part-size '' is not a size"),
        ("--retry-for", "soon", "--retry-for 'soon' is not a time span"),
        ("--store-option", "part_count=inf", "part_count=inf: expected a number above 0"),
        ("--store-option", "part_count=2.5", "part_count=2.5: expected a whole number above 0"),
        ("--store-option", "max_object_size=nan", "max_object_size=nan: expected a number"),
        ("--store-option", "read_timeout=-1", "read_timeout=-1: expected a number above 0"),
        ("--store-option", "anonymous=perhaps", "anonymous=perhaps: expected true or false"),
    ],
)
def test_bad_values_are_refused(large: LargeArtifact, option: str, value: str, says: str) -> None:
    """By the name of the option, before anything is asked of the store."""
    fail_cleanly(shell("push", large.folder, "s3://bucket/m", option, value), 2, says)


def test_unknown_option_is_refused(site: Site, large: LargeArtifact) -> None:
    """By name, with the nearest known one; its value may be a secret."""
    result = site.push(large, "--store-option", "storage_clas=SECRETIVE")
    fail_cleanly(result, 2, "storage_clas", "did you mean storage_class?")
    assert "SECRETIVE" not in result.stderr + result.stdout


# -------------------------------------------------------------------------------- output


def test_json_lines(site: Site, large: LargeArtifact) -> None:
    """Each line is an event; the last one is the summary."""
    result = site.push(large).ok()
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert {event["schema_version"] for event in events} == {1}
    assert [events[0]["type"], events[-1]["type"]] == ["started", "summary"]
    files = {event["path"]: event["size_bytes"] for event in json_lines(result, "file")}
    assert files == large.files
    end = events[-1]
    assert end["artifact"] == large.id
    assert end["url"] == f"{site.url}/{large.version}"
    assert end["bytes"] == end["sent_bytes"] == large.payload + manifest_size(large)
    assert end["tags"] == ["latest"]
    assert end["requests"] == len(site.proxy.settle())
    assert end["retries"] == end["throttled"] == 0
    assert end["cpu_seconds_per_gb"] > 0


def test_metrics_file(site: Site, large: LargeArtifact, tmp_path: Path) -> None:
    """Prometheus' text format, replaced whole; the last one says that it went well."""
    path = tmp_path / "push.prom"
    site.push(large, "--metrics-file", path).ok()
    found = {
        name.removeprefix("mxconvert_transfer_"): v for name, v in metrics(path.read_text()).items()
    }
    assert 'command="push"' in path.read_text()
    assert found["success"] == 1
    assert found["done_bytes"] == found["total_bytes"] == large.payload
    assert found["done_files"] == found["total_files"] == len(large.files)
    assert found["sent_bytes_total"] >= large.payload
    assert found["requests_total"] == len(site.proxy.settle())
    assert found["seconds"] > 0
    assert [each.name for each in tmp_path.iterdir()] == ["push.prom"]


def test_metrics_go_on_while_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer that waits for its store has no events; its retries are in the file."""
    from mxconvert.store import Counters
    from mxconvert.transfer import metrics as module

    monkeypatch.setattr(module, "_EVERY_SECONDS", 0.01)
    counters, path = Counters(), tmp_path / "m"
    file = module.MetricsFile(path, "pull", counters, lambda _: None)
    counters.add(retries=3)
    end = time.monotonic() + 20
    while metrics(path.read_text())["mxconvert_transfer_retries_total"] != 3:
        assert time.monotonic() < end
        time.sleep(0.005)
    file.finish(success=True)
    assert metrics(path.read_text())["mxconvert_transfer_success"] == 1


def test_metrics_of_a_push_that_fails(site: Site, large: LargeArtifact, tmp_path: Path) -> None:
    path = tmp_path / "push.prom"
    site.proxy.add(access_denied(), "PutObject", key=f"*/{INDEX}")
    fail_cleanly(site.push(large, "--metrics-file", path), 6)
    found = metrics(path.read_text())
    assert found["mxconvert_transfer_success"] == 0
    assert found["mxconvert_transfer_done_bytes"] == large.payload - large.files[INDEX]


def test_metrics_file_that_cannot_be_written(site: Site, large: LargeArtifact, tmp_path) -> None:
    """Found out before anything is sent."""
    path = tmp_path / "no" / "push.prom"
    fail_cleanly(site.push(large, "--metrics-file", path), 7, str(path))
    assert site.proxy.settle() == []


SECRETS = ("AKIDVERYSECRET", "secret/of+the=user", "token//of==the+session", "p4ssw0rd")


@pytest.mark.parametrize("how", ["denied", "signature", "expired", "unreachable", "ok"])
def test_credentials_appear_nowhere(site: Site, large: LargeArtifact, how: str, tmp_path) -> None:
    """Not in messages, not in tracebacks, not in metrics, whatever goes wrong."""
    env = {
        "AWS_ACCESS_KEY_ID": SECRETS[0],
        "AWS_SECRET_ACCESS_KEY": SECRETS[1],
        "AWS_SESSION_TOKEN": SECRETS[2],
    }
    refusal = {
        "denied": access_denied(),
        "signature": Respond(403, "SignatureDoesNotMatch", "signatures differ"),
        "expired": expired_token(),
    }
    site.proxy.trusted.add(SECRETS[0])
    if how in refusal:
        site.proxy.add(refusal[how])
    arguments = ["push", str(large.folder), site.url, "--debug", "--retry-for", "1s"]
    arguments += ["--metrics-file", str(tmp_path / "m")]
    if how == "unreachable":
        env["AWS_ENDPOINT_URL_S3"] = closed_endpoint()
        env["HTTP_PROXY"] = "http://user:p4ssw0rd@127.0.0.1:9"
        env["NO_PROXY"] = env["no_proxy"] = ""
    with start_cli(*arguments, env=site.proxy.environment() | env) as run:
        result = run.wait()
    assert result.status == (0 if how == "ok" else 6)
    text = result.stdout + result.stderr + (tmp_path / "m").read_text()
    for secret in SECRETS:
        assert secret not in text


def test_a_password_in_the_endpoint_is_refused(site: Site, large: LargeArtifact) -> None:
    """It would not be used, and be printed with every message."""
    for endpoint in ("http://user:p4ssw0rd@127.0.0.1:9", "user:p4ssw0rd@127.0.0.1"):
        result = site.push(large, "--debug", "--store-option", f"endpoint={endpoint}")
        assert result.status == 2
        assert "endpoint" in result.stderr
        assert "p4ssw0rd" not in result.stderr + result.stdout


@pytest.mark.parametrize("option", [("--checksum", "always"), ("--part-size", "32MiB")])
def test_what_a_store_cannot_do_is_refused(
    reference: Reference, tmp_path: Path, option: tuple[str, str]
) -> None:
    """An option that would do nothing is an error, before anything is written."""
    result = run_cli("push", reference.target, tmp_path / "store", *option)
    fail_cleanly(result, 2, option[0])
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------- the streams


@pytest.mark.parametrize(
    ("redirect", "status"), [("", 1), (">/dev/full", 7), (">&-", 0), ("<&- >&- 2>&-", 0)]
)
@pytest.mark.parametrize("name", ["push", "pull"])
def test_where_the_output_goes(
    large: LargeArtifact, tmp_path: Path, name: str, redirect: str, status: int
) -> None:
    """Trouble with it is not told as trouble with the folder; closed streams are no trouble."""
    places: tuple[object, ...] = (large.folder, tmp_path / "store")
    if name == "pull":
        shell("push", *places).ok()
        places = (tmp_path / "store", tmp_path / "target")
    command = [sys.executable, "-m", "mxconvert", name, *map(str, places), "--json"]
    reading, writing = os.pipe()
    os.close(reading)  # what reads the output has ended
    done = subprocess.run(
        ["bash", "-c", f"{shlex.join(command)} {redirect}"],
        env=environment(),
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert done.returncode == status, done.stderr
    assert ("cannot write the output: No space left on device" in done.stderr) == (status == 7)
    assert str(tmp_path) not in done.stderr
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr
    if status == 0 and name == "pull":
        assert snapshot(tmp_path / "target") == large.digests
