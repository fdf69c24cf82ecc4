"""`push_artifact`: from a folder to a version that readers see whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert import failpoints
from mxconvert.crc import crc64nvme
from mxconvert.errors import StoreError, StoreFault, UsageError
from mxconvert.events import Notice, Started, ignore
from mxconvert.manifest import MANIFEST_NAME
from mxconvert.model import FileRole
from mxconvert.remote import folder_of, honours_conditions, move_ref, ref_key
from mxconvert.remote.layout import LATEST
from mxconvert.store import CommitStore
from mxconvert.transfer.crew import Crew
from mxconvert.transfer.local import open_artifact
from mxconvert.transfer.parts import plan_parts
from mxconvert.transfer.push.commit import push_commit
from mxconvert.transfer.push.existing import copies
from mxconvert.transfer.push.flat import refuse_occupied
from mxconvert.transfer.push.options import Outcome, PushOptions, PushResult, Tally
from mxconvert.transfer.push.upload import FilePush, PushContext

if TYPE_CHECKING:
    from pathlib import Path

    from mxconvert.events import Reporter
    from mxconvert.manifest import FileEntry
    from mxconvert.store import Client, PartLimits
    from mxconvert.transfer.local import LocalArtifact


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of a push that was not begun: its path, size, and how it would be cut."""

    path: str
    size: int
    part_size: int
    parts: int


def plan_push(
    artifact: LocalArtifact,
    limits: PartLimits | None,
    part_size: int | None,
    report: Reporter = ignore,
) -> list[PlannedFile]:
    """Return what would be sent to an empty store, without a request.

    Args:
        artifact: What would be pushed.
        limits: Of the store; ``None`` if it knows no parts.
        part_size: Bytes of a part that the user asks for.
        report: Told if parts have to be larger than that.

    Raises:
        UsageError: A file, or a part that is asked for, is too large for the store, or the
            store takes no parts.
    """
    files, chunk_size = artifact.manifest.files, artifact.manifest.chunk_size
    if limits is None and part_size is not None:
        raise UsageError(
            "--part-size: this store chooses its parts itself",
            hint="leave it out",
            code="part-size",
        )
    if limits is None:
        return [PlannedFile(entry.path, entry.size, entry.size, 1) for entry in files]
    plans = [
        plan_parts(entry.size, chunk_size=chunk_size, limits=limits, asked=part_size)
        for entry in files
    ]
    largest = max((plan.part_size for plan in plans), default=0)
    if part_size is not None and largest > part_size:
        message = (
            f"parts of up to {largest} bytes instead of {part_size}: they are multiples of "
            f"{chunk_size}, the store takes {limits.smallest} at least, and an object has at most "
            f"{limits.count}"
        )
        report(Notice(severity="info", code="part-size-raised", message=message))
    return [
        PlannedFile(entry.path, entry.size, plan.part_size, plan.count)
        for entry, plan in zip(files, plans, strict=True)
    ]


def push_artifact(
    root: Path, client: Client, options: PushOptions, report: Reporter = ignore
) -> PushResult:
    """Publish the artifact in a folder.

    Every byte is compared with the manifest while it is read. Index and manifest are
    written last, tags after them. A push that was stopped leaves uploads that the next
    one continues, and no manifest.

    Raises:
        UsageError: Not an artifact, or the URL holds another one (``flat``).
        VerificationError: The folder does not hold what its manifest lists.
        StoreError: The store, after retries.
        LocalError: The folder cannot be read.
        Interrupted: A signal came.
    """
    wanted = _wanted_tags(options)
    artifact = open_artifact(root)
    plan_push(artifact, client.parts.limits if client.parts else None, options.part_size, report)
    if isinstance(client.store, CommitStore):
        return push_commit(artifact, client, client.store, options, report)
    folder = "" if options.flat else folder_of(artifact.id)
    if options.flat:
        refuse_occupied(client, artifact)
    tags = _usable_tags(client, wanted, options, report)
    context = PushContext(
        client=client,
        artifact=artifact,
        folder=folder,
        part_size=options.part_size,
        copies=copies(client, artifact.manifest, folder) if options.reuse else {},
        report=report,
        tally=Tally(),
    )
    _publish(context)
    failpoints.hit("push.before-tags")
    for tag in tags:
        move_ref(client, tag, artifact.id)
    return _result(context, tags)


def _publish(context: PushContext) -> None:
    """Write the files, then the index, then the manifest."""
    manifest = context.artifact.manifest
    total = manifest.totals.file_bytes
    context.report(Started(what="push", total_bytes=total, total_files=len(manifest.files)))
    payload = [entry for entry in manifest.files if entry.role is not FileRole.INDEX]
    _send(context, sorted(payload, key=lambda entry: -entry.size))
    is_published = _is_published(context)
    if not is_published:
        _look_again(context, [entry for entry in payload if entry.path in context.tally.present])
    failpoints.hit("push.before-index")
    _send(context, [entry for entry in manifest.files if entry.role is FileRole.INDEX])
    failpoints.hit("push.before-manifest")
    data = context.artifact.data
    if not is_published:
        context.client.put(context.key(MANIFEST_NAME), data)
    outcome = Outcome.PRESENT if is_published else Outcome.SENT
    context.tally.add(MANIFEST_NAME, outcome, len(data))


def _is_published(context: PushContext) -> bool:
    """Whether the manifest is there."""
    key, data = context.key(MANIFEST_NAME), context.artifact.data
    info = context.client.find(key)
    if info is None or info.size != len(data):
        return False
    if info.crc64nvme is not None:
        return info.crc64nvme == f"{crc64nvme(data):016x}"
    return context.client.get(key, len(data)).data == data


def _look_again(context: PushContext, entries: list[FileEntry]) -> None:
    """Look once more for files: `gc` may have removed one that was there already."""
    tasks = (FilePush(context, entry).look for entry in entries)
    Crew(context.client.options.jobs, context.client).run(tasks)


def _send(context: PushContext, entries: list[FileEntry]) -> None:
    tasks = (FilePush(context, entry).begin for entry in entries)
    Crew(context.client.options.jobs, context.client).run(tasks)


def _wanted_tags(options: PushOptions) -> tuple[str, ...]:
    """Return the tags to move.

    Raises:
        UsageError: One is no name for a tag, or a tag would have no folder to point at.
    """
    if options.flat and options.tags:
        raise UsageError(
            "--flat and --tag exclude each other: tags point at folders named by the id",
            hint="push without --flat",
        )
    implied = (LATEST,) if options.latest and not options.flat else ()
    wanted = tuple(dict.fromkeys((*options.tags, *implied)))
    for tag in wanted:
        ref_key(tag)
    return wanted


def _usable_tags(
    client: Client, wanted: tuple[str, ...], options: PushOptions, report: Reporter
) -> tuple[str, ...]:
    """Return the tags that can be moved; find out first whether the store does it safely."""
    if not wanted or honours_conditions(client):
        return wanted
    what = f"{client.store.label}: the store does not honour conditional writes"
    if options.tags:
        raise StoreError(
            StoreFault.UNSUPPORTED,
            f"{what}: tags cannot be moved safely",
            hint="push with --no-latest and without --tag; pull by URL@ID",
        )
    message = f"{what}: the tag {LATEST!r} is not moved; pull by URL@ID"
    report(Notice(severity="warning", code="no-tags", message=message))
    return ()


def _result(context: PushContext, tags: tuple[str, ...]) -> PushResult:
    manifest, tally = context.artifact.manifest, context.tally
    label = context.client.store.url(context.folder).rstrip("/")
    return PushResult(
        artifact=context.artifact.id,
        url=label,
        files=len(manifest.files) + 1,
        bytes=manifest.totals.file_bytes + len(context.artifact.data),
        sent_files=tally.files[Outcome.SENT],
        sent_bytes=tally.bytes[Outcome.SENT] - tally.resumed_bytes,
        copied_files=tally.files[Outcome.COPIED],
        copied_bytes=tally.bytes[Outcome.COPIED],
        present_files=tally.files[Outcome.PRESENT],
        present_bytes=tally.bytes[Outcome.PRESENT],
        tags=tags,
    )
