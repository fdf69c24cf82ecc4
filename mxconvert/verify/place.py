"""Where an artifact lies: a folder on disk, or one at a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

Task = TypeVar("Task")
Result = TypeVar("Result")
Piece = bytes | memoryview


class Seen(Protocol):
    """A file that is there."""

    @property
    def size(self) -> int:
        """Bytes."""


class Place(Protocol):
    """What is there, and its bytes; `Folder` is one.

    Reading raises `OSError` if one file cannot be read or is no longer what was seen;
    trouble with the place as a whole raises other errors. Files may be read from many
    threads.
    """

    @property
    def root(self) -> object:
        """What messages call it."""

    @property
    def files(self) -> Mapping[str, Seen]:
        """Regular files by relative POSIX path."""

    @property
    def special(self) -> Mapping[str, str]:
        """Links and special files, and what they are."""

    @property
    def empty(self) -> Sequence[str]:
        """Folders without entries."""

    @property
    def hidden(self) -> Sequence[str]:
        """Folders whose name begins with a dot; nothing below them is listed."""

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Folders that cannot be listed, and why."""

    def read(self, path: str) -> bytes:
        """Return a whole small file of `files`."""

    def read_range(self, path: str, begin: int, end: int) -> bytes:
        """Return bytes ``[begin, end)`` of a file of `files`, fewer if it ends before."""

    def pieces(self, path: str, begin: int, end: int) -> Generator[Piece, None, None]:
        """Yield bytes ``[begin, end)`` of a file of `files`, piece by piece.

        A piece is good until the next one is asked for.
        """


class Mapper(Protocol):
    """Calls work on tasks, several at once, and yields the results in order."""

    def __call__(
        self, work: Callable[[Task], Result], tasks: Iterable[Task], /
    ) -> Iterator[Result]:
        """See `workers.map_bounded`."""
