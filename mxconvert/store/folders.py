"""Folders below a root, opened segment by segment, so that no link leads out of it.

Every function raises `OSError`; a link that leaves the root is ``ELOOP``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import uuid
from typing import TYPE_CHECKING

from mxconvert.store.keys import LOCK_FILE, PARTIAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o644
_NAME_BYTES = 255


def inside(root: str, parts: Sequence[str]) -> list[str]:
    """Return where a path below ``root`` leads when its links are followed, below ``root``."""
    top = os.path.realpath(root)
    found = os.path.realpath(os.path.join(top, *parts))  # noqa: PTH118  (resolve() may loop)
    if found != top and not found.startswith(top.rstrip("/") + "/"):
        raise OSError(errno.ELOOP, "a link leads out of the store")
    return [part for part in found[len(top) :].split("/") if part]


@contextlib.contextmanager
def folder(root: str, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
    """Open the folder at resolved ``parts``; with ``create`` make it and what leads there."""
    if create:
        os.makedirs(root, exist_ok=True)  # noqa: PTH103  (as the others here)
    descriptor = os.open(root, _FOLDER & ~os.O_NOFOLLOW)
    try:
        for part in parts:
            if create:
                _make(part, descriptor)
            below = os.open(part, _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def _make(name: str, descriptor: int) -> None:
    try:
        os.mkdir(name, dir_fd=descriptor)
    except FileExistsError:
        return
    os.fsync(descriptor)


@contextlib.contextmanager
def locked(descriptor: int, *, certainly: bool) -> Iterator[None]:
    """Hold a folder against other writers of it.

    Network file systems cannot lock a folder. There a lock file in it is taken when the
    lock is needed ``certainly``, and none otherwise.
    """
    holder = -1
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            if certainly:
                holder = os.open(LOCK_FILE, _WRITE, _MODE, dir_fd=descriptor)
                fcntl.flock(holder, fcntl.LOCK_EX)
        yield
    finally:
        if holder >= 0:
            os.close(holder)
        else:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def partial(name: str, descriptor: int) -> Iterator[tuple[str, int]]:
    """Open an empty file beside ``name`` to write; yield its own name and descriptor.

    A killed writer's file is written anew; one that is being written is left alone. What
    was not renamed in the end is removed.
    """
    own, file = _partial_file(name, descriptor)
    try:
        yield own, file
    finally:
        # Before it is closed: its lock keeps others from taking it up.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), status(own, descriptor)):
                os.unlink(own, dir_fd=descriptor)
        os.close(file)


def _partial_file(name: str, descriptor: int) -> tuple[str, int]:
    own = name + PARTIAL
    if len(os.fsencode(own)) > _NAME_BYTES:
        own = hashlib.sha256(os.fsencode(name)).hexdigest() + PARTIAL
    file = os.open(own, _WRITE, _MODE, dir_fd=descriptor)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), status(own, descriptor)):
            os.ftruncate(file, 0)
            return own, file
    except OSError:  # another writer's, or no locks here
        pass
    os.close(file)
    own = uuid.uuid4().hex + PARTIAL
    return own, os.open(own, _WRITE | os.O_EXCL, _MODE, dir_fd=descriptor)


def drop_partial(name: str, descriptor: int) -> bool:
    """Remove a file that a killed writer has left; ``False`` if one is writing it."""
    file = os.open(name, _WRITE & ~os.O_CREAT, dir_fd=descriptor)
    try:
        if _is_held(file):
            return False
        if os.path.samestat(os.fstat(file), status(name, descriptor)):
            os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(file)
    return True


def _is_held(file: int) -> bool:
    """Whether another one has locked a file, as far as locks work; lock it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.EWOULDBLOCK
    return False


def rename(own: str, name: str, descriptor: int) -> None:
    """Give what is written its final name, past the power going off."""
    with locked(descriptor, certainly=False):
        os.replace(own, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
    os.fsync(descriptor)


def status(name: str, descriptor: int) -> os.stat_result:
    """Return the status of a name in a folder, of a link itself if it is one."""
    return os.stat(name, dir_fd=descriptor, follow_symlinks=False)


def drop_empty(root: str, parts: Sequence[str]) -> None:
    """Remove the folder at ``parts`` and those above it, up to ``root``, while empty."""
    for length in range(len(parts), 0, -1):
        try:
            with folder(root, parts[: length - 1]) as above:
                os.rmdir(parts[length - 1], dir_fd=above)
        except OSError:
            return
