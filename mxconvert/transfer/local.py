"""The artifact that is pushed: checked before anything is sent, and while it is read."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.digest import xxh3_128
from mxconvert.errors import LocalError, UsageError, VerificationError
from mxconvert.folder import Folder, scan_folder
from mxconvert.manifest import (
    MANIFEST_NAME,
    RECORD_NAME,
    WORK_FOLDER,
    Manifest,
    artifact_id,
    parse_manifest,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mxconvert.manifest import FileEntry

_PIECE = 2**20
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class LocalArtifact:
    """A finished artifact on disk.

    Attributes:
        folder: What lies there.
        id: SHA-256 of the manifest.
        data: The manifest's bytes.
        manifest: The manifest, checked.
    """

    folder: Folder
    id: str
    data: bytes
    manifest: Manifest

    @contextlib.contextmanager
    def open(self, entry: FileEntry) -> Iterator[int]:
        """Give a descriptor of one of its files.

        Raises:
            LocalError: It cannot be opened.
            VerificationError: It is not the file that was seen.
        """
        path = self.folder.root / entry.path
        try:
            fd = self.folder.open(entry.path)
        except OSError as error:
            if error.errno and error.errno != errno.ELOOP:
                raise LocalError.unreadable(path, error) from error
            raise VerificationError(
                f"{path}: was replaced or resized during the push",
                hint="let nothing write to the folder and run the same command again",
                code="changed",
            ) from error
        try:
            yield fd
        finally:
            os.close(fd)


def open_artifact(root: Path) -> LocalArtifact:
    """Read the manifest of a folder and look for every file that it lists.

    Raises:
        UsageError: No such folder, or not a finished artifact.
        VerificationError: The manifest is damaged, or files are missing, are links or have
            another size.
        LocalError: The folder cannot be read.
    """
    if not root.is_dir():
        what = "not a folder" if root.exists() else "no such folder"
        raise UsageError(f"{root}: {what}", hint="give the folder of an artifact")
    try:
        folder = scan_folder(root)
        if MANIFEST_NAME not in folder.files:
            raise _unfinished(root, folder)
        data = folder.read(MANIFEST_NAME)
    except OSError as error:
        raise LocalError.unreadable(root, error) from error
    manifest = parse_manifest(data, str(root / MANIFEST_NAME))
    if RECORD_NAME in folder.files:
        raise UsageError(
            f"{root}: holds a part of an artifact ({RECORD_NAME}), expected a whole one",
            hint="pull without naming a part to fetch the rest",
            code="part",
        )
    faults = [fault for entry in manifest.files if (fault := _fault(folder, entry))]
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise VerificationError(
            f"{root}: does not hold what its manifest lists: {'; '.join(faults[:_SHOWN])}{more}",
            hint=f"mxconvert verify {root} tells all; nothing was sent",
            code="incomplete-artifact",
        )
    return LocalArtifact(folder, artifact_id(data), data, manifest)


def _unfinished(root: Path, folder: Folder) -> UsageError:
    if WORK_FOLDER in folder.hidden:
        return UsageError(
            f"{root}: a run has not finished here: there is no {MANIFEST_NAME}",
            hint="run the command that began it again",
            code="unfinished",
        )
    return UsageError(
        f"{root}: no {MANIFEST_NAME}: not an artifact",
        hint="push takes what `mxconvert quantize` or `mxconvert pull` has made",
        code="no-manifest",
    )


def _fault(folder: Folder, entry: FileEntry) -> str | None:
    if entry.path in folder.special:
        return f"{entry.path} is {folder.special[entry.path]}"
    found = folder.files.get(entry.path)
    if found is None:
        return f"{entry.path} is missing"
    if found.size != entry.size:
        return f"{entry.path} has {found.size} bytes, expected {entry.size}"
    return None


class FileRange:
    """Bytes ``[begin, end)`` of a file as a body to send, compared with the manifest.

    ``read`` ignores how much it is asked for and returns up to 1 MiB in one reused
    buffer: a socket takes it whole, and it is hashed while it is in the cache. The range
    begins and ends at chunks (or the end of the file).
    """

    def __init__(self, fd: int, entry: FileEntry, begin: int, end: int, chunk_size: int) -> None:
        self._fd = fd
        self._entry = entry
        self._begin, self._end, self._chunk_size = begin, end, chunk_size
        self._buffer = memoryview(bytearray(min(_PIECE, end - begin)))
        self._position = begin
        self._hasher = xxh3_128()
        self._found: list[str] = []
        self.reached: Callable[[int], None] | None = None
        """Called with the position after each read."""

    def __len__(self) -> int:
        return self._end - self._begin

    def tell(self) -> int:
        """Return the position, counted from the range's begin."""
        return self._position - self._begin

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to the begin, to read again, or to the end, to be measured."""
        if whence == os.SEEK_END:
            self._position = self._end
        elif whence == os.SEEK_SET and offset == 0:
            self._position = self._begin
            self._hasher, self._found = xxh3_128(), []
        elif self.tell() != offset:
            raise ValueError(f"seek to {offset}, whence {whence}")
        return self.tell()

    def read(self, _most: int = -1, /) -> memoryview:
        """Return the next bytes, nothing at the end.

        Raises:
            VerificationError: The file ends early.
            LocalError: It cannot be read.
        """
        chunk_end = (self._position // self._chunk_size + 1) * self._chunk_size
        room = min(len(self._buffer), chunk_end - self._position, self._end - self._position)
        if not room:
            return self._buffer[:0]
        try:
            count = os.preadv(self._fd, [self._buffer[:room]], self._position)
        except OSError as error:
            raise LocalError.unreadable(self._entry.path, error) from error
        if not count:
            raise VerificationError(
                f"{self._entry.path}: ends at byte {self._position}, expected {self._entry.size}",
                code="size",
            )
        view = self._buffer[:count]
        self._hasher.update(view)
        self._position += count
        if self._position in (chunk_end, self._end):
            self._found.append(self._hasher.hexdigest())
            self._hasher = xxh3_128()
        if self.reached is not None:
            self.reached(self.tell())
        return view

    def check(self) -> None:
        """Compare what was read with the manifest.

        Raises:
            VerificationError: A chunk differs.
        """
        first = self._begin // self._chunk_size
        for index, found in enumerate(self._found, first):
            expected = self._entry.chunks[index].xxh3_128
            if found != expected:
                raise VerificationError(
                    f"{self._entry.path}: XXH3-128 of chunk {index}: expected {expected}, found "
                    f"{found}",
                    hint="the file was changed or damaged after it was made; it was not sent",
                    code="digest",
                )

    def pieces(self) -> Iterator[memoryview]:
        """Yield all bytes; the last piece comes only if every chunk is right.

        Raises:
            VerificationError: A chunk differs.
        """
        self.seek(0)
        while piece := self.read():
            if self._position == self._end:
                self.check()
            yield piece
