"""The output folder: what may be written there, and what is in the way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mxconvert.errors import LocalError, UsageError, VerificationError
from mxconvert.events import Notice
from mxconvert.manifest import MANIFEST_NAME, RECORD_NAME, TENSORS_NAME, WORK_FOLDER, parse_manifest
from mxconvert.manifest.loadable import may_be_loaded
from mxconvert.model import REPORT_NAME
from mxconvert.writer import PARTIAL_SUFFIX, remove_quietly
from mxconvert.writer.atomic import local_error

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from mxconvert.events import Reporter

_SHOWN = 8
_MARGIN = 64 * 1024 * 1024  # documents, journal, file system overhead


def check_destination(source: Path, target: Path) -> None:
    """Refuse a destination that cannot or must not be written, before anything is read.

    Raises:
        UsageError: It is a file, or the source, or lies within the source or around it.
        LocalError: Its parent is missing, or it is not writable.
    """
    real_source, real = source.resolve(), target.resolve()
    if real == real_source or _is_same(real, real_source):
        raise UsageError(f"{target}: the output folder is the source", hint="choose another one")
    if _lies_within(real, real_source) or _lies_within(real_source, real):
        raise UsageError(
            f"{target}: the output folder and the source {source} lie within each other",
            hint="choose a folder beside the source",
        )
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: is a file, expected a folder", hint="choose another name")
    if not target.exists() and not real.parent.is_dir():
        raise LocalError(
            f"{target}: the parent folder {real.parent} does not exist",
            hint=f"mkdir -p {real.parent}",
        )


def check_base(base: Path, target: Path) -> None:
    """Refuse a base that is no folder, or that the run would write to.

    Raises:
        UsageError: It is not there, or it is the output folder, lies in it or around it.
    """
    if not base.is_dir():
        raise UsageError(f"--base {base}: no such folder", hint="give the folder of an artifact")
    real_base, real = base.resolve(), target.resolve()
    same = real == real_base or _is_same(real, real_base)
    if same or _lies_within(real, real_base) or _lies_within(real_base, real):
        raise UsageError(
            f"--base {base}: it and the output folder {target} lie within each other",
            hint="choose a new output folder beside the base",
        )


def _lies_within(inner: Path, outer: Path) -> bool:
    return any(parent == outer or _is_same(parent, outer) for parent in inner.parents)


def _is_same(one: Path, other: Path) -> bool:
    """Whether two paths are one folder; sees through bind mounts."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def make_folder(target: Path) -> None:
    """Create the output folder and its journal folder.

    Raises:
        LocalError: Not writable.
    """
    try:
        target.mkdir(exist_ok=True)
        (target / WORK_FOLDER).mkdir(exist_ok=True)
        (target / WORK_FOLDER / "files").mkdir(exist_ok=True)
    except OSError as error:
        raise local_error(error, target) from error


def leftovers(target: Path) -> list[str]:
    """Return what lies in the output folder, the journal excepted, sorted."""
    return sorted(_walk(target)) if target.is_dir() else []


def _walk(target: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(target):
        if Path(folder) == target and WORK_FOLDER in folders:
            folders.remove(WORK_FOLDER)
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in (*files, *links):
            yield Path(folder, name).relative_to(target).as_posix()


def refuse_leftovers(target: Path, what: str = "") -> None:
    """Refuse a folder with contents of another origin; ``what`` says which, if known.

    Raises:
        UsageError: Listing what is there.
    """
    found = leftovers(target)
    if found:
        raise UsageError(
            f"{target}: is not empty: {_some(found)}" + (f" ({what})" if what else ""),
            hint="choose another folder, or pass --overwrite to replace the model files in it",
            code="destination-occupied",
        )


def refuse_strangers(target: Path, expected: Collection[str]) -> None:
    """Refuse to go on beside files that are not this model's and that a loader would read.

    Raises:
        UsageError: Listing them.
    """
    found = [name for name in leftovers(target) if name not in expected and _is_model_file(name)]
    if found:
        raise UsageError(
            f"{target}: files that do not belong to this model: {_some(found)}",
            hint="move them elsewhere, or pass --overwrite to remove them and start over",
            code="destination-occupied",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def clear(target: Path, report: Reporter, keep: Collection[str] = ()) -> None:
    """Remove every file that an artifact consists of or a loader would read; keep the rest.

    The manifest goes first: from then on the folder is no artifact. The files of ``keep``
    stay.

    Raises:
        LocalError: Something cannot be removed.
    """
    found = leftovers(target)
    doomed = [name for name in _doomed(target) if name not in keep]
    doomed.sort(key=lambda name: name != MANIFEST_NAME)
    try:
        for name in doomed:
            remove_quietly(target / name)
    except OSError as error:
        raise local_error(error, target / str(error.filename)) from error
    kept = sorted(set(found) - set(doomed) - set(keep))
    for code, label, names in (("removed", "removed", doomed), ("kept-files", "left alone", kept)):
        if names:
            message = f"{target}: {label}: {_some(names)}"
            report(Notice(severity="info", code=code, message=message))


def _doomed(target: Path) -> list[str]:
    ours = _listed_in_manifest(target)
    return [name for name in leftovers(target) if name in ours or _is_model_file(name)]


def reclaimable(target: Path) -> int:
    """Return the bytes that `clear` would free."""
    return sum((target / name).lstat().st_size for name in _doomed(target))


def _is_model_file(name: str) -> bool:
    if name == REPORT_NAME:  # of the artifact that is removed
        return True
    parts = name.split("/")
    if any(part.startswith(".") for part in parts):
        return False
    base = parts[-1]
    return (
        base.startswith((MANIFEST_NAME, TENSORS_NAME, RECORD_NAME))
        or base.endswith(PARTIAL_SUFFIX)
        or may_be_loaded(base)
    )


def _listed_in_manifest(target: Path) -> set[str]:
    try:
        manifest = parse_manifest((target / MANIFEST_NAME).read_bytes(), MANIFEST_NAME)
    except (OSError, VerificationError):
        return set()
    return {entry.path for entry in manifest.files}


def remove_partials(target: Path) -> None:
    """Remove what a killed run left unfinished."""
    for name in leftovers(target):
        if name.endswith(PARTIAL_SUFFIX):
            remove_quietly(target / name)


def check_space(target: Path, needed: int, reclaimed: int = 0) -> None:
    """Refuse to start what cannot end.

    Args:
        target: The output folder, which exists.
        needed: Bytes still to be written.
        reclaimed: Bytes in use now that will be free by then.

    Raises:
        LocalError: States bytes needed and free.
    """
    info = os.statvfs(target)
    free = info.f_bavail * info.f_frsize + reclaimed
    if free < needed + min(_MARGIN, needed // 64):
        raise LocalError(
            f"{target}: {needed} bytes are still to be written, {free} are free",
            hint="free space or choose another folder",
            code="disk-full",
        )
