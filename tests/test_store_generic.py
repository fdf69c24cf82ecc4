"""Objects of fsspec's file systems."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry

from mxconvert.errors import MissingExtraError, StoreError, StoreFault, UsageError
from mxconvert.store import StoreOptions
from mxconvert.store.generic_options import storage_options
from tests.store_base import (
    AWKWARD,
    DiskError,
    StoreBehaviour,
    fault,
    identity,
    keys,
    make,
    pieces,
    read,
)
from tests.support.gcs import GcsServer


class TestMemory(StoreBehaviour):
    @pytest.fixture
    def store(self):
        return make(f"memory://{uuid.uuid4().hex}/below")


class TestS3ThroughFsspec(StoreBehaviour):
    @pytest.fixture
    def store(self, s3, bucket, monkeypatch):
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        return make(f"s3://{bucket}/some prefix", engine="fsspec", endpoint=s3.endpoint)


class TestS3(StoreBehaviour):
    """The store of botocore does the same."""

    folders_vanish = False  # SeaweedFS shows a folder after its last object is gone

    @pytest.fixture
    def store(self, s3, bucket, monkeypatch):
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        store = make(f"s3://{bucket}/some prefix", endpoint=s3.endpoint)
        yield store
        store.close()


class _Elsewhere(LocalFileSystem):
    """A file system with folders, as sftp has them; ``mv`` renames over what is there."""

    protocol = "webdav"
    root: str

    @classmethod
    def _strip_protocol(cls, path):
        path = path.removeprefix("webdav://server")
        return path if path.startswith(cls.root) else cls.root + path

    def mv(self, old, new):
        Path(old).replace(new)


class TestFileSystemWithFolders(StoreBehaviour):
    conditions = False
    folders_vanish = True

    @pytest.fixture
    def store(self, tmp_path):
        _Elsewhere.root = str(tmp_path)
        fsspec.register_implementation("webdav", _Elsewhere, clobber=True)
        yield make("webdav://server/some dir/store", auto_mkdir="true")
        _registry.pop("webdav")

    def test_files_that_a_killed_writer_has_left(self, store, tmp_path):
        store.put("v/a", b"1")
        left = tmp_path / "some dir" / "store" / "v" / "a.0123.partial"
        left.write_bytes(b"12345")
        assert keys(store) == ["v/a"]
        [found] = store.partials()
        assert (found.key, found.size) == ("v/a.0123.partial", 5)
        assert store.drop_partial(found.key)
        assert not left.exists()
        assert keys(store) == ["v/a"]


@pytest.fixture
def web():
    """A web server that knows ranges: the stand-in for GCS answers as one."""
    with GcsServer() as server:
        server.objects["files"] = {}
        for key, data in {"v/a.bin": DATA, f"v/{AWKWARD}": b"awkward"}.items():
            server.store("files", key, data, {})
        yield server


DATA = bytes(range(256)) * 40


def test_a_web_server(web):
    store = make(f"{web.endpoint}/files/v")
    assert store.head("a.bin").size == len(DATA)
    assert read(store, "a.bin", 17, 9000, store.head("a.bin").etag) == DATA[17:9000]
    assert store.get(AWKWARD, 99).data == b"awkward"
    assert fault(store.head, "absent") is StoreFault.MISSING
    assert fault(store.open, "a.bin", 0, 1, "other") is StoreFault.CHANGED
    assert fault(store.put, "b", b"1") is StoreFault.UNSUPPORTED
    assert fault(store.upload, "b", pieces(b"1"), identity(b"1")) is StoreFault.UNSUPPORTED
    assert fault(keys, store) is StoreFault.UNSUPPORTED
    assert fault(lambda: list(store.folders())) is StoreFault.UNSUPPORTED


@pytest.mark.parametrize(
    ("status", "expected"),
    [(403, StoreFault.DENIED), (429, StoreFault.THROTTLED), (500, StoreFault.TRANSIENT)],
)
def test_faults_of_a_web_server(web, status, expected):
    store = make(f"{web.endpoint}/files/v")
    web.fail_next(status, status)  # it asks again another way for the size
    assert fault(store.head, "a.bin") is expected


def test_a_password_in_the_url_is_not_shown():
    with GcsServer() as gone:
        url = gone.endpoint.replace("http://", "http://user:SECRET@") + "/files"
    store = make(url)
    with pytest.raises(StoreError) as caught:
        store.head("a")
    assert caught.value.fault is StoreFault.TRANSIENT
    assert "SECRET" not in caught.value.message + store.label + store.url("a")


def test_an_absent_bucket_is_not_created(s3, monkeypatch):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    store = make("s3://absent-bucket-of-tests/p", engine="fsspec", endpoint=s3.endpoint)
    for work in (
        lambda: store.put("a", b"1"),
        lambda: store.upload("a", pieces(b"1"), identity(b"1")),
        lambda: store.head("a"),
    ):
        assert fault(work) in (StoreFault.NO_BUCKET, StoreFault.MISSING)


def test_a_failed_upload_leaves_no_parts(s3, bucket, monkeypatch):
    """Nobody sees them, and everybody pays for them."""
    monkeypatch.setattr("mxconvert.store.generic_writing._BLOCK", 5 * 2**20)
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    store = make(f"s3://{bucket}", engine="fsspec", endpoint=s3.endpoint)

    def broken():
        yield from pieces(bytes(12 * 2**20), 2**20)
        raise DiskError

    with pytest.raises(DiskError):
        store.upload("a", broken(), identity(bytes(13 * 2**20)))
    assert s3.uploads(bucket) == []


@pytest.mark.parametrize("engine", ["botocore", "fsspec"])
def test_markers_of_folders_are_no_objects(s3, bucket, monkeypatch, engine):
    """Consoles make them: objects of no bytes whose names end in a slash."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    for key in ("p/", "p/a/"):
        s3.put(bucket, key, b"")
    s3.put(bucket, "p/a/b", b"1")
    store = make(f"s3://{bucket}/p", engine=engine, endpoint=s3.endpoint)
    assert keys(store) == ["a/b"]
    store.close()


def test_engines():
    with pytest.raises(UsageError, match="botocore or fsspec"):
        make("s3://b", engine="nonsense")


def test_options_of_s3fs():
    with pytest.raises(UsageError, match="part_count"):
        make("s3://b", engine="fsspec", part_count="9")
    with pytest.raises(UsageError, match="regoin"):
        make("s3://b", engine="fsspec", regoin="x")
    given = storage_options(
        StoreOptions(
            values={
                "acl": "private",
                "anonymous": "true",
                "ca_bundle": "/ca",
                "endpoint": "http://s3",
                "profile": "p",
                "proxy": "http://proxy",
                "region": "r",
                "requester_pays": "yes",
                "sse": "AES256",
            }
        ),
        "s3",
    )
    assert given["anon"] is given["requester_pays"] is True
    assert given["client_kwargs"] == {"region_name": "r", "verify": "/ca"}
    assert given["s3_additional_kwargs"] == {"ACL": "private", "ServerSideEncryption": "AES256"}
    assert given["config_kwargs"]["s3"] == {"addressing_style": "path"}
    assert given["config_kwargs"]["proxies"]["https"] == "http://proxy"
    assert given["profile"] == "p"


def test_options_of_other_schemes_are_typed():
    values = {"port": "22", "look_for_keys": "false", "username": "007", "password": "x"}
    assert storage_options(StoreOptions(values=values), "sftp") == {
        "port": 22,
        "look_for_keys": False,
        "username": "007",
        "password": "x",
    }


def test_unknown_schemes_and_missing_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(UsageError, match="nonsense://"):
        make("nonsense://a")
    with pytest.raises(MissingExtraError) as caught:
        make("sftp://host/a")
    assert "pip install paramiko" in (caught.value.hint or "")
