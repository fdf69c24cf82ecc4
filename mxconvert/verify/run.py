"""One verification under way: everything but the source, wherever the artifact lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxconvert.errors import Interrupted
from mxconvert.events import Advanced
from mxconvert.manifest import MANIFEST_NAME, PLAIN_FORMAT, RECORD_NAME, TENSORS_NAME, WORK_FOLDER
from mxconvert.model import FileRole
from mxconvert.recipes import head_is_tied
from mxconvert.source import QUANTIZATION_FILES
from mxconvert.verify.config import check_config
from mxconvert.verify.documents import (
    CONFIG_NAME,
    INDEX_NAME,
    read_object,
    read_weight_map,
)
from mxconvert.verify.extras import check_extras
from mxconvert.verify.listing import RecordGroups
from mxconvert.verify.payload import is_weight
from mxconvert.verify.report import Check, Collector, VerifyReport
from mxconvert.verify.structure import StructureCheck, compare_records, read_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mxconvert.events import Event, Reporter
    from mxconvert.manifest import Manifest
    from mxconvert.model import TensorInfo
    from mxconvert.stop import StopToken
    from mxconvert.verify.options import VerifyOptions
    from mxconvert.verify.place import Mapper, Place

_SINGLE = "model.safetensors"


def stoppable(reporter: Reporter, stop: StopToken) -> Reporter:
    """Wrap a reporter so that every piece of work looks at ``stop`` first."""

    def report(event: Event) -> None:
        if stop.signum is not None:
            raise Interrupted(stop.signum)
        reporter(event)

    return report


def build_report(
    target: str,
    options: VerifyOptions,
    collector: Collector,
    artifact_id: str | None,
    location: str | None = None,
) -> VerifyReport:
    """Return what was collected."""
    return VerifyReport(
        target=target,
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
        location=location,
    )


class Run:
    """The checks of an artifact's structure, one after the other."""

    def __init__(
        self,
        place: Place,
        options: VerifyOptions,
        collector: Collector,
        reporter: Reporter,
        map_headers: Mapper,
    ) -> None:
        self._place = place
        self._options = options
        self._collector = collector
        self._report = reporter
        self._map_headers = map_headers
        self._is_part = False

    # --------------------------------------------------------------- without a manifest

    def without_manifest(self) -> None:
        """Say why there may be none; nothing else can be checked."""
        left = [path for path in self._place.files if path.endswith(".partial")]
        if WORK_FOLDER in self._place.hidden or left:
            message = f"{self._place.root}: a run did not finish here; quantize again to resume it"
            self._collector.fail(Check.FILES, "unfinished", message)
        self._collector.skip("nothing but the manifest was checked")

    def foreign(self) -> list[TensorInfo]:
        """Check another tool's folder: headers, index and config; return its tensors."""
        place, collector = self._place, self._collector
        for path, kind in sorted(place.special.items()):
            collector.fail(Check.FILES, "special-file", f"{path}: {kind}", path=path)
        indexed = self._index(INDEX_NAME) if INDEX_NAME in place.files else None
        names = sorted(set(indexed[0].values())) if indexed else [_SINGLE]
        found = [name for name in names if name in place.files]
        for name in names:
            if name not in place.files:
                collector.fail(Check.FILES, "missing-file", f"{name}: missing", path=name)
        tensors: list[TensorInfo] = []
        structure = self._structure(None, indexed)
        for path, header in zip(found, self._headers(found, set(found)), strict=True):
            if header is not None:
                structure.add_file(path, header)
                tensors += header
        self._finish_structure(structure, indexed, set(names) - set(found))
        collector.skip("there is no manifest: no byte was compared with a digest")
        return tensors

    # ------------------------------------------------------------------ with a manifest

    def artifact(
        self, manifest: Manifest, part: bytes | None = None
    ) -> tuple[set[str], bytes | None]:
        """Check what is there and its structure.

        Args:
            manifest: What should be there.
            part: The tensor list of a part of an artifact, which is then what is there.

        Returns:
            The paths that are worth reading, and the tensor list if it can be read.
        """
        self._is_part = part is not None
        usable = self._check_listed(manifest)
        check_extras(
            self._place,
            [entry.path for entry in manifest.files] + [RECORD_NAME] * (part is not None),
            self._options.ignore,
            self._collector,
            strict=self._options.strict,
        )
        listed = self._tensor_list(usable) if part is None else part
        self._check_structure(manifest, usable, listed)
        return usable, listed

    def _check_listed(self, manifest: Manifest) -> set[str]:
        """Check presence, kind and size; return the paths that are worth reading."""
        usable = set()
        for entry in manifest.files:
            path = entry.path
            self._collector.count("files_listed")
            self._collector.look(path, Check.FILES)
            seen = self._place.files.get(path)
            if path in self._place.special:
                kind = self._place.special[path]
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
            return self._place.read(TENSORS_NAME)
        except OSError as error:
            self._fail_file("unreadable", TENSORS_NAME, f"cannot be read: {error.strerror}")
            return None

    # ------------------------------------------------------------------------ structure

    def _index(self, path: str) -> tuple[dict[str, str], object] | None:
        return read_weight_map(self._place, path, self._collector)

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
            plain=manifest is not None and manifest.format == PLAIN_FORMAT,
            part=self._is_part,
        )

    def _config(self) -> dict[str, object] | None:
        if CONFIG_NAME not in self._place.files:
            self._collector.fail(
                Check.CONFIG, "no-config", f"no {CONFIG_NAME}: nothing can load this"
            )
            return None
        return read_object(self._place, CONFIG_NAME, self._collector)

    def _headers(self, paths: Iterable[str], usable: set[str]) -> Iterator[list[TensorInfo] | None]:
        def read(path: str) -> list[TensorInfo] | None:
            self._report(Advanced(num_bytes=0))  # a place to stop
            return read_header(self._place, path, self._collector) if path in usable else None

        return self._map_headers(read, paths)

    def _check_structure(self, manifest: Manifest, usable: set[str], listed: bytes | None) -> None:
        indexes = [entry.path for entry in manifest.files if entry.role is FileRole.INDEX]
        index = next((path for path in indexes if path in usable), None)
        indexed = None if index is None else self._index(index)
        if not indexes and [e.path for e in manifest.files if is_weight(e)] != [_SINGLE]:
            self._fail_file("no-index", MANIFEST_NAME, "lists no index of the weight files")
        for entry in manifest.files:
            if entry.path.rpartition("/")[2] in QUANTIZATION_FILES:
                what = "settings of another scheme"
                self._fail_file("stale-quantization-config", entry.path, what)
        structure = self._structure(manifest, indexed)
        groups = RecordGroups(listed, self._collector)
        unread = set()
        weights = [entry for entry in manifest.files if is_weight(entry)]
        headers = self._headers((entry.path for entry in weights), usable)
        for entry, tensors in zip(weights, headers, strict=True):
            records = groups.take(entry.path)
            if tensors is None:
                unread.add(entry.path)
                continue
            structure.add_file(entry.path, tensors)
            if records is not None:
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
