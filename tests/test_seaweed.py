"""The S3 server of the tests judges: what it is trusted to refuse, it refuses."""

from __future__ import annotations

import base64
import subprocess
import sys
import time
from pathlib import Path

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from tests.support.seaweed import Upload, shared_server


def code(failure: pytest.ExceptionInfo[ClientError]) -> str:
    return failure.value.response["Error"]["Code"]


def test_object_comes_back(s3, bucket):
    s3.put(bucket, "a/b c+é", b"bytes")
    assert s3.get(bucket, "a/b c+é") == b"bytes"
    assert s3.get(bucket, "a/b c+é", Range="bytes=1-2") == b"yt"
    assert s3.head(bucket, "a/b c+é")["ContentLength"] == 5
    assert s3.keys(bucket) == ["a/b c+é"]
    s3.delete(bucket, "a/b c+é")
    assert s3.keys(bucket) == []


def test_wrong_checksum_is_refused(s3, bucket):
    wrong = base64.b64encode(bytes(8)).decode()
    with pytest.raises(ClientError) as failure:
        s3.put(bucket, "a", b"bytes", ChecksumCRC64NVME=wrong)
    assert code(failure) in {"BadDigest", "InvalidRequest"}
    assert s3.keys(bucket) == []


def test_checksum_of_an_object_is_given(s3, bucket):
    put = s3.put(bucket, "a", b"bytes", ChecksumAlgorithm="CRC64NVME")
    assert put["ChecksumCRC64NVME"] == s3.head(bucket, "a")["ChecksumCRC64NVME"]


def test_wrong_signature_is_refused(s3, bucket):
    client = s3.client(secret_key="wrong")  # noqa: S106
    with pytest.raises(ClientError) as failure:
        client.put_object(Bucket=bucket, Key="a", Body=b"")
    assert code(failure) == "SignatureDoesNotMatch"


def test_unknown_key_is_refused(s3, bucket):
    client = s3.client(access_key="unknown")
    with pytest.raises(ClientError) as failure:
        client.list_objects_v2(Bucket=bucket)
    assert code(failure) == "InvalidAccessKeyId"


def test_missing_bucket_is_not_made(s3):
    with pytest.raises(ClientError) as failure:
        s3.put("no-such-bucket", "a", b"")
    assert code(failure) == "NoSuchBucket"


def test_put_if_none_match(s3, bucket):
    s3.put(bucket, "a", b"first", IfNoneMatch="*")
    with pytest.raises(ClientError) as failure:
        s3.put(bucket, "a", b"second", IfNoneMatch="*")
    assert code(failure) == "PreconditionFailed"
    assert s3.get(bucket, "a") == b"first"


def test_put_and_get_if_match(s3, bucket):
    old = s3.put(bucket, "a", b"first")["ETag"]
    s3.put(bucket, "a", b"second", IfMatch=old)
    for action in (
        lambda: s3.put(bucket, "a", b"third", IfMatch=old),
        lambda: s3.get(bucket, "a", IfMatch=old),
        lambda: s3.get(bucket, "a", IfMatch=old, Range="bytes=0-1"),
    ):
        with pytest.raises(ClientError) as failure:
            action()
        assert failure.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
    assert s3.get(bucket, "a") == b"second"


def test_multipart_upload_is_seen_until_it_ends(s3, bucket):
    client = s3.client()
    where = {"Bucket": bucket, "Key": "big"}
    upload = Upload("big", client.create_multipart_upload(**where)["UploadId"])
    assert s3.uploads(bucket) == [upload]
    where["UploadId"] = upload.id
    parts = [bytes(5 << 20), b"end"]
    for number, data in enumerate(parts, 1):
        client.upload_part(**where, PartNumber=number, Body=data)
    listed = s3.parts(bucket, upload)
    assert [(part["PartNumber"], part["Size"]) for part in listed] == [(1, 5 << 20), (2, 3)]
    done = [{key: part[key] for key in ("PartNumber", "ETag")} for part in listed]
    answer = client.complete_multipart_upload(**where, MultipartUpload={"Parts": done})
    assert answer["ETag"].endswith('-2"')
    assert s3.get(bucket, "big") == b"".join(parts)
    assert s3.uploads(bucket) == []


def test_server_ends_with_a_run_that_is_killed(s3, tmp_path):
    """No server and no data stay behind."""
    watched = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    server = shared_server(tmp_path, watched.pid)
    server.close()
    (pid,) = tmp_path.glob("seaweedfs-*/guard.pid")
    guard = Path("/proc") / pid.read_text() / "cmdline"
    watched.kill()
    watched.wait()
    end = time.monotonic() + 10
    while pid.parent.exists() or (guard.exists() and guard.read_bytes()):
        assert time.monotonic() < end
        time.sleep(0.02)
    with pytest.raises(EndpointConnectionError):
        server.make_bucket()
    server.close()
