"""`pull_artifact`: from a version at a store to a folder that loaders take."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

from mxconvert import failpoints
from mxconvert.errors import LocalError, UsageError
from mxconvert.events import Notice, Started, ignore
from mxconvert.lock import Lock
from mxconvert.manifest import MANIFEST_NAME, artifact_id
from mxconvert.model import FileRole
from mxconvert.pipeline.destination import (
    check_space,
    clear,
    refuse_leftovers,
    refuse_strangers,
)
from mxconvert.remote import find_artifact
from mxconvert.transfer.crew import Crew
from mxconvert.transfer.pull.fetch import FilePull, PullContext, PullTally
from mxconvert.transfer.pull.folder import regular_size
from mxconvert.transfer.pull.journal import PullJournal
from mxconvert.transfer.pull.options import PullOptions, PullResult
from mxconvert.writer import PARTIAL_SUFFIX, write_file
from mxconvert.writer.atomic import local_error

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mxconvert.events import Reporter
    from mxconvert.manifest import FileEntry
    from mxconvert.remote import RemoteArtifact
    from mxconvert.store import Client

_WAIT_SECONDS = 0.5


def pull_artifact(
    client: Client, target: Path, options: PullOptions, report: Reporter = ignore
) -> PullResult:
    """Fetch an artifact into a folder.

    Each chunk is compared with the manifest as it lands; a file gets its name when all
    its chunks are right and on disk, the index after all other files, the manifest last.

    Raises:
        UsageError: The folder holds something else.
        VerificationError: Not the expected artifact, or no manifest.
        StoreError: The store, after retries.
        LocalError: Disk, permissions, or another run works here.
        Interrupted: A signal came.
    """
    _check_target(target)
    artifact = find_artifact(client, options.version, options.expect_id)
    entries = _chosen(artifact, options.include)
    if _holds(target, artifact):
        return _complete_already(artifact)
    _make_folder(target)
    journal = PullJournal(target)
    lock = Lock(journal.folder)
    _acquire(lock, client, options, report)
    try:
        if _holds(target, artifact):  # whoever had the lock has fetched it
            return _complete_already(artifact)
        _prepare(target, journal, artifact, options, report)
        context = PullContext(
            client, artifact, target, journal, options.sha256, report, PullTally()
        )
        return _fetch(context, entries)
    finally:
        lock.release()
        journal.remove_folder()


def _check_target(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: is a file, expected a folder", hint="choose another name")
    if not target.exists() and not target.absolute().parent.is_dir():
        parent = target.absolute().parent
        raise LocalError(
            f"{target}: the parent folder {parent} does not exist", hint=f"mkdir -p {parent}"
        )


def _make_folder(target: Path) -> None:
    try:
        target.mkdir(exist_ok=True)
        PullJournal(target).folder.mkdir(exist_ok=True)
    except OSError as error:
        raise local_error(error, target) from error


def _chosen(artifact: RemoteArtifact, include: Sequence[str]) -> list[FileEntry]:
    """Return the files to fetch now.

    Raises:
        UsageError: A glob that matches nothing.
    """
    files = artifact.manifest.files
    for glob in include:
        if not any(fnmatch.fnmatchcase(entry.path, glob) for entry in files):
            raise UsageError(
                f"--include {glob}: matches no file of the artifact",
                hint=f"its files are {', '.join(entry.path for entry in files[:5])} ...",
                code="matches-nothing",
            )
    if not include:
        return list(files)
    return [e for e in files if any(fnmatch.fnmatchcase(e.path, glob) for glob in include)]


def _acquire(lock: Lock, client: Client, options: PullOptions, report: Reporter) -> None:
    told = False
    while True:
        try:
            lock.acquire(report, break_lock=options.break_lock)
        except LocalError as error:
            if error.code != "locked" or not options.wait:
                if error.code == "locked":
                    error.hint = f"{error.hint}, or pass --wait"
                raise
            if not told:
                report(Notice(severity="info", code="waiting", message=f"{error.message}: waiting"))
                told = True
            client.sleep(_WAIT_SECONDS)
        else:
            return


def _holds(target: Path, artifact: RemoteArtifact) -> bool:
    """Whether the folder holds the finished artifact, by its manifest and all sizes."""
    try:
        data = (target / MANIFEST_NAME).read_bytes()
    except OSError:
        return False
    return artifact_id(data) == artifact.id and all(
        regular_size(target / entry.path) == entry.size for entry in artifact.manifest.files
    )


def _complete_already(artifact: RemoteArtifact) -> PullResult:
    return PullResult(
        artifact=artifact.id,
        files=len(artifact.manifest.files) + 1,
        bytes=artifact.manifest.totals.file_bytes + len(artifact.data),
        fetched_files=0,
        fetched_bytes=0,
        resumed_bytes=0,
        left_files=0,
        refetched_chunks=0,
        was_complete=True,
    )


def _prepare(
    target: Path,
    journal: PullJournal,
    artifact: RemoteArtifact,
    options: PullOptions,
    report: Reporter,
) -> None:
    """Make sure that nothing of another origin is mixed in."""
    if options.overwrite and not (journal.exists and _same(journal, artifact)):
        journal.discard()
        clear(target, report)
    elif journal.of_quantize:
        raise UsageError(
            f"{target}: an unfinished conversion is here",
            hint="choose another folder, or pass --overwrite to replace it",
            code="destination-occupied",
        )
    elif not journal.exists:
        refuse_leftovers(target)
    paths = [entry.path for entry in artifact.manifest.files]
    expected = {*paths, *(path + PARTIAL_SUFFIX for path in paths), MANIFEST_NAME}
    refuse_strangers(target, expected)
    journal.open(artifact)


def _same(journal: PullJournal, artifact: RemoteArtifact) -> bool:
    try:
        journal.open(artifact)
    except (UsageError, LocalError):
        return False
    return True


def _fetch(context: PullContext, entries: list[FileEntry]) -> PullResult:
    target, artifact = context.target, context.artifact
    check_space(target, sum(_bytes_to_come(target, entry) for entry in entries))
    total = sum(entry.size for entry in entries)
    context.report(Started(what="pull", total_bytes=total, total_files=len(entries)))
    _run(context, [entry for entry in entries if entry.role is not FileRole.INDEX])
    if not _left(context, but_index=True):
        failpoints.hit("pull.before-index")
        _run(context, [entry for entry in entries if entry.role is FileRole.INDEX])
    left = _left(context)
    if not left:
        failpoints.hit("pull.before-manifest")
        write_file(target / MANIFEST_NAME, artifact.data)
        failpoints.hit("pull.before-cleanup")
        context.journal.discard()
    return PullResult(
        artifact=artifact.id,
        files=len(artifact.manifest.files) + 1,
        bytes=artifact.manifest.totals.file_bytes + len(artifact.data),
        fetched_files=context.tally.files + (not left),
        fetched_bytes=context.client.counters.bytes_in,
        resumed_bytes=context.tally.resumed_bytes,
        left_files=len(left),
        refetched_chunks=context.tally.refetched_chunks,
    )


def _left(context: PullContext, *, but_index: bool = False) -> list[FileEntry]:
    """Return the files that have no final name yet."""
    return [
        entry
        for entry in context.artifact.manifest.files
        if regular_size(context.target / entry.path) != entry.size
        and not (but_index and entry.role is FileRole.INDEX)
    ]


def _run(context: PullContext, entries: list[FileEntry]) -> None:
    ordered = sorted(entries, key=lambda entry: -entry.size)
    tasks = (FilePull(context, entry).begin for entry in ordered)
    Crew(context.client.options.jobs, context.client).run(tasks)


def _bytes_to_come(target: Path, entry: FileEntry) -> int:
    """Return the disk space that a file still takes: a partial one has its already."""
    path = target / entry.path
    if regular_size(path) == entry.size:
        return 0
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        return max(0, entry.size - partial.lstat().st_blocks * 512)
    except OSError:
        return entry.size
