"""Models on the Hugging Face Hub: huggingface_hub itself, against a stand-in of the Hub."""

from __future__ import annotations

import hashlib
import sys

import pytest

from mxconvert.errors import MissingExtraError, StoreError, StoreFault, UsageError
from mxconvert.store import Client, ClientOptions
from tests.store_base import AWKWARD, fault, identity, keys, make, read
from tests.support.hub import Hub, commit_id

# Of huggingface_hub and its HTTP library, about each other.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")

BIG = bytes(range(256)) * 40
FILES = {
    "config.json": b"{}",
    "empty": b"",
    "model-1.safetensors": BIG,
    f"sub/{AWKWARD}": b"awkward",
    "sub/a/big.bin": BIG[:5000],
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants")
    utils = pytest.importorskip("huggingface_hub.utils")
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with Hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)  # as HF_ENDPOINT does
        server.add("org/model", FILES)
        yield server
    getattr(utils, "close_session", lambda: None)()  # since 1.0


def test_reading(hub):
    store = make("hf://org/model")
    assert keys(store) == sorted(FILES)
    assert keys(store, "sub/a/") == ["sub/a/big.bin"]
    assert list(store.folders()) == ["sub"]
    for key, data in FILES.items():
        assert store.head(key).size == len(data)
        assert store.get(key, len(data)).data == data
    assert read(store, "model-1.safetensors", 17, 9000) == BIG[17:9000]
    assert fault(store.get, "config.json", 1) is StoreFault.REFUSED
    assert fault(store.head, "absent") is StoreFault.MISSING
    assert hub.tokens - {None} == {"Bearer hf_secretsecret"}


def test_a_folder_of_a_repository(hub):
    store = make("hf://org/model/sub")
    assert keys(store) == ["a/big.bin", AWKWARD]
    assert store.get(AWKWARD, 99).data == b"awkward"


def test_large_files_tell_their_sha256(hub):
    store = make("hf://org/model")
    assert store.head("model-1.safetensors").sha256 == hashlib.sha256(BIG).hexdigest()
    assert store.head("config.json").sha256 is None


def test_everything_is_read_from_one_commit(hub):
    first = make("hf://org/model")
    assert first.get("config.json", 9).data == b"{}"
    hub.add("org/model", {"config.json": b"new"})
    assert first.get("config.json", 9).data == b"{}"
    assert make("hf://org/model").get("config.json", 9).data == b"new"
    assert make(f"hf://org/model@{commit_id(1)}").get("config.json", 9).data == b"{}"
    assert make("hf://org/model@main").commit_id == commit_id(2)


def test_a_server_that_ignores_ranges(hub):
    hub.ignore_ranges = True
    assert read(make("hf://org/model"), "model-1.safetensors", 5000, 9000) == BIG[5000:9000]


def test_a_tag_of_another_content(hub):
    store = make("hf://org/model")
    assert fault(store.open, "config.json", 0, 1, "other") is StoreFault.CHANGED
    assert read(store, "config.json", 0, 2, store.head("config.json").etag) == b"{}"


def test_names_that_are_not_there(hub):
    assert fault(make("hf://org/absent").head, "a") is StoreFault.NO_BUCKET
    assert fault(make("hf://org/model@absent").head, "a") is StoreFault.MISSING


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (401, StoreFault.DENIED),
        (403, StoreFault.DENIED),
        (429, StoreFault.THROTTLED),
        (500, StoreFault.TRANSIENT),
        (503, StoreFault.THROTTLED),
    ],
)
def test_faults(hub, status, expected):
    store = make("hf://org/model")
    hub.answers.append(status)
    assert fault(store.head, "config.json") is expected
    store.head("config.json")
    hub.answers.append(status)
    assert fault(store.open, "config.json", 0, 2, None) is expected


def test_the_client_repeats(hub):
    client = Client(make("hf://org/model"), ClientOptions())
    hub.answers.extend([500, 502])
    assert client.get("config.json", 9).data == b"{}"


def test_no_server(hub):
    with Hub() as gone:
        store = make("hf://org/model", endpoint=gone.endpoint)
    assert fault(store.head, "a") is StoreFault.TRANSIENT


def test_a_push_is_one_commit(hub, tmp_path):
    (tmp_path / "shard").write_bytes(BIG + b"new")
    store = make("hf://org/model/v2")
    assert keys(store) == []
    files = {"a/shard.safetensors": tmp_path / "shard", "config.json": b"[]", "same": BIG}
    found = store.commit(files, "Add MXFP4")
    assert found == commit_id(2) == store.commit_id
    assert hub.messages == ["Add MXFP4"]
    now = hub.files("org/model", "main")
    assert now == FILES | {
        "v2/a/shard.safetensors": BIG + b"new",
        "v2/config.json": b"[]",
        "v2/same": BIG,
    }
    assert keys(store) == ["a/shard.safetensors", "config.json", "same"]


def test_what_is_there_already_is_not_sent_again(hub):
    store = make("hf://org/model")
    store.commit({"big": BIG + b"1"}, "one")
    sent = sum(request.startswith("PUT") for request in hub.requests)
    store.commit({"other": BIG + b"1"}, "two")
    assert sum(request.startswith("PUT") for request in hub.requests) == sent == 1


def test_a_commit_that_leaves_files_out_is_refused(hub):
    hub.ignored.add("logs.txt")
    assert fault(make("hf://org/model").commit, {"logs.txt": b"1", "a": b"2"}, "m") is (
        StoreFault.REFUSED
    )


def test_repositories_are_not_created(hub):
    assert fault(make("hf://org/absent").commit, {"a": b"1"}, "m") is StoreFault.NO_BUCKET
    assert not any("create" in request for request in hub.requests)


def test_single_objects_cannot_be_written(hub):
    store = make("hf://org/model")
    assert fault(store.put, "a", b"1") is StoreFault.UNSUPPORTED
    assert fault(store.upload, "a", (), identity(b"")) is StoreFault.UNSUPPORTED
    assert fault(store.copy, "config.json", "b", identity(b"{}")) is StoreFault.UNSUPPORTED
    assert fault(store.delete, "config.json") is StoreFault.UNSUPPORTED


def test_the_token_is_not_shown(hub, capfd, caplog):
    store = make("hf://org/model")
    hub.answers.append(401)
    with pytest.raises(StoreError) as caught:
        store.head("a")
    store.commit({"big": BIG}, "m")
    printed = "".join(capfd.readouterr())
    assert printed == ""
    shown = caught.value.message + str(caught.value.hint)
    assert "secretsecret" not in shown + caplog.text


def test_options_and_places_that_are_refused(hub):
    with pytest.raises(UsageError, match="token"):
        make("hf://org/model", token="x")  # noqa: S106
    with pytest.raises(UsageError, match="models"):
        make("hf://datasets/org/data")


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError) as caught:
        make("hf://org/model")
    assert "pip install 'mxconvert[hf]'" in (caught.value.hint or "")
