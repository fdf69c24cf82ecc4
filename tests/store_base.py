"""What every store does, as tests: subclass `StoreBehaviour` and give it a ``store`` fixture."""

from __future__ import annotations

import contextlib
import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from awscrt.checksums import crc64nvme

from mxconvert.errors import StoreError, StoreFault
from mxconvert.store import Condition, Identity, StoreOptions, open_store, parse_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxconvert.store import Store

AWKWARD = "model v2 + test/ü😂#1%20@^(a)/tokenizer (1).json"


def make(url: str, **values: str) -> Store:
    """Open a store as the commands do."""
    return open_store(parse_url(url), StoreOptions(values=values))


def identity(data: bytes) -> Identity:
    return Identity(len(data), hashlib.sha256(data).hexdigest(), f"{crc64nvme(data):016x}")


def pieces(data: bytes, size: int = 1000) -> Iterator[memoryview]:
    for begin in range(0, len(data), size):
        yield memoryview(data)[begin : begin + size]


def read(store: Store, key: str, begin: int, end: int, etag: str | None = None) -> bytes:
    body = store.open(key, begin, end, etag)
    found = bytearray()
    try:
        while piece := body.read(777):
            assert len(piece) <= 777
            found += piece
    finally:
        body.close()
    return bytes(found[body.skip :])


def fault(work, *arguments) -> StoreFault:
    with pytest.raises(StoreError) as caught:
        work(*arguments)
    return caught.value.fault


def keys(store: Store, prefix: str = "") -> list[str]:
    return sorted(info.key for info in store.objects(prefix))


class DiskError(Exception):
    """An error of whoever makes the pieces."""


class StoreBehaviour:
    """The behaviour; what a store cannot do is switched off in its subclass."""

    conditions = True
    tags = True
    folders_vanish = True
    listings_have_tags = True

    def test_small_objects(self, store):
        tag = store.put("a/b.json", b"one")
        blob = store.get("a/b.json", 3)
        assert blob.data == b"one"
        assert blob.etag == tag == store.head("a/b.json").etag
        assert store.put("a/b.json", b"three") != tag or not self.tags
        assert store.get("a/b.json", 100).data == b"three"
        assert store.head("a/b.json").size == 5
        assert fault(store.get, "a/b.json", 4) is StoreFault.REFUSED

    def test_empty_objects(self, store):
        store.put("empty", b"")
        store.upload("empty too", iter(()), identity(b""))
        assert store.get("empty", 0).data == b""
        assert store.head("empty too").size == 0
        assert keys(store) == ["empty", "empty too"]

    def test_an_absent_key(self, store):
        store.put("a/b", b"1")
        for key in ("a", "a/c", "a/b/c", "c"):
            assert fault(store.head, key) is StoreFault.MISSING
            assert fault(store.get, key, 9) is StoreFault.MISSING
            assert fault(store.open, key, 0, 1, None) is StoreFault.MISSING
        store.delete("a/c")
        store.delete("x/y")

    def test_ranges(self, store):
        data = bytes(range(256)) * 20
        store.upload("f/data.bin", pieces(data), identity(data))
        for begin, end in ((0, len(data)), (0, 1), (17, 4000), (len(data) - 1, len(data))):
            assert read(store, "f/data.bin", begin, end) == data[begin:end]

    def test_ranges_in_threads(self, store):
        data = bytes(range(256)) * 40
        store.upload("data.bin", pieces(data), identity(data))
        ranges = [(begin, begin + 500) for begin in range(0, 9000, 333)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda each: read(store, "data.bin", *each), ranges))
        assert found == [data[begin:end] for begin, end in ranges]

    def test_a_replaced_object_is_noticed(self, store):
        if not self.tags:
            pytest.skip("no tags")
        tag = store.put("x", b"before")
        assert read(store, "x", 0, 6, tag) == b"before"
        store.put("x", b"after!")
        assert fault(read, store, "x", 0, 6, tag) is StoreFault.CHANGED

    def test_listings(self, store):
        for key in ("m", "a/1", "a/2", "ab/3", "a/b/c/4", "a-b/5"):
            store.put(key, key.encode())
        assert keys(store) == ["a-b/5", "a/1", "a/2", "a/b/c/4", "ab/3", "m"]
        assert keys(store, "a/") == ["a/1", "a/2", "a/b/c/4"]
        assert keys(store, "a") == ["a-b/5", "a/1", "a/2", "a/b/c/4", "ab/3"]
        assert keys(store, "a/b/") == ["a/b/c/4"]
        assert keys(store, "nothing/") == keys(store, "n") == []
        assert {info.size for info in store.objects("a/b/c/4")} == {7}
        assert sorted(store.folders()) == ["a", "a-b", "ab"]

    def test_listings_say_what_head_says(self, store):
        store.put("a/1", b"123")
        (info,) = store.objects("")
        head = store.head("a/1")
        assert (info.key, info.size) == (head.key, head.size)
        assert info.etag == head.etag or not self.listings_have_tags
        if info.modified is not None and head.modified is not None:
            assert abs(info.modified - head.modified) < 2

    def test_an_empty_store(self, store):
        assert keys(store) == list(store.folders()) == []

    def test_deleting(self, store):
        store.put("a/b/c", b"1")
        store.put("a/d", b"2")
        store.delete("a/b/c")
        assert keys(store) == ["a/d"]
        store.delete("a/d")
        assert keys(store) == []
        assert not self.folders_vanish or list(store.folders()) == []
        store.put("a/b/c", b"again")
        assert store.get("a/b/c", 9).data == b"again"

    def test_awkward_keys(self, store):
        data = b"awkward" * 500
        store.put(AWKWARD, b"small")
        store.upload(AWKWARD, pieces(data), identity(data))
        assert keys(store) == keys(store, "model v2 + test/") == [AWKWARD]
        assert list(store.folders()) == ["model v2 + test"]
        assert read(store, AWKWARD, 5, 3000) == data[5:3000]
        store.copy(AWKWARD, AWKWARD + " copy", identity(data))
        assert store.get(AWKWARD + " copy", len(data)).data == data
        store.delete(AWKWARD)
        assert keys(store) == [AWKWARD + " copy"]

    def test_copies(self, store):
        data = bytes(range(256)) * 20
        store.upload("one/file", pieces(data), identity(data))
        store.put("two/file", b"old")
        store.copy("one/file", "two/file", identity(data))
        store.copy("one/file", "two/file", identity(data))
        assert read(store, "two/file", 0, len(data)) == data
        store.put("one/file", b"new")
        store.delete("one/file")
        assert store.get("two/file", len(data)).data == data
        assert keys(store) == ["two/file"]
        assert fault(store.copy, "absent", "three", identity(b"")) is StoreFault.MISSING
        assert keys(store) == ["two/file"]

    @pytest.mark.parametrize("size", [0, 2_500, 7 * 2**20])
    def test_an_upload_that_fails_leaves_nothing(self, store, size):
        def broken() -> Iterator[memoryview]:
            yield from pieces(bytes(size), 2**20)
            raise DiskError

        with pytest.raises(DiskError):
            store.upload("v/broken", broken(), identity(bytes(size + 1)))
        assert fault(store.head, "v/broken") is StoreFault.MISSING
        assert keys(store) == []

    def test_an_upload_that_ends_early_is_refused(self, store):
        with pytest.raises(StoreError):
            store.upload("short", pieces(b"123"), identity(b"1234"))
        assert keys(store) == []

    def test_creating(self, store):
        if not self.conditions:
            assert fault(store.put, "ref", b"1", Condition(None)) is StoreFault.UNSUPPORTED
            return
        store.put("ref", b"1", Condition(None))
        assert fault(store.put, "ref", b"2", Condition(None)) is StoreFault.CHANGED
        assert store.get("ref", 9).data == b"1"

    def test_replacing_what_was_seen(self, store):
        if not self.conditions:
            return
        first = store.put("refs/a", b"1")
        second = store.put("refs/a", b"2", Condition(first))
        assert fault(store.put, "refs/a", b"3", Condition(first)) is StoreFault.CHANGED
        store.put("refs/a", b"4", Condition(second))
        assert store.get("refs/a", 9).data == b"4"
        absent = fault(store.put, "refs/b", b"1", Condition(second))
        assert absent in (StoreFault.CHANGED, StoreFault.MISSING)
        assert keys(store) == ["refs/a"]

    def test_many_that_replace_at_once_lose_nothing(self, store):
        if not self.conditions:
            return
        store.put("counter", b"0")

        def count(_: int) -> None:
            while True:
                with contextlib.suppress(StoreError):  # another thread was faster
                    seen = store.get("counter", 9)
                    store.put("counter", b"%d" % (int(seen.data) + 1), Condition(seen.etag))
                    return

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(count, range(12)))
        assert store.get("counter", 9).data == b"12"

    def test_keys_that_leave_the_store_are_refused(self, store):
        for key in ("../x", "a/../../x", "/etc/passwd", "a//b", ""):
            with pytest.raises(StoreError):
                store.head(key)
            with pytest.raises(StoreError):
                store.get(key, 9)
