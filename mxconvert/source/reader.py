"""Byte ranges of source files, by ``preadv`` into the caller's buffers.

Not mmap: a file that shrinks under a map is a SIGBUS, here it is an error.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Self

from mxconvert import failpoints
from mxconvert.errors import LocalError, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from mxconvert.model import SourceFile


_MAX_OPEN = 256
"""Files held open; the usual limit of a process is 1024, and outputs need some too."""


class _Handle:
    """An open file that is closed when nobody reads from it any more."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class SourceReader:
    """Reads ranges of a checkpoint's files; may be shared between threads.

    Every file is checked against its preflight identity when first opened and again by
    `check_unchanged`, so bytes of two versions are never mixed.
    """

    def __init__(self, root: Path, files: Iterable[SourceFile]) -> None:
        self._root = root
        self._files = {file.path: file for file in files}
        self._handles: dict[str, _Handle] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every open file."""
        with self._lock:
            self._handles.clear()

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` (bytes) from ``file`` at ``offset``.

        Raises:
            SourceError: The file ends early or is not the one seen in preflight.
            LocalError: The operating system reports a read error.
        """
        handle = self._handles.get(file) or self._open(file)
        done = 0
        while done < len(buffer):
            try:
                failpoints.hit("reader.read", file)
                count = os.preadv(handle.fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise LocalError(
                    f"{self._root / file}: reading at byte {offset + done}: {error.strerror}",
                    hint="check the disk, then run the same command again",
                    code="read-error",
                ) from error
            if count == 0:
                raise _changed(file, f"it ends at byte {offset + done}, more was expected")
            done += count

    def check_unchanged(self, files: Iterable[str]) -> None:
        """Compare files with what preflight saw.

        Raises:
            SourceError: Size, time of modification or inode differ.
        """
        for name in files:
            try:
                info = (self._root / name).stat()
            except OSError as error:
                raise _changed(name, error.strerror or "cannot be read") from error
            self._compare(name, info)

    def _open(self, file: str) -> _Handle:
        with self._lock:
            if file in self._handles:
                return self._handles[file]
            try:
                handle = _Handle(os.open(self._root / file, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                raise _changed(file, error.strerror or "cannot be opened") from error
            self._compare(file, os.fstat(handle.fd))
            if len(self._handles) >= _MAX_OPEN:
                del self._handles[next(iter(self._handles))]  # the one opened first
            self._handles[file] = handle
            return handle

    def _compare(self, name: str, info: os.stat_result) -> None:
        expected = self._files[name]
        for what, before, now in (
            ("size", expected.size, info.st_size),
            ("modification time", expected.mtime_ns, info.st_mtime_ns),
            ("inode", expected.inode, info.st_ino),
        ):
            if before != now:
                raise _changed(name, f"{what} was {before} at the start, is {now} now")


def _changed(file: str, what: str) -> SourceError:
    return SourceError(
        f"{file}: the source changed during the run: {what}",
        hint="let nothing write to the source, then run the same command again",
        code="source-changed",
    )
