"""The one folder that bench writes to, and its end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mxconvert.errors import LocalError
from mxconvert.writer.atomic import local_error

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "mxconvert-bench-"
_LOCK = ".lock"
_MARGIN = 64 << 20  # left free for others


def check_space(folder: Path, needed: int) -> None:
    """Refuse a folder that cannot hold what bench will write.

    Raises:
        LocalError: It is no folder, or states bytes needed and free.
    """
    if not folder.is_dir():
        raise LocalError(
            f"{folder}: is not a folder", hint="name an existing folder on the disk to measure"
        )
    info = os.statvfs(folder)
    free = info.f_bavail * info.f_frsize
    if free < needed + _MARGIN:
        raise LocalError(
            f"{folder}: bench needs {needed + _MARGIN} bytes for a short time, {free} are free",
            hint="free space, choose another --folder, or pass --quick, which needs less",
            code="disk-full",
        )


@contextlib.contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """Give an empty folder below ``folder`` and remove it, whatever happens.

    A process that is killed outright cannot clean up; what it left is removed by the next
    bench in the same folder. A lock tells such leftovers from a run that is under way.

    Raises:
        LocalError: The folder cannot be written.
    """
    _sweep(folder)
    try:
        made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
    except OSError as error:
        raise local_error(error, folder) from error
    fd = -1
    try:
        fd = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield made
    except OSError as error:
        raise local_error(error, Path(error.filename or made)) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if fd >= 0:
            os.close(fd)


def _sweep(folder: Path) -> None:
    """Remove the folders of runs that were killed."""
    for left in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = os.open(left / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(fd)
