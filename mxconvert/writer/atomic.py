"""Small files: ``name.partial``, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from typing import TYPE_CHECKING

from mxconvert import failpoints
from mxconvert.digest import ChunkHasher, FileDigest, digest_bytes
from mxconvert.errors import LocalError, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from io import FileIO
    from pathlib import Path

PARTIAL_SUFFIX = ".partial"
_PIECE = 1 << 20
_MODE = 0o644
_IOV_MAX = 1024  # IOV_MAX of Linux


def local_error(error: OSError, path: Path) -> LocalError:
    """Say what the operating system refused, and what to do about it."""
    hints = {
        errno.ENOSPC: "free space or choose another folder, then run the same command again",
        errno.EDQUOT: "the quota is used up; free space, then run the same command again",
        errno.EROFS: "the file system is mounted read-only; choose another folder",
        errno.EACCES: "check the permissions of the folder",
        errno.EPERM: "check the permissions of the folder",
    }
    return LocalError(
        f"{path}: {error.strerror or error}",
        hint=hints.get(error.errno or 0, "mend the cause, then run the same command again"),
        code={errno.ENOSPC: "disk-full", errno.EDQUOT: "disk-full"}.get(error.errno or 0, "local"),
    )


def remove_quietly(path: Path) -> None:
    """Remove a file if it is there."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def partial_file(target: Path, *, counted: bool = True) -> Iterator[int]:
    """Give a descriptor for ``target.partial`` that becomes ``target`` on success.

    Args:
        target: The final name.
        counted: Whether the failpoints of small files see it; statistics are left out, so
            that a place's number says which file of the artifact it is.

    Raises:
        LocalError: The operating system refuses; the partial file is gone.
    """
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    fd = -1
    try:
        remove_quietly(partial)
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        if counted:
            failpoints.hit("writer.small-file", str(target))
        yield fd
        if counted:
            failpoints.hit("writer.small-written", str(target))
        os.fsync(fd)
        os.close(fd)
        fd = -1
        partial.rename(target)
        if counted:
            failpoints.hit("writer.small-renamed", str(target))
        sync_folder(target.parent)
    except OSError as error:
        raise local_error(error, target) from error
    finally:
        if fd >= 0:
            os.close(fd)
        with contextlib.suppress(OSError):
            remove_quietly(partial)


def write_all(fd: int, data: memoryview) -> None:
    """Write every byte at the descriptor's position."""
    while data:
        data = data[os.write(fd, data) :]


def write_views(fd: int, views: Sequence[memoryview]) -> None:
    """Write several buffers one after the other, in few system calls."""
    for start in range(0, len(views), _IOV_MAX):
        batch = views[start : start + _IOV_MAX]
        done = os.writev(fd, batch)
        for view in batch:  # a short write: the rest of it, one by one
            if done < len(view):
                write_all(fd, view[done:])
            done = max(0, done - len(view))


def write_file(target: Path, data: bytes) -> FileDigest:
    """Write a small file atomically.

    Raises:
        LocalError: The operating system refuses.
    """
    with partial_file(target) as fd:
        write_all(fd, memoryview(data))
    return digest_bytes(data)


def write_statistics(target: Path, pieces: Iterable[bytes]) -> None:
    """Write a file that lies beside an artifact, atomically.

    Raises:
        LocalError: The operating system refuses.
    """
    with partial_file(target, counted=False) as fd:
        failpoints.hit("writer.statistics", str(target))
        for piece in pieces:
            write_all(fd, memoryview(piece))


def copy_file(source: Path, target: Path, expected_sha256: str) -> FileDigest:
    """Copy a file byte for byte, as a regular file, atomically.

    Raises:
        SourceError: The bytes are not those seen in preflight.
        LocalError: The operating system refuses.
    """
    chunks, sha256 = ChunkHasher(), hashlib.sha256()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise local_error(error, target.parent) from error
    try:
        reading = source.open("rb", buffering=0)
    except OSError as error:
        raise _changed(source, error.strerror or str(error)) from error
    with reading, partial_file(target) as fd:
        while piece := _read(reading, source):
            chunks.update(piece)
            sha256.update(piece)
            write_all(fd, memoryview(piece))
        if sha256.hexdigest() != expected_sha256:
            raise _changed(source, f"SHA-256 was {expected_sha256}, is {sha256.hexdigest()}")
    return chunks.finish(sha256.hexdigest())


@contextlib.contextmanager
def take_file(source: Path, target: Path, expected_sha256: str) -> Iterator[None]:
    """Give a file of another folder a name here too: the same file if possible, else a copy.

    The file gets its name when the context ends without an error.

    Args:
        source: A regular file that nobody writes to.
        target: The final name.
        expected_sha256: Of its bytes; compared if it is copied.

    Raises:
        SourceError: The copied bytes are others.
        LocalError: The operating system refuses.
    """
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    try:
        _link_or_copy(source, partial, expected_sha256)
        yield
        failpoints.hit("writer.before-rename", str(partial))
        remove_quietly(target)  # renaming a link over the very file that it links to does nothing
        partial.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise local_error(error, target) from error
    finally:
        with contextlib.suppress(OSError):
            remove_quietly(partial)


def _link_or_copy(source: Path, target: Path, expected_sha256: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_quietly(target)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        copy_file(source, target, expected_sha256)


def _read(file: FileIO, path: Path) -> bytes:
    try:
        return file.read(_PIECE)
    except OSError as error:
        raise LocalError(
            f"{path}: reading: {error.strerror}",
            hint="check the disk, then run the same command again",
            code="read-error",
        ) from error


def _changed(path: Path, what: str) -> SourceError:
    return SourceError(
        f"{path}: changed during the run: {what}",
        hint="let nothing write to the source, then run the same command again",
        code="source-changed",
    )
