"""Objects as files of a local or mounted file system."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mxconvert.errors import StoreError, StoreFault
from mxconvert.store import copying, folders
from mxconvert.store.base import Blob, ObjectInfo
from mxconvert.store.keys import PARTIAL, is_own, segments
from mxconvert.store.local_body import LocalBody, tag_of
from mxconvert.store.pieces import guarded, unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mxconvert.store.base import Condition, Identity
    from mxconvert.store.options import StoreOptions
    from mxconvert.store.url import StoreURL

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FAULTS = {
    StoreFault.MISSING: (errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
    StoreFault.DENIED: (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP),
    StoreFault.CHANGED: (errno.EEXIST,),
    StoreFault.TRANSIENT: (errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EBUSY),
}
_BY_ERRNO = {number: fault for fault, numbers in _FAULTS.items() for number in numbers}
_HINTS = {
    errno.ENOSPC: "free some space and run the same command again",
    errno.EDQUOT: "raise the quota and run the same command again",
}


class LocalStore:
    """Files below a folder, which is made when something is written.

    Each write goes to a file of its own beside the final name, reaches the disk, and is
    renamed: a name never holds half an object. A conditional write is a compare-and-swap
    among all writers on this host, and on others if the file system has locks. Links are
    followed inside the folder only; folders behind links are not listed. The tag of an
    object is made of its time, size and inode.
    """

    def __init__(self, url: StoreURL, options: StoreOptions) -> None:
        options.refuse_unknown((), "file")
        self._root = url.prefix

    @property
    def label(self) -> str:
        """The folder."""
        return self._root

    def url(self, key: str) -> str:
        """Return the path of a key."""
        return f"{self._root.rstrip('/')}/{key}"

    @contextmanager
    def _translated(self, key: str, *, writes: bool = False) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            fault = _BY_ERRNO.get(error.errno or 0, StoreFault.REFUSED)
            if writes and error.errno == errno.ENOENT:  # another one removed the empty folder
                fault = StoreFault.TRANSIENT
            message = f"{self.url(key)}: {error.strerror or error}"
            raise StoreError(fault, message, hint=_HINTS.get(error.errno or 0)) from error

    @contextmanager
    def _place(self, key: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """Open the folder of a key; yield its descriptor and the name in it."""
        parts = segments(key, self.url(key))
        with self._translated(key, writes=create):
            if create:
                parts = [*folders.inside(self._root, parts[:-1]), parts[-1]]
            else:
                parts = folders.inside(self._root, parts) or parts
            with folders.folder(self._root, parts[:-1], create=create) as descriptor:
                yield descriptor, parts[-1]

    # ---------------------------------------------------------------------------- reading

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        with self._place(key) as (descriptor, name):
            found = folders.status(name, descriptor)
            _require_file(found)
        return ObjectInfo(key=key, size=found.st_size, etag=tag_of(found), modified=found.st_mtime)

    def open(self, key: str, begin: int, end: int, etag: str | None) -> LocalBody:
        """See `Store.open`."""
        with self._place(key) as (descriptor, name):
            body = LocalBody(self.url(key), os.open(name, _READ, dir_fd=descriptor), begin, end)
        try:
            body.check(etag)
        except BaseException:
            body.close()
            raise
        return body

    def get(self, key: str, limit: int) -> Blob:
        """See `Store.get`."""
        with (
            self._place(key) as (descriptor, name),
            os.fdopen(os.open(name, _READ, dir_fd=descriptor), "rb") as file,
        ):
            found = os.fstat(file.fileno())
            _require_file(found)
            data = file.read(limit + 1)
        if len(data) > limit:
            raise StoreError(
                StoreFault.REFUSED,
                f"{self.url(key)}: {found.st_size} bytes, expected at most {limit}",
            )
        return Blob(data, tag_of(found))

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.objects`."""
        above = prefix.rpartition("/")[0]
        if above:
            segments(above, self.url(prefix))
        with self._translated(prefix):
            for key in self._below(above, prefix):
                if not is_own(key.rpartition("/")[2]):
                    with contextlib.suppress(StoreError):  # gone, a pipe, or a link out of here
                        yield self.head(key)

    def partials(self) -> Iterator[ObjectInfo]:
        """See `FileStore.partials`."""
        with self._translated(""):
            for key in self._below("", ""):
                if key.endswith(PARTIAL):
                    with contextlib.suppress(FileNotFoundError):
                        found = os.lstat(self.url(key))
                        if stat.S_ISREG(found.st_mode):
                            yield ObjectInfo(key=key, size=found.st_size, modified=found.st_mtime)

    def drop_partial(self, key: str) -> bool:
        """See `FileStore.drop_partial`."""
        above, name = key.split("/")[:-1], key.rpartition("/")[2]
        try:
            with self._translated(key), folders.folder(self._root, above) as descriptor:
                if not folders.drop_partial(name, descriptor):
                    return False
                folders.drop_empty(self._root, above)
        except StoreError as error:
            if error.fault is not StoreFault.MISSING:
                raise
        return True

    def _below(self, above: str, prefix: str) -> Iterator[str]:
        try:
            with os.scandir(self.url(above)) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in found:
            key = f"{above}/{entry.name}" if above else entry.name
            if entry.is_dir(follow_symlinks=False):
                if f"{key}/".startswith(prefix) or prefix.startswith(f"{key}/"):
                    yield from self._below(key, prefix)
            elif key.startswith(prefix):
                yield key

    def folders(self) -> Iterator[str]:
        """See `Store.folders`."""
        with self._translated(""):
            try:
                with os.scandir(self._root) as entries:
                    names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
            except FileNotFoundError:
                return
        yield from (name for name in names if any(self.objects(f"{name}/")))

    # ---------------------------------------------------------------------------- writing

    def put(self, key: str, data: bytes, condition: Condition | None = None) -> str | None:
        """See `Store.put`."""
        with (
            self._place(key, create=True) as (descriptor, name),
            folders.partial(name, descriptor) as (own, file),
        ):
            _write(file, memoryview(data))
            os.fsync(file)
            with folders.locked(descriptor, certainly=condition is not None):
                self._check(key, name, descriptor, condition)
                os.replace(own, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
            os.fsync(descriptor)
            return tag_of(os.fstat(file))

    def _check(self, key: str, name: str, descriptor: int, condition: Condition | None) -> None:
        if condition is None:
            return
        try:
            found = tag_of(folders.status(name, descriptor))
        except FileNotFoundError:
            found = None
        if found != condition.etag:
            raise StoreError(
                StoreFault.CHANGED,
                f"{self.url(key)}: expected tag {condition.etag}, found {found}",
            )

    def upload(self, key: str, pieces: Iterable[memoryview], identity: Identity) -> None:
        """See `Store.upload`; what was under the key before stays there after a failure."""
        with (
            unwrapped(),
            self._place(key, create=True) as (descriptor, name),
            folders.partial(name, descriptor) as (own, file),
        ):
            size = 0
            for piece in guarded(pieces):
                _write(file, piece)
                size += len(piece)
            if size != identity.size:
                raise StoreError(
                    StoreFault.CORRUPT,
                    f"{self.url(key)}: {size} bytes came, expected {identity.size}",
                )
            os.fsync(file)
            folders.rename(own, name, descriptor)

    def copy(self, source: str, key: str, identity: Identity) -> None:
        """See `Store.copy`: a second name of the same bytes where the file system has those."""
        with self._place(source) as (folder, name):
            origin = os.open(name, _READ, dir_fd=folder)
        try:
            self._check_size(source, origin, identity)
            with self._place(key, create=True) as (folder, name):
                if not copying.link(origin, name, folder):
                    self._copy_bytes(origin, name, folder, identity.size)
        finally:
            os.close(origin)

    def _copy_bytes(self, origin: int, name: str, descriptor: int, size: int) -> None:
        with folders.partial(name, descriptor) as (own, file):
            copying.copy(origin, file, size)
            os.fsync(file)
            folders.rename(own, name, descriptor)

    def _check_size(self, key: str, file: int, identity: Identity) -> None:
        with self._translated(key):
            found = os.fstat(file)
            _require_file(found)
        if found.st_size != identity.size:
            raise StoreError(
                StoreFault.CHANGED,
                f"{self.url(key)}: {found.st_size} bytes, expected {identity.size}",
            )

    def delete(self, key: str) -> None:
        """See `Store.delete`; folders that this leaves empty are removed."""
        parts = segments(key, self.url(key))
        try:
            with self._translated(key):
                above = folders.inside(self._root, parts[:-1])
                with (
                    folders.folder(self._root, above) as descriptor,
                    folders.locked(descriptor, certainly=False),
                ):
                    os.unlink(parts[-1], dir_fd=descriptor)
                folders.drop_empty(self._root, above)
        except StoreError as error:
            if error.fault is not StoreFault.MISSING:
                raise

    def renew(self) -> None:
        """See `Store.renew`."""

    def close(self) -> None:
        """See `Store.close`."""


def _require_file(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.ENOENT, "not a regular file")


def _write(file: int, piece: memoryview) -> None:
    done = 0
    while done < len(piece):
        done += os.write(file, piece[done:])
