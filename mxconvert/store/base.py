"""What transfers ask of a store. Each call is one attempt; `Client` repeats it.

Keys are relative to the URL the store was opened at, with ``/`` between segments.
Every method raises `StoreError` whose ``fault`` says what happened; the message names
the key and never holds a secret.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a store says about an object.

    Attributes:
        key: Relative to the store's URL.
        size: Bytes.
        etag: The store's own tag of this content, whatever its form; never a digest.
        crc64nvme: CRC64-NVME of the whole object, 16 hexadecimal digits, if the store keeps it.
        sha256: What mxconvert noted when it wrote the object, if the store keeps metadata.
        modified: When it was written, in seconds since the epoch, if the store says.
    """

    key: str
    size: int
    etag: str | None = None
    crc64nvme: str | None = None
    sha256: str | None = None
    modified: float | None = None


@dataclass(frozen=True, slots=True)
class Blob:
    """A small object's bytes and the tag that a conditional write takes."""

    data: bytes
    etag: str | None


@dataclass(frozen=True, slots=True)
class Identity:
    """What an object has to be: size and digests as in a manifest, hexadecimal."""

    size: int
    sha256: str
    crc64nvme: str


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an unfinished upload: its number from 1, size, tag and CRC64-NVME."""

    number: int
    size: int
    etag: str
    crc64nvme: str | None


@dataclass(frozen=True, slots=True)
class Upload:
    """An unfinished multipart upload and when it began, in seconds since the epoch."""

    key: str
    id: str
    started: float


@dataclass(frozen=True, slots=True)
class PartLimits:
    """What a store takes: sizes of parts and of an object in bytes, and parts per object."""

    smallest: int = 5 * 2**20
    largest: int = 5 * 2**30
    count: int = 10_000
    object_size: int = 5 * 2**40


@dataclass(frozen=True, slots=True)
class Condition:
    """A write happens only if the key is absent (``etag`` is ``None``) or has this tag."""

    etag: str | None


class Body(Protocol):
    """Bytes of a range while they arrive."""

    @property
    def skip(self) -> int:
        """Bytes that come before the range: all before it if the store has ignored it."""

    def read(self, most: int, /) -> bytes | memoryview:
        """Return at least one byte and at most ``most``; nothing at the end.

        A view is good until the next call.
        """

    def close(self) -> None:
        """Give the connection up."""


class PartBody(Protocol):
    """Bytes of a part while they are sent: a binary file that knows its length.

    ``read`` may return more than it is asked for; the view is good until the next call.
    """

    def __len__(self) -> int:
        """Bytes in all."""

    def read(self, most: int = -1, /) -> memoryview:
        """Return the next bytes, nothing at the end."""

    def tell(self) -> int:
        """Return the position."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to a position; 0 begins anew."""


class Store(Protocol):
    """A place that holds objects."""

    @property
    def label(self) -> str:
        """The URL, and the endpoint if it is not the usual one, for messages."""

    def url(self, key: str) -> str:
        """Return the full URL of a key, for messages."""

    def head(self, key: str) -> ObjectInfo:
        """Return what the store knows about an object, without its bytes."""

    def open(self, key: str, begin: int, end: int, etag: str | None) -> Body:
        """Open bytes ``[begin, end)``; with ``etag`` only if the object still has that tag.

        A store that sends the whole object instead is not refused: see `Body.skip`.
        """

    def get(self, key: str, limit: int) -> Blob:
        """Return a small object whole; more than ``limit`` bytes are refused."""

    def put(self, key: str, data: bytes, condition: Condition | None = None) -> str | None:
        """Write a small object at once; return its new tag."""

    def upload(self, key: str, pieces: Iterable[memoryview], identity: Identity) -> None:
        """Write an object from pieces in order; a failure leaves nothing under the key."""

    def copy(self, source: str, key: str, identity: Identity) -> None:
        """Copy an object inside the store."""

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object whose key begins with ``prefix``."""

    def folders(self) -> Iterator[str]:
        """Yield the first segments of all keys that have more than one."""

    def delete(self, key: str) -> None:
        """Remove an object; one that is absent is no error."""

    def renew(self) -> None:
        """Read credentials anew."""

    def close(self) -> None:
        """Close connections."""


@runtime_checkable
class FileStore(Protocol):
    """A store whose writers leave files of their own behind when they are killed."""

    def partials(self) -> Iterator[ObjectInfo]:
        """Yield these files; their keys are no keys of objects."""

    def drop_partial(self, key: str) -> bool:
        """Remove one, unless it is being written; return whether it is gone."""


@runtime_checkable
class CommitStore(Protocol):
    """A store that is written in commits of many files."""

    def commit(self, files: Mapping[str, Path | bytes], message: str) -> str:
        """Write files, by key, at once; return the commit's id."""


@runtime_checkable
class PartStore(Protocol):
    """A store whose multipart uploads can be taken up again by another process."""

    @property
    def limits(self) -> PartLimits:
        """What the store takes."""

    def begin_upload(self, key: str, identity: Identity) -> str:
        """Begin a multipart upload; return its id."""

    def upload_part(
        self, key: str, upload: str, number: int, body: PartBody, crc64nvme: str
    ) -> Part:
        """Send one part. The store compares its CRC64-NVME if it can."""

    def parts(self, key: str, upload: str) -> list[Part]:
        """Return the parts that the store holds of an upload, by number."""

    def complete(self, key: str, upload: str, parts: Sequence[Part], identity: Identity) -> None:
        """Make the object of its parts."""

    def abort(self, key: str, upload: str) -> None:
        """Drop an upload and its parts; one that is gone is no error."""

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield the unfinished uploads of keys that begin with ``prefix``."""
