"""What lies in an artifact's folder, and opening it without being led astray.

Links are never followed and special files never opened: the folder may come from
anywhere. Only what `scan_folder` saw as a regular file is opened, and the opened file
must be the one that was seen.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

_PIECE_SIZE = 4 * 1024 * 1024

_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISCHR, "a character device"),
)


@dataclass(frozen=True, slots=True)
class Found:
    """A regular file: its size and what identifies it while it is open."""

    size: int
    inode: int
    device: int


@dataclass(slots=True)
class Folder:
    """Everything below a folder, by relative POSIX path.

    Attributes:
        root: The folder.
        files: Regular files.
        special: Links and special files, and what they are.
        empty: Folders without entries.
        hidden: Folders whose name begins with a dot; nothing below them is listed.
        unreadable: Folders that cannot be listed, and why.
    """

    root: Path
    files: dict[str, Found] = field(default_factory=dict)
    special: dict[str, str] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)

    def open(self, path: str) -> int:
        """Open a file of `files` for reading; the caller closes the descriptor.

        Raises:
            OSError: It cannot be opened, or is not the file that was seen.
        """
        seen = self.files[path]
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(self.root / path, flags)
        now = os.fstat(fd)
        same = (now.st_ino, now.st_dev, now.st_size) == (seen.inode, seen.device, seen.size)
        if not same or not stat.S_ISREG(now.st_mode):
            os.close(fd)
            raise OSError(0, "it changed while it was being verified")
        return fd

    def read(self, path: str) -> bytes:
        """Return a whole small file of `files`.

        Raises:
            OSError: It cannot be read.
        """
        with os.fdopen(self.open(path), "rb") as file:
            return file.read()

    def read_range(self, path: str, begin: int, end: int) -> bytes:
        """Return bytes ``[begin, end)`` of a file of `files`, fewer if it ends before.

        Raises:
            OSError: They cannot be read.
        """
        with os.fdopen(self.open(path), "rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    def pieces(self, path: str, begin: int, end: int) -> Generator[bytes | memoryview, None, None]:
        """Yield bytes ``[begin, end)`` of a file of `files`, piece by piece.

        A piece is good until the next one is asked for.

        Raises:
            OSError: They cannot be read.
        """
        buffer = memoryview(bytearray(min(_PIECE_SIZE, end - begin)))
        fd = self.open(path)
        try:
            while begin < end:
                count = os.preadv(fd, [buffer[: end - begin]], begin)
                if count == 0:
                    raise OSError(0, f"it ended at byte {begin} while it was read")
                begin += count
                yield buffer[:count]
        finally:
            os.close(fd)


def describe(mode: int) -> str:
    """Say what kind of file a mode is, in words."""
    return next((words for is_kind, words in _KINDS if is_kind(mode)), "a special file")


def scan_folder(root: Path) -> Folder:
    """List a folder without following links.

    Raises:
        OSError: The folder itself cannot be listed.
    """
    folder = Folder(root)
    pending = [""]
    while pending:
        prefix = pending.pop()
        try:
            with os.scandir(root / prefix) as entries:
                names = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            if not prefix:
                raise
            folder.unreadable[prefix] = error.strerror or "cannot be listed"
            continue
        if prefix and not names:
            folder.empty.append(prefix)
        for entry in names:
            _file_away(
                folder, f"{prefix}/{entry.name}" if prefix else entry.name, entry, pending.append
            )
    return folder


def _file_away(
    folder: Folder, path: str, entry: os.DirEntry[str], descend: Callable[[str], None]
) -> None:
    info = entry.stat(follow_symlinks=False)
    if stat.S_ISDIR(info.st_mode):
        if entry.name.startswith("."):
            folder.hidden.append(path)
        else:
            descend(path)
    elif stat.S_ISREG(info.st_mode):
        folder.files[path] = Found(info.st_size, info.st_ino, info.st_dev)
    else:
        folder.special[path] = describe(info.st_mode)
