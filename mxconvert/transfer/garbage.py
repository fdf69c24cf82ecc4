"""What unfinished pushes leave at a store, and removing it.

Leftovers are multipart uploads that nobody has completed, objects in folders of versions
without a manifest, probes, and, where objects are files, those that were being written.
A running push leaves the same traces for a while, so nothing younger than a grace
period is touched, nor anything of a version in which something is: a push may well take
longer than that.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from mxconvert.errors import StoreError, StoreFault
from mxconvert.events import FileFinished, Notice, ignore
from mxconvert.manifest import MANIFEST_NAME
from mxconvert.remote import PROBE, is_folder
from mxconvert.remote.layout import REFS
from mxconvert.store import FileStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxconvert.events import Reporter
    from mxconvert.store import Client, PartStore, Upload

DEFAULT_GRACE = 24 * 3600.0
_SAME_SECONDS = 2.0


class Kind(StrEnum):
    """What a leftover is."""

    UPLOAD = "unfinished upload"
    OBJECT = "object without a manifest"
    PARTIAL = "unfinished file"
    PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that no version needs.

    Attributes:
        kind: What it is.
        key: Its key below the URL.
        size: Bytes that it takes, as far as the store says.
        age: Seconds since it was written, as far as the store says.
        upload: The id of an unfinished upload.
        written: When an object was written, in seconds since the epoch.
    """

    kind: Kind
    key: str
    size: int
    age: float | None
    upload: str | None = None
    written: float | None = None


def find_leftovers(
    client: Client, grace: float = DEFAULT_GRACE, report: Reporter = ignore
) -> list[Leftover]:
    """Return what no version needs and is older than ``grace`` seconds, by key.

    Raises:
        StoreError: The store cannot be listed.
    """
    now = time.time()
    found = [*_uploads(client, now, report), *_objects(client, now), *_partials(client, now)]
    busy = {_version_of(item) for item in found if item.age is not None and item.age < grace}
    old = [item for item in found if _version_of(item) not in busy]
    if len(old) < len(found):
        message = (
            f"{len(found) - len(old)} leftovers may belong to a push under way: something of "
            f"their version is younger than {_span(grace)}"
        )
        report(Notice(severity="info", code="in-grace", message=message))
    return sorted(old, key=lambda item: item.key)


def _span(seconds: float) -> str:
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds:g} s"  # noqa: PLR2004


def _version_of(item: Leftover) -> str:
    """Return the folder of the version that something belongs to, else its own key."""
    folder, slash, _ = item.key.partition("/")
    return folder if slash and is_folder(folder) else item.key


def remove_leftovers(
    client: Client, found: list[Leftover], report: Reporter = ignore
) -> list[Leftover]:
    """Remove leftovers, but none that was written anew or got its manifest meanwhile.

    Returns:
        What was removed.
    """
    removed = []
    for item in found:
        if item.kind is Kind.OBJECT and not _is_unused(client, item):
            continue
        if not _remove(client, item):
            continue
        report(FileFinished(path=item.key, size_bytes=item.size))
        removed.append(item)
    return removed


def _is_unused(client: Client, item: Leftover) -> bool:
    """Whether an object is the one that was found, and its version has no manifest still."""
    info = client.find(item.key)
    if info is None or info.size != item.size:
        return False
    # Of what a listing says to the millisecond a head may say the second only.
    if (info.modified or 0.0) - (item.written or time.time()) > _SAME_SECONDS:
        return False
    return not _has_manifest(client, _version_of(item))


def _remove(client: Client, item: Leftover) -> bool:
    """Remove one leftover; ``False`` if somebody has taken it up."""
    if item.upload is not None and client.parts is not None:
        client.call(client.parts.abort, item.key, item.upload)
    elif item.kind is Kind.PARTIAL and isinstance(client.store, FileStore):
        return client.call(client.store.drop_partial, item.key)
    else:
        client.delete(item.key)
    return True


def _partials(client: Client, now: float) -> Iterator[Leftover]:
    store = client.store
    if isinstance(store, FileStore):
        for info in client.call(lambda: list(store.partials())):
            folder = info.key.partition("/")[0]
            if not (is_folder(folder) or info.key.startswith(REFS)):
                continue  # of a pull, or of somebody else
            age = None if info.modified is None else now - info.modified
            yield Leftover(Kind.PARTIAL, info.key, info.size, age)


def _uploads(client: Client, now: float, report: Reporter) -> Iterator[Leftover]:
    parts = client.parts
    if parts is None:
        return
    try:
        uploads = client.call(lambda: list(parts.uploads("")))
    except StoreError as error:
        if error.fault is not StoreFault.UNSUPPORTED:
            raise
        message = f"{client.store.label}: the store does not list unfinished uploads"
        report(Notice(severity="warning", code="uploads-not-listed", message=message))
        return
    for upload in uploads:
        size = _size(client, parts, upload)
        if size is not None:
            yield Leftover(Kind.UPLOAD, upload.key, size, now - upload.started, upload.id)


def _size(client: Client, parts: PartStore, upload: Upload) -> int | None:
    """Return the bytes of an upload, ``None`` if it has ended meanwhile."""
    try:
        return sum(part.size for part in client.call(parts.parts, upload.key, upload.id))
    except StoreError as error:
        if error.fault is not StoreFault.MISSING:
            raise
        return None


def _objects(client: Client, now: float) -> Iterator[Leftover]:
    finished: dict[str, bool] = {}
    for info in client.objects(""):
        age = None if info.modified is None else now - info.modified
        folder, slash, _ = info.key.partition("/")
        if info.key.startswith(PROBE):
            yield Leftover(Kind.PROBE, info.key, info.size, age)
        elif slash and is_folder(folder):
            if folder not in finished:
                finished[folder] = _has_manifest(client, folder)
            if not finished[folder]:
                yield Leftover(Kind.OBJECT, info.key, info.size, age, written=info.modified)


def _has_manifest(client: Client, folder: str) -> bool:
    return client.find(f"{folder}/{MANIFEST_NAME}") is not None
