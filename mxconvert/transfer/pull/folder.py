"""The folder that is pulled into: looked at and opened without following links.

Only the last name of a path can be guarded when it is opened, so whatever reads or writes
below the folder first asks `plain_stat` or `make_parents` about the folders on the way.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from functools import cache
from typing import TYPE_CHECKING

from mxconvert.errors import LocalError
from mxconvert.folder import describe
from mxconvert.writer import PARTIAL_SUFFIX
from mxconvert.writer.atomic import local_error, sync_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_MODE = 0o644
_SYNC_FILE_RANGE_WRITE = 2  # sync_file_range(2): start, do not wait
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def partial_path(path: str) -> str:
    """Return the name that a file has until it is whole."""
    return path + PARTIAL_SUFFIX


def _parents(root: Path, path: str) -> Iterator[Path]:
    folder = root
    for part in path.split("/")[:-1]:
        folder /= part
        yield folder


def make_parents(root: Path, path: str) -> None:
    """Create the folders of a relative path; anything else in their place is refused.

    Raises:
        LocalError: A link or a file is in the way, or nothing can be created.
    """
    for folder in _parents(root, path):
        make_folder(folder)


def make_folder(folder: Path) -> None:
    """Create a folder unless it is there, durably.

    Raises:
        LocalError: A link or a file is in the way, or it cannot be created.
    """
    try:
        try:
            folder.mkdir()
        except FileExistsError:
            mode = folder.lstat().st_mode
        else:
            sync_folder(folder.parent)
            return
    except OSError as error:
        raise local_error(error, folder) from error
    if not stat.S_ISDIR(mode):
        what = "a file" if stat.S_ISREG(mode) else describe(mode)
        raise LocalError(f"{folder}: is {what}, expected a folder", hint="remove it")


def plain_stat(root: Path, path: str) -> os.stat_result | None:
    """Return what the system says about a regular file below ``root``.

    ``None`` if it is not there, is something else, or lies behind a link.
    """
    try:
        if any(not stat.S_ISDIR(folder.lstat().st_mode) for folder in _parents(root, path)):
            return None
        info = (root / path).lstat()
    except OSError:
        return None
    return info if stat.S_ISREG(info.st_mode) else None


def plain_size(root: Path, path: str) -> int | None:
    """Return the size of a regular file, ``None`` as in `plain_stat`."""
    info = plain_stat(root, path)
    return None if info is None else info.st_size


def open_plain(root: Path, path: str) -> int:
    """Open a regular file below ``root`` for reading.

    Raises:
        OSError: It is not there, is something else, or lies behind a link.
    """
    if plain_stat(root, path) is None:
        raise OSError(errno.ENOENT, "not a regular file", str(root / path))
    return os.open(root / path, _READ)


def read_plain(root: Path, path: str) -> bytes:
    """Return the bytes of a regular file below ``root``.

    Raises:
        OSError: As `open_plain`.
    """
    with os.fdopen(open_plain(root, path), "rb") as file:
        return file.read()


def refuse_odd(root: Path, path: str) -> None:
    """Refuse a folder, or a special file, under the name of a file that is to be written.

    A link is none of these: it is replaced, never followed.

    Raises:
        LocalError: Naming it.
    """
    try:
        mode = (root / path).lstat().st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        what = "a folder" if stat.S_ISDIR(mode) else describe(mode)
        raise LocalError(f"{root / path}: is {what}, expected a file", hint="remove it")


def open_partial(root: Path, path: str, size: int) -> int:
    """Open ``path.partial`` with ``size`` bytes allocated; what it holds is kept.

    Raises:
        LocalError: It is not a regular file; the operating system refuses; the disk is full.
    """
    make_parents(root, path)
    name = partial_path(path)
    target = root / name
    refuse_odd(root, path)
    refuse_odd(root, name)
    fd = -1
    try:
        fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
        os.ftruncate(fd, size)
        if size:
            _allocate(fd, size)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        if error.errno == errno.ELOOP:
            raise LocalError(f"{target}: is a link, expected a file", hint="remove it") from error
        raise local_error(error, target) from error
    return fd


def _allocate(fd: int, size: int) -> None:
    """Take the disk space now, so that a full disk shows before the transfer."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return the system call, which Python does not offer; ``None`` where libc lacks it."""
    try:
        call = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    found: Callable[[int, int, int, int], int] = call
    return found


def start_writeback(fd: int, begin: int, size: int) -> None:
    """Let the disk begin with a range, so that little is left for the ``fsync`` at the end.

    It promises nothing, so nothing can go wrong with it; on tmpfs it does nothing.
    """
    call = _sync_file_range()
    if call is not None:
        call(fd, begin, size, _SYNC_FILE_RANGE_WRITE)


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
