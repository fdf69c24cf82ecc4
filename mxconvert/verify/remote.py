"""`verify_remote`: an artifact at a store, by the same checks as a folder."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from mxconvert.errors import StoreError, StoreFault, UsageError
from mxconvert.events import Advanced, ignore
from mxconvert.manifest import MANIFEST_NAME
from mxconvert.remote import locate, no_version
from mxconvert.remote.layout import FOLDER_DIGITS, REFS, is_folder
from mxconvert.stop import StopToken
from mxconvert.verify.identity import Named, find_manifest
from mxconvert.verify.payload import Payload
from mxconvert.verify.remote_folder import RemoteFolder
from mxconvert.verify.report import Check, Collector, Level, VerifyReport
from mxconvert.verify.run import Run, build_report, stoppable
from mxconvert.workers import map_watched

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mxconvert.events import Reporter
    from mxconvert.manifest import FileEntry, Manifest
    from mxconvert.remote import Location
    from mxconvert.store import Client, StoreURL
    from mxconvert.verify.options import VerifyOptions

_FOLDER = re.compile(rf"(?=.*[a-f])[0-9a-f]{{{FOLDER_DIGITS}}}")
_NO_LISTING = frozenset({StoreFault.DENIED, StoreFault.UNSUPPORTED})


def verify_remote(
    client: Client,
    url: StoreURL,
    options: VerifyOptions,
    reporter: Reporter = ignore,
    *,
    stop: StopToken | None = None,
) -> VerifyReport:
    """Check an artifact at a store and collect everything that is wrong with it.

    At level structure no byte of the weights is read: headers by ranges, small files
    whole, and what the store itself says about each object. At level digest every byte
    is streamed; with ``options.sample`` a part of the chunks.

    Args:
        client: At the URL.
        url: The URL and the version.
        options: How deep to look; level numeric and ``foreign`` are for local folders.
        reporter: Told about progress, from several threads.
        stop: Set from a signal handler to end early; the client should have the same.

    Raises:
        Interrupted: ``stop`` was set.
        UsageError: Options that make no sense.
        LocalError: ``options.manifest`` cannot be read.
        StoreError: No such version, or the store cannot be used.
        VerificationError: ``options.manifest`` is not a manifest, the tag not a pointer.
    """
    options.check()
    if options.level is Level.NUMERIC or options.foreign or options.source is not None:
        raise UsageError(
            "the numbers can only be checked in a local folder: --level numeric, --source and "
            "--foreign make no sense with a URL",
            hint="pull the artifact and verify the folder",
            code="local-only",
        )
    collector = Collector()
    stop = stop or StopToken()
    report = stoppable(reporter, stop)

    def work(_: None) -> tuple[str | None, str]:
        check = _RemoteCheck(client, url, options, collector, report)
        return check(), check.location

    with stop.watched():
        # Not in this thread: a signal has to end it even if a connection hangs.
        watch = partial(report, Advanced(num_bytes=0))
        ((artifact_id, location),) = map_watched(work, [None], 1, watch)
    version = "" if url.version is None else f"@{url.version}"
    return build_report(f"{url}{version}", options, collector, artifact_id, location)


class _RemoteCheck:
    """One verification of a URL under way."""

    def __init__(
        self,
        client: Client,
        url: StoreURL,
        options: VerifyOptions,
        collector: Collector,
        reporter: Reporter,
    ) -> None:
        self._client = client
        self._options = options
        self._collector = collector
        self._report = reporter
        self._location = locate(client, url.version)
        self._named = _named(self._location, url)
        self._folder = RemoteFolder(client, self._location)

    @property
    def location(self) -> str:
        """URL of the artifact's folder, without a slash at its end."""
        return self._folder.root.rstrip("/")

    def __call__(self) -> str | None:
        """Check everything; return the id of the manifest that was checked against."""
        folder, options, collector = self._folder, self._options, self._collector
        folder.look_for([MANIFEST_NAME])
        if MANIFEST_NAME not in folder.files and options.manifest is None:
            raise no_version(self._client, self._location.missing)
        identity = find_manifest(folder, options, collector, self._named)
        run = Run(folder, options, collector, self._report, folder.map)
        if identity is None:
            run.without_manifest()
            return None
        manifest = identity.manifest
        folder.expect(manifest.files)
        folder.look_for(entry.path for entry in manifest.files)
        self._list_extras(manifest)
        usable, listed = run.artifact(manifest)
        self._compare_stored([entry for entry in manifest.files if entry.path in usable])
        payload = Payload(folder, options, collector, self._report, folder.map)
        payload.check(manifest, usable, listed)
        collector.skip("the numbers were not compared with a source")
        return identity.id

    # -------------------------------------------------------------------------- listing

    def _list_extras(self, manifest: Manifest) -> None:
        """Look for objects that the manifest does not list."""
        prefix = self._location.key("")
        try:
            found = self._client.objects(prefix)
        except StoreError as error:
            if error.fault not in _NO_LISTING:
                raise
            self._collector.skip(f"extra objects were not looked for: {error.message}")
            return
        known = {MANIFEST_NAME, *(entry.path for entry in manifest.files)}
        paths = {info.key.removeprefix(prefix) for info in found} - known - {""}
        self._folder.add_extras(path for path in paths if prefix or not _is_versions(path))

    # ------------------------------------------------------------- what the store says

    def _compare_stored(self, entries: Iterable[FileEntry]) -> None:
        """Compare the digests that the store keeps; ETags are none, whatever they look like."""
        silent = 0
        for entry in entries:
            info = self._folder.files[entry.path]
            if info.crc64nvme is None and info.sha256 is None:
                silent += 1
                continue
            self._collector.look(entry.path, Check.DIGEST)
            self._compare(entry, "store-checksum", "CRC64-NVME", entry.crc64nvme, info.crc64nvme)
            self._compare(entry, "store-note", "SHA-256", entry.sha256, info.sha256)
        if silent and self._options.level is Level.STRUCTURE:
            self._collector.skip(
                f"of {silent} files the store keeps neither CRC64-NVME nor SHA-256: nothing "
                "speaks for bytes of them that were not read"
            )

    def _compare(
        self, entry: FileEntry, code: str, kind: str, expected: str, found: str | None
    ) -> None:
        if found is not None and found.lower() != expected:
            message = f"{entry.path}: the {kind} that the store keeps"
            self._collector.fail(
                Check.DIGEST, code, message, path=entry.path, expected=expected, found=found
            )


def _named(location: Location, url: StoreURL) -> Named | None:
    """Return which id a tag, a version or the name of the folder promises."""
    if location.id is not None:
        return Named(location.id, f"the version {url.version or 'latest'}")
    last = url.prefix.rpartition("/")[2]
    return Named(last, "the folder's name") if _FOLDER.fullmatch(last) else None


def _is_versions(path: str) -> bool:
    """Whether a path below a URL is a tag's, or in the folder of a version."""
    first, slash, _ = path.partition("/")
    return path.startswith(REFS) or (bool(slash) and is_folder(first))
