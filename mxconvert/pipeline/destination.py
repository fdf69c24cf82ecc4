"""The output folder: what may be written there, and what is in the way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mxconvert.errors import LocalError, UsageError, VerificationError
from mxconvert.events import Notice
from mxconvert.manifest import MANIFEST_NAME, TENSORS_NAME, parse_manifest
from mxconvert.pipeline.journal import JOURNAL_FOLDER
from mxconvert.writer import PARTIAL_SUFFIX, remove_quietly
from mxconvert.writer.atomic import local_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxconvert.events import Reporter

_SHOWN = 8
_MARGIN = 64 * 1024 * 1024  # documents, journal, file system overhead

# What a loader would read if it were left over from another model.
_READ_BY_LOADERS = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".jinja", ".py", ".model",
    ".tiktoken", "merges.txt", "vocab.txt",
)  # fmt: skip


def check_destination(source: Path, target: Path) -> None:
    """Refuse a destination that cannot or must not be written, before anything is read.

    Raises:
        UsageError: It is a file, or the source, or lies within the source or around it.
        LocalError: Its parent is missing, or it is not writable.
    """
    real_source, real = source.resolve(), target.resolve()
    if real == real_source:
        raise UsageError(f"{target}: the output folder is the source", hint="choose another one")
    if real.is_relative_to(real_source) or real_source.is_relative_to(real):
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


def make_folder(target: Path) -> None:
    """Create the output folder and its journal folder.

    Raises:
        LocalError: Not writable.
    """
    try:
        target.mkdir(exist_ok=True)
        (target / JOURNAL_FOLDER).mkdir(exist_ok=True)
        (target / JOURNAL_FOLDER / "files").mkdir(exist_ok=True)
    except OSError as error:
        raise local_error(error, target) from error


def leftovers(target: Path) -> list[str]:
    """Return what lies in the output folder, the journal excepted, sorted."""
    return sorted(_walk(target)) if target.is_dir() else []


def _walk(target: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(target):
        if Path(folder) == target and JOURNAL_FOLDER in folders:
            folders.remove(JOURNAL_FOLDER)
        for name in files:
            yield Path(folder, name).relative_to(target).as_posix()


def refuse_leftovers(target: Path) -> None:
    """Refuse a folder with contents of unknown origin.

    Raises:
        UsageError: Listing what is there.
    """
    found = leftovers(target)
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise UsageError(
            f"{target}: is not empty: {', '.join(found[:_SHOWN])}{more}",
            hint="choose another folder, or pass --overwrite to replace the model files in it",
            code="destination-occupied",
        )


def clear(target: Path, report: Reporter) -> None:
    """Remove every file that an artifact consists of or a loader would read; keep the rest.

    The manifest goes first: from then on the folder is no artifact.

    Raises:
        LocalError: Something cannot be removed.
    """
    ours = _listed_in_manifest(target)
    found = leftovers(target)
    doomed = [name for name in found if name in ours or _is_model_file(name)]
    doomed.sort(key=lambda name: name != MANIFEST_NAME)
    try:
        for name in doomed:
            remove_quietly(target / name)
    except OSError as error:
        raise local_error(error, target / str(error.filename)) from error
    kept = sorted(set(found) - set(doomed))
    if kept:
        report(
            Notice(
                severity="info",
                code="kept-files",
                message=f"{target}: left alone: {', '.join(kept[:_SHOWN])}"
                + (f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else ""),
            )
        )


def _is_model_file(name: str) -> bool:
    base = name.rpartition("/")[2]
    if base.startswith("."):
        return False
    return base in {MANIFEST_NAME, TENSORS_NAME} or base.endswith(
        (*_READ_BY_LOADERS, PARTIAL_SUFFIX)
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


def check_space(target: Path, needed: int) -> None:
    """Refuse to start what cannot end.

    Args:
        target: The output folder, which exists.
        needed: Bytes still to be written.

    Raises:
        LocalError: States bytes needed and free.
    """
    info = os.statvfs(target)
    free = info.f_bavail * info.f_frsize
    if free < needed + min(_MARGIN, needed // 64):
        raise LocalError(
            f"{target}: {needed} bytes are still to be written, {free} are free",
            hint="free space or choose another folder",
            code="disk-full",
        )
