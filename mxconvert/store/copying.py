"""Copies of files without bytes through this process."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid

from mxconvert.store import folders
from mxconvert.store.keys import PARTIAL

_COPY_BYTES = 2**30
_NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_NO_RANGE = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


def link(origin: int, name: str, folder: int) -> bool:
    """Give an open file the name ``name`` in a folder; ``False`` if it cannot have one."""
    own = uuid.uuid4().hex + PARTIAL
    try:
        os.link(f"/proc/self/fd/{origin}", own, dst_dir_fd=folder)
    except OSError as error:
        if error.errno in _NO_LINK or not os.path.exists("/proc/self/fd"):  # noqa: PTH110
            return False
        raise
    try:
        folders.rename(own, name, folder)
    finally:
        # Renaming onto another name of the same file does nothing and leaves both.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(own, dir_fd=folder)
    return True


def copy(origin: int, file: int, size: int) -> None:
    """Copy ``size`` bytes between open files, each at its position."""
    done = 0
    while done < size:
        most = min(_COPY_BYTES, size - done)
        try:
            count = os.copy_file_range(origin, file, most)
        except OSError as error:
            if error.errno not in _NO_RANGE:
                raise
            count = os.sendfile(file, origin, done, most)
        if count == 0:
            raise OSError(errno.EIO, "the file shrank while it was copied")
        done += count
