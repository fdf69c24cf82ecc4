"""What a store can do, found by doing it with a few small objects that are removed again."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mxconvert.crc import combine_crc64nvme, crc64nvme
from mxconvert.errors import StoreError, StoreFault
from mxconvert.remote import PROBE
from mxconvert.store import Condition, Identity, RangeIgnored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mxconvert.store import Client, ObjectInfo, PartStore

_SIZE = 1_000_003
_BEGIN, _END = 70_001, 70_101
_PART = 5 * 2**20


@dataclass(slots=True)
class EndpointReport:
    """What was found.

    Attributes:
        label: The URL and its endpoint.
        abilities: By name: whether it works; ``None`` where it could not be tried.
        details: By name: more about it, in words.
        consequences: What push and pull will do about it.
        obstacle: Why nothing more could be tried.
        put_seconds: Time to write one object of 1 MB.
        get_seconds: Time to read it.
    """

    label: str
    abilities: dict[str, bool | None] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    consequences: list[str] = field(default_factory=list)
    obstacle: StoreError | None = None
    put_seconds: float | None = None
    get_seconds: float | None = None

    def note(self, name: str, works: bool | None, detail: str = "") -> None:
        """Record an ability."""
        self.abilities[name] = works
        if detail:
            self.details[name] = detail


class _Part:
    """A part of zeros as a body."""

    def __init__(self, size: int) -> None:
        self._view = memoryview(bytes(size))
        self._position = 0

    def __len__(self) -> int:
        return len(self._view)

    def read(self, _most: int = -1, /) -> memoryview:
        view, self._position = self._view[self._position :], len(self._view)
        return view

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = len(self._view) if whence == os.SEEK_END else offset
        return self._position


def examine_endpoint(client: Client) -> EndpointReport:
    """Put, get and compare probe objects; never raises for what a store cannot do."""
    report = EndpointReport(client.store.label)
    keys = [f"{PROBE}{uuid.uuid4().hex}" for _ in range(3)]
    try:
        with client.temporary(keys):
            _try_object(client, keys[0], report)
            _try_ranges(client, keys[0], report)
            _try_conditions(client, keys[1], report)
            _try_copy(client, keys[0], keys[2], report)
            _try_parts(client, keys[2], report)
            _try_listing(client, keys[0], report)
    except StoreError as error:
        report.obstacle = error
    report.consequences = list(_consequences(report))
    return report


def _probe() -> tuple[bytes, Identity]:
    data = hashlib.shake_128(b"mxconvert").digest(_SIZE)
    crc = f"{crc64nvme(data):016x}"
    return data, Identity(len(data), hashlib.sha256(data).hexdigest(), crc)


def _try_object(client: Client, key: str, report: EndpointReport) -> None:
    data, identity = _probe()
    begin = time.perf_counter()
    client.call(client.store.upload, key, [memoryview(data)], identity)
    report.put_seconds = time.perf_counter() - begin
    report.note("put", works=True)
    begin = time.perf_counter()
    found = client.get(key, 2 * _SIZE).data
    report.get_seconds = time.perf_counter() - begin
    report.note("get", found == data, "" if found == data else _difference(data, found))
    info = client.head(key)
    report.note("size", info.size == len(data), f"{info.size} bytes")
    _note_digests(info, identity, report)


def _difference(data: bytes, found: bytes) -> str:
    if len(found) != len(data):
        return f"{len(data)} bytes were written, {len(found)} read"
    at = next(i for i, pair in enumerate(zip(data, found, strict=True)) if pair[0] != pair[1])
    return f"byte {at} differs"


def _note_digests(info: ObjectInfo, identity: Identity, report: EndpointReport) -> None:
    kept = info.crc64nvme is not None
    right = info.crc64nvme == identity.crc64nvme
    report.note("crc64nvme", kept and right, "" if right else f"kept: {info.crc64nvme}")
    report.note("metadata", info.sha256 == identity.sha256)


def _try_ranges(client: Client, key: str, report: EndpointReport) -> None:
    data, _ = _probe()
    etag = client.head(key).etag
    try:
        pieces = client.pieces(key, _BEGIN, _END, etag, in_ranges=True)
        report.note("ranges", b"".join(map(bytes, pieces)) == data[_BEGIN:_END])
    except RangeIgnored:
        report.note("ranges", works=False, detail="the whole object is sent")
    if etag is None:
        report.note("if-match", works=None, detail="no ETag")
        return
    report.note("if-match", _is_refused(lambda: _read(client, key, '"0123456789abcdef"')))


def _read(client: Client, key: str, etag: str) -> None:
    for _ in client.pieces(key, 0, 10, etag):
        pass


def _is_refused(work: Callable[[], object]) -> bool:
    """Whether a request fails because its condition does not hold."""
    try:
        work()
    except StoreError as error:
        if error.fault in (StoreFault.CHANGED, StoreFault.UNSUPPORTED):
            return error.fault is StoreFault.CHANGED
        raise
    return False


def _try_conditions(client: Client, key: str, report: EndpointReport) -> None:
    try:
        etag = client.put(key, b"1", Condition(None))
    except StoreError as error:
        if error.fault not in (StoreFault.UNSUPPORTED, StoreFault.CHANGED):
            raise
        report.note("create if absent", works=False)
        report.note("replace if unchanged", works=False)
        return
    report.note("create if absent", _is_refused(lambda: client.put(key, b"2", Condition(None))))
    etag = client.head(key).etag or etag
    client.put(key, b"3")
    report.note("replace if unchanged", _is_refused(lambda: client.put(key, b"4", Condition(etag))))


def _try_copy(client: Client, source: str, key: str, report: EndpointReport) -> None:
    data, identity = _probe()
    try:
        client.copy(source, key, identity)
        report.note("copy", client.get(key, 2 * _SIZE).data == data)
    except StoreError as error:
        if error.fault in (StoreFault.NO_CREDENTIALS, StoreFault.NO_BUCKET):
            raise
        report.note("copy", works=False, detail=error.message)


def _try_parts(client: Client, key: str, report: EndpointReport) -> None:
    parts = client.parts
    if parts is None:
        report.note("multipart uploads", works=None, detail="not used with this store")
        return
    crc = f"{crc64nvme(bytes(_PART)):016x}"
    whole = combine_crc64nvme(int(crc, 16), crc64nvme(b"\0"), 1)
    identity = Identity(_PART + 1, "", f"{whole:016x}")
    try:
        upload = client.call(parts.begin_upload, key, identity)
    except StoreError as error:
        report.note("multipart uploads", works=False, detail=error.message)
        return
    try:
        _try_upload(client, parts, key, upload, crc, identity, report)
    except StoreError as error:
        report.note("multipart uploads", works=False, detail=error.message)
        client.call(parts.abort, key, upload)


def _try_upload(  # noqa: PLR0917  (one story)
    client: Client,
    parts: PartStore,
    key: str,
    upload: str,
    crc: str,
    identity: Identity,
    report: EndpointReport,
) -> None:
    last = f"{crc64nvme(bytes(1)):016x}"
    sent = [
        client.call(parts.upload_part, key, upload, 1, _Part(_PART), crc),
        client.call(parts.upload_part, key, upload, 2, _Part(1), last),
    ]
    listed = client.call(parts.parts, key, upload)
    found = any(item.id == upload for item in client.call(lambda: list(parts.uploads(key))))
    report.note("resume", found and len(listed) == len(sent), "" if found else "uploads not listed")
    kept = all(part.crc64nvme is not None for part in listed)
    report.note("part checksums", kept, "" if kept else "a resumed push compares MD5")
    client.call(parts.complete, key, upload, sent, identity)
    info = client.head(key)
    report.note("multipart uploads", info.size == _PART + 1)
    report.note("whole checksum of parts", info.crc64nvme == identity.crc64nvme)


def _try_listing(client: Client, key: str, report: EndpointReport) -> None:
    try:
        found = any(info.key == key for info in client.objects(PROBE))
    except StoreError as error:
        report.note("list", works=False, detail=error.message)
        return
    report.note("list", found, "" if found else "what was just written is not listed")


_MEANS: tuple[tuple[str, str, str], ...] = (
    ("get", "", "the store returns other bytes than it was given: do not use it"),
    (
        "create if absent",
        "tags are moved by compare-and-swap",
        "no tags: pull by URL@ID",
    ),
    (
        "resume",
        "a killed push goes on with the parts that are there",
        "a killed push sends unfinished files again",
    ),
    ("ranges", "", "ranges are ignored: pull fetches each file in one request, from its begin"),
    ("if-match", "", "a replaced object is noticed by its chunks' digests only"),
    ("copy", "", "files of earlier versions are sent again, not copied"),
    ("list", "", "list, gc and reuse of earlier versions do not work; push, pull and verify do"),
)
"""An ability, and what follows from having or lacking it."""


def _consequences(report: EndpointReport) -> Iterator[str]:
    able = dict(report.abilities)
    if report.obstacle is not None:
        yield "nothing can be pushed here" if "put" not in able else "see the error"
        return
    yield _integrity(able)
    able["create if absent"] = able["create if absent"] and able["replace if unchanged"]
    for name, having, lacking in _MEANS:
        text = having if able.get(name) else lacking
        if text:
            yield text


def _integrity(able: dict[str, bool | None]) -> str:
    if able.get("crc64nvme"):
        return "push lets the store check CRC64-NVME of each part and object"
    if able.get("metadata"):
        return "push notes SHA-256 with each object; only pull and verify compare bytes"
    return "a second push reads back what is there to compare it"
