"""Publishing where files are written in commits: the Hugging Face Hub."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from mxconvert.errors import UsageError, VerificationError
from mxconvert.events import Advanced, FileFinished, Started
from mxconvert.manifest import MANIFEST_NAME
from mxconvert.remote import read_manifest
from mxconvert.transfer.crew import Crew
from mxconvert.transfer.local import FileRange
from mxconvert.transfer.push.options import PushOptions, PushResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mxconvert.events import Reporter
    from mxconvert.manifest import FileEntry
    from mxconvert.store import Client, CommitStore
    from mxconvert.transfer.crew import Task
    from mxconvert.transfer.local import LocalArtifact


def push_commit(
    artifact: LocalArtifact,
    client: Client,
    store: CommitStore,
    options: PushOptions,
    report: Reporter,
) -> PushResult:
    """Write all files of an artifact in one commit.

    Every byte is compared with the manifest first, since the library reads the files
    itself. A file that the repository holds already is not sent again.

    Raises:
        UsageError: Tags, which are git's there, or a rate, which the library does not keep.
        VerificationError: A file is not what the manifest says.
        StoreError: The Hub, after retries.
    """
    if options.tags:
        raise UsageError(
            f"{client.store.label}: --tag: tags of this store are git's",
            hint="push to a branch with URL@BRANCH, or tag the commit with the Hub's own tools",
        )
    if client.options.limit_rate is not None:
        raise UsageError(
            f"{client.store.label}: --limit-rate: the Hub's library sends at its own rate",
            hint="leave it out",
        )
    manifest = artifact.manifest
    total = manifest.totals.file_bytes
    report(Started(what="check", total_bytes=total, total_files=len(manifest.files)))
    tasks = (functools.partial(_check, artifact, client, entry, report) for entry in manifest.files)
    Crew(client.options.jobs, client).run(tasks)
    there = _held(client)
    missing = [entry for entry in manifest.files if there.get(entry.path) != entry.sha256]
    root = artifact.folder.root
    files = {entry.path: root / entry.path for entry in manifest.files}
    size = sum(entry.size for entry in missing)
    if missing or there.get(MANIFEST_NAME) != artifact.id:
        message = f"Add MXFP4 artifact {artifact.id[:16]}"
        client.call(store.commit, {**files, MANIFEST_NAME: artifact.data}, message)
        client.moved(bytes_out=size)
    return PushResult(
        artifact=artifact.id,
        url=client.store.label,
        files=len(manifest.files) + 1,
        bytes=total + len(artifact.data),
        sent_files=len(missing) + 1,
        sent_bytes=size + len(artifact.data),
        copied_files=0,
        copied_bytes=0,
        present_files=len(manifest.files) - len(missing),
        present_bytes=total - size,
        tags=(),
    )


def _check(
    artifact: LocalArtifact, client: Client, entry: FileEntry, report: Reporter
) -> Iterable[Task]:
    """Read a file and compare its chunks with the manifest."""
    with artifact.open(entry) as fd:
        body = FileRange(fd, entry, 0, entry.size, artifact.manifest.chunk_size)
        for piece in body.pieces():
            client.check()
            report(Advanced(num_bytes=len(piece)))
    report(FileFinished(path=entry.path, size_bytes=entry.size))
    return ()


def _held(client: Client) -> dict[str, str]:
    """Return SHA-256 by path of what the repository's own manifest says it holds."""
    try:
        found = read_manifest(client, "")
    except VerificationError:  # of something else; all of ours is written
        return {}
    if found is None:
        return {}
    held = {entry.path: entry.sha256 for entry in found.manifest.files}
    return held | {MANIFEST_NAME: found.id}
