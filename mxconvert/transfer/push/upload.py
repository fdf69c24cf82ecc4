"""One file on its way to the store."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mxconvert import failpoints
from mxconvert.errors import StoreError, StoreFault
from mxconvert.events import Advanced, FileFinished, Notice
from mxconvert.store import Identity
from mxconvert.transfer.local import FileRange
from mxconvert.transfer.parts import PartPlan, crc_of, plan_parts
from mxconvert.transfer.push.existing import is_there, says_the_same
from mxconvert.transfer.push.options import Outcome, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from mxconvert.events import Reporter
    from mxconvert.manifest import FileEntry
    from mxconvert.store import Client, Part, PartStore, Upload
    from mxconvert.transfer.crew import Task
    from mxconvert.transfer.local import LocalArtifact

_RESTARTS = 3
_MOST_WHOLE = 64 * 2**20  # what is sent in one request lies in memory
_MD5 = re.compile(r'"?[0-9a-fA-F]{32}"?')


@dataclass(frozen=True, slots=True)
class PushContext:
    """What all files of a push share.

    Attributes:
        client: At the URL.
        artifact: What is pushed.
        folder: Where, below the URL; empty for the URL itself.
        part_size: Bytes of a part that the user asks for.
        copies: Keys of other versions by SHA-256.
        report: Told about progress.
        tally: Counts what was done.
    """

    client: Client
    artifact: LocalArtifact
    folder: str
    part_size: int | None
    copies: Mapping[str, str]
    report: Reporter
    tally: Tally

    @property
    def chunk_size(self) -> int:
        """Bytes of a digest chunk."""
        return self.artifact.manifest.chunk_size

    def key(self, path: str) -> str:
        """Return the key of a file."""
        return f"{self.folder}/{path}" if self.folder else path

    def tell_of_checksums(self) -> None:
        """Say, once, that the store has refused checksums."""
        if self.client.dropped_checksums and self.tally.first_telling():
            message = (
                f"{self.client.store.label}: the store refuses checksums of the newer kinds; "
                "`mxconvert verify URL` proves what it holds"
            )
            self.report(Notice(severity="warning", code="no-store-checksums", message=message))


@dataclass(slots=True)
class _Progress:
    """The state of one multipart upload."""

    upload: str
    plan: PartPlan
    done: dict[int, Part] = field(default_factory=dict)
    unproven: dict[int, Part] = field(default_factory=dict)
    resumed: int = 0

    @property
    def promise(self) -> int:
        """Bytes that may not have to be sent again."""
        return sum(part.size for part in (*self.done.values(), *self.unproven.values()))


class FilePush:
    """Brings one file to the store; its methods are tasks, see `Crew`."""

    def __init__(self, context: PushContext, entry: FileEntry) -> None:
        self._context = context
        self._entry = entry
        self._key = context.key(entry.path)
        self._identity = Identity(entry.size, entry.sha256, entry.crc64nvme)
        self._lock = threading.Lock()
        self._state: _Progress | None = None
        self._uploads: set[str] = set()  # of the key, begun by this push or found
        self._restarts = 0
        self._advanced = self._sent = 0

    def begin(self) -> Iterable[Task]:
        """Find out what is missing and return the tasks that send it."""
        client = self._context.client
        info = client.find(self._key)
        if is_there(client, info, self._entry, self._context.chunk_size):
            self._drop_uploads()
            # After a restart it is what this push has sent: the answer was lost.
            outcome = Outcome.SENT if self._restarts else Outcome.PRESENT
            return self._finished(outcome, in_parts=True)
        if self._copy():
            return self._finished(Outcome.COPIED)
        plan = self._plan()
        if plan is None or (plan.count == 1 and self._entry.size <= _MOST_WHOLE):
            self._send_whole()
            return self._finished(Outcome.SENT)
        return self._begin_parts(plan)

    def look(self) -> Iterable[Task]:
        """Make sure that the file is there.

        Raises:
            StoreError: It is not.
        """
        try:
            self._confirm()
        except StoreError as error:
            if error.fault is not StoreFault.MISSING:
                raise
            raise StoreError(
                StoreFault.CHANGED,
                f"{error.message}: it was removed during the push",
                hint="let no `mxconvert gc` run meanwhile, and run the same command again",
            ) from error
        return ()

    def _plan(self) -> PartPlan | None:
        parts = self._context.client.parts
        if parts is None:
            return None
        return plan_parts(
            self._entry.size,
            chunk_size=self._context.chunk_size,
            limits=parts.limits,
            asked=self._context.part_size,
        )

    # ------------------------------------------------------------------- in one request

    def _copy(self) -> bool:
        """Copy the file from another version, if that is still right; whether it worked."""
        source = self._context.copies.get(self._entry.sha256)
        if source is None:
            return False
        try:
            if not says_the_same(self._context.client.find(source), self._entry):
                return False
            self._context.client.copy(source, self._key, self._identity)
            self._confirm()
        except StoreError as error:
            if error.fault in (StoreFault.NO_CREDENTIALS, StoreFault.NO_BUCKET):
                raise
            return False
        return True

    def _send_whole(self) -> None:
        client, entry = self._context.client, self._entry
        with self._context.artifact.open(entry) as fd:
            body = FileRange(fd, entry, 0, entry.size, self._context.chunk_size)

            def attempt(reached: Callable[[int], None]) -> None:
                body.reached = reached
                try:
                    client.store.upload(self._key, self._paced(body), self._identity)
                except BaseException:
                    self._advance(-self._advanced)  # nothing of it is there
                    raise

            client.send(attempt)
        self._confirm()

    def _paced(self, body: FileRange) -> Iterator[memoryview]:
        """Yield a body's pieces at the rate that is asked for; tell of them as they go."""
        client = self._context.client
        for piece in body.pieces():
            client.take_rate(len(piece))
            yield piece
            client.moved(bytes_out=len(piece))
            self._advance(len(piece))

    # ------------------------------------------------------------------------- in parts

    @property
    def _parts(self) -> PartStore:
        parts = self._context.client.parts
        assert parts is not None  # noqa: S101  (`_plan` has asked)
        return parts

    def _begin_parts(self, plan: PartPlan) -> Iterable[Task]:
        found = self._continued(plan)
        if found is None:
            client = self._context.client
            upload = client.call(self._parts.begin_upload, self._key, self._identity)
            found = _Progress(upload, plan)
            self._uploads.add(upload)
            self._context.tell_of_checksums()
            failpoints.hit("push.upload-begun")
        self._state = found
        self._advance(found.resumed)
        missing = [n for n in range(1, plan.count + 1) if n not in found.done]
        if not missing:
            return (functools.partial(self._complete, found),)
        return [
            functools.partial(
                self._check_part if number in found.unproven else self._send_part, found, number
            )
            for number in missing
        ]

    def _continued(self, plan: PartPlan) -> _Progress | None:
        """Return the upload that a killed run has left furthest, ``None`` if there is none."""
        client = self._context.client
        try:
            left = client.call(lambda: list(self._parts.uploads(self._key)))
        except StoreError as error:
            if error.fault in (StoreFault.UNSUPPORTED, StoreFault.DENIED, StoreFault.MISSING):
                return None
            raise
        own = [upload for upload in left if upload.key == self._key]
        self._uploads.update(upload.id for upload in own)
        found = [state for upload in own if (state := self._resumed(upload, plan)) is not None]
        return max(found, key=lambda state: state.promise, default=None)

    def _resumed(self, upload: Upload, plan: PartPlan) -> _Progress | None:
        """Return how far an upload is; ``None`` if it is gone, or of parts of another size.

        Such a one may belong to a push under way, whose parts must not be overwritten.
        """
        state = _Progress(upload.id, plan)
        client = self._context.client
        try:
            parts = client.call(self._parts.parts, upload.key, upload.id)
        except StoreError as error:
            if error.fault is not StoreFault.MISSING:
                raise
            return None
        for part in parts:
            begin, end = plan.range(part.number)
            if part.number > plan.count or part.size != end - begin:
                continue
            if part.crc64nvme == crc_of(self._entry, begin, end, self._context.chunk_size):
                state.done[part.number] = part
                state.resumed += part.size
            elif part.crc64nvme is None and _MD5.fullmatch(part.etag):
                state.unproven[part.number] = part
        return state if state.promise or not parts else None

    def _check_part(self, state: _Progress, number: int) -> Iterable[Task]:
        """Keep a part of an earlier run if its tag is the MD5 of the file's bytes.

        Many stores list no checksum of parts; the tag of a part is its MD5 unless the
        object is encrypted with a key of the user's, and then the part is sent again.
        """
        part = state.unproven[number]
        begin, end = state.plan.range(number)
        found = hashlib.md5(usedforsecurity=False)
        with self._context.artifact.open(self._entry) as fd:
            body = FileRange(fd, self._entry, begin, end, self._context.chunk_size)
            for piece in body.pieces():
                found.update(piece)
        if found.hexdigest() != part.etag.strip('"').lower():
            return self._send_part(state, number)
        with self._lock:
            state.resumed += part.size
        return self._note_part(state, part)

    def _note_part(self, state: _Progress, part: Part) -> Iterable[Task]:
        self._advance(part.size)
        with self._lock:
            state.done[part.number] = part
            is_last = len(state.done) == state.plan.count
        return (functools.partial(self._complete, state),) if is_last else ()

    def _send_part(self, state: _Progress, number: int) -> Iterable[Task]:
        if self._state is not state:  # the upload vanished, another one has begun
            return ()
        begin, end = state.plan.range(number)
        crc = crc_of(self._entry, begin, end, self._context.chunk_size)
        client = self._context.client
        client.take_rate(end - begin)
        with self._context.artifact.open(self._entry) as fd:
            body = FileRange(fd, self._entry, begin, end, self._context.chunk_size)

            def attempt(reached: Callable[[int], None]) -> Part:
                body.seek(0)
                body.reached = reached
                try:
                    part = self._parts.upload_part(self._key, state.upload, number, body, crc)
                except StoreError as error:
                    if error.fault is StoreFault.CORRUPT:
                        body.check()  # was it our disk?
                    raise
                body.check()
                return part

            try:
                part = client.send(attempt)
            except StoreError as error:
                return self._restart(state, error)
        client.moved(bytes_out=end - begin)
        with self._lock:
            self._sent += end - begin
        failpoints.hit("push.part-sent")
        return self._note_part(state, part)

    def _complete(self, state: _Progress) -> Iterable[Task]:
        failpoints.hit("push.before-complete")
        parts = [state.done[number] for number in sorted(state.done)]
        client = self._context.client
        try:
            client.call(self._parts.complete, self._key, state.upload, parts, self._identity)
        except StoreError as error:
            return self._restart(state, error)
        self._uploads.discard(state.upload)
        self._confirm()
        self._drop_uploads()
        return self._finished(Outcome.SENT, in_parts=True)

    def _drop_uploads(self) -> None:
        """Drop other uploads of the key, now that its object is right.

        Another push that goes on with one of them finds it gone, and the object there.
        """
        while self._uploads:
            with contextlib.suppress(StoreError):  # `gc` finds what is left
                self._context.client.call(self._parts.abort, self._key, self._uploads.pop())

    def _restart(self, state: _Progress, error: StoreError) -> Iterable[Task]:
        """Begin anew when the upload is gone, or its parts are others, by another push."""
        if error.fault not in (StoreFault.MISSING, StoreFault.CHANGED):
            raise error
        with self._lock:
            if self._state is not state:
                return ()
            self._restarts += 1
            if self._restarts > _RESTARTS:
                raise error
            self._state = None
        self._advance(-self._advanced)
        return (self.begin,)

    # ---------------------------------------------------------------------------- the end

    def _confirm(self) -> None:
        """Compare what the store says it holds with what it should.

        Raises:
            StoreError: Size or checksum differ.
        """
        info = self._context.client.head(self._key)
        where = self._context.client.store.url(self._key)
        if info.size != self._entry.size:
            raise StoreError(
                StoreFault.CORRUPT,
                f"{where}: the store holds {info.size} bytes, expected {self._entry.size}",
                hint="run the same command again",
            )
        if info.crc64nvme not in (None, self._entry.crc64nvme):
            raise StoreError(
                StoreFault.CORRUPT,
                f"{where}: CRC64-NVME at the store: expected {self._entry.crc64nvme}, found "
                f"{info.crc64nvme}",
                hint="run the same command again",
            )

    def _advance(self, num_bytes: int) -> None:
        with self._lock:
            self._advanced += num_bytes
        if num_bytes:
            self._context.report(Advanced(num_bytes=num_bytes))

    def _finished(self, outcome: Outcome, *, in_parts: bool = False) -> Iterable[Task]:
        by_others = in_parts and outcome is Outcome.SENT
        resumed = max(0, self._entry.size - self._sent) if by_others else 0
        self._advance(self._entry.size - self._advanced)
        self._context.tell_of_checksums()
        self._context.tally.add(self._entry.path, outcome, self._entry.size, resumed)
        self._context.report(FileFinished(path=self._entry.path, size_bytes=self._entry.size))
        failpoints.hit("push.file-finished")
        return ()
