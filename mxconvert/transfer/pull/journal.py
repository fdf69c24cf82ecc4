"""What a pull leaves behind so that the next one can go on.

``DIR/.mxconvert/`` holds until the artifact is complete:

* ``pull.json``: the artifact's id, and which part of it is pulled;
* ``chunks/<name>``: one byte for each chunk of a file, or for each tensor of a file that is
  made of some of another's, 1 once it was checked and written,
  and after them, once the file has its name, a stamp that tells it from another file.

A byte says that a chunk was fetched, not that it is still right: the machine may have gone
down before it reached the disk, or somebody has changed the partial file. So the chunks of
partial files are read and compared before they count. A finished file went to the disk
before it got its name; it is read again only if it is not the one that was stamped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mxconvert.errors import LocalError, UsageError
from mxconvert.lock import LOCK_NAME
from mxconvert.manifest import WORK_FOLDER
from mxconvert.transfer.pull.folder import make_folder, plain_stat, read_plain
from mxconvert.writer import remove_quietly, write_file
from mxconvert.writer.atomic import local_error

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mxconvert.manifest import FileEntry

SCHEMA_VERSION = 1
_JOURNAL, _CHUNKS = "pull.json", "chunks"
_OF_QUANTIZE = "journal.json"
_LONGEST = 200
_MODE = 0o644


class PullJournal:
    """The journal of one folder."""

    def __init__(self, target: Path) -> None:
        self.folder = target / WORK_FOLDER
        self._target = target

    @property
    def exists(self) -> bool:
        """Whether an unfinished pull left a journal here."""
        return plain_stat(self._target, f"{WORK_FOLDER}/{_JOURNAL}") is not None

    @property
    def has_folder(self) -> bool:
        """Whether a run works here, or left something to clear away."""
        return self.folder.exists()

    @property
    def of_quantize(self) -> bool:
        """Whether the folder belongs to an unfinished conversion instead."""
        return not self.exists and (self.folder / _OF_QUANTIZE).exists()

    def make(self) -> None:
        """Create the journal's folder.

        Raises:
            LocalError: A link or a file is in the way, or it cannot be created.
        """
        make_folder(self.folder)

    def is_of(self, artifact_id: str) -> bool:
        """Whether an unfinished pull of this artifact left a journal that can be read."""
        try:
            return bool(self._read()["artifact"] == artifact_id)
        except LocalError:
            return False

    def open(self, artifact_id: str, selection: Mapping[str, Any] | None = None) -> None:
        """Start a journal, or bind to the one that is here.

        Args:
            artifact_id: Of what is pulled.
            selection: Which part of it; ``None``: all.

        Raises:
            UsageError: It belongs to another artifact.
            LocalError: It cannot be read or written.
        """
        if not self.exists:
            self.discard()
            make_folder(self.folder / _CHUNKS)
            self._write(artifact_id, selection)
            return
        found = self._read()["artifact"]
        if found != artifact_id:
            raise UsageError(
                f"{self._target}: an unfinished pull of another artifact is here: {found}, asked "
                f"for is {artifact_id}",
                hint=f"finish it with URL@{found[:16]}, or pass --overwrite to discard it",
                code="resume-mismatch",
            )
        make_folder(self.folder / _CHUNKS)
        if self.selection != selection:
            self._write(artifact_id, selection)

    @property
    def selection(self) -> dict[str, Any] | None:
        """Which part of the artifact an unfinished pull was to fetch; ``None``: all."""
        found = self._read().get("selection")
        return found if isinstance(found, dict) else None

    def _write(self, artifact_id: str, selection: Mapping[str, Any] | None) -> None:
        document: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "artifact": artifact_id}
        if selection is not None:
            document["selection"] = dict(selection)
        write_file(self.folder / _JOURNAL, json.dumps(document).encode())

    def _read(self) -> dict[str, Any]:
        """Return what the journal says."""
        where = self.folder / _JOURNAL
        try:
            document = json.loads(read_plain(self._target, f"{WORK_FOLDER}/{_JOURNAL}"))
            version, found = document["schema_version"], document["artifact"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _unreadable(where, str(error)) from error
        if version != SCHEMA_VERSION or not isinstance(found, str):
            raise _unreadable(where, f"schema_version {version!r}, expected {SCHEMA_VERSION}")
        return dict(document)

    def chunk_map(self, entry: FileEntry) -> ChunkMap:
        """Return the map of a file's chunks."""
        return self.map_of(entry.path, len(entry.chunks))

    def map_of(self, path: str, count: int) -> ChunkMap:
        """Return the map of a file that has so many chunks, or tensors of a new file."""
        name = quote(path, safe="")
        if len(name) > _LONGEST:  # file systems take 255 bytes
            name = hashlib.sha256(path.encode()).hexdigest()
        return ChunkMap(self._target, f"{WORK_FOLDER}/{_CHUNKS}/{name}", count)

    def discard(self) -> None:
        """Forget everything, a conversion's journal too; the lock stays.

        Raises:
            LocalError: Something cannot be removed.
        """
        try:
            for name in (_JOURNAL, _OF_QUANTIZE):
                remove_quietly(self.folder / name)
            for path in sorted(self.folder.iterdir()):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name.partition(".")[0] != LOCK_NAME:
                    remove_quietly(path)
        except OSError as error:
            raise local_error(error, self.folder) from error

    def remove_folder(self) -> None:
        """Remove the journal's folder if nothing is left in it."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def _unreadable(path: Path, why: str) -> LocalError:
    return LocalError(f"{path}: cannot be read: {why}", hint="pass --overwrite to start over")


class ChunkMap:
    """Which chunks of a file are done, and whether the file has its name."""

    def __init__(self, target: Path, name: str, count: int) -> None:
        self._target, self._name = target, name
        self._path = target / name
        self._count = count
        self._fd = -1

    def load(self) -> tuple[set[int], str]:
        """Return the chunks that are done, and the stamp of the finished file or nothing."""
        try:
            raw = read_plain(self._target, self._name)
        except OSError:  # what is not known is done again
            return set(), ""
        done = {index for index, flag in enumerate(raw[: self._count]) if flag == 1}
        return done, raw[self._count :].decode("ascii", "replace")

    def open(self, done: set[int]) -> None:
        """Get ready to set bytes; ``done`` replaces what was there.

        Raises:
            LocalError: The operating system refuses.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            if plain_stat(self._target, self._name) is None:
                remove_quietly(self._path)
            self._fd = os.open(self._path, flags, _MODE)
            os.ftruncate(self._fd, self._count)
            os.pwrite(self._fd, bytes(int(index in done) for index in range(self._count)), 0)
        except OSError as error:
            raise local_error(error, self._path) from error

    def set(self, index: int) -> None:
        """Note that a chunk was written.

        Raises:
            LocalError: The operating system refuses.
        """
        self._write(b"\x01", index)

    def finish(self, stamp: str) -> None:
        """Note what tells the finished file from another one, and close.

        Raises:
            LocalError: The operating system refuses.
        """
        self._write(stamp.encode("ascii"), self._count)
        self.close()

    def _write(self, data: bytes, position: int) -> None:
        try:
            os.pwrite(self._fd, data, position)
        except OSError as error:
            raise local_error(error, self._path) from error

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def stamp_of(info: os.stat_result, *, sha256: bool) -> str:
    """Return what tells a finished file from one that was changed or put there later."""
    parts = (info.st_size, info.st_mtime_ns, info.st_ino, info.st_dev, int(sha256))
    return " ".join(map(str, parts))
