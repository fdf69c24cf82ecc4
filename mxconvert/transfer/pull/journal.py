"""What a pull leaves behind so that the next one can go on.

``DIR/.mxconvert/`` holds until the artifact is complete:

* ``pull.json``: the artifact's id, and the boot of the machine that wrote it;
* ``manifest.json``: the manifest, so that a resume needs no store to know what is done;
* ``chunks/<name>``: one byte for each chunk of a file, 1 once it was checked and written.

A byte is set after the chunk was written, and both go through the same page cache: what
a killed process has set is true. A machine that went down may have lost the chunk and
kept the byte, so after another boot each such chunk is read and compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from mxconvert.errors import LocalError, UsageError
from mxconvert.manifest import WORK_FOLDER
from mxconvert.writer import remove_quietly, write_file
from mxconvert.writer.atomic import local_error

if TYPE_CHECKING:
    from mxconvert.manifest import FileEntry
    from mxconvert.remote import RemoteArtifact

SCHEMA_VERSION = 1
_JOURNAL, _MANIFEST, _CHUNKS = "pull.json", "manifest.json", "chunks"
_LONGEST = 200
_MODE = 0o644
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PullJournal:
    """The journal of one folder."""

    def __init__(self, target: Path) -> None:
        self.folder = target / WORK_FOLDER
        self._target = target
        self.same_boot = True

    @property
    def exists(self) -> bool:
        """Whether an unfinished pull left a journal here."""
        return (self.folder / _JOURNAL).exists()

    @property
    def of_quantize(self) -> bool:
        """Whether the folder belongs to an unfinished conversion instead."""
        return (self.folder / "journal.json").exists()

    def open(self, artifact: RemoteArtifact) -> None:
        """Start a journal, or bind to the one that is here.

        Raises:
            UsageError: It belongs to another artifact.
            LocalError: It cannot be read or written.
        """
        if not self.exists:
            self._begin(artifact)
            return
        try:
            found = json.loads((self.folder / _JOURNAL).read_bytes())
            version, earlier, boot = found["schema_version"], found["artifact"], found["boot"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LocalError(
                f"{self.folder / _JOURNAL}: cannot be read: {error}",
                hint="pass --overwrite to start over",
            ) from error
        if (version, earlier) != (SCHEMA_VERSION, artifact.id):
            raise UsageError(
                f"{self._target}: an unfinished pull of another artifact is here: {earlier}, "
                f"asked for is {artifact.id}",
                hint=f"finish it with URL@{earlier[:16]}, or pass --overwrite to discard it",
                code="resume-mismatch",
            )
        self.same_boot = boot == _boot()
        if not self.same_boot:
            self._note_boot(artifact.id)

    def _begin(self, artifact: RemoteArtifact) -> None:
        try:
            (self.folder / _CHUNKS).mkdir(exist_ok=True)
        except OSError as error:
            raise local_error(error, self.folder) from error
        write_file(self.folder / _MANIFEST, artifact.data)
        self._note_boot(artifact.id)

    def _note_boot(self, artifact_id: str) -> None:
        document = {"schema_version": SCHEMA_VERSION, "artifact": artifact_id, "boot": _boot()}
        write_file(self.folder / _JOURNAL, json.dumps(document).encode())

    def chunk_map(self, entry: FileEntry) -> ChunkMap:
        """Return the map of a file's chunks."""
        name = quote(entry.path, safe="")
        if len(name) > _LONGEST:  # file systems take 255 bytes
            name = hashlib.sha256(entry.path.encode()).hexdigest()
        return ChunkMap(self.folder / _CHUNKS / name, len(entry.chunks))

    def discard(self) -> None:
        """Forget everything; the lock stays."""
        remove_quietly(self.folder / _JOURNAL)
        remove_quietly(self.folder / _MANIFEST)
        shutil.rmtree(self.folder / _CHUNKS, ignore_errors=True)

    def remove_folder(self) -> None:
        """Remove the journal's folder if nothing is left in it."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


class ChunkMap:
    """Which chunks of a file are done: a file with one byte for each."""

    def __init__(self, path: Path, count: int) -> None:
        self._path = path
        self._count = count
        self._fd = -1

    def load(self) -> set[int]:
        """Return the chunks that are done."""
        try:
            flags = self._path.read_bytes()
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise local_error(error, self._path) from error
        return {index for index, flag in enumerate(flags[: self._count]) if flag == 1}

    def open(self, done: set[int]) -> None:
        """Get ready to set bytes; ``done`` replaces what was there."""
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
            flags = bytes(int(index in done) for index in range(self._count))
            os.pwrite(self._fd, flags, 0)
            os.ftruncate(self._fd, self._count)
        except OSError as error:
            raise local_error(error, self._path) from error

    def set(self, index: int) -> None:
        """Note that a chunk was written."""
        try:
            os.pwrite(self._fd, b"\x01", index)
        except OSError as error:
            raise local_error(error, self._path) from error

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Remove it: the file has its name."""
        self.close()
        with contextlib.suppress(OSError):
            remove_quietly(self._path)


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"
