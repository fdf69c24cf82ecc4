"""`verify_artifact`: the levels one after the other, everything collected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxconvert.errors import Interrupted, LocalError, UsageError
from mxconvert.events import Advanced, Started, ignore
from mxconvert.folder import Folder, scan_folder
from mxconvert.manifest import MANIFEST_NAME, TENSORS_NAME, WORK_FOLDER
from mxconvert.model import FileRole
from mxconvert.recipes import head_is_tied
from mxconvert.stop import StopToken
from mxconvert.verify.config import check_config
from mxconvert.verify.digests import DigestCheck, DigestTask
from mxconvert.verify.documents import (
    CONFIG_NAME,
    INDEX_NAME,
    STALE_NAME,
    read_object,
    read_weight_map,
)
from mxconvert.verify.extras import check_extras
from mxconvert.verify.identity import find_manifest
from mxconvert.verify.listing import RecordGroups, records_of
from mxconvert.verify.report import Check, Collector, Level, VerifyReport
from mxconvert.verify.source import SourceRun
from mxconvert.verify.structure import StructureCheck, compare_records, read_header
from mxconvert.workers import default_jobs, run_bounded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mxconvert.events import Event, Reporter
    from mxconvert.manifest import FileEntry, Manifest
    from mxconvert.model import TensorInfo
    from mxconvert.verify.options import VerifyOptions

_WEIGHTS = frozenset({FileRole.DENSE, FileRole.EXPERTS, FileRole.MIXED})
_WEIGHT_SUFFIX = ".safetensors"
_SINGLE = "model.safetensors"


def verify_artifact(
    root: Path,
    options: VerifyOptions,
    reporter: Reporter = ignore,
    *,
    stop: StopToken | None = None,
) -> VerifyReport:
    """Check an artifact's folder and collect everything that is wrong with it.

    Args:
        root: The folder.
        options: How deep to look, and at what.
        reporter: Told about progress, from several threads.
        stop: Set from a signal handler to end early.

    Raises:
        Interrupted: ``stop`` was set.
        UsageError: Options that make no sense, or no such folder.
        LocalError: The folder, ``options.manifest`` or the source cannot be read.
        VerificationError: ``options.manifest`` is not a manifest.
        SourceError: ``options.source`` is damaged or changes during the run.
    """
    options.check()
    folder = _scan(root)
    collector = Collector()
    stop = stop or StopToken()
    run = _Run(folder, options, collector, _stoppable(reporter, stop))
    with stop.watched():
        artifact_id = run()
    return VerifyReport(
        target=str(root),
        level=options.level,
        artifact_id=artifact_id,
        findings=collector.ordered(),
        notes=tuple(collector.notes),
        not_checked=tuple(collector.not_checked),
        checked=tuple(sorted(collector.checked)),
        counts=dict(collector.counts) | {"files_failed": len(collector.failed_paths())},
        ignored=options.ignore,
        strict=options.strict,
        error=collector.error,
    )


def _stoppable(reporter: Reporter, stop: StopToken) -> Reporter:
    """Wrap a reporter so that every piece of work looks at ``stop`` first."""

    def report(event: Event) -> None:
        if stop.signum is not None:
            raise Interrupted(stop.signum)
        reporter(event)

    return report


def _scan(root: Path) -> Folder:
    if not root.is_dir():
        what = "not a folder" if root.exists() else "no such folder"
        raise UsageError(f"{root}: {what}", hint="give the folder that holds the artifact")
    try:
        return scan_folder(root)
    except OSError as error:
        raise LocalError(f"{root}: {error.strerror}") from error


class _Run:
    """One verification under way."""

    def __init__(
        self, folder: Folder, options: VerifyOptions, collector: Collector, reporter: Reporter
    ) -> None:
        self._folder = folder
        self._options = options
        self._collector = collector
        self._report = reporter

    def __call__(self) -> str | None:
        """Check everything; return the id of the manifest that was checked against."""
        if self._options.foreign:
            self.foreign()
            return None
        identity = find_manifest(self._folder, self._options, self._collector)
        if identity is None:
            self.without_manifest()
            return None
        self.artifact(identity.manifest)
        return identity.id

    # --------------------------------------------------------------- without a manifest

    def without_manifest(self) -> None:
        """Say why there may be none; nothing else can be checked."""
        left = [path for path in self._folder.files if path.endswith(".partial")]
        if WORK_FOLDER in self._folder.hidden or left:
            message = f"{self._folder.root}: a run did not finish here; quantize again to resume it"
            self._collector.fail(Check.FILES, "unfinished", message)
        self._collector.skip("nothing but the manifest was checked")

    def foreign(self) -> None:
        """Check another tool's folder: headers, index and config; errors with a source."""
        folder, collector = self._folder, self._collector
        for path, kind in sorted(folder.special.items()):
            collector.fail(Check.FILES, "special-file", f"{path}: {kind}", path=path)
        indexed = self._index(INDEX_NAME) if INDEX_NAME in folder.files else None
        names = sorted(set(indexed[0].values())) if indexed else [_SINGLE]
        found = [name for name in names if name in folder.files]
        for name in names:
            if name not in folder.files:
                collector.fail(Check.FILES, "missing-file", f"{name}: missing", path=name)
        tensors: list[TensorInfo] = []
        structure = self._structure(None, indexed)
        for path in found:
            tensors += self._header(path, structure) or []
        self._finish_structure(structure, indexed, set(names) - set(found))
        collector.skip("there is no manifest: no byte was compared with a digest")
        if self._options.level is Level.NUMERIC:
            self._source_run().against_names(tensors)

    # ------------------------------------------------------------------ with a manifest

    def artifact(self, manifest: Manifest) -> None:
        """Run the levels asked for."""
        usable = self._check_listed(manifest)
        check_extras(
            self._folder,
            [entry.path for entry in manifest.files],
            self._options.ignore,
            self._collector,
            strict=self._options.strict,
        )
        listed = self._tensor_list(usable)
        self._check_structure(manifest, usable, listed)
        depth = self._options.level.depth
        if depth >= Level.DIGEST.depth:
            self._check_digests(manifest, usable, listed)
        else:
            self._collector.skip("only headers were read: no digest was compared")
        if depth >= Level.NUMERIC.depth and listed is not None:
            data = listed
            self._source_run().against_manifest(manifest, lambda: records_of(data, usable))
        elif depth < Level.NUMERIC.depth:
            self._collector.skip("the numbers were not compared with a source")

    def _source_run(self) -> SourceRun:
        return SourceRun(self._folder, self._options, self._collector, self._report)

    def _check_listed(self, manifest: Manifest) -> set[str]:
        """Check presence, kind and size; return the paths that are worth reading."""
        usable = set()
        for entry in manifest.files:
            path = entry.path
            self._collector.count("files_listed")
            self._collector.look(path, Check.FILES)
            seen = self._folder.files.get(path)
            if path in self._folder.special:
                kind = self._folder.special[path]
                self._fail_file("special-file", path, f"{kind}, expected a regular file")
            elif seen is None:
                self._fail_file("missing-file", path, "missing")
            elif seen.size != entry.size:
                self._fail_file("size", path, "the size", expected=entry.size, found=seen.size)
            else:
                usable.add(path)
        return usable

    def _fail_file(
        self, code: str, path: str, what: str, *, expected: object = None, found: object = None
    ) -> None:
        message = f"{path}: {what}"
        self._collector.fail(Check.FILES, code, message, path=path, expected=expected, found=found)

    def _tensor_list(self, usable: set[str]) -> bytes | None:
        if TENSORS_NAME not in usable:
            self._collector.skip("tensors were not checked one by one: their list is missing")
            return None
        try:
            return self._folder.read(TENSORS_NAME)
        except OSError as error:
            self._fail_file("unreadable", TENSORS_NAME, f"cannot be read: {error.strerror}")
            return None

    # ------------------------------------------------------------------------ structure

    def _index(self, path: str) -> tuple[dict[str, str], object] | None:
        return read_weight_map(self._folder, path, self._collector)

    def _structure(
        self, manifest: Manifest | None, indexed: tuple[dict[str, str], object] | None
    ) -> StructureCheck:
        config = self._config()
        declaration = None
        if config is not None:
            declaration = check_config(
                config,
                self._collector,
                path=CONFIG_NAME,
                format_spec=None if manifest is None else manifest.format,
                activations=None if manifest is None else manifest.options.get("activations"),
            )
        return StructureCheck(
            self._collector,
            declaration,
            None if indexed is None else indexed[0],
            foreign=manifest is None,
            tied_head=head_is_tied(config or {}),
        )

    def _config(self) -> dict[str, object] | None:
        if CONFIG_NAME not in self._folder.files:
            self._collector.fail(
                Check.CONFIG, "no-config", f"no {CONFIG_NAME}: nothing can load this"
            )
            return None
        return read_object(self._folder, CONFIG_NAME, self._collector)

    def _header(self, path: str, structure: StructureCheck) -> list[TensorInfo] | None:
        self._report(Advanced(num_bytes=0))  # a place to stop
        tensors = read_header(self._folder, path, self._collector)
        if tensors is not None:
            structure.add_file(path, tensors)
        return tensors

    def _check_structure(self, manifest: Manifest, usable: set[str], listed: bytes | None) -> None:
        indexes = [entry.path for entry in manifest.files if entry.role is FileRole.INDEX]
        index = next((path for path in indexes if path in usable), None)
        indexed = None if index is None else self._index(index)
        if not indexes and [e.path for e in _weights(manifest)] != [_SINGLE]:
            self._fail_file("no-index", MANIFEST_NAME, "lists no index of the weight files")
        if any(entry.path.endswith(STALE_NAME) for entry in manifest.files):
            self._fail_file("stale-quantization-config", STALE_NAME, "settings of another scheme")
        structure = self._structure(manifest, indexed)
        groups = RecordGroups(listed, self._collector)
        unread = set()
        for entry in _weights(manifest):
            records = groups.take(entry.path)
            tensors = self._header(entry.path, structure) if entry.path in usable else None
            if tensors is None:
                unread.add(entry.path)
            elif records is not None:
                compare_records(entry, records, tensors, self._collector)
        groups.finish()
        if groups.complete and groups.count != manifest.totals.tensors:
            self._collector.fail(
                Check.STRUCTURE,
                "totals",
                f"{TENSORS_NAME}: the number of tensors",
                path=TENSORS_NAME,
                expected=manifest.totals.tensors,
                found=groups.count,
            )
        self._finish_structure(structure, indexed, unread, index or INDEX_NAME)

    def _finish_structure(
        self,
        structure: StructureCheck,
        indexed: tuple[dict[str, str], object] | None,
        unread: set[str],
        index_path: str = INDEX_NAME,
    ) -> None:
        structure.finish(index_path, unread)
        if indexed is None or unread:
            return
        stated = indexed[1]
        if stated != structure.total_bytes or isinstance(stated, bool):
            self._collector.fail(
                Check.STRUCTURE,
                "total-size",
                f"{index_path}: metadata.total_size",
                path=index_path,
                expected=structure.total_bytes,
                found=repr(stated),
            )

    # --------------------------------------------------------------------------- digest

    def _check_digests(self, manifest: Manifest, usable: set[str], listed: bytes | None) -> None:
        entries = [entry for entry in manifest.files if entry.path in usable]
        size = sum(entry.size for entry in entries)
        self._report(Started(what="verify", total_bytes=size, total_files=len(entries)))
        check = DigestCheck(self._folder, manifest.chunk_size, self._collector, self._report)

        def tasks() -> Iterator[DigestTask]:
            groups = RecordGroups(listed, None)
            for entry in entries:
                yield DigestTask(entry, groups.take(entry.path) or ())

        run_bounded(check.check, tasks(), self._options.jobs or default_jobs())


def _weights(manifest: Manifest) -> list[FileEntry]:
    return [
        entry
        for entry in manifest.files
        if entry.role in _WEIGHTS or entry.path.endswith(_WEIGHT_SUFFIX)
    ]
