"""`pull_artifact`: from a version at a store to a folder that loaders take."""

from __future__ import annotations

import contextlib
import fnmatch
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mxconvert import failpoints
from mxconvert.destination import (
    check_space,
    clear,
    refuse_leftovers,
    refuse_strangers,
)
from mxconvert.errors import LocalError, UsageError
from mxconvert.events import Notice, Started, ignore
from mxconvert.lock import Lock
from mxconvert.manifest import MANIFEST_NAME, artifact_id
from mxconvert.model import FileRole
from mxconvert.remote import find_artifact
from mxconvert.transfer.crew import Crew
from mxconvert.transfer.pull.check import compare_sha256
from mxconvert.transfer.pull.context import PullContext, PullTally
from mxconvert.transfer.pull.fetch import FilePull, is_finished
from mxconvert.transfer.pull.folder import (
    open_plain,
    partial_path,
    plain_size,
    plain_stat,
    read_plain,
)
from mxconvert.transfer.pull.journal import PullJournal
from mxconvert.transfer.pull.options import PullOptions, PullResult
from mxconvert.writer import write_file
from mxconvert.writer.atomic import local_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mxconvert.events import Reporter
    from mxconvert.manifest import FileEntry
    from mxconvert.remote import RemoteArtifact
    from mxconvert.store import Client
    from mxconvert.transfer.crew import Task

_WAIT_SECONDS = 0.5
_REPAIR = "`mxconvert verify` tells what differs; --overwrite fetches that again"
_BLOCK = 512  # what st_blocks counts


def pull_artifact(
    client: Client, target: Path, options: PullOptions, report: Reporter = ignore
) -> PullResult:
    """Fetch an artifact into a folder.

    Each chunk is compared with the manifest as it lands; a file gets its name when all
    its chunks are right and on disk, the index after all other files, the manifest last.

    Raises:
        UsageError: The folder holds something else.
        VerificationError: Not the expected artifact, no manifest, or a wrong SHA-256.
        StoreError: The store, after retries.
        LocalError: Disk, permissions, or another run works here.
        Interrupted: A signal came.
    """
    try:
        return _pull(client, target, options, report)
    except OSError as error:
        if not error.filename:  # not of a file: whoever reports has lost its reader
            raise
        raise local_error(error, Path(os.fsdecode(error.filename))) from error


def _pull(client: Client, target: Path, options: PullOptions, report: Reporter) -> PullResult:
    _check_target(target)
    artifact = find_artifact(client, options.version, options.expect_id)
    entries = _chosen(artifact, options.include)
    context = PullContext(
        client,
        artifact,
        target,
        PullJournal(target),
        options.sha256,
        report,
        PullTally(),
        options.direct,
    )
    if not context.journal.has_folder and _is_complete(context, options):
        return _complete_already(artifact)
    with _locked(context, options):
        if _is_complete(context, options):  # whoever had the lock has fetched it
            context.journal.discard()
            return _complete_already(artifact)
        _prepare(context, options)
        return _fetch(context, entries)


@contextlib.contextmanager
def _locked(context: PullContext, options: PullOptions) -> Iterator[None]:
    """Make the folder and hold its lock."""
    try:
        context.target.mkdir(exist_ok=True)
    except OSError as error:
        raise local_error(error, context.target) from error
    context.journal.make()
    lock = Lock(context.journal.folder)
    try:
        _acquire(lock, context.client, options, context.report)
        try:
            yield
        finally:
            lock.release()
    finally:
        context.journal.remove_folder()


def _check_target(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: is a file, expected a folder", hint="choose another name")
    if not target.exists() and not target.absolute().parent.is_dir():
        parent = target.absolute().parent
        raise LocalError(
            f"{target}: the parent folder {parent} does not exist", hint=f"mkdir -p {parent}"
        )


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


def _is_complete(context: PullContext, options: PullOptions) -> bool:
    """Whether the folder holds the finished artifact, by its manifest and all sizes.

    Raises:
        VerificationError: By these it does, but not by its SHA-256, if that is asked for.
    """
    try:
        data = read_plain(context.target, MANIFEST_NAME)
    except OSError:
        return False
    if options.overwrite or artifact_id(data) != context.artifact.id:
        return False
    files = context.artifact.manifest.files
    if any(plain_size(context.target, entry.path) != entry.size for entry in files):
        return False
    if options.sha256:
        tasks = (_comparison(context, entry) for entry in files)
        Crew(context.client.options.jobs, context.client).run(tasks)
    return True


def _comparison(context: PullContext, entry: FileEntry) -> Task:
    def compare() -> Iterable[Task]:
        path = context.target / entry.path
        fd = open_plain(context.target, entry.path)
        try:
            compare_sha256(fd, entry, path, context.client.check, hint=_REPAIR)
        except OSError as error:
            raise local_error(error, path) from error
        finally:
            os.close(fd)
        return ()

    return compare


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


def _prepare(context: PullContext, options: PullOptions) -> None:
    """Make sure that nothing of another origin is mixed in.

    With ``overwrite`` files stay that have the name and size of one of the artifact: what
    they hold is compared with the manifest later.
    """
    target, journal, artifact = context.target, context.journal, context.artifact
    files = artifact.manifest.files
    names = [MANIFEST_NAME, *(entry.path for entry in files)]
    expected = {*names, *map(partial_path, names)}
    if options.overwrite:
        if not journal.is_of(artifact.id):
            journal.discard()
        usable = set().union(*(_usable(context, entry) for entry in files))
        clear(target, context.report, keep=usable)
    elif journal.of_quantize:
        raise UsageError(
            f"{target}: an unfinished conversion is here",
            hint="choose another folder, or pass --overwrite to replace it",
            code="destination-occupied",
        )
    elif not journal.exists:
        refuse_leftovers(target)
    else:
        journal.open(artifact.id)
    refuse_strangers(target, expected)
    journal.open(artifact.id)


def _fetch(context: PullContext, entries: list[FileEntry]) -> PullResult:
    target, artifact = context.target, context.artifact
    check_space(target, sum(_bytes_to_come(target, entry) for entry in entries))
    total = sum(entry.size for entry in entries)
    context.report(Started(what="pull", total_bytes=total, total_files=len(entries)))
    _run(context, [entry for entry in entries if entry.role is not FileRole.INDEX])
    if not _unfinished(context, but_index=True):
        failpoints.hit("pull.before-index", str(target))
        _run(context, [entry for entry in entries if entry.role is FileRole.INDEX])
    left = _unfinished(context)
    if not left:
        failpoints.hit("pull.before-manifest", str(target))
        write_file(target / MANIFEST_NAME, artifact.data)
        failpoints.hit("pull.before-cleanup", str(target))
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


def _usable(context: PullContext, entry: FileEntry) -> set[str]:
    """Return the names under which what is there of a file may be used again."""
    names = {entry.path, partial_path(entry.path)}
    return {name for name in names if plain_size(context.target, name) == entry.size}


def _unfinished(context: PullContext, *, but_index: bool = False) -> list[FileEntry]:
    """Return the files that are not known to be whole under their final names."""
    return [
        entry
        for entry in context.artifact.manifest.files
        if not (but_index and entry.role is FileRole.INDEX) and not is_finished(context, entry)
    ]


def _run(context: PullContext, entries: list[FileEntry]) -> None:
    """Fetch files, the largest first."""
    ordered = sorted(entries, key=lambda entry: -entry.size)
    begun: list[FilePull] = []

    def tasks() -> Iterator[Task]:
        for entry in ordered:
            begun.append(FilePull(context, entry))
            yield begun[-1].begin

    crew = Crew(context.client.options.jobs, context.client)
    try:
        crew.run(tasks())
    finally:
        if crew.is_over:
            for file in begun:
                file.close()


def _bytes_to_come(target: Path, entry: FileEntry) -> int:
    """Return the disk space that a file still takes: a partial one has its already."""
    if plain_size(target, entry.path) == entry.size:
        return 0
    info = plain_stat(target, partial_path(entry.path))
    return entry.size if info is None else max(0, entry.size - info.st_blocks * _BLOCK)
