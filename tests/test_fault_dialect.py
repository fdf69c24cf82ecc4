"""Each fault of S3's own does what it says, against the real server."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from urllib.parse import quote, urlsplit

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ReadTimeoutError

from tests.support.faults import (
    Anonymous,
    ChangeETag,
    EmptyPage,
    FlipUpload,
    HideKeys,
    IgnoreConditions,
    IgnoreRange,
    PageSize,
    SilentListener,
    StrangeTokens,
    StripChecksums,
    WholeChecksum,
    access_denied,
    closed_endpoint,
    conditional,
    etag_base64,
    etag_none,
    etag_of_parts,
    etag_random,
    expired_token,
    illegal_location,
    internal_error,
    invalid_range,
    malformed_authorization,
    moved,
    no_checksums,
    not_implemented,
    skewed_clock,
    slow_down,
    with_checksum,
)

KEYS = [f"k/{number}" for number in range(7)]


@pytest.fixture
def client(s3, proxy):
    """A botocore client through the proxy that does not retry."""
    return s3.client(proxy.endpoint, read_timeout=5)


def get(client, bucket: str, key: str = "a", **options) -> bytes:
    with contextlib.closing(client.get_object(Bucket=bucket, Key=key, **options)["Body"]) as body:
        return body.read()


def fetch(proxy, path: str, method: str = "GET") -> tuple[int, bytes]:
    """Request without a signature."""
    link = http.client.HTTPConnection(urlsplit(proxy.endpoint).netloc)
    with contextlib.closing(link):
        link.request(method, quote(path))
        answer = link.getresponse()
        return answer.status, answer.read()


def failure_of(action) -> dict:
    with pytest.raises(ClientError) as failure:
        action()
    return failure.value.response


def listed(client, bucket: str) -> list[str]:
    """List with botocore's paginator, which follows tokens as given."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return [entry["Key"] for page in pages for entry in page.get("Contents", ())]


# Errors.


@pytest.mark.parametrize(
    ("action", "status", "code"),
    [
        (slow_down("3"), 503, "SlowDown"),
        (internal_error(), 500, "InternalError"),
        (expired_token(), 400, "ExpiredToken"),
        (skewed_clock(), 403, "RequestTimeTooSkewed"),
        (access_denied(), 403, "AccessDenied"),
        (not_implemented(), 501, "NotImplemented"),
        (malformed_authorization("eu-west-1"), 400, "AuthorizationHeaderMalformed"),
        (illegal_location("eu-west-1"), 400, "IllegalLocationConstraintException"),
        (invalid_range(), 416, "InvalidRange"),
        (no_checksums(), 400, "InvalidArgument"),
    ],
)
def test_error(proxy, action, status, code):
    proxy.add(action)
    answer = fetch(proxy, "/bucket/a")
    assert answer[0] == status
    assert f"<Code>{code}</Code>".encode() in answer[1]


def test_error_names_the_region(bucket, proxy):
    proxy.add(malformed_authorization("eu-west-1"))
    assert b"<Region>eu-west-1</Region>" in fetch(proxy, f"/{bucket}/a")[1]


def test_late_error_of_complete(s3, bucket, proxy, client):
    proxy.add(internal_error(200), "CompleteMultipartUpload")
    where = {"Bucket": bucket, "Key": "a"}
    where["UploadId"] = client.create_multipart_upload(**where)["UploadId"]
    tag = client.upload_part(**where, PartNumber=1, Body=b"x")["ETag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
    failure = failure_of(lambda: client.complete_multipart_upload(**where, MultipartUpload=parts))
    assert failure["Error"]["Code"] == "InternalError"
    assert proxy.log[-1].status in {200, 500}
    assert len(s3.uploads(bucket)) == 1


def test_moved(bucket, proxy):
    proxy.add(moved("eu-west-1"))
    link = http.client.HTTPConnection(urlsplit(proxy.endpoint).netloc)
    with contextlib.closing(link):
        link.request("GET", f"/{bucket}/a")
        answer = link.getresponse()
        assert (answer.status, answer.read()) == (301, b"")
        assert answer.headers["x-amz-bucket-region"] == "eu-west-1"
        assert "location" not in answer.headers


def test_key_expires_and_another_is_taken(s3, bucket, proxy, client):
    rule = proxy.add(expired_token(), access_key=s3.access_key, skip=1)
    client.put_object(Bucket=bucket, Key="a", Body=b"1")
    failure = failure_of(lambda: client.put_object(Bucket=bucket, Key="b", Body=b"1"))
    assert failure["Error"]["Code"] == "ExpiredToken"
    fresh = s3.client(proxy.endpoint, access_key="FRESH", secret_key="any")  # noqa: S106
    failure = failure_of(lambda: fresh.put_object(Bucket=bucket, Key="b", Body=b"1"))
    assert failure["Error"]["Code"] == "InvalidAccessKeyId"
    proxy.trusted.add("FRESH")
    fresh.put_object(Bucket=bucket, Key="b", Body=b"1")
    assert s3.keys(bucket) == ["a", "b"]
    assert rule.fired == 1


# Checksums.


def test_checksums_are_rejected(s3, bucket, proxy, client):
    rule = proxy.add(no_checksums(501), where=with_checksum)
    failure = failure_of(lambda: client.put_object(Bucket=bucket, Key="a", Body=b"1"))
    assert failure["Error"]["Code"] == "NotImplemented"
    plain = s3.client(proxy.endpoint, request_checksum_calculation="when_required")
    plain.put_object(Bucket=bucket, Key="a", Body=b"1")
    assert get(client, bucket) == b"1"
    assert rule.fired == 1


def test_checksums_are_stripped(s3, bucket, proxy, client):
    s3.put(bucket, "a", b"1", ChecksumAlgorithm="CRC64NVME")
    head = {"Bucket": bucket, "Key": "a", "ChecksumMode": "ENABLED"}
    assert "ChecksumCRC64NVME" in client.head_object(**head)
    proxy.add(StripChecksums())
    assert not [name for name in client.head_object(**head) if name.startswith("Checksum")]


def test_whole_checksum_of_a_range(s3, bucket, proxy, client):
    s3.put(bucket, "a", b"0123456789", ChecksumAlgorithm="CRC64NVME")
    whole = s3.head(bucket, "a")["ChecksumCRC64NVME"]
    proxy.add(WholeChecksum(), "GetObject")
    answer = client.get_object(Bucket=bucket, Key="a", Range="bytes=0-3")
    answer["Body"].close()
    assert answer["ChecksumCRC64NVME"] == whole


# Ranges, conditions, ETags.


def test_range_is_ignored(s3, bucket, proxy, client):
    s3.put(bucket, "a", b"0123456789")
    proxy.add(IgnoreRange(), "GetObject", times=1)
    assert get(client, bucket, Range="bytes=2-3") == b"0123456789"
    assert get(client, bucket, Range="bytes=2-3") == b"23"
    assert [(record.status, record.range) for record in proxy.log] == [
        (200, "bytes=2-3"),
        (206, "bytes=2-3"),
    ]


def test_conditions_are_ignored(s3, bucket, proxy, client):
    s3.put(bucket, "a", b"old")
    proxy.add(IgnoreConditions(), "PutObject")
    client.put_object(Bucket=bucket, Key="a", Body=b"new", IfNoneMatch="*")
    assert s3.get(bucket, "a") == b"new"


def test_conditional_writes_are_not_implemented(s3, bucket, proxy, client):
    rule = proxy.add(not_implemented(), "PutObject", where=conditional)
    client.put_object(Bucket=bucket, Key="a", Body=b"old")
    put = {"Bucket": bucket, "Key": "a", "Body": b"new"}
    assert failure_of(lambda: client.put_object(**put, IfNoneMatch="*"))["Error"]["Code"] == (
        "NotImplemented"
    )
    assert rule.fired == 1


@pytest.mark.parametrize("make", [etag_of_parts, etag_base64, etag_random])
def test_etag_is_changed(s3, bucket, proxy, make):
    real = s3.put(bucket, "a", b"0123456789")["ETag"]
    client = s3.client(proxy.endpoint)
    proxy.add(ChangeETag(make), ("GetObject", "HeadObject"))
    tags = [client.head_object(Bucket=bucket, Key="a")["ETag"] for _ in range(2)]
    assert real not in tags
    assert (tags[0] == tags[1]) is (make is not etag_random)
    assert get(client, bucket, IfMatch=tags[0], Range="bytes=1-2") == b"12"
    s3.put(bucket, "a", b"another")
    failure = failure_of(lambda: get(client, bucket, IfMatch=tags[0]))
    assert failure["ResponseMetadata"]["HTTPStatusCode"] == 412


def test_no_etag(s3, bucket, proxy, client):
    s3.put(bucket, "a", b"1")
    proxy.add(ChangeETag(etag_none))
    assert "ETag" not in client.head_object(Bucket=bucket, Key="a")


# Listings.


@pytest.fixture
def seven(s3, bucket):
    for key in KEYS:
        s3.put(bucket, key, b"1")
    return bucket


def test_page_size(seven, proxy, client):
    proxy.add(PageSize(3), "ListObjectsV2")
    assert listed(client, seven) == KEYS
    assert len(proxy.log) == 3


def test_empty_page(seven, proxy, client):
    proxy.add(EmptyPage(), "ListObjectsV2")
    first = client.list_objects_v2(Bucket=seven)
    assert (first["KeyCount"], first["IsTruncated"], "Contents" in first) == (0, True, False)
    assert listed(client, seven) == KEYS


def test_strange_tokens(seven, proxy, client):
    proxy.add(PageSize(3), "ListObjectsV2")
    proxy.add(StrangeTokens(), "ListObjectsV2")
    token = client.list_objects_v2(Bucket=seven)["NextContinuationToken"]
    assert "+" in token
    assert "&" in token
    assert listed(client, seven) == KEYS
    wrong = {"Bucket": seven, "ContinuationToken": token.replace("+", " ")}
    assert failure_of(lambda: client.list_objects_v2(**wrong))["Error"]["Code"] == (
        "InvalidArgument"
    )


def test_hidden_keys(seven, proxy, client):
    proxy.add(HideKeys(newest=2), "ListObjectsV2", times=1)
    proxy.add(HideKeys(where=lambda key: key.endswith("3")), "ListObjectsV2", skip=1, times=1)
    assert len(listed(client, seven)) == 5
    assert listed(client, seven) == [key for key in KEYS if key != "k/3"]
    assert listed(client, seven) == KEYS


# Who asks.


def test_anonymous(s3, bucket, proxy, client):
    s3.put(bucket, "public/a b", b"1")
    s3.put(bucket, "private", b"1")
    proxy.add(Anonymous(f"/{bucket}/public/*"))
    assert fetch(proxy, f"/{bucket}/public/a b") == (200, b"1")
    for path, method in (
        (f"/{bucket}/private", "GET"),
        (f"/{bucket}/public/a b", "DELETE"),
        (f"/{bucket}?list-type=2", "GET"),
    ):
        assert fetch(proxy, path, method)[0] == 403
    assert get(client, bucket, "private") == b"1"
    assert [record.signed for record in proxy.log] == [False] * 4 + [True]


def test_anonymous_listing(s3, bucket, proxy):
    from botocore import UNSIGNED

    s3.put(bucket, "a", b"1")
    proxy.add(Anonymous(f"/{bucket}/*", listing=True))
    client = s3.client(proxy.endpoint, signature_version=UNSIGNED)
    assert listed(client, bucket) == ["a"]


def test_resigned_request_still_covers_its_body(s3, bucket, proxy, client):
    """A signature made anew keeps the client's hash of the body: damage is still found."""
    proxy.add(IgnoreConditions(), "PutObject")
    proxy.add(FlipUpload(0), "PutObject")
    failure_of(lambda: client.put_object(Bucket=bucket, Key="a", Body=b"1", IfNoneMatch="*"))
    assert s3.keys(bucket) == []


# No server.


def test_handshake_never_completes():
    with SilentListener() as silent:
        parts = urlsplit(silent.endpoint)
        context = ssl.create_default_context()
        with (
            socket.create_connection((parts.hostname, parts.port), timeout=0.2) as sock,
            pytest.raises(TimeoutError),
        ):
            context.wrap_socket(sock, server_hostname="127.0.0.1")
        assert silent.accepted == 1


def test_botocore_times_out_on_silence(s3):
    with SilentListener() as silent, pytest.raises((ReadTimeoutError, EndpointConnectionError)):
        s3.client(silent.endpoint, read_timeout=0.2, connect_timeout=0.2).list_buckets()


def test_closed_endpoint(s3):
    with pytest.raises(EndpointConnectionError):
        s3.client(closed_endpoint()).list_buckets()
