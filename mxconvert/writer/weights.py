"""One weight file, written front to back and digested as it goes."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from mxconvert import failpoints
from mxconvert.digest import ChunkHasher, FileDigest
from mxconvert.writer.atomic import (
    PARTIAL_SUFFIX,
    local_error,
    remove_quietly,
    sync_folder,
    write_views,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_MODE = 0o644


class WeightFileWriter:
    """Writes ``name.partial``; only `publish` gives the file its name.

    `append` and `hash_sha256` may run on different threads, each in file order; SHA-256
    is apart because it is the slowest digest and needs no disk.
    """

    def __init__(self, target: Path, size: int) -> None:
        self.target = target
        self._partial = target.with_name(target.name + PARTIAL_SUFFIX)
        self._size = size
        self._fd = -1
        self._chunks = ChunkHasher()
        self._sha256 = hashlib.sha256()

    def create(self) -> None:
        """Start the partial file anew.

        Raises:
            LocalError: The operating system refuses.
        """
        try:
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            remove_quietly(self._partial)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(self._partial, flags, _MODE)
            failpoints.hit("writer.created", str(self._partial))
        except OSError as error:
            raise local_error(error, self._partial) from error

    def append(self, views: Sequence[memoryview]) -> None:
        """Write the file's next bytes and take their chunk digests.

        Raises:
            LocalError: The operating system refuses.
        """
        try:
            failpoints.hit("writer.append", str(self._partial))
            write_views(self._fd, views[:1])
            failpoints.hit("writer.mid-append", str(self._partial))
            write_views(self._fd, views[1:])
        except OSError as error:
            raise local_error(error, self._partial) from error
        for view in views:
            self._chunks.update(view)

    def hash_sha256(self, views: Sequence[memoryview]) -> None:
        """Take the file's next bytes into its SHA-256."""
        for view in views:
            self._sha256.update(view)

    def flush(self) -> FileDigest:
        """Bring every byte to the disk and return the digests; the name is still partial.

        Raises:
            LocalError: The operating system refuses.
            AssertionError: Fewer or more bytes than planned; a bug.
        """
        digest = self._chunks.finish(self._sha256.hexdigest())
        assert digest.size_bytes == self._size, (digest.size_bytes, self._size)  # noqa: S101
        try:
            failpoints.hit("writer.before-fsync", str(self._partial))
            os.fsync(self._fd)
            os.close(self._fd)
        except OSError as error:
            raise local_error(error, self._partial) from error
        self._fd = -1
        return digest

    def publish(self) -> None:
        """Give the flushed file its final name, durably.

        Raises:
            LocalError: The operating system refuses.
        """
        try:
            failpoints.hit("writer.before-rename", str(self._partial))
            self._partial.rename(self.target)
            failpoints.hit("writer.after-rename", str(self.target))
            sync_folder(self.target.parent)
        except OSError as error:
            raise local_error(error, self.target) from error

    def discard(self) -> None:
        """Remove the partial file; does nothing after `publish`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        remove_quietly(self._partial)
