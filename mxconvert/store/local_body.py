"""Ranges of local files."""

from __future__ import annotations

import os
import stat

from mxconvert.errors import StoreError, StoreFault

_WINDOW = 2**20


class LocalBody:
    """A range of an open file."""

    skip = 0

    def __init__(self, where: str, file: int, begin: int, end: int) -> None:
        self._where = where
        self._file = file
        self._begin, self._end = begin, end
        self._buffer = memoryview(bytearray(min(_WINDOW, max(0, end - begin))))

    def check(self, etag: str | None) -> None:
        """Refuse what is no file, has another tag, or ends before the range."""
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(StoreFault.MISSING, f"{self._where}: not a regular file")
        if etag not in (None, tag_of(found)):
            raise StoreError(
                StoreFault.CHANGED,
                f"{self._where}: the file was replaced: its tag was {etag}, is {tag_of(found)}",
            )
        if found.st_size < self._end:
            raise StoreError(
                StoreFault.REFUSED,
                f"{self._where}: {found.st_size} bytes, expected at least {self._end}",
            )

    def read(self, most: int, /) -> memoryview:
        """See `Body.read`."""
        view = self._buffer[: min(most, self._end - self._begin)]
        try:
            count = os.preadv(self._file, [view], self._begin)
        except OSError as error:
            raise StoreError(
                StoreFault.TRANSIENT, f"{self._where}: {error.strerror or error}"
            ) from error
        self._begin += count
        return view[:count]

    def close(self) -> None:
        """See `Body.close`."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def tag_of(found: os.stat_result) -> str:
    """Return the tag of a file: no two writes of a name have the same."""
    return f"{found.st_mtime_ns:x}-{found.st_size:x}-{found.st_ino:x}"
