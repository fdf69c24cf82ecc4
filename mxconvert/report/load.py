"""Where the records of a report come from: the file that a run left beside an artifact."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from mxconvert.errors import LocalError, UsageError, VerificationError
from mxconvert.manifest import MANIFEST_NAME, artifact_id
from mxconvert.statistics import REPORT_NAME, Header, Record, read_records

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def open_report(target: Path) -> Iterator[tuple[Header, Iterator[Record]]]:
    """Give the header and the records of a report file.

    Args:
        target: An artifact's folder, or the report file itself.

    Raises:
        UsageError: There is none.
        LocalError: It cannot be read.
        VerificationError: It is damaged, or belongs to another artifact than the folder's.
    """
    path = target / REPORT_NAME if target.is_dir() else target
    if not path.exists():
        raise _nothing(target)
    try:
        with path.open("rb") as file:
            header, records = read_records(file, path.name)
            if target.is_dir():
                _refuse_other(target, header)
            yield header, records
    except OSError as error:
        raise LocalError.unreadable(path, error) from error


def _nothing(target: Path) -> UsageError:
    if not target.exists():
        return UsageError(f"{target}: no such folder", hint="give the folder of the artifact")
    return UsageError(
        f"{target}: no {REPORT_NAME} beside the artifact",
        hint="pass --source SRC with the checkpoint it was made from, to measure it now",
        code="no-report",
    )


def _refuse_other(target: Path, header: Header) -> None:
    found = manifest_id(target)
    if header.artifact is None or found in (None, header.artifact):
        return
    raise VerificationError(
        f"{target / REPORT_NAME}: it is about artifact {header.artifact[:16]}, the folder holds "
        f"{found[:16] if found else None}",
        hint="remove it, or measure again with --source SRC",
        code="other-artifact",
    )


def manifest_id(folder: Path) -> str | None:
    """Return the id of the artifact in a folder, ``None`` if it has no manifest.

    Raises:
        LocalError: The manifest cannot be read.
    """
    path = folder / MANIFEST_NAME
    try:
        return artifact_id(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LocalError.unreadable(path, error) from error
