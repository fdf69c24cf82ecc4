"""Objects of every file system that fsspec knows."""

from __future__ import annotations

import contextlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mxconvert.errors import StoreError, StoreFault
from mxconvert.store.base import Blob, ObjectInfo
from mxconvert.store.generic_body import WINDOW, GenericBody, opened
from mxconvert.store.generic_connection import WEB, WITH_FOLDERS, Connection
from mxconvert.store.generic_faults import explained
from mxconvert.store.generic_writing import writer_of
from mxconvert.store.keys import PARTIAL, is_own, segments
from mxconvert.store.pieces import guarded, unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mxconvert.store.base import Condition, Identity
    from mxconvert.store.options import StoreOptions
    from mxconvert.store.url import StoreURL

_LOST = frozenset({StoreFault.TRANSIENT, StoreFault.STALLED, StoreFault.EXPIRED})
_TAGS = ("ETag", "etag", "e_tag")
_STAMPS = (
    "mtime", "modified", "LastModified", "Last-Modified", "last_modified", "updated", "created",
)  # fmt: skip


class GenericStore:
    """Objects below a path of one of fsspec's file systems.

    A new object appears whole: file systems with folders write beside the final name and
    rename, object stores show an upload when it is completed. Conditional writes are for
    ``memory`` and ``s3`` alone; web servers are read only and not listed. Where a store has
    no tags, an object's is made of its time and size.
    """

    def __init__(self, url: StoreURL, options: StoreOptions) -> None:
        self._connection = Connection(url, options)
        self._scheme = url.scheme
        self._writer = writer_of(url.scheme)

    @property
    def label(self) -> str:
        """The URL."""
        return self._connection.shown

    def url(self, key: str) -> str:
        """Return the URL of a key."""
        return f"{self._connection.shown.rstrip('/')}/{key}"

    @contextmanager
    def explained(self, key: str) -> Iterator[None]:
        """Turn what the file system raises into `StoreError`."""
        try:
            with explained(self.url(key), self._connection.secret):
                yield
        except StoreError as error:
            if error.fault in _LOST and self._scheme in WITH_FOLDERS:
                self._connection.drop()
            raise

    @property
    def _system(self) -> Any:
        return self._connection.system()

    @property
    def _base(self) -> str:
        """What every path below the URL begins with."""
        path = self._connection.path.rstrip("/")
        return f"{path}/" if path or self._connection.path else ""

    def _path(self, key: str) -> str:
        segments(key, self.url(key))
        return self._base + (quote(key) if self._scheme in WEB else key)

    # ---------------------------------------------------------------------------- reading

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        path = self._path(key)
        with self.explained(key):
            found = self._system.info(path)
        if found.get("type") == "directory":
            raise StoreError(StoreFault.MISSING, f"{self.url(key)}: a folder")
        if found.get("size") is None:
            raise StoreError(StoreFault.UNSUPPORTED, f"{self.url(key)}: the store tells no size")
        return _info(key, found)

    def open(self, key: str, begin: int, end: int, etag: str | None) -> GenericBody:
        """See `Store.open`; a few MiB are fetched at a time."""
        found = self.head(key)
        if etag not in (None, found.etag):
            raise StoreError(
                StoreFault.CHANGED,
                f"{self.url(key)}: the object was replaced: its tag was {etag}, is {found.etag}",
            )
        if found.size < end:
            raise StoreError(
                StoreFault.REFUSED,
                f"{self.url(key)}: {found.size} bytes, expected at least {end}",
            )
        with self.explained(key):
            file = opened(self._system, self._path(key), self._scheme)
        return GenericBody(lambda: self.explained(key), file, begin, end)

    def get(self, key: str, limit: int) -> Blob:
        """See `Store.get`."""
        found = self.head(key)
        if found.size > limit:
            raise StoreError(
                StoreFault.REFUSED,
                f"{self.url(key)}: {found.size} bytes, expected at most {limit}",
            )
        with self.explained(key):
            data = bytes(self._system.cat_file(self._path(key)))
        if self.head(key) != found or len(data) != found.size:
            raise StoreError(StoreFault.TRANSIENT, f"{self.url(key)}: changed while it was read")
        return Blob(data, found.etag)

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.objects`."""
        above = prefix.rpartition("/")[0]
        path = self._path(above) if above else self._base.rstrip("/")
        with self.explained(prefix):
            found = self._files(path)
        for each in found:
            key = self._key(each["name"])
            # Ending in a slash, or of the prefix itself: stands for a folder.
            marker = not key or key.endswith("/")
            if key.startswith(prefix) and not (marker or is_own(_last(key))):
                yield _info(key, each)

    def partials(self) -> Iterator[ObjectInfo]:
        """See `FileStore.partials`; object stores have none."""
        if self._scheme not in WITH_FOLDERS:
            return
        with self.explained(""):
            for each in self._files(self._base.rstrip("/")):
                key = self._key(each["name"])
                if key.endswith(PARTIAL):
                    yield _info(key, each)

    def drop_partial(self, key: str) -> bool:
        """See `FileStore.drop_partial`; whether one is being written cannot be seen."""
        with self.explained(key), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._base + key)
        return True

    def _key(self, path: str) -> str:
        return path[len(self._base) :]

    def _files(self, path: str) -> list[dict[str, Any]]:
        self._require_listing()
        if self._scheme in ("memory", "s3"):
            found = self._system.find(path, detail=True).values()
        else:
            found = _walk(self._system, path)
        return [each for each in found if each["type"] != "directory"]

    def folders(self) -> Iterator[str]:
        """See `Store.folders`."""
        with self.explained(""):
            self._require_listing()
            found = _ls(self._system, self._base.rstrip("/"))
        names = {_last(each["name"].rstrip("/")) for each in found if each["type"] == "directory"}
        yield from (name for name in sorted(names) if any(self.objects(f"{name}/")))

    def _require_listing(self) -> None:
        if self._scheme in WEB:
            raise StoreError(
                StoreFault.UNSUPPORTED,
                f"{self.label}: a web server does not list what it holds",
                hint="name the version, URL@VERSION",
            )

    # ---------------------------------------------------------------------------- writing

    def put(self, key: str, data: bytes, condition: Condition | None = None) -> str | None:
        """See `Store.put`.

        Raises:
            StoreError: Among others ``UNSUPPORTED``: the store cannot keep a condition.
        """
        path = self._path(key)
        with self.explained(key):
            tag = self._writer.put(self._system, path, data, condition, lambda: self._tag_now(key))
        return tag or self._tag_now(key)

    def _tag_now(self, key: str) -> str | None:
        try:
            return self.head(key).etag
        except StoreError as error:
            if error.fault is not StoreFault.MISSING:
                raise
            return None

    def upload(self, key: str, pieces: Iterable[memoryview], identity: Identity) -> None:
        """See `Store.upload`."""
        path = self._path(key)
        with unwrapped(), self.explained(key):
            self._writer.write(self._system, path, guarded(pieces), identity.size)

    def copy(self, source: str, key: str, identity: Identity) -> None:
        """See `Store.copy`; through this machine where the file system cannot."""
        origin, path = self._path(source), self._path(key)
        if self._scheme in WITH_FOLDERS or self._scheme in WEB:
            self.upload(key, self._pieces(source, identity.size), identity)
            return
        with self.explained(key):
            self._system.cp_file(origin, path)

    def _pieces(self, key: str, size: int) -> Iterator[memoryview]:
        with contextlib.closing(self.open(key, 0, size, None)) as body:
            while piece := body.read(WINDOW):
                yield memoryview(piece)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        path = self._path(key)
        try:
            with self.explained(key):
                self._system.rm_file(path)
        except StoreError as error:
            if error.fault is not StoreFault.MISSING:
                raise

    def renew(self) -> None:
        """See `Store.renew`."""
        self._connection.drop()

    def close(self) -> None:
        """See `Store.close`."""
        self._connection.drop()


def _ls(system: Any, path: str) -> list[dict[str, Any]]:
    system.invalidate_cache()
    try:
        found: list[dict[str, Any]] = system.ls(path, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return found


def _walk(system: Any, path: str) -> Iterator[dict[str, Any]]:
    """Yield what lies below a path; unlike fsspec's own, an error is not passed over."""
    for each in _ls(system, path):
        if each["type"] != "directory":
            yield each
        elif each["name"].rstrip("/") != path:
            yield from _walk(system, each["name"].rstrip("/"))


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _info(key: str, found: dict[str, Any]) -> ObjectInfo:
    written = _written(found)
    tag = next((str(found[name]) for name in _TAGS if found.get(name)), None)
    if tag is None and written is not None:
        tag = f"{written}-{found['size']}"
    moment = written if isinstance(written, int | float) else None
    return ObjectInfo(key=key, size=found["size"], etag=tag, modified=moment)


def _written(found: dict[str, Any]) -> Any:
    """Return when an object was written: seconds since the epoch, or some text."""
    stamp: Any = next((found[name] for name in _STAMPS if found.get(name)), None)
    return stamp.timestamp() if hasattr(stamp, "timestamp") else stamp
