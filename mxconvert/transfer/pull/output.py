"""How fetched bytes reach a partial file: through the page cache, or past it.

Past the page cache (``O_DIRECT``, open(2)) a byte is copied once less, no memory fills with
pages that have to be written out later, and a container's memory limit does not throttle the
transfer; a loader then reads from the disk. Memory, offset and length of such a write are
multiples of `ALIGNMENT`; the end of a file, which is not, goes through the page cache.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from typing import TYPE_CHECKING, Protocol

from mxconvert.errors import LocalError
from mxconvert.transfer.pull.folder import partial_path, start_writeback, write_at
from mxconvert.writer.atomic import local_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ALIGNMENT = 4096
"""What every file system that takes ``O_DIRECT`` is content with, in bytes."""

STAGING_SIZE = 2 * 2**20
"""Bytes that a thread collects for one direct write."""

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_own = threading.local()


class Output(Protocol):
    """Where one thread writes neighbouring bytes of a file."""

    def write(self, data: memoryview, offset: int) -> None:
        """Take bytes, which must not change before `flush` returns."""

    def flush(self) -> None:
        """Have everything written that was taken."""

    def start_writeback(self, begin: int, size: int) -> None:
        """Let the disk begin with a range."""


class CachedOutput:
    """Writes through the page cache."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self._path = fd, path

    def write(self, data: memoryview, offset: int) -> None:
        """Write at once."""
        write_at(self._fd, data, offset, self._path)

    def flush(self) -> None:
        """Do nothing: all is written."""

    def start_writeback(self, begin: int, size: int) -> None:
        """Let the disk begin with a range."""
        start_writeback(self._fd, begin, size)


class DirectOutput:
    """Collects bytes in aligned memory of the thread and writes them past the page cache.

    Args:
        direct: The file, as `open_direct` opened it.
        cached: The same file, opened for writes through the page cache.
        path: Of the file, for errors.
        refused: Called when the file system, which let it be opened, takes no such write.
    """

    def __init__(self, direct: int, cached: int, path: Path, refused: Callable[[], None]) -> None:
        self._direct, self._cached, self._path = direct, cached, path
        self._refused = refused
        self._staging = _staging()
        self._begin = self._filled = 0

    def write(self, data: memoryview, offset: int) -> None:
        """Take bytes; those of a full buffer are written.

        Raises:
            ValueError: They do not follow what was taken, and do not begin aligned.
            LocalError: The operating system refuses.
        """
        if offset != self._begin + self._filled:
            self.flush()
            if offset % ALIGNMENT:
                raise ValueError(f"{self._path}: a direct write cannot begin at {offset}")
            self._begin = offset
        while data:
            part = data[: STAGING_SIZE - self._filled]
            self._staging[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == STAGING_SIZE:
                self.flush()

    def flush(self) -> None:
        """Write what was taken; after an end that is not aligned nothing may follow.

        Raises:
            LocalError: The operating system refuses.
        """
        aligned = self._filled // ALIGNMENT * ALIGNMENT
        view = memoryview(self._staging)
        self._write_aligned(view[:aligned])
        write_at(self._cached, view[aligned : self._filled], self._begin + aligned, self._path)
        self._begin, self._filled = self._begin + self._filled, 0

    def _write_aligned(self, data: memoryview) -> None:
        try:
            write_at(self._direct, data, self._begin, self._path)
        except LocalError as error:
            if not _says_unable(error.__cause__):
                raise
            self._refused()
            write_at(self._cached, data, self._begin, self._path)

    def start_writeback(self, begin: int, size: int) -> None:
        """Do nothing: the disk has it."""


def open_direct(target: Path, path: str) -> int | None:
    """Open a partial file for direct writes; ``None`` where system or file system cannot.

    Raises:
        LocalError: The operating system refuses for another reason.
    """
    if not _O_DIRECT:
        return None
    partial = target / partial_path(path)
    try:
        return os.open(partial, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | _O_DIRECT)
    except OSError as error:
        if _says_unable(error):
            return None
        raise local_error(error, partial) from error


def _says_unable(error: BaseException | None) -> bool:
    """Whether a file system says that it takes no direct writes, or none aligned like ours."""
    return isinstance(error, OSError) and error.errno in (errno.EINVAL, errno.EOPNOTSUPP)


def _staging() -> mmap.mmap:
    """Return the thread's buffer; anonymous maps are aligned to pages."""
    if not hasattr(_own, "buffer"):
        _own.buffer = mmap.mmap(-1, STAGING_SIZE)
    buffer: mmap.mmap = _own.buffer
    return buffer
