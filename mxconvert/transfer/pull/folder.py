"""The folder that is pulled into: opened without following links."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from mxconvert.errors import LocalError
from mxconvert.writer import PARTIAL_SUFFIX
from mxconvert.writer.atomic import local_error

if TYPE_CHECKING:
    from pathlib import Path

_MODE = 0o644
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def make_parents(root: Path, path: str) -> None:
    """Create the folders of a relative path; a link in their place is refused.

    Raises:
        LocalError: A link or a file is in the way, or nothing can be created.
    """
    folder = root
    for part in path.split("/")[:-1]:
        folder /= part
        try:
            folder.mkdir(exist_ok=True)
            mode = folder.lstat().st_mode
        except OSError as error:
            raise local_error(error, folder) from error
        if not stat.S_ISDIR(mode):
            raise LocalError(f"{folder}: is a link, expected a folder", hint="remove it")


def open_partial(root: Path, path: str, size: int) -> int:
    """Open ``path.partial`` with ``size`` bytes allocated; what it holds is kept.

    Raises:
        LocalError: The operating system refuses; the disk is full.
    """
    make_parents(root, path)
    target = root / (path + PARTIAL_SUFFIX)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    if target.exists() and regular_size(target) is None:
        raise LocalError(f"{target}: is not a regular file", hint="remove it")
    fd = -1
    try:
        fd = os.open(target, flags, _MODE)
        os.ftruncate(fd, size)
        if size:
            _allocate(fd, size)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise local_error(error, target) from error
    return fd


def _allocate(fd: int, size: int) -> None:
    """Take the disk space now, so that a full disk shows before the transfer."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise


def regular_size(path: Path) -> int | None:
    """Return the size of a regular file, ``None`` if it is not there or something else."""
    try:
        info = path.lstat()
    except OSError:
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) else None


def write_at(fd: int, data: bytes | memoryview, offset: int, path: Path) -> None:
    """Write all of ``data`` at an offset.

    Raises:
        LocalError: The operating system refuses.
    """
    view = memoryview(data)
    try:
        while view:
            count = os.pwrite(fd, view, offset)
            view, offset = view[count:], offset + count
    except OSError as error:
        raise local_error(error, path) from error
