"""Objects of Google Cloud Storage and Azure Blob Storage, through obstore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import obstore

from mxconvert.errors import StoreError, StoreFault
from mxconvert.store.base import Blob, ObjectInfo, PartLimits
from mxconvert.store.cloud_faults import translated
from mxconvert.store.cloud_options import cloud_store
from mxconvert.store.keys import segments
from mxconvert.store.pieces import guarded, unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mxconvert.store.base import Condition, Identity
    from mxconvert.store.options import StoreOptions
    from mxconvert.store.url import StoreURL

_SHA256 = {"gs": "mxconvert-sha256", "az": "mxconvert_sha256"}  # az takes identifiers only
_LIMITS = {
    "gs": PartLimits(object_size=5 * 2**40),
    "az": PartLimits(largest=4000 * 2**20, count=50_000, object_size=190 * 2**40),
}
_AT_ONCE = 16 * 2**20
_MEMORY = 256 * 2**20
_MOST_PARTS = 4
_CHUNK = 2**20
_SEPARATOR = "#"


class CloudStore:
    """Objects below a prefix of a bucket or container. One instance serves all threads.

    The tag of an object of ``gs`` is its ETag and its generation, ``ETAG#GENERATION``;
    listings tell the ETag alone. Objects of zero bytes that stand for a folder are not
    listed where something lies in that folder.
    """

    def __init__(self, url: StoreURL, options: StoreOptions) -> None:
        self._url, self._options = url, options
        self._limits = _LIMITS[url.scheme]
        self._sha256 = _SHA256[url.scheme]
        self._endpoint = options.text("endpoint")
        self.renew()

    @property
    def label(self) -> str:
        """The URL, and the endpoint if one was given."""
        return f"{self._url} at {self._endpoint}" if self._endpoint else str(self._url)

    def url(self, key: str) -> str:
        """Return the URL of a key."""
        return f"{self._url}/{key}"

    @property
    def _root(self) -> str:
        return f"{self._url.prefix}/" if self._url.prefix else ""

    def _path(self, key: str) -> str:
        segments(key, self.url(key))
        return self._root + key

    # ---------------------------------------------------------------------------- reading

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        with translated(self.url(key)):
            found = obstore.get(self._reader, self._path(key), options={"head": True})
            return self._info(key, found.meta, found.attributes)

    def open(self, key: str, begin: int, end: int, etag: str | None) -> CloudBody:
        """See `Store.open`."""
        options: Any = {"range": (begin, end)}
        if etag is not None:
            options["if_match"] = etag.partition(_SEPARATOR)[0]
        with translated(self.url(key)):
            found = obstore.get(self._reader, self._path(key), options=options)
        now = _tag(found.meta)
        if etag is not None and now is not None and not _same(now, etag):
            raise StoreError(
                StoreFault.CHANGED,
                f"{self.url(key)}: the object was replaced: its tag was {etag}, is {now}",
            )
        return CloudBody(found, self.url(key), begin)

    def get(self, key: str, limit: int) -> Blob:
        """See `Store.get`."""
        with translated(self.url(key)):
            found = obstore.get(self._reader, self._path(key))
            if found.meta["size"] <= limit:
                return Blob(bytes(found.bytes()), _tag(found.meta))
        raise StoreError(
            StoreFault.REFUSED,
            f"{self.url(key)}: {found.meta['size']} bytes, expected at most {limit}",
        )

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.objects`."""
        last: ObjectInfo | None = None
        for info in self._listed(prefix.rpartition("/")[0]):
            if last is not None and not _is_marker(last, info) and last.key.startswith(prefix):
                yield last
            last = info
        if last is not None and last.key.startswith(prefix):
            yield last

    def _listed(self, above: str) -> Iterator[ObjectInfo]:
        path = self._path(above) if above else self._url.prefix
        with translated(self.url(above)):
            for page in obstore.list(self._reader, path or None, chunk_size=1000):
                for found in page:
                    # Without the slash at its end, a marker of the prefix itself is no key.
                    if key := found["path"][len(self._root) :]:
                        yield self._info(key, found, {})

    def folders(self) -> Iterator[str]:
        """See `Store.folders`."""
        with translated(str(self._url)):
            found = obstore.list_with_delimiter(self._reader, self._url.prefix or None)
        for path in found["common_prefixes"]:
            yield path[len(self._root) :].rstrip("/")

    def _info(self, key: str, meta: Any, attributes: Any) -> ObjectInfo:
        return ObjectInfo(
            key=key,
            size=meta["size"],
            etag=_tag(meta),
            sha256=attributes.get(self._sha256),
            modified=meta["last_modified"].timestamp(),
        )

    # ---------------------------------------------------------------------------- writing

    def put(self, key: str, data: bytes, condition: Condition | None = None) -> str | None:
        """See `Store.put`."""
        mode: Any = "overwrite"
        if condition is not None:
            mode = "create" if condition.etag is None else _version(condition.etag)
        with translated(self.url(key)):
            return _tag(
                obstore.put(self._writer, self._path(key), data, mode=mode, use_multipart=False)
            )

    def upload(self, key: str, pieces: Iterable[memoryview], identity: Identity) -> None:
        """See `Store.upload`; parts are as large as the number of parts requires."""
        limits, size = self._limits, identity.size
        if size > limits.object_size:
            raise StoreError(
                StoreFault.REFUSED,
                f"{self.url(key)}: {size} bytes, the store takes {limits.object_size}",
            )
        counted = self._counted(key, pieces, size)
        chunk = max(_AT_ONCE, -(-size // (limits.count * 9 // 10)))
        at_once = size <= _AT_ONCE
        with unwrapped(), translated(self.url(key)):
            obstore.put(
                self._writer,
                self._path(key),
                b"".join(counted) if at_once else counted,
                attributes={self._sha256: identity.sha256},
                use_multipart=not at_once,
                chunk_size=chunk,
                max_concurrency=max(1, min(_MOST_PARTS, _MEMORY // chunk)),
            )

    def _counted(self, key: str, pieces: Iterable[memoryview], size: int) -> Iterator[bytes]:
        """Yield copies: the store sends them after the next one is asked for."""
        done = 0
        for piece in guarded(pieces):
            done += len(piece)
            yield bytes(piece)
        if done != size:
            raise StoreError(
                StoreFault.CORRUPT, f"{self.url(key)}: {done} bytes came, expected {size}"
            )

    def copy(self, source: str, key: str, identity: Identity) -> None:
        """See `Store.copy`."""
        with translated(self.url(key)):
            obstore.copy(self._writer, self._path(source), self._path(key), overwrite=True)
        found = self.head(key)
        if found.size != identity.size:
            raise StoreError(
                StoreFault.TRANSIENT,
                f"{self.url(key)}: {found.size} bytes after the copy, expected {identity.size}",
            )

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        try:
            with translated(self.url(key)):
                obstore.delete(self._writer, self._path(key))
        except StoreError as error:
            if error.fault is not StoreFault.MISSING:
                raise

    def renew(self) -> None:
        """See `Store.renew`."""
        self._reader = cloud_store(self._url, self._options, writes=False)
        self._writer = cloud_store(self._url, self._options, writes=True)

    def close(self) -> None:
        """See `Store.close`."""


class CloudBody:
    """The bytes of one answer."""

    def __init__(self, found: Any, where: str, begin: int) -> None:
        self._where = where
        self.skip: int = begin - found.range[0]
        self._stream: Any = iter(found.stream(min_chunk_size=_CHUNK))
        self._left = memoryview(b"")

    def read(self, most: int, /) -> memoryview:
        """See `Body.read`."""
        while not self._left:
            with translated(self._where):
                chunk = next(self._stream, None)
            if chunk is None:
                return self._left
            self._left = memoryview(chunk)
        piece, self._left = self._left[:most], self._left[most:]
        return piece

    def close(self) -> None:
        """See `Body.close`."""
        self._stream = iter(())


def _tag(meta: Any) -> str | None:
    tag, version = meta.get("e_tag"), meta.get("version")
    if tag and not tag.startswith(('"', "W/")):
        tag = f'"{tag}"'  # listings of az leave the quotes out
    # A generation of gs is a number; az has versions too, which its conditions do not take.
    return f"{tag}{_SEPARATOR}{version}" if version and str(version).isdigit() else tag


def _version(tag: str) -> dict[str, str]:
    name, separator, version = tag.rpartition(_SEPARATOR)
    return {"e_tag": name, "version": version} if separator else {"e_tag": tag}


def _same(one: str, other: str) -> bool:
    """Whether two tags agree as far as both of them go."""
    first, second = one.split(_SEPARATOR), other.split(_SEPARATOR)
    return all(left == right for left, right in zip(first, second, strict=False))


def _is_marker(info: ObjectInfo, following: ObjectInfo) -> bool:
    return info.size == 0 and following.key.startswith(f"{info.key}/")
