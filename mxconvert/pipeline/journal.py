"""What a run leaves behind so that the next one can go on.

``DST/.mxconvert/`` holds, until the artifact is complete:

* ``journal.json``: the plan's digest, the options, and the identity of every input;
* ``files/<name>.json``: one record per finished weight file: its digests and those of
  its tensors. A file counts as finished if its record and its final name both exist.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mxconvert import __version__, failpoints
from mxconvert.digest import ChunkDigest, FileDigest
from mxconvert.errors import LocalError, UsageError
from mxconvert.lock import LOCK_NAME
from mxconvert.pipeline.job import FileResult
from mxconvert.plan import plan_digest
from mxconvert.writer import PARTIAL_SUFFIX, remove_quietly, write_file, write_statistics
from mxconvert.writer.atomic import local_error

if TYPE_CHECKING:
    from pathlib import Path

    from mxconvert.model import Checkpoint, OutputFile, Plan

JOURNAL_FOLDER = ".mxconvert"
SCHEMA_VERSION = 1
_JOURNAL = "journal.json"
_FILES = "files"
_STATISTICS = "statistics"
_PULL, _CHUNKS = "pull.json", "chunks"  # of an unfinished pull into the same folder
_SHOWN = 4
_LONGEST = 200


class Journal:
    """The journal of one output folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / JOURNAL_FOLDER
        self._target = folder

    @property
    def exists(self) -> bool:
        """Whether an unfinished run left a journal here."""
        return (self.folder / _JOURNAL).exists()

    def open(self, plan: Plan, checkpoint: Checkpoint) -> None:
        """Start a journal, or bind to the one that is here.

        Raises:
            UsageError: It belongs to other options, another version or another source;
                says what differs.
            LocalError: It cannot be read or written.
        """
        current = describe(plan, checkpoint)
        if not self.exists:
            (self.folder / _FILES).mkdir(exist_ok=True)
            write_file(self.folder / _JOURNAL, json.dumps(current, indent=1).encode())
            return
        try:
            earlier = json.loads((self.folder / _JOURNAL).read_bytes())
            differences = _differences(earlier, current)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise LocalError(
                f"{self.folder / _JOURNAL}: cannot be read: {error}",
                hint="pass --overwrite to start over",
            ) from error
        if differences:
            raise UsageError(
                f"{self._target}: an unfinished run here was started differently: "
                + "; ".join(differences),
                hint="run the earlier command again to finish it, or pass --overwrite to "
                "discard its work and start over",
                code="resume-mismatch",
            )

    def record(self, file: OutputFile, result: FileResult) -> None:
        """Record a file that is about to get its final name.

        Raises:
            LocalError: The operating system refuses.
        """
        document = {
            "digest": asdict(result.digest),
            "outputs": result.outputs,
            "sources": result.sources,
        }
        write_file(self._record_path(file), json.dumps(document).encode())

    def record_statistics(self, file: OutputFile, fragment: bytes) -> None:
        """Keep the statistics of a file that is about to be recorded.

        Raises:
            LocalError: The operating system refuses.
        """
        self._statistics_path(file).parent.mkdir(exist_ok=True)
        write_statistics(self._statistics_path(file), [fragment])

    def statistics(self, file: OutputFile) -> bytes | None:
        """Return the statistics of a finished file, ``None`` if none were measured."""
        try:
            return self._statistics_path(file).read_bytes()
        except FileNotFoundError:
            return None

    def finished(self, file: OutputFile) -> bool:
        """Whether a file is complete under its final name."""
        try:
            size = (self._target / file.name).lstat().st_size
        except OSError:
            return False
        return size == file.size and self._record_path(file).exists()

    def load(self, file: OutputFile) -> FileResult:
        """Return the record of a finished file.

        Raises:
            LocalError: It cannot be read.
        """
        path = self._record_path(file)
        try:
            document = json.loads(path.read_bytes())
            digest = document["digest"]
            chunks = tuple(ChunkDigest(**chunk) for chunk in digest.pop("chunks"))
            return FileResult(
                FileDigest(**digest, chunks=chunks), document["outputs"], document["sources"]
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LocalError(
                f"{path}: cannot be read: {error}", hint=f"remove {path} and run again"
            ) from error

    def discard(self) -> None:
        """Forget every finished file, those of an unfinished pull too; the lock stays."""
        for name in (_JOURNAL, _PULL):
            remove_quietly(self.folder / name)
        self._remove_records()

    def remove(self) -> None:
        """Remove everything but the lock.

        Raises:
            LocalError: Something cannot be removed.
        """
        try:
            remove_quietly(self.folder / _JOURNAL)
            failpoints.hit("journal.removing")
            self._remove_records()
            for path in self.folder.glob("*"):
                if path.name != LOCK_NAME:
                    remove_quietly(path)
        except OSError as error:
            raise local_error(error, self.folder) from error

    def remove_partials(self) -> None:
        """Remove what a killed run left unfinished in the journal itself."""
        for path in self.folder.rglob(f"*{PARTIAL_SUFFIX}"):
            remove_quietly(path)

    def _remove_records(self) -> None:
        for name in (_FILES, _STATISTICS, _CHUNKS):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def remove_folder(self) -> None:
        """Remove the journal's folder if nothing is left in it."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _statistics_path(self, file: OutputFile) -> Path:
        return self.folder / _STATISTICS / (self._record_path(file).stem + ".jsonl")

    def _record_path(self, file: OutputFile) -> Path:
        name = quote(file.name, safe="")
        if len(name) > _LONGEST:  # file systems take 255 bytes, suffixes included
            name = hashlib.sha256(file.name.encode()).hexdigest()
        return self.folder / _FILES / (name + ".json")


def command_of(plan: Plan) -> str:
    """Return the command that makes what is planned."""
    return "dequantize" if plan.plain else "quantize"


def describe(plan: Plan, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a journal is bound to."""
    return {
        "schema_version": SCHEMA_VERSION,
        "version": __version__,
        "command": command_of(plan),
        "plan": plan_digest(plan, __version__),
        "options": json.loads(json.dumps(asdict(plan.options))),
        "sources": {
            file.path: [file.size, file.mtime_ns, file.inode, file.header_sha256]
            for file in checkpoint.files
        },
        "sidecars": {file.path: [file.size, file.sha256] for file in checkpoint.sidecars},
    }


def _differences(earlier: dict[str, Any], current: dict[str, Any]) -> list[str]:
    if earlier["schema_version"] != current["schema_version"]:
        return [f"its journal has version {earlier['schema_version']}"]
    found = []
    if earlier["version"] != current["version"]:
        found.append(f"by mxconvert {earlier['version']}, this is {current['version']}")
    if earlier["command"] != current["command"]:
        found.append(f"by {earlier['command']}, this is {current['command']}")
    for name, value in current["options"].items():
        before = earlier["options"].get(name)
        if before != value:
            found.append(f"--{name.replace('_', '-')} was {before}, is {value}")
    for what, label in (("sources", "source file"), ("sidecars", "file")):
        found += _changed_files(earlier[what], current[what], label)
    if not found and earlier["plan"] != current["plan"]:
        found.append("the plan is another one")
    return found


def _changed_files(earlier: dict[str, Any], current: dict[str, Any], label: str) -> list[str]:
    names = sorted(earlier.keys() | current.keys())
    changed = [name for name in names if earlier.get(name) != current.get(name)]
    shown = [f"{label} {name} {_what(earlier.get(name), current.get(name))}" for name in changed]
    more = [f"and {len(shown) - _SHOWN} more files"] if len(shown) > _SHOWN else []
    return shown[:_SHOWN] + more


def _what(before: list[Any] | None, now: list[Any] | None) -> str:
    if before is None:
        return "is new"
    if now is None:
        return "is gone"
    if before[0] != now[0]:
        return f"had {before[0]} bytes, has {now[0]}"
    return "has changed"
