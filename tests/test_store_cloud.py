"""Objects of Google Cloud Storage and Azure, against stand-ins of both."""

from __future__ import annotations

import json
import socket

import pytest

from mxconvert.errors import LocalError, StoreError, StoreFault, UsageError
from mxconvert.store.base import Identity, PartLimits
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
from tests.support import azurite
from tests.support.gcs import GcsServer


@pytest.fixture
def gcs():
    with GcsServer() as server:
        yield server


def gs(server, bucket):
    account = {"gcs_base_url": server.endpoint, "disable_oauth": True, "client_email": ""}
    key = json.dumps(account | {"private_key": "", "private_key_id": ""})
    return make(f"gs://{bucket}/some prefix", endpoint=server.endpoint, service_account_key=key)


@pytest.fixture(scope="session")
def azure(tmp_path_factory):
    with azurite.azurite(tmp_path_factory.mktemp("azurite")) as endpoint:
        yield endpoint


def az(endpoint, container):
    return make(
        f"az://{container}/some prefix",
        endpoint=endpoint,
        account_name=azurite.AZURITE_ACCOUNT,
        account_key=azurite.AZURITE_KEY,
    )


class CloudBehaviour(StoreBehaviour):
    def test_the_digest_comes_back(self, store):
        data = b"12" * 9
        store.upload("a", pieces(data), identity(data))
        assert store.head("a").sha256 == identity(data).sha256
        store.copy("a", "b", identity(data))
        assert store.head("b").sha256 == identity(data).sha256

    def test_an_upload_of_many_parts(self, store, monkeypatch):
        monkeypatch.setattr("mxconvert.store.cloud._AT_ONCE", 2**18)
        monkeypatch.setattr(store, "_limits", PartLimits(count=6))
        data = bytes(range(256)) * 2**12 + b"rest"
        store.upload("a", pieces(data, 100_000), identity(data))
        assert read(store, "a", 0, len(data)) == data
        assert store.head("a").sha256 == identity(data).sha256

    def test_pieces_of_one_buffer(self, store, monkeypatch):
        """A reader fills one buffer again and again: nothing may still be sent from it."""
        monkeypatch.setattr("mxconvert.store.cloud._AT_ONCE", 2**18)
        buffer = memoryview(bytearray(2**18))
        data = b"".join(bytes([number]) * 2**18 for number in range(8))

        def reused():
            for number in range(8):
                buffer[:] = bytes([number]) * 2**18
                yield buffer

        store.upload("a", reused(), identity(data))
        assert read(store, "a", 0, len(data)) == data


class TestGoogle(CloudBehaviour):
    listings_have_tags = False  # of the generation

    @pytest.fixture
    def store(self, gcs):
        return gs(gcs, gcs.make_bucket())

    def test_names_are_what_was_asked_for(self, gcs):
        """A round trip alone would not show that a name is escaped twice."""
        bucket = gcs.make_bucket()
        gs(gcs, bucket).put(AWKWARD, b"1")
        assert list(gcs.objects[bucket]) == [f"some prefix/{AWKWARD}"]

    def test_a_failed_upload_leaves_no_parts(self, gcs, monkeypatch):
        monkeypatch.setattr("mxconvert.store.cloud._AT_ONCE", 2**18)
        store = gs(gcs, gcs.make_bucket())

        def broken():
            yield memoryview(bytes(2**20))
            raise DiskError

        with pytest.raises(DiskError):
            store.upload("a", broken(), identity(bytes(2**21)))
        assert gcs.uploads == {}

    @pytest.mark.parametrize(
        ("status", "expected"),
        [
            (429, StoreFault.THROTTLED),
            (503, StoreFault.THROTTLED),
            (500, StoreFault.TRANSIENT),
            (403, StoreFault.DENIED),
            (401, StoreFault.DENIED),
            (404, StoreFault.MISSING),
            (400, StoreFault.REFUSED),
        ],
    )
    def test_faults(self, gcs, status, expected):
        store = gs(gcs, gcs.make_bucket())
        for work in (store.head, lambda key: store.put(key, b"1"), lambda key: store.get(key, 9)):
            gcs.fail_next(status)
            assert fault(work, "a") is expected
        assert len(gcs.requests) == 3  # one attempt each: the client repeats

    def test_an_absent_bucket(self, gcs):
        assert fault(gs(gcs, "absent").put, "a", b"1") is StoreFault.NO_BUCKET

    def test_markers_of_folders_are_no_objects(self, gcs):
        bucket = gcs.make_bucket()
        store = gs(gcs, bucket)
        for key in ("some prefix/", "some prefix/a/"):
            gcs.store(bucket, key, b"", {})
        store.put("a/b", b"1")
        assert keys(store) == ["a/b"]

    def test_no_server(self, gcs):
        store = gs(gcs, "bucket")
        with GcsServer() as gone:
            other = gs(gone, "bucket")
        del store
        assert fault(other.head, "a") is StoreFault.TRANSIENT


@pytest.mark.emulator
class TestAzure(CloudBehaviour):
    @pytest.fixture
    def store(self, azure):
        return az(azure, azurite.make_azure_container(azure))

    def test_an_absent_container(self, azure):
        assert fault(az(azure, "absent").put, "a", b"1") is StoreFault.NO_BUCKET


def test_options_that_are_refused(tmp_path):
    with pytest.raises(UsageError, match="acount_name"):
        make("az://c", acount_name="x")
    with pytest.raises(UsageError, match="region"):
        make("gs://b", region="x")
    with pytest.raises(UsageError, match="Account must be"):
        make("az://c")
    with pytest.raises(LocalError, match="absent"):
        make("gs://b", ca_bundle=str(tmp_path / "absent"))


def test_no_signature_is_shown():
    """A shared access signature travels in the query of the URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store = make(
        "az://c", endpoint=f"http://127.0.0.1:{port}", account_name="x", sas_key="sig=SECRET%3D"
    )
    with pytest.raises(StoreError) as caught:
        store.head("a")
    assert caught.value.fault is StoreFault.TRANSIENT
    assert "SECRET" not in caught.value.message


@pytest.mark.parametrize(
    ("url", "size", "parts"), [("gs://b", 5 * 2**40, 10_000), ("az://b", 190 * 2**40, 50_000)]
)
def test_the_largest_object_fits_into_the_parts(url, size, parts, monkeypatch):
    given = {}
    monkeypatch.setattr("obstore.put", lambda *_, **options: given.update(options))
    store = make(url, **({"account_name": "x"} if url.startswith("az") else {}))
    store.upload("a", iter(()), Identity(size, "0" * 64, "0" * 16))
    assert -(-size // given["chunk_size"]) <= parts
    assert given["chunk_size"] <= 5 * 2**30
    assert fault(store.upload, "a", (), Identity(size + 1, "", "")) is StoreFault.REFUSED
