"""An artifact's folder at a store, read as one on disk is."""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING, TypeVar

from mxconvert.errors import StoreError, StoreFault
from mxconvert.manifest import MANIFEST_NAME
from mxconvert.store import Abandoned
from mxconvert.workers import map_watched

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from mxconvert.manifest import FileEntry
    from mxconvert.remote import Location
    from mxconvert.store import Client, ObjectInfo
    from mxconvert.verify.place import Piece

Task = TypeVar("Task")
Result = TypeVar("Result")

WHOLE_LIMIT = 512 * 2**20
"""Bytes of a document that are read at most."""

_ODD = frozenset({"", ".", ".."})
_OF_AN_OBJECT = frozenset({StoreFault.MISSING, StoreFault.CHANGED, StoreFault.REFUSED})


class RemoteFolder:
    """What is there is what HEAD says; a listing only adds what the manifest does not list.

    Attributes:
        root: Its URL.
        files: Objects of the manifest that are there, and others once `add_extras` ran.
        special: Objects that no folder can hold, once `add_extras` ran.
        empty: Objects that stand for folders, without their slash.
        hidden: Folders whose name begins with a dot.
        unreadable: Always empty.
    """

    def __init__(self, client: Client, location: Location) -> None:
        self.root = client.store.url(location.folder)
        self.files: dict[str, ObjectInfo] = {}
        self.special: dict[str, str] = {}
        self.empty: list[str] = []
        self.hidden: list[str] = []
        self.unreadable: dict[str, str] = {}
        self._client = client
        self._key = location.key
        self._expected = {} if location.id is None else {MANIFEST_NAME: location.id}
        self._kept: dict[str, bytes] = {}
        self._error: BaseException | None = None

    # --------------------------------------------------------------------- what is there

    def look_for(self, paths: Iterable[str]) -> None:
        """Ask for each path whether it is there."""
        paths = list(paths)
        for path, info in zip(paths, self.map(self._find, paths), strict=True):
            if info is not None:
                self.files[path] = info

    def _find(self, path: str) -> ObjectInfo | None:
        return self._client.find(self._key(path))

    def expect(self, entries: Iterable[FileEntry]) -> None:
        """Say what the files must be, so that `read` can tell damage on the way."""
        self._expected |= {entry.path: entry.sha256 for entry in entries}

    def add_extras(self, paths: Iterable[str]) -> None:
        """Take paths that a listing shows besides those of the manifest, as far as they exist."""
        files = set()
        for path in paths:
            *folders, name = path.split("/")
            dotted = next((i for i, part in enumerate(folders) if part.startswith(".")), None)
            if _ODD & {*folders, name or "x"}:
                self.special[path] = "an object whose name cannot be that of a file"
            elif dotted is not None:
                self.hidden.append("/".join(folders[: dotted + 1]))
            elif not name:
                self.empty.append("/".join(folders))
            else:
                files.add(path)
        self.hidden = sorted(set(self.hidden))
        self.look_for(sorted(files))

    # --------------------------------------------------------------------------- reading

    def read(self, path: str) -> bytes:
        """Return a whole small file of `files`; once more if it is not as expected.

        Raises:
            OSError: It cannot be read.
            StoreError: The store does not answer.
        """
        if path not in self._kept:
            size, expected = self.files[path].size, self._expected.get(path)
            if size > WHOLE_LIMIT:
                raise OSError(0, f"it has {size} bytes; at most {WHOLE_LIMIT} are read at once")
            data = self.read_range(path, 0, size)
            if expected and not hashlib.sha256(data).hexdigest().startswith(expected):
                data = self.read_range(path, 0, size)
            self._kept[path] = data
        return self._kept[path]

    def read_range(self, path: str, begin: int, end: int) -> bytes:
        """Return bytes ``[begin, end)`` of a file of `files`.

        Raises:
            OSError: They cannot be read.
            StoreError: The store does not answer.
        """
        pieces = self.pieces(path, begin, min(end, self.files[path].size))
        return b"".join(map(bytes, pieces))

    def pieces(self, path: str, begin: int, end: int) -> Generator[Piece, None, None]:
        """Yield bytes ``[begin, end)`` of a file of `files`, piece by piece.

        A piece is good until the next one is asked for.

        Raises:
            OSError: They cannot be read, or are no longer of the object that was seen.
            StoreError: The store does not answer.
        """
        if path in self._kept:
            yield memoryview(self._kept[path])[begin:end]
            return
        # Not tied to the tag that HEAD gave: some stores have another for each request, and
        # what was replaced meanwhile differs from its digests.
        with self._told_apart(path):
            yield from self._client.pieces(self._key(path), begin, end)

    @contextlib.contextmanager
    def _told_apart(self, path: str) -> Iterator[None]:
        """Turn trouble with one object into `OSError`; the store as a whole works then."""
        try:
            yield
        except StoreError as error:
            if error.fault not in _OF_AN_OBJECT:
                raise
            now = self._find(path)
            if now is None:
                raise OSError(0, "it is no longer there") from error
            if error.fault is StoreFault.MISSING or now.size != self.files[path].size:
                raise OSError(0, "it changed while it was being verified") from error
            raise

    # --------------------------------------------------------------------- many at once

    def map(self, work: Callable[[Task], Result], tasks: Iterable[Task], /) -> Iterator[Result]:
        """Call ``work`` on every task, as many at once as the client has requests.

        The first failure ends what the other threads do.
        """

        def guarded(task: Task) -> Result:
            try:
                return work(task)
            except Abandoned:
                raise
            except BaseException as error:
                self._error = self._error or error
                self._client.give_up()
                raise

        try:
            yield from map_watched(guarded, tasks, self._client.options.jobs, self._client.check)
        except Abandoned:
            assert self._error is not None  # noqa: S101  (only `guarded` gives up)
            raise self._error from None
