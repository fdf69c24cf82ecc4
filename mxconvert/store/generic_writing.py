"""Three ways to make an object appear whole or not at all."""

from __future__ import annotations

import contextlib
import threading
import uuid
from typing import TYPE_CHECKING, Any

from mxconvert.errors import StoreError, StoreFault
from mxconvert.store.generic_connection import WEB, WITH_FOLDERS
from mxconvert.store.keys import PARTIAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mxconvert.store.base import Condition

    Found = Callable[[], str | None]

_BLOCK, _BLOCKS = 50 * 2**20, 9_000
_NAME = 40
_memory_lock = threading.RLock()


class Writer:
    """An object store: an upload of many parts is shown when it is completed."""

    def put(
        self, system: Any, path: str, data: bytes, condition: Condition | None, found: Found
    ) -> str | None:
        """Write a small object; return its tag if the store tells it in its answer.

        Args:
            system: fsspec's file system.
            path: Where.
            data: What.
            condition: When.
            found: Returns the tag that the object has now, ``None`` if it is not there.
        """
        del found
        if condition is not None:
            raise StoreError(
                StoreFault.UNSUPPORTED, f"{path}: this store cannot write under a condition"
            )
        self.write(system, path, [memoryview(data)], len(data))
        return None

    def write(self, system: Any, path: str, pieces: Iterable[memoryview], size: int) -> None:
        """Write an object from pieces."""
        file = system.open(path, "wb", block_size=max(_BLOCK, -(-size // _BLOCKS)))
        try:
            _fill(file, pieces, path, size)
        except BaseException:
            _discard(file)
            raise
        file.close()


class S3Writer(Writer):
    """Conditions travel with the request."""

    def put(
        self, system: Any, path: str, data: bytes, condition: Condition | None, found: Found
    ) -> str | None:
        """See `Writer.put`."""
        del found
        conditions = {}
        if condition is not None:
            conditions = {"IfMatch": condition.etag} if condition.etag else {"IfNoneMatch": "*"}
        answer = system.pipe_file(path, data, **conditions)
        return answer.get("ETag") if isinstance(answer, dict) else None


class FolderWriter(Writer):
    """A file system: written beside the final name, then renamed."""

    def write(self, system: Any, path: str, pieces: Iterable[memoryview], size: int) -> None:
        """See `Writer.write`."""
        above, slash, name = path.rpartition("/")
        own = f"{above}{slash}{name[:_NAME]}.{uuid.uuid4().hex}{PARTIAL}"
        if above:
            system.makedirs(above, exist_ok=True)
        try:
            with system.open(own, "wb") as file:
                _fill(file, pieces, path, size)
            system.mv(own, path)
        except BaseException:
            with contextlib.suppress(Exception):
                system.rm_file(own)
            raise


class MemoryWriter(Writer):
    """The memory of this process: set at once, under a lock."""

    def put(
        self, system: Any, path: str, data: bytes, condition: Condition | None, found: Found
    ) -> str | None:
        """See `Writer.put`."""
        with _memory_lock:
            now = None if condition is None else found()
            if condition is not None and now != condition.etag:
                raise StoreError(
                    StoreFault.CHANGED, f"{path}: expected tag {condition.etag}, found {now}"
                )
            system.pipe_file(path, data)
            return found()

    def write(self, system: Any, path: str, pieces: Iterable[memoryview], size: int) -> None:
        """See `Writer.write`."""
        data = b"".join(pieces)
        _check(path, len(data), size)
        with _memory_lock:
            system.pipe_file(path, data)


class WebWriter(Writer):
    """A web server: read only."""

    def write(self, system: Any, path: str, pieces: Iterable[memoryview], size: int) -> None:
        """See `Writer.write`."""
        del system, pieces, size
        raise StoreError(StoreFault.UNSUPPORTED, f"{path}: a web server is only read")


def writer_of(scheme: str) -> Writer:
    """Return how a scheme is written."""
    if scheme in WEB:
        return WebWriter()
    if scheme in WITH_FOLDERS:
        return FolderWriter()
    return {"memory": MemoryWriter, "s3": S3Writer}.get(scheme, Writer)()


def _fill(file: Any, pieces: Iterable[memoryview], path: str, size: int) -> None:
    done = 0
    for piece in pieces:
        file.write(piece)
        done += len(piece)
    _check(path, done, size)


def _check(path: str, found: int, size: int) -> None:
    if found != size:
        raise StoreError(StoreFault.CORRUPT, f"{path}: {found} bytes came, expected {size}")


def _discard(file: Any) -> None:
    """Drop what was sent of an object; closing the file would complete it."""
    file.closed = True
    with contextlib.suppress(Exception):
        file.discard()
