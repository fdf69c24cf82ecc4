"""Each fault does what it says, against the real server: what is built on it is not vacuous."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    HTTPClientError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from tests.support.faults import (
    Call,
    CutBody,
    CutUpload,
    Delay,
    FaultProxy,
    Flip,
    FlipUpload,
    HangUp,
    LoseAnswer,
    NeverAnswer,
    Respond,
    SetHeaders,
    Stall,
)

DATA = random.Random(0).randbytes(1_000_000)


@pytest.fixture
def client(s3, proxy):
    """A botocore client through the proxy that does not retry."""
    return s3.client(proxy.endpoint, read_timeout=5)


@contextlib.contextmanager
def fails(code: str, status: int):
    with pytest.raises(ClientError) as failure:
        yield
    assert failure.value.response["Error"]["Code"] == code
    assert failure.value.response["ResponseMetadata"]["HTTPStatusCode"] == status


def get(client, bucket: str, key: str = "a", **options) -> bytes:
    with client.get_object(Bucket=bucket, Key=key, **options)["Body"] as body:
        return body.read()


def first_bytes(client, bucket: str) -> bytes:
    """Read what comes of an object whose transfer is cut."""
    found = b""
    ends = (HTTPClientError, IncompleteReadError)  # a time-out is one of the former
    body = client.get_object(Bucket=bucket, Key="a")["Body"]
    with contextlib.closing(body), contextlib.suppress(*ends):
        while byte := body.read(1):
            found += byte
    return found


# The log, and requests that nothing disturbs.


def test_proxy_changes_nothing(s3, bucket, proxy, client):
    client.put_object(Bucket=bucket, Key="a b/ü+", Body=DATA, IfNoneMatch="*")
    assert s3.get(bucket, "a b/ü+") == DATA
    assert get(client, bucket, "a b/ü+") == DATA
    assert get(client, bucket, "a b/ü+", Range="bytes=5-6") == DATA[5:7]
    assert client.head_object(Bucket=bucket, Key="a b/ü+")["ContentLength"] == len(DATA)
    with fails("PreconditionFailed", 412):
        client.put_object(Bucket=bucket, Key="a b/ü+", Body=DATA, IfNoneMatch="*")
    assert [each["Key"] for each in client.list_objects_v2(Bucket=bucket)["Contents"]] == ["a b/ü+"]
    client.delete_object(Bucket=bucket, Key="a b/ü+")
    assert s3.keys(bucket) == []


def test_log_counts_bytes(s3, bucket, proxy, client):
    client.put_object(Bucket=bucket, Key="a", Body=DATA)
    get(client, bucket, Range="bytes=0-9")
    client.head_object(Bucket=bucket, Key="a")
    proxy.settle()
    put, ranged, head = proxy.log
    assert (put.op, put.key, put.status, put.received) == ("PutObject", "a", 200, len(DATA))
    assert (ranged.op, ranged.range, ranged.status, ranged.sent) == (
        "GetObject",
        "bytes=0-9",
        206,
        10,
    )
    assert (head.op, head.path, head.sent) == ("HeadObject", f"/{bucket}/a", 0)
    assert all(record.signed and record.ended >= record.began for record in proxy.log)
    assert {record.connection for record in proxy.log} == {0}
    assert proxy.sent("GetObject") == 10
    assert proxy.received(key="a") == len(DATA)
    assert proxy.requests("GetObject", header="range") == [ranged]


def test_operations_have_their_names(s3, bucket, proxy, client):
    where = {"Bucket": bucket, "Key": "big"}
    upload = client.create_multipart_upload(**where)["UploadId"]
    tag = client.upload_part(**where, UploadId=upload, PartNumber=1, Body=b"x")["ETag"]
    client.list_parts(**where, UploadId=upload)
    client.list_multipart_uploads(Bucket=bucket)
    parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
    client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload=parts)
    client.list_objects_v2(Bucket=bucket)
    client.copy_object(Bucket=bucket, Key="copy", CopySource=f"{bucket}/big")
    client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "copy"}]})
    assert [record.op for record in proxy.log] == [
        "CreateMultipartUpload",
        "UploadPart",
        "ListParts",
        "ListMultipartUploads",
        "CompleteMultipartUpload",
        "ListObjectsV2",
        "CopyObject",
        "DeleteObjects",
    ]


def test_client_that_asks_may_send_its_body(s3, bucket, proxy, client):
    """Expect: 100-continue; SeaweedFS, unlike Amazon, reads also a body that it refuses."""
    with fails("NoSuchBucket", 404):
        client.put_object(Bucket="no-such-bucket", Key="a", Body=DATA)
    client.put_object(Bucket=bucket, Key="a", Body=DATA)
    assert [record.headers.get("expect") for record in proxy.log] == ["100-continue"] * 2
    assert min(record.ended - record.began for record in proxy.settle()) < 0.9  # or it waits 1 s


# Rules.


def test_rule_skips_counts_and_ends(s3, bucket, proxy, client):
    rule = proxy.add(Respond(503, "SlowDown"), "PutObject", key="b*", skip=1, times=2)

    def put(key: str) -> int:
        try:
            client.put_object(Bucket=bucket, Key=key, Body=b"")
        except ClientError as error:
            return error.response["ResponseMetadata"]["HTTPStatusCode"]
        return 200

    assert [put(key) for key in ("a", "b", "b1", "a", "b2", "b3")] == [200, 200, 503, 200, 503, 200]
    assert rule.fired == 2
    assert [record.faults for record in proxy.log] == [[], [], ["Respond"], [], ["Respond"], []]
    proxy.remove(rule)
    assert proxy.rules == []


def test_rule_with_a_probability_is_seeded(bucket, proxy, client):
    for seed in (1, 1, 2):
        proxy.remove()
        proxy.add(Respond(500, "InternalError"), probability=0.5, seed=seed)
        for _ in range(20):
            with contextlib.suppress(ClientError):
                client.head_bucket(Bucket=bucket)
    statuses = [record.status for record in proxy.log]
    assert statuses[:20] == statuses[20:40] != statuses[40:]
    assert 4 < statuses[:20].count(500) < 16


# Answers in the server's place.


def test_respond(s3, bucket, proxy, client):
    proxy.add(Respond(503, "SlowDown", headers={"Retry-After": "7"}), "PutObject", times=1)
    with pytest.raises(ClientError) as failure:
        client.put_object(Bucket=bucket, Key="a", Body=DATA)
    assert failure.value.response["Error"]["Code"] == "SlowDown"
    assert failure.value.response["ResponseMetadata"]["HTTPHeaders"]["retry-after"] == "7"
    assert proxy.received() == len(DATA)
    assert s3.keys(bucket) == []
    client.put_object(Bucket=bucket, Key="a", Body=DATA)
    assert {record.connection for record in proxy.log} == {0}


def test_respond_at_once(s3, bucket, proxy, client):
    proxy.add(Respond(503, "SlowDown", drain=False), "PutObject")
    with fails("SlowDown", 503):
        client.put_object(Bucket=bucket, Key="a", Body=DATA)
    assert proxy.received() == 0
    with fails("NoSuchKey", 404):
        client.get_object(Bucket=bucket, Key="a")
    assert [record.connection for record in proxy.log] == [0, 1]


def test_respond_to_head_and_with_no_body(s3, bucket, proxy, client):
    proxy.add(Respond(403), "HeadObject")
    proxy.add(Respond(301, body=b"", headers={"x-amz-bucket-region": "eu-west-1"}), "GetObject")
    with fails("403", 403):
        client.head_object(Bucket=bucket, Key="a")
    with fails("301", 301):
        client.get_object(Bucket=bucket, Key="a")
    assert proxy.sent() == 0
    assert {record.connection for record in proxy.log} == {0}


# Cuts.


def test_hang_up(s3, bucket, proxy, client):
    proxy.add(HangUp(), "PutObject", times=1)
    proxy.add(HangUp(reset=True), "PutObject", times=1)
    for _ in range(2):
        with pytest.raises((ConnectionClosedError, HTTPClientError)):
            client.put_object(Bucket=bucket, Key="a", Body=DATA)
    assert s3.keys(bucket) == []
    proxy.settle()
    assert all(record.cut and not record.status for record in proxy.log)


def test_lost_answer(s3, bucket, proxy, client):
    proxy.add(LoseAnswer(), "PutObject", times=1)
    with pytest.raises(ConnectionClosedError):
        client.put_object(Bucket=bucket, Key="a", Body=DATA, IfNoneMatch="*")
    assert s3.get(bucket, "a") == DATA


def test_never_answered(s3, bucket, proxy):
    client = s3.client(proxy.endpoint, read_timeout=0.6)
    proxy.add(NeverAnswer(), "PutObject", key="a")
    proxy.add(NeverAnswer(forward=True), "PutObject", key="b")
    for key in "ab":
        with pytest.raises(ReadTimeoutError):
            client.put_object(Bucket=bucket, Key=key, Body=DATA)
    proxy.settle()
    assert s3.keys(bucket) == ["b"]
    assert [record.received for record in proxy.log] == [len(DATA)] * 2


def test_never_answered_is_released(bucket, proxy, client):
    action = NeverAnswer()
    proxy.add(action)
    threading.Timer(0.1, action.release).start()
    with pytest.raises(ConnectionClosedError):
        client.head_bucket(Bucket=bucket)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_body_is_cut(s3, bucket, proxy, reset, chunked):
    s3.put(bucket, "a", DATA)
    proxy.add(CutBody(0.5, reset=reset, chunked=chunked), "GetObject", times=1)
    client = s3.client(proxy.endpoint)
    answer = client.get_object(Bucket=bucket, Key="a")
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    assert ("content-length" in headers) is not chunked
    with (
        contextlib.closing(answer["Body"]) as body,
        pytest.raises((HTTPClientError, ResponseStreamingError)),
    ):
        body.read()
    proxy.settle()
    assert proxy.log[0].sent == len(DATA) // 2
    assert proxy.log[0].cut
    assert get(client, bucket) == DATA


def test_reset_is_a_reset(s3, bucket, proxy):
    """RST, not FIN: the reader sees ECONNRESET."""
    proxy.add(HangUp(reset=True))
    with socket.create_connection(
        (urlsplit(proxy.endpoint).hostname, urlsplit(proxy.endpoint).port)
    ) as sock:
        sock.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            sock.recv(1)


def test_body_is_cut_at_a_byte(s3, bucket, proxy, client):
    s3.put(bucket, "a", DATA)
    proxy.add(CutBody(1234), "GetObject")
    assert first_bytes(client, bucket) == DATA[:1234]


def test_upload_is_cut(s3, bucket, proxy, client):
    proxy.add(CutUpload(1000, reset=True), "PutObject")
    with pytest.raises((ConnectionClosedError, HTTPClientError)):
        client.put_object(Bucket=bucket, Key="a", Body=DATA)
    assert s3.keys(bucket) == []


# Changed bytes.


@pytest.mark.parametrize(("offset", "place"), [(0, 0), (700_000, 700_000), (-1, len(DATA) - 1)])
def test_one_bit_is_flipped(s3, bucket, proxy, offset, place):
    client = s3.client(proxy.endpoint)
    s3.put(bucket, "a", DATA)
    proxy.add(Flip(offset, bit=3), "GetObject", times=1)
    wanted = bytearray(DATA)
    wanted[place] ^= 8
    assert get(client, bucket) == wanted
    assert get(client, bucket) == DATA


def test_one_bit_of_an_upload_is_flipped(s3, bucket, proxy):
    """Stored when no checksum or signature covers the body; refused when one does."""
    proxy.add(FlipUpload(10), "PutObject")
    signed = s3.client(proxy.endpoint)
    with pytest.raises(ClientError):
        signed.put_object(Bucket=bucket, Key="a", Body=DATA)
    assert s3.keys(bucket) == []
    unsigned = s3.client(
        proxy.endpoint,
        s3={"payload_signing_enabled": False, "addressing_style": "path"},
        request_checksum_calculation="when_required",
    )
    unsigned.put_object(Bucket=bucket, Key="a", Body=DATA)
    assert s3.get(bucket, "a") == DATA[:10] + bytes([DATA[10] ^ 1]) + DATA[11:]


# Time.


def test_stall(s3, bucket, proxy):
    s3.put(bucket, "a", DATA)
    proxy.add(Stall(1000), "GetObject")
    client = s3.client(proxy.endpoint, read_timeout=0.6)
    assert first_bytes(client, bucket) == DATA[:1000]
    assert proxy.log[0].sent == 1000


def test_stall_is_released(s3, bucket, proxy, client):
    s3.put(bucket, "a", DATA)
    action = Stall(0.5)
    proxy.add(action, "GetObject")

    def release() -> None:
        while not proxy.sent("GetObject"):
            time.sleep(0.01)
        time.sleep(0.2)
        action.release()

    thread = threading.Thread(target=release)
    thread.start()
    assert get(client, bucket) == DATA
    thread.join()
    proxy.settle()
    assert proxy.log[0].ended - proxy.log[0].began > 0.15


def test_closing_ends_a_stall(s3, bucket):
    s3.put(bucket, "a", DATA)
    with FaultProxy(s3) as proxy:
        proxy.add(Stall())
        begin = time.monotonic()
        threading.Timer(0.1, proxy.close).start()
        assert first_bytes(s3.client(proxy.endpoint), bucket) == b""
    assert time.monotonic() - begin < 20


def test_latency_delay_and_rate(s3, bucket, proxy, client):
    s3.put(bucket, "a", DATA)
    proxy.latency = 0.1
    proxy.add(Delay(0.1), "HeadBucket")
    client.head_bucket(Bucket=bucket)
    proxy.latency, proxy.rate = 0, 2e6
    get(client, bucket)
    proxy.settle()
    head, body = (record.ended - record.began for record in proxy.log)
    assert head >= 0.2
    assert body >= 0.45


# Hooks and heads.


def test_call_swaps_an_object(s3, bucket, proxy, client):
    s3.put(bucket, "a", b"old")
    swap = Call(lambda exchange: s3.put(bucket, exchange.request.key, b"new"))
    proxy.add(swap, "GetObject", skip=2, times=1)
    assert [get(client, bucket) for _ in range(4)] == [b"old", b"old", b"new", b"new"]


def test_headers_are_set(s3, bucket, proxy, client):
    s3.put(bucket, "a", b"old")
    proxy.add(SetHeaders(ETag=None, x_amz_meta_new="1"), "HeadObject")
    head = client.head_object(Bucket=bucket, Key="a")
    assert "ETag" not in head
    assert head["Metadata"] == {"new": "1"}


def test_fault_of_a_hook_is_reported(s3, bucket):
    """A mistake in a test's own function fails that test."""
    proxy = FaultProxy(s3)
    proxy.add(Call(lambda _: 1 / 0))
    with pytest.raises(ConnectionClosedError):
        s3.client(proxy.endpoint).head_bucket(Bucket=bucket)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        proxy.close()


def test_many_connections_at_once(s3, bucket, proxy):
    s3.put(bucket, "a", DATA)
    address = urlsplit(proxy.endpoint).netloc

    def fetch() -> None:
        link = http.client.HTTPConnection(address)
        link.request("GET", f"/{bucket}/a")
        link.getresponse().read()
        link.close()

    threads = [threading.Thread(target=fetch) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(proxy.log) == 32
    assert {record.connection for record in proxy.log} == set(range(32))
