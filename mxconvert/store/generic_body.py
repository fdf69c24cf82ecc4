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
        with explained():
            self.skip = 0 if _is_placed(file, begin) else begin
        self._begin, self._end = begin - self.skip, end

    def read(self, most: int, /) -> bytes:
        """See `Body.read`."""
        count = min(most, self._end - self._begin, WINDOW)
        if count == 0:
            return b""
        with self._explained():
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


def _is_placed(file: Any, begin: int) -> bool:
    """Go to a position; ``False`` if the store sends from the beginning only."""
    if begin:
        try:
            file.seek(begin)
        except ValueError:
            return False
    return True
