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
from mxconvert.transfer.pull.local import LocalTensors, prefill
from mxconvert.transfer.pull.options import PullOptions, PullResult
from mxconvert.transfer.pull.part import PartPull
from mxconvert.transfer.pull.subset import (
    TensorList,
    find_wanted,
    is_part_there,
    journal_of,
    remove_old,
    write_documents,
)
from mxconvert.writer import write_file
from mxconvert.writer.atomic import local_error, remove_quietly, sync_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mxconvert.events import Event, Reporter
    from mxconvert.manifest import FileEntry
    from mxconvert.selection import PartFile
    from mxconvert.store import Client
    from mxconvert.transfer.crew import Task
    from mxconvert.transfer.pull.subset import Wanted

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
    options.request.check()
    artifact = find_artifact(client, options.version, options.expect_id)
    tensors, told = TensorList(client, artifact, target), set[str]()

    def report_once(event: Event) -> None:
        if isinstance(event, Notice):
            if event.message in told:
                return
            told.add(event.message)
        report(event)

    def look() -> PullContext:
        return _context(client, tensors, target, options, report_once)

    context = look()
    _chosen(context.wanted, options.include)
    if not context.journal.has_folder and _is_complete(context, options):
        return _result(context, was_complete=True)
    with _locked(context, options):
        # Whoever had the lock may have fetched it, or another part.
        context = look()
        if _is_complete(context, options):
            context.journal.discard()
            return _result(context, was_complete=True)
        entries = _chosen(context.wanted, options.include)
        _prepare(context, options)
        return _fetch(context, entries)


def _context(
    client: Client, tensors: TensorList, target: Path, options: PullOptions, report: Reporter
) -> PullContext:
    artifact, journal = tensors.artifact, PullJournal(target)
    wanted = find_wanted(
        options.request, target, journal, tensors, overwrite=options.overwrite, report=report
    )
    return PullContext(
        client,
        artifact,
        target,
        journal,
        options.sha256,
        report,
        PullTally(),
        options.direct,
        wanted,
    )


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


def _chosen(wanted: Wanted, include: Sequence[str]) -> list[FileEntry]:
    """Return the files to fetch now.

    Raises:
        UsageError: A glob that matches nothing, or globs and a part.
    """
    if include and wanted.plan is not None:
        raise UsageError("--include cannot choose among the files of a part", code="bad-include")
    files = wanted.files
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
    files = context.wanted.files
    if any(plain_size(context.target, entry.path) != entry.size for entry in files):
        return False
    if not is_part_there(context.target, context.wanted):
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


def _result(
    context: PullContext, *, left: int = 0, files: int = 0, was_complete: bool = False
) -> PullResult:
    wanted, artifact, tally = context.wanted, context.artifact, context.tally
    size = sum(entry.size for entry in wanted.files) + sum(part.size for part in wanted.parts)
    return PullResult(
        artifact=artifact.id,
        files=len(wanted.files) + len(wanted.parts) + (1 if wanted.plan is None else 3),
        bytes=size + len(artifact.data),
        fetched_files=files,
        fetched_bytes=0 if was_complete else context.client.counters.bytes_in,
        resumed_bytes=tally.resumed_bytes,
        left_files=left,
        refetched_chunks=tally.refetched_chunks,
        was_complete=was_complete,
        selection=None if wanted.selection is None else wanted.selection.describe(),
    )


def _prepare(context: PullContext, options: PullOptions) -> None:
    """Make sure that nothing of another origin is mixed in.

    With ``overwrite`` files stay that have the name and size of one of the artifact: what
    they hold is compared with the manifest later.
    """
    target, journal, artifact = context.target, context.journal, context.artifact
    files = artifact.manifest.files
    names = [MANIFEST_NAME, *(entry.path for entry in files)]
    derived = context.wanted.names
    expected = {*names, *map(partial_path, names), *derived, *map(partial_path, derived)}
    if options.overwrite:
        if not journal.is_of(artifact.id):
            journal.discard()
        usable = set().union(*(_usable(context, entry) for entry in context.wanted.files))
        clear(target, context.report, keep=usable)
    elif journal.of_quantize:
        raise UsageError(
            f"{target}: an unfinished conversion is here",
            hint="choose another folder, or pass --overwrite to replace it",
            code="destination-occupied",
        )
    elif journal.exists:
        journal.open(artifact.id, journal.selection)
    elif context.wanted.record is None:
        refuse_leftovers(target)
    refuse_strangers(target, expected)
    journal.open(artifact.id, journal_of(context.wanted.selection))
    if context.wanted.record is not None:  # from here on it is not what it was
        remove_quietly(target / MANIFEST_NAME)
        sync_folder(target)


def _fetch(context: PullContext, entries: list[FileEntry]) -> PullResult:
    target, artifact, wanted = context.target, context.artifact, context.wanted
    parts, local = wanted.parts, LocalTensors(target, artifact.manifest, wanted.held)
    if parts and context.sha256:
        _tell_uncovered(context)
    to_come = sum(_bytes_to_come(target, entry) for entry in entries)
    check_space(target, to_come + sum(_part_to_come(target, part) for part in parts))
    total = sum(entry.size for entry in entries) + sum(part.num_bytes for part in parts)
    context.report(Started(what="pull", total_bytes=total, total_files=len(entries) + len(parts)))
    made = _run(context, [e for e in entries if e.role is not FileRole.INDEX], parts, local)
    if not _unfinished(context, but_index=True):
        if wanted.plan is not None:
            write_documents(context.client, artifact, target, wanted.plan, made)
        else:
            failpoints.hit("pull.before-index", str(target))
            _run(context, [e for e in entries if e.role is FileRole.INDEX], (), local)
    left = _unfinished(context)
    if not left:
        remove_old(target, wanted)
        failpoints.hit("pull.before-manifest", str(target))
        write_file(target / MANIFEST_NAME, artifact.data)
        failpoints.hit("pull.before-cleanup", str(target))
        context.journal.discard()
    files = context.tally.files + (0 if left else 1 if wanted.plan is None else 3)
    return _result(context, left=len(left), files=files)


def _tell_uncovered(context: PullContext) -> None:
    message = (
        f"{context.target}: {len(context.wanted.parts)} files are made of tensors of others, which "
        "have an XXH3-128 each and no SHA-256: --sha256 does not cover them"
    )
    context.report(Notice(severity="warning", code="sha256-of-parts", message=message))


def _usable(context: PullContext, entry: FileEntry) -> set[str]:
    """Return the names under which what is there of a file may be used again."""
    names = {entry.path, partial_path(entry.path)}
    return {name for name in names if plain_size(context.target, name) == entry.size}


def _unfinished(context: PullContext, *, but_index: bool = False) -> list[FileEntry]:
    """Return the files that are not known to be whole under their final names."""
    return [
        entry
        for entry in context.wanted.files
        if not (but_index and entry.role is FileRole.INDEX) and not is_finished(context, entry)
    ]


def _run(
    context: PullContext,
    entries: list[FileEntry],
    parts: Sequence[PartFile],
    local: LocalTensors,
) -> list[FileEntry]:
    """Fetch files, the largest first; return the entries of the new ones."""
    ordered = sorted(entries, key=lambda entry: -entry.size)
    begun: list[FilePull | PartPull] = []
    made = [PartPull(context, part, local) for part in parts]

    def begin(entry: FileEntry) -> Task:
        def task() -> Iterable[Task]:
            prefill(context, entry, local)
            return file.begin()

        file = FilePull(context, entry)
        begun.append(file)
        return task

    def tasks() -> Iterator[Task]:
        for part in made:
            begun.append(part)
            yield part.begin
        for entry in ordered:
            yield begin(entry)

    crew = Crew(context.client.options.jobs, context.client)
    try:
        crew.run(tasks())
    finally:
        if crew.is_over:
            for file in begun:
                file.close()
    return [part.entry for part in made if part.entry is not None]


def _part_to_come(target: Path, part: PartFile) -> int:
    return 0 if plain_size(target, part.path) == part.size else part.size


def _bytes_to_come(target: Path, entry: FileEntry) -> int:
    """Return the disk space that a file still takes: a partial one has its already."""
    if plain_size(target, entry.path) == entry.size:
        return 0
    info = plain_stat(target, partial_path(entry.path))
    return entry.size if info is None else max(0, entry.size - info.st_blocks * _BLOCK)
