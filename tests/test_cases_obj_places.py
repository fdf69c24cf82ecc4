"""Where a bucket is and who may read it: buckets, regions, addresses, credentials."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from mxconvert.manifest import MANIFEST_NAME
from tests.pull_base import (
    COMMANDS,
    PREFIX,
    QUICK,
    Place,
    Published,
    command,
)
from tests.support import fail_cleanly, shell
from tests.support.faults import (
    Action,
    Anonymous,
    Respond,
    SilentListener,
    illegal_location,
    malformed_authorization,
    moved,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.faults import Exchange, Request
    from tests.support.runs import Reference

REGION = "eu-west-7"


@pytest.fixture
def made(place: Place) -> Published:
    return place.publish()


# ------------------------------------------------------------ OBJ-12: no such bucket


@pytest.mark.parametrize("name", COMMANDS)
def test_no_such_bucket(place: Place, reference: Reference, name: str) -> None:
    """One try, at once, with the bucket, the key and the server; no bucket is made."""
    bucket = place.bucket + "-none"
    begin = time.monotonic()
    result = command(name, place, reference.target, f"s3://{bucket}/m")
    fail_cleanly(result, 6, f"s3://{bucket}/m/", place.proxy.endpoint, "create the bucket")
    assert time.monotonic() - begin < 3
    assert "trying again" not in result.stderr
    asked = [(record.method, record.path, record.query.get("prefix")) for record in place.proxy.log]
    assert len(asked) == len(set(asked))
    names = [each["Name"] for each in place.s3.client().list_buckets()["Buckets"]]
    assert bucket not in names
    assert not place.target.exists()


def test_no_bucket_and_no_key_read_differently(place: Place, made: Published) -> None:
    place.s3.delete(place.bucket, made.base + MANIFEST_NAME)
    no_key = place.fails(6, made.id, "which is not there").stderr
    no_bucket = place.pull(f"s3://{place.bucket}-none/{PREFIX}@{made.id}").stderr
    assert "NoSuchBucket" in no_bucket
    assert "NoSuchBucket" not in no_key
    assert "create the bucket" not in no_key


# ------------------------------------------------------------- OBJ-13: the wrong region


def signed_for(region: str) -> Callable[[Request], bool]:
    return lambda request: f"/{region}/s3/" in (request.headers.get("authorization") or "")


ELSEWHERE = {
    "301": moved(REGION),
    "malformed": malformed_authorization(REGION),
    "location": Respond(
        400, "IllegalLocationConstraintException", headers={"x-amz-bucket-region": REGION}
    ),
}


@pytest.mark.parametrize("answer", ELSEWHERE.values(), ids=ELSEWHERE)
@pytest.mark.parametrize("name", ["push", "pull"])
def test_bucket_in_another_region(
    place: Place, reference: Reference, name: str, answer: Respond
) -> None:
    """GET, HEAD and PUT follow the store to the region that it names."""
    if name == "pull":
        made = place.publish()
    rule = place.proxy.add(answer, where=signed_for(place.s3.region))
    command(name, place, reference.target, place.url()).ok()
    assert 1 <= rule.fired <= 20
    followed = [r for r in place.proxy.log if signed_for(REGION)(r)]
    assert len(followed) > 5
    place.proxy.remove(rule)
    if name == "pull":
        made.assert_whole(place.target)
    else:
        base = f"{PREFIX}/{reference.artifact[:16]}/"
        kept = {key.removeprefix(base) for key in place.s3.keys(place.bucket, base)}
        assert kept == set(reference.files)


@pytest.mark.parametrize("op", ["HeadObject", "GetObject", "PutObject"])
def test_empty_redirect_is_no_success(place: Place, reference: Reference, op: str) -> None:
    """To nowhere: neither the bytes that are not there nor a file that was not written."""
    place.publish()
    place.proxy.add(Respond(301, body=b""), op)
    name = "push" if op == "PutObject" else "pull"
    result = command(name, place, reference.target, place.url())
    fail_cleanly(result, 6, "another region", place.s3.region)
    assert not (place.target / MANIFEST_NAME).exists()
    base = f"{PREFIX}/{reference.artifact[:16]}/"
    assert MANIFEST_NAME not in "".join(place.s3.keys(place.bucket, base))


@pytest.mark.parametrize("name", ["push", "pull"])
@pytest.mark.parametrize("answer", [moved(REGION), malformed_authorization(REGION)])
def test_region_that_does_not_help(
    place: Place, reference: Reference, name: str, answer: Respond
) -> None:
    """Both regions are named."""
    place.publish()
    place.proxy.add(answer)
    result = command(name, place, reference.target, place.url())
    fail_cleanly(result, 6, REGION)
    assert answer.status != 301 or place.s3.region in result.stderr
    assert len(place.proxy.log) < 12


def test_illegal_location_without_a_region(place: Place) -> None:
    place.publish()
    place.proxy.add(illegal_location(REGION))
    place.fails(6, "another region", place.s3.region, "--store-option region=")


# --------------------------------------------------------------- OBJ-14: addresses


class VirtualHosts(Action):
    """Serve ``BUCKET.s3.test``, asked as an HTTP proxy is; others are refused."""

    def __init__(self) -> None:
        self.hosts: set[str] = set()

    def request(self, exchange: Exchange) -> None:
        request = exchange.request
        parts = urlsplit(request.target)
        host = parts.hostname or ""
        assert host.endswith("s3.test"), request.target
        self.hosts.add(host)
        bucket = host.removesuffix("s3.test").rstrip(".")
        path = f"/{bucket}{parts.path}" if bucket else parts.path
        request.target = path + (f"?{parts.query}" if parts.query else "")
        request.headers.set("Host", urlsplit(exchange.proxy.server.endpoint).netloc)
        exchange.changed = True


@pytest.mark.parametrize("style", ["virtual", "path", None])
def test_one_style_of_addresses(place: Place, style: str | None) -> None:
    """A bucket with dots behind an own endpoint: by path, unless asked otherwise; all calls."""
    bucket = place.s3.make_bucket("team.models.v1")
    place.bucket = bucket
    made = place.publish()
    hosts = VirtualHosts()
    place.proxy.add(hosts)
    reached = {"endpoint": "http://s3.test:1234", "proxy": place.proxy.endpoint}
    options = [f"--store-option={key}={value}" for key, value in reached.items()]
    options += [f"--store-option=addressing={style}"] if style else []
    place.pull(None, *options).ok()
    made.assert_whole(place.target)
    shell("list", place.url(), *QUICK, *options).ok()
    shell("push", place.folder / "artifact-1", place.url("again"), *QUICK, *options).ok()
    assert hosts.hosts == {f"{bucket}.s3.test" if style == "virtual" else "s3.test"}


class BelowPath(Action):
    """An endpoint with a path: take it away."""

    def request(self, exchange: Exchange) -> None:
        assert exchange.request.target.startswith("/gate/s3/"), exchange.request.target
        exchange.request.target = exchange.request.target.removeprefix("/gate/s3")
        exchange.changed = True


def test_endpoint_with_a_path(place: Place) -> None:
    made = place.publish()
    place.proxy.add(BelowPath())
    option = f"--store-option=endpoint={place.proxy.endpoint}/gate/s3"
    place.pull(None, option).ok()
    made.assert_whole(place.target)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "s3.example.com", "ftp://x", "http://"])
def test_bad_endpoints(place: Place, endpoint: str) -> None:
    """Told apart from a server that does not answer."""
    place.fails(2, "endpoint", options=(f"--store-option=endpoint={endpoint}",))


def test_bad_addressing(place: Place) -> None:
    place.fails(2, "addressing", "path", options=("--store-option=addressing=dns",))


# -------------------------------------------------------------- OBJ-15: anonymous reading


@pytest.fixture
def stranger(place: Place, monkeypatch: pytest.MonkeyPatch):
    """A machine without credentials; the metadata service of its cloud never answers."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name)
    with SilentListener("http") as silent:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", silent.endpoint)
        place.proxy.add(Anonymous(f"/{place.bucket}/{PREFIX}/*"))
        yield silent


def test_public_artifacts(place: Place, made: Published, stranger: SilentListener) -> None:
    """No signature is sent, and nobody is asked for credentials."""
    place.pull(None, "--store-option", "anonymous=true").ok()
    made.assert_whole(place.target)
    assert place.proxy.log
    assert not any(record.signed for record in place.proxy.log)
    assert stranger.accepted == 0


def test_without_credentials(place: Place, made: Published, stranger: SilentListener) -> None:
    """Told soon, with the option."""
    result = place.fails(6, "no credentials", "--store-option anonymous=true")
    assert result.seconds < 5
    assert place.proxy.log == []


def test_private_artifacts(place: Place, stranger: SilentListener) -> None:
    place.publish(prefix="private")
    result = place.pull(place.url("private"), "--store-option", "anonymous=true")
    fail_cleanly(result, 6, "AccessDenied", "s3://", "private")
    assert result.seconds < 5
    assert not place.target.exists()
