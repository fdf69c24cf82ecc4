"""A folder's disk: what it is, and whether what `quantize` relies on works there."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mxconvert.doctor.machine import PROC, read_text

if TYPE_CHECKING:
    from collections.abc import Callable

_IN_MEMORY = {"tmpfs", "ramfs"}
_ESCAPES = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}
_PREFIX = ".mxconvert-doctor-"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderReport:
    """What is known of a folder.

    Attributes:
        path: As an absolute path.
        file_system: Its type, for example ``ext4``.
        read_only: Whether it is mounted so.
        free: Bytes.
        writable: Whether a file could be made; if not, ``obstacle`` says why.
        obstacle: ``None`` if it can be written.
        hard_links: Whether they work, ``None`` if it was not tried.
        fsync: Whether files and the folder can be synced, ``None`` if it was not tried.
    """

    path: str
    file_system: str
    read_only: bool
    free: int
    writable: bool
    obstacle: str | None
    hard_links: bool | None
    fsync: bool | None


def _mount(folder: Path, proc: Path) -> tuple[str, set[str]]:
    """Return type and options of the mount that a folder lies in; the last one wins."""
    real = folder.resolve()
    best, found = -1, ("unknown", set[str]())
    for line in read_text(proc / "self" / "mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        point = Path(_unescape(fields[4]))
        if (point == real or point in real.parents) and len(point.parts) >= best:
            options = {*fields[5].split(","), *tail[2].split(",")}
            best, found = len(point.parts), (tail[0], options)
    return found


def _unescape(text: str) -> str:
    for escape, char in _ESCAPES.items():
        text = text.replace(escape, char)
    return text


def file_system(folder: Path, proc: Path = PROC) -> str:
    """Return the type of the file system that a folder lies in."""
    return _mount(folder, proc)[0]


def in_memory(folder: Path, proc: Path = PROC) -> bool:
    """Whether a folder's files live in memory, so that no disk limits them."""
    return file_system(folder, proc) in _IN_MEMORY


def examine(folder: Path, proc: Path = PROC) -> FolderReport:
    """Look at a folder, and try what is relied on in a folder of its own, removed again.

    A folder that is missing or cannot be written is reported, not raised.
    """
    kind, options = _mount(folder, proc)
    writable, obstacle, links, fsync = _try_writing(folder)
    return FolderReport(
        path=str(folder.resolve()),
        file_system=kind,
        read_only="ro" in options,
        free=_free(folder),
        writable=writable,
        obstacle=obstacle,
        hard_links=links,
        fsync=fsync,
    )


def _free(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return 0


def _try_writing(folder: Path) -> tuple[bool, str | None, bool | None, bool | None]:
    try:
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=folder) as name:
            probe = Path(name) / "probe"
            probe.write_bytes(b"probe")
            links = _works(lambda: os.link(probe, probe.with_name("link")))
            return True, None, links, _works(lambda: _sync(probe))
    except OSError as error:
        return False, error.strerror or str(error), None, None


def _sync(probe: Path) -> None:
    for path in (probe, probe.parent):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return False
    return True
