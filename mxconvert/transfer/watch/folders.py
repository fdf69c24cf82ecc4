"""A folder of versions: ``<first 16 digits of the id>/`` each, and ``current``, a link to one.

The link is replaced by a rename, so that whoever follows it finds one whole version or the
other. A version that goes away gets a hidden name first.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from typing import TYPE_CHECKING

from mxconvert import failpoints
from mxconvert.errors import LocalError
from mxconvert.manifest import MANIFEST_NAME
from mxconvert.writer.atomic import local_error, remove_quietly, sync_folder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from mxconvert.manifest import FileEntry

CURRENT = "current"
_VERSION = re.compile(r"[0-9a-f]{16}")
_TEMPORARY = re.compile(r"\.(?:current|removed)-[0-9a-f]{32}")


class Versions:
    """The versions in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, artifact_id: str) -> Path:
        """Return where a version lies, or will."""
        return self.root / artifact_id[:16]

    @property
    def current(self) -> str | None:
        """The name of the folder that ``current`` points at, ``None`` without a link.

        Raises:
            LocalError: ``current`` is something else.
        """
        link = self.root / CURRENT
        try:
            return link.readlink().name
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LocalError(
                f"{link}: expected a link that `pull --watch` has made, found something else",
                hint="choose another folder, or move it away",
            ) from error

    def is_whole(self, artifact_id: str) -> bool:
        """Whether a version has its manifest."""
        return (self.folder(artifact_id) / MANIFEST_NAME).is_file()

    def switch(self, artifact_id: str) -> None:
        """Let ``current`` point at a version.

        Raises:
            LocalError: The operating system refuses.
        """
        folder = self.folder(artifact_id)
        temporary = self.root / f".{CURRENT}-{uuid.uuid4().hex}"
        try:
            os.utime(folder)  # what `prune` goes by
            temporary.symlink_to(folder.name)
            failpoints.hit("watch.linked", str(temporary))
            temporary.replace(self.root / CURRENT)
            failpoints.hit("watch.switched", str(folder))
            sync_folder(self.root)
        except OSError as error:
            raise local_error(error, self.root / CURRENT) from error

    def prune(self, keep: int) -> list[str]:
        """Remove all versions but ``keep``, those that were current last; return their names.

        Raises:
            LocalError: The operating system refuses.
        """
        current = self.current
        others = [
            path
            for path in self.root.iterdir()
            if _VERSION.fullmatch(path.name)
            and path.is_dir()
            and not path.is_symlink()
            and path.name != current
        ]
        others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        doomed = others[max(0, keep - 1) :]
        for path in doomed:
            self._remove(path)
        return sorted(path.name for path in doomed)

    def _remove(self, folder: Path) -> None:
        hidden = self.root / f".removed-{uuid.uuid4().hex}"
        try:
            folder.rename(hidden)
            failpoints.hit("watch.removing", str(hidden))
            shutil.rmtree(hidden)
        except OSError as error:
            raise local_error(error, folder) from error

    def tidy(self) -> None:
        """Remove what a run that was killed left behind."""
        for path in self.root.iterdir():
            if not _TEMPORARY.fullmatch(path.name):
                continue
            with contextlib.suppress(OSError):
                if path.is_symlink():
                    remove_quietly(path)
                else:
                    shutil.rmtree(path)

    def reuse(self, entries: Iterable[FileEntry], held: Iterable[FileEntry], target: Path) -> int:
        """Give files of the current version that a new one has as well a second name in it.

        Args:
            entries: Of the new version.
            held: Of the current one.
            target: The folder of the new one.

        Returns:
            Bytes that need not be fetched; the pull compares them.
        """
        current, saved = self.current, 0
        known = {(entry.path, entry.size, entry.sha256) for entry in held}
        for entry in entries:
            if current is None or (entry.path, entry.size, entry.sha256) not in known:
                continue
            source, path = self.root / current / entry.path, target / entry.path
            with contextlib.suppress(OSError):  # it is fetched then
                path.parent.mkdir(parents=True, exist_ok=True)
                os.link(source, path, follow_symlinks=False)
                saved += entry.size
        return saved
