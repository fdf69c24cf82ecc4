"""Ranges of what fsspec opens, a few MiB at a time."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Explained = Callable[[], contextlib.AbstractContextManager[None]]

WINDOW = 8 * 2**20


def opened(system: Any, path: str, scheme: str) -> Any:
    """Open an object to read, without a cache."""
    if scheme == "memory":  # all who open one of its files share one position
        return _Slices(system, path)
    return system.open(path, "rb", block_size=WINDOW, cache_type="none")


class GenericBody:
    """A range of an open file."""

    def __init__(self, explained: Explained, file: Any, begin: int, end: int) -> None:
        self._explained = explained
        self._file = file
        self._begin, self._end = begin, end
        self._placed = False

    def read(self, most: int, /) -> bytes:
        """See `Body.read`."""
        count = min(most, self._end - self._begin, WINDOW)
        if count == 0:
            return b""
        with self._explained():
            if not self._placed:
                _place(self._file, self._begin)
                self._placed = True
            data: bytes = self._file.read(count)
        self._begin += len(data)
        return data

    def close(self) -> None:
        """See `Body.close`."""
        with contextlib.suppress(Exception):
            self._file.close()


class _Slices:
    """An object in memory, with a position of its own."""

    def __init__(self, system: Any, path: str) -> None:
        self._system, self._path = system, path
        self._at = 0

    def seekable(self) -> bool:
        return True

    def seek(self, position: int) -> None:
        self._at = position

    def read(self, count: int) -> bytes:
        data: bytes = self._system.cat_file(self._path, self._at, self._at + count)
        self._at += len(data)
        return data

    def close(self) -> None:
        pass


def _place(file: Any, begin: int) -> None:
    """Go to a position; read up to it where the store sends from the beginning only."""
    if begin == 0:
        return
    try:
        file.seek(begin)
    except ValueError:
        while begin:
            dropped = len(file.read(min(begin, WINDOW)))
            if not dropped:
                raise EOFError("the object ended early") from None
            begin -= dropped
