"""Objects as local files."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mxconvert.errors import StoreFault, UsageError
from mxconvert.store import Condition
from tests.store_base import DiskError, StoreBehaviour, fault, identity, keys, make, pieces, read


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


class TestLocal(StoreBehaviour):
    @pytest.fixture
    def store(self, tmp_path):
        return make(str(tmp_path / "some dir" / "store"))


class TestLocalWithoutLocksOnFolders(StoreBehaviour):
    """As on NFS: a lock file stands in where a condition has to be kept."""

    @pytest.fixture
    def store(self, tmp_path, monkeypatch):
        import fcntl

        flock = fcntl.flock

        def refuse_folders(descriptor, operation):
            if Path(f"/proc/self/fd/{descriptor}").resolve().is_dir():
                raise OSError(9, "Bad file descriptor")
            flock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", refuse_folders)
        return make(f"file://{tmp_path}/store")


def test_a_relative_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = make("out/store")
    store.put("a/b", b"1")
    assert (tmp_path / "out/store/a/b").read_bytes() == b"1"
    assert store.url("a/b") == "out/store/a/b"


def test_options_are_refused():
    with pytest.raises(UsageError, match="region"):
        make("/tmp", region="x")  # noqa: S108


def test_writes_leave_no_files_of_their_own(tmp_path):
    """What lies in a version's folder is loaded by engines: nothing may be left in it."""
    store = make(str(tmp_path))
    store.put("refs/a", b"1", Condition(None))
    store.put("refs/a", b"2", Condition(store.head("refs/a").etag))
    store.upload("v/a", pieces(b"12"), identity(b"12"))
    store.copy("v/a", "v/b", identity(b"12"))
    with pytest.raises(DiskError):
        store.upload("v/c", _broken(), identity(b"123"))
    assert names(tmp_path) == ["refs", "refs/a", "v", "v/a", "v/b"]


def _broken():
    yield memoryview(b"1")
    raise DiskError


def test_a_failed_upload_keeps_what_was_there(tmp_path):
    store = make(str(tmp_path))
    store.put("a", b"old")
    with pytest.raises(DiskError):
        store.upload("a", _broken(), identity(b"123"))
    assert store.get("a", 9).data == b"old"


def test_what_a_killed_writer_left_is_written_anew_and_never_listed(tmp_path):
    store = make(str(tmp_path))
    (tmp_path / "a.partial").write_bytes(b"a long remainder")
    assert keys(store) == []
    store.upload("a", pieces(b"new"), identity(b"new"))
    assert (tmp_path / "a").read_bytes() == b"new"
    assert names(tmp_path) == ["a"]


def test_two_uploads_of_one_key_at_once(tmp_path):
    store = make(str(tmp_path))

    def second():
        yield memoryview(b"1")
        store.upload("a", pieces(b"two"), identity(b"two"))
        assert store.get("a", 9).data == b"two"
        yield memoryview(b"1")

    store.upload("a", second(), identity(b"11"))
    assert store.get("a", 9).data == b"11"
    assert names(tmp_path) == ["a"]


def test_links_out_of_the_store_are_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_bytes(b"secret")
    root = tmp_path / "store"
    root.mkdir()
    (root / "link").symlink_to("../secret")
    (root / "folder").symlink_to("../outside")
    (root / "loop").symlink_to("loop")
    store = make(str(root))
    for key in ("link", "folder/file", "loop"):
        assert fault(store.get, key, 9) is StoreFault.DENIED
        assert fault(store.open, key, 0, 1, None) is StoreFault.DENIED
        assert fault(store.copy, key, "copy", identity(b"secret")) is StoreFault.DENIED
    assert fault(store.put, "folder/new", b"1") is StoreFault.DENIED
    assert fault(store.delete, "folder/file") is StoreFault.DENIED
    assert keys(store) == list(store.folders()) == []
    assert names(tmp_path / "outside") == ["file"]


def test_links_inside_the_store_are_followed(tmp_path):
    """As in a cache of models: names that are links to blobs beside them."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/1").write_bytes(b"blob")
    (tmp_path / "v").mkdir()
    (tmp_path / "v/file").symlink_to("../blobs/1")
    store = make(str(tmp_path))
    assert read(store, "v/file", 1, 4) == b"lob"
    assert keys(store, "v/") == ["v/file"]
    store.put("v/file", b"new")
    assert (tmp_path / "blobs/1").read_bytes() == b"blob"


def test_things_that_are_no_objects(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    store = make(str(tmp_path))
    assert keys(store) == list(store.folders()) == []
    assert fault(store.get, "pipe", 9) is StoreFault.MISSING
    assert fault(store.get, "folder", 9) is StoreFault.MISSING
    assert fault(store.open, "pipe", 0, 1, None) is StoreFault.MISSING


def test_names_of_our_own_are_no_keys(tmp_path):
    store = make(str(tmp_path))
    assert fault(store.put, "a.partial", b"1") is StoreFault.REFUSED


def test_a_name_as_long_as_the_file_system_takes(tmp_path):
    store = make(str(tmp_path))
    store.upload("n" * 255, pieces(b"12"), identity(b"12"))
    assert keys(store) == ["n" * 255]
    assert fault(store.put, "n" * 256, b"") is StoreFault.REFUSED


def test_a_range_past_the_end_is_not_tried_again(tmp_path):
    store = make(str(tmp_path))
    store.put("a", b"123")
    assert fault(store.open, "a", 0, 4, None) is StoreFault.REFUSED


def test_a_folder_that_cannot_be_written(tmp_path):
    if os.geteuid() == 0:
        (tmp_path / "file").write_bytes(b"")
        assert fault(make(str(tmp_path / "file")).put, "a", b"1") is not StoreFault.TRANSIENT
        return
    tmp_path.chmod(0o500)
    assert fault(make(str(tmp_path)).put, "a", b"1") is StoreFault.DENIED


_COUNT = """
import sys
from mxconvert.errors import StoreError
from mxconvert.store import Condition, StoreOptions, open_store, parse_url
store = open_store(parse_url(sys.argv[1]), StoreOptions(values={}))
for _ in range(25):
    while True:
        seen = store.get("refs/n", 9)
        try:
            store.put("refs/n", b"%d" % (int(seen.data) + 1), Condition(seen.etag))
            break
        except StoreError as error:
            assert error.fault == "changed", error
"""


def test_processes_that_replace_at_once_lose_nothing(tmp_path):
    store = make(str(tmp_path))
    store.put("refs/n", b"0")
    command = [sys.executable, "-c", _COUNT, str(tmp_path)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: subprocess.run(command, check=True), range(3)))
    assert store.get("refs/n", 9).data == b"75"
