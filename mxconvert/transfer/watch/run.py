"""`pull --watch`: follow a tag, one folder for each version, ``current`` always whole."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mxconvert import failpoints
from mxconvert.errors import (
    Interrupted,
    LocalError,
    MxConvertError,
    StoreError,
    UsageError,
    VerificationError,
)
from mxconvert.events import Notice
from mxconvert.lock import Lock
from mxconvert.manifest import MANIFEST_NAME, WORK_FOLDER, parse_manifest
from mxconvert.remote import find_artifact, is_id, no_version, read_ref, ref_key
from mxconvert.transfer.pull.journal import PullJournal
from mxconvert.transfer.pull.run import pull_artifact
from mxconvert.transfer.pull.subset import journal_of
from mxconvert.transfer.watch.folders import CURRENT, Versions
from mxconvert.writer.atomic import local_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from mxconvert.events import Reporter
    from mxconvert.remote import RemoteArtifact
    from mxconvert.stop import StopToken
    from mxconvert.store import Client
    from mxconvert.transfer.pull.options import PullOptions

_MOST_WAIT = 10.0
"""Poll intervals that are waited after errors, at most."""

_JITTER = 0.2
_SLICE_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """How a tag is followed.

    Attributes:
        tag: The tag.
        poll: Seconds between looks, give or take a fifth.
        keep: Versions that are kept, the current one among them.
        on_update: A command with its arguments, run after each switch; empty: none.
        rounds: Looks after which to end; ``None``: never.
    """

    tag: str
    poll: float = 30.0
    keep: int = 2
    on_update: tuple[str, ...] = ()
    rounds: int | None = None


class Watcher:
    """Follows one tag into one folder.

    Args:
        connect: Returns a client at the URL; a new one after each error.
        root: The folder of versions.
        pulling: How each version is pulled; its version is the tag's.
        watching: How the tag is followed.
        report: Told what happens.
        stop: Ends it.
        wait: Waits for so many seconds or until there may be news; by default the time.
    """

    def __init__(
        self,
        connect: Callable[[], Client],
        root: Path,
        pulling: PullOptions,
        watching: WatchOptions,
        *,
        report: Reporter,
        stop: StopToken,
        wait: Callable[[float], None] | None = None,
    ) -> None:
        self._connect = connect
        self._client = connect()
        self._versions = Versions(root)
        self._pulling, self._watching = pulling, watching
        self._report, self._stop = report, stop
        self._wait_for = wait or self._sleep
        self._etag: str | None = None
        self._random = random.Random()  # noqa: S311  (spreads looks, guards nothing)

    def __call__(self) -> None:
        """Follow the tag until told to stop.

        Raises:
            MxConvertError: The first version cannot be had, or something is wrong here.
            Interrupted: ``stop`` was set.
        """
        root = self._versions.root
        try:
            root.mkdir(exist_ok=True)
            (root / WORK_FOLDER).mkdir(exist_ok=True)
        except OSError as error:
            raise local_error(error, root) from error
        lock = Lock(root / WORK_FOLDER)
        lock.acquire(self._report, break_lock=self._pulling.break_lock)
        try:
            self._versions.tidy()
            self._follow()
        finally:
            lock.release()

    def _follow(self) -> None:
        errors = round_ = 0
        while True:
            try:
                self._look()
                errors = 0
            except (StoreError, VerificationError, LocalError) as error:
                errors = self._note(error, errors)
            round_ += 1
            if self._watching.rounds is not None and round_ >= self._watching.rounds:
                return
            patience = min(2.0**errors, _MOST_WAIT) * self._watching.poll
            self._wait_for(patience * self._random.uniform(1 - _JITTER, 1 + _JITTER))
            self._check()

    def _note(self, error: MxConvertError, errors: int) -> int:
        """Report an error that may pass; the first version's are final."""
        if self._versions.current is None:
            raise error
        message = f"{error.message}; {CURRENT} stays, trying again"
        self._report(Notice(severity="warning", code="watch-failed", message=message))
        self._client, self._etag = self._connect(), None
        return errors + 1

    def _look(self) -> None:
        """Follow the tag if it has moved."""
        artifact = self._moved()
        if artifact is None:
            return
        if self._versions.current == artifact[:16]:
            self._prune()  # what a run that was killed had no time for
            return
        previous, folder = self._versions.current, self._versions.folder(artifact)
        if not self._versions.is_whole(artifact):
            self._pull(artifact, folder)
        self._versions.switch(artifact)
        message = f"{self._watching.tag} is {artifact[:16]}: {self._versions.root / CURRENT}"
        self._report(Notice(severity="info", code="switched", message=message))
        self._run_command(artifact, folder, previous)
        self._prune()

    def _prune(self) -> None:
        for name in self._versions.prune(self._watching.keep):
            message = f"{self._versions.root / name}: removed, --keep {self._watching.keep}"
            self._report(Notice(severity="info", code="removed", message=message))

    def _moved(self) -> str | None:
        """Return the id that the tag points at, ``None`` if it is where it was.

        Its ETag is asked for first, which costs the store no more than a conditional GET.
        """
        key = ref_key(self._watching.tag)
        info = self._client.find(key)
        if info is not None and info.etag is not None and info.etag == self._etag:
            return None
        ref = None if info is None else read_ref(self._client, self._watching.tag)
        if ref is None:
            raise no_version(self._client, f"no tag {self._watching.tag!r}")
        self._etag = ref.etag
        return ref.id

    def _pull(self, artifact_id: str, folder: Path) -> None:
        options = replace(self._pulling, version=artifact_id)
        artifact = find_artifact(self._client, artifact_id, options.expect_id)
        if not folder.exists():
            self._begin(folder, artifact, options)
        failpoints.hit("watch.pulling", str(folder))
        pull_artifact(self._client, folder, options, self._report)

    def _begin(self, folder: Path, artifact: RemoteArtifact, options: PullOptions) -> None:
        """Begin a folder with the files that the current version has as well."""
        current, manifest = self._versions.current, artifact.manifest
        if current is None:
            return
        try:
            data = (self._versions.root / current / MANIFEST_NAME).read_bytes()
            held = parse_manifest(data, current).files
            folder.mkdir()
        except (OSError, MxConvertError):
            return
        journal = PullJournal(folder)
        journal.make()
        selection = options.request.resolve(manifest) if options.request else None
        whole = selection is None or selection.is_everything
        journal.open(artifact.id, None if whole else journal_of(selection))
        self._versions.reuse(manifest.files, held, folder)

    # ---------------------------------------------------------------------------- command

    def _run_command(self, artifact: str, folder: Path, previous: str | None) -> None:
        """Run the command; that it fails is reported, not more."""
        command = self._watching.on_update
        if not command:
            return
        facts = {
            "ID": artifact,
            "PATH": str(folder),
            "PREVIOUS": "" if previous is None else str(self._versions.root / previous),
            "TAG": self._watching.tag,
            "URL": self._client.store.label,
        }
        environment = {**os.environ, **{f"MXCONVERT_{key}": text for key, text in facts.items()}}
        try:
            # stdout is for events
            process = subprocess.Popen(list(command), env=environment, stdout=sys.stderr)  # noqa: S603
        except OSError as error:
            self._command_failed(f"cannot be run: {error.strerror}")
            return
        try:
            while process.poll() is None:
                self._check()
                time.sleep(0.02)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if process.returncode:
            self._command_failed(f"ended with status {process.returncode}")

    def _command_failed(self, what: str) -> None:
        message = f"--on-update {self._watching.on_update[0]}: {what}"
        self._report(Notice(severity="warning", code="on-update-failed", message=message))

    # ---------------------------------------------------------------------------- waiting

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._check()
            time.sleep(min(left, _SLICE_SECONDS))

    def _check(self) -> None:
        if self._stop.signum is not None:
            raise Interrupted(self._stop.signum)


def check_watching(version: str | None, options: Sequence[tuple[str, bool]]) -> str:
    """Return the tag to follow.

    Args:
        version: Of the URL.
        options: Of `pull`, and whether they were given, that make no sense with ``--watch``.

    Raises:
        UsageError: The URL names an id, or one of the options was given.
    """
    if version is not None and is_id(version):
        raise UsageError(
            f"--watch: {version} is an id, which never moves", hint="name a tag: URL@TAG"
        )
    for name, given in options:
        if given:
            raise UsageError(f"--watch and {name} exclude each other")
    return version or "latest"
