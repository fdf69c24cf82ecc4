"""Which paths a manifest may name.

A path is checked before any file is touched, so that no entry can lead outside the
artifact's folder or name one file twice, on any system that may read the artifact.
"""

from __future__ import annotations

import re
import unicodedata

from mxconvert.errors import VerificationError

MANIFEST_NAME = "mxconvert.manifest.json"
TENSORS_NAME = "mxconvert.tensors.jsonl.zst"
RECORD_NAME = "mxconvert.selection.json"
"""What part of the artifact a folder holds, see `mxconvert.selection`; never part of one."""
WORK_FOLDER = ".mxconvert"
"""Journal and locks of an unfinished run; never part of an artifact."""

_DRIVE = re.compile(r"^[A-Za-z]:")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def path_fault(path: str) -> str | None:
    """Say what is unsafe about a relative POSIX path, ``None`` when nothing is."""
    parts = path.split("/")
    faults = (
        (path == "", "it is empty"),
        (_CONTROL.search(path) is not None, "it has a control character"),
        ("\\" in path, "it has a backslash"),
        (path.startswith("/"), "it is absolute"),
        (_DRIVE.match(path) is not None, "it has a drive letter"),
        (".." in parts, "it has a '..' segment"),
        ("." in parts, "it has a '.' segment"),
        ("" in parts, "it has an empty segment"),
        (path == MANIFEST_NAME, "a manifest does not list itself"),
        (parts[0] == WORK_FOLDER, f"{WORK_FOLDER}/ is never part of an artifact"),
    )
    return next((fault for found, fault in faults if found), None)


def spelling_key(path: str) -> str:
    """Return what two spellings of one name have in common (case, Unicode form)."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def refuse_clashes(paths: list[str], where: str) -> None:
    """Refuse one file named twice, and a file that is also a folder.

    Raises:
        VerificationError: Naming both entries.
    """
    seen: dict[str, str] = {}
    for path in paths:
        key = spelling_key(path)
        other = seen.get(key)
        seen[key] = path
        if other is not None:
            raise VerificationError(
                f"{where}: the entries {other!a} and {path!a} name the same file",
                code="duplicate-entry",
            )
    for path in paths:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            other_file = seen.get(spelling_key("/".join(parts[:depth])))
            if other_file is not None:
                raise VerificationError(
                    f"{where}: the entry {other_file!a} is a folder of the entry {path!a}",
                    code="duplicate-entry",
                )
