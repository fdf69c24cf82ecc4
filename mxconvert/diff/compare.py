"""`compare_folders`: pair the tensors of two folders by name, and say what differs."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.diff.documents import config_changes, file_changes, manifest_changes
from mxconvert.diff.folder import Folder, Unit, open_folder
from mxconvert.diff.payload import Payload, PayloadCheck
from mxconvert.diff.records import DIFFERENT, Comparison, Difference, RoleSizes, Side, Status
from mxconvert.errors import Interrupted, UsageError
from mxconvert.events import Advanced, Started, ignore
from mxconvert.quantize import FloatType, load_backend
from mxconvert.recipes.families import DENSE
from mxconvert.source import SourceReader
from mxconvert.statistics import Sums
from mxconvert.stop import StopToken
from mxconvert.workers import default_jobs, map_bounded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from mxconvert.events import Reporter
    from mxconvert.recipes import Classifier
    from mxconvert.statistics import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """How deep to look.

    Attributes:
        read: Whether tensors whose digests are not in the tensor lists are read.
        values: Whether the values of weights that differ are compared.
        jobs: Threads; ``None`` chooses.
    """

    read: bool = True
    values: bool = False
    jobs: int | None = None


def compare_folders(
    a: Path,
    b: Path,
    options: DiffOptions,
    reporter: Reporter = ignore,
    *,
    stop: StopToken | None = None,
) -> Comparison:
    """Compare two folders: artifacts of any tool, or checkpoints.

    Args:
        a: The first.
        b: The second.
        options: How deep to look.
        reporter: Told about progress, from several threads.
        stop: Set from a signal handler to end early.

    Raises:
        UsageError: ``values`` without ``read``.
        SourceError: A folder is damaged, or changes while it is read.
        VerificationError: A manifest or tensor list is damaged.
        LocalError: Something cannot be read.
        Interrupted: ``stop`` was set.
    """
    if options.values and not options.read:
        raise UsageError("--values reads the weights, --no-read forbids it", hint="drop one")
    folders = open_folder(a, b), open_folder(b, a)
    stop = stop or StopToken()
    with ExitStack() as stack:
        one, other = (_payload(folder, stack) for folder in folders)
        stack.enter_context(stop.watched())

        def advanced(num_bytes: int) -> None:
            if stop.signum is not None:
                raise Interrupted(stop.signum)
            reporter(Advanced(num_bytes=num_bytes))

        check = PayloadCheck(one, other, _decoder(), advanced)
        work = _Work(folders[0].units, folders[1].units, check, options)
        reporter(Started(what="compare", total_bytes=work.total_bytes(), total_files=0))
        found = list(map_bounded(work, work.names, options.jobs or default_jobs()))
    return _comparison((a, b), folders, found, options)


def _payload(folder: Folder, stack: ExitStack) -> Payload:
    reader = SourceReader(folder.checkpoint.root, folder.checkpoint.files)
    return Payload(stack.enter_context(reader), folder.digests)


def _decoder() -> Decoder:
    backend = load_backend("auto")
    return lambda codes, scales, out: backend.dequantize(codes, scales, FloatType.F32, out)


class _Work:
    """The comparison of one name; called from several threads."""

    def __init__(
        self,
        a: Mapping[str, Unit],
        b: Mapping[str, Unit],
        check: PayloadCheck,
        options: DiffOptions,
    ) -> None:
        self.names = sorted(a.keys() | b.keys())
        self._a, self._b = a, b
        self._check = check
        self._options = options

    def total_bytes(self) -> int:
        """Return about how many bytes will be read."""
        return sum(
            unit.size + self._b[name].size
            for name, unit in self._a.items()
            if name in self._b and not self._check.known(unit, self._b[name])
        )

    def __call__(self, name: str) -> Difference:
        a, b = self._a.get(name), self._b.get(name)
        status = self._status(a, b)
        if status not in DIFFERENT:
            return Difference(name, status, None, None)
        values = None
        if self._options.values and a is not None and b is not None:
            values = self._check.measure(a, b)
        forms = (None if a is None else a.form, None if b is None else b.form)
        return Difference(name, status, forms[0], forms[1], values)

    def _status(self, a: Unit | None, b: Unit | None) -> Status:
        if a is None:
            return Status.ONLY_B
        if b is None:
            return Status.ONLY_A
        if a.packed != b.packed:
            return Status.FORM if a.shape == b.shape else Status.SHAPE
        if a.form != b.form:
            return Status.SHAPE
        if not self._options.read and not self._check.known(a, b):
            return Status.UNREAD
        return Status.SAME if self._check.equal(a, b) else Status.BYTES


def _comparison(
    paths: tuple[Path, Path],
    folders: tuple[Folder, Folder],
    found: list[Difference],
    options: DiffOptions,
) -> Comparison:
    one, other = folders
    differing = [entry for entry in found if entry.status in DIFFERENT]
    differing.sort(key=lambda entry: (DIFFERENT.index(entry.status), entry.name))
    measured = [entry.values for entry in differing if entry.values is not None]
    paired = sum(entry.a is not None and entry.b is not None for entry in differing)
    quantization, config = config_changes(one.checkpoint.config, other.checkpoint.config)
    return Comparison(
        a=_side(paths[0], one),
        b=_side(paths[1], other),
        counts=Counter(entry.status for entry in found),
        tensors=tuple(differing),
        moved=_moved(one, other),
        roles=_roles(one, other, {entry.name for entry in differing}),
        quantization=tuple(quantization),
        config=tuple(config),
        files=tuple(file_changes(one.checkpoint, other.checkpoint)),
        manifest=tuple(manifest_changes(one.manifest, other.manifest)),
        values=sum(measured, Sums()) if options.values else None,
        not_measured=paired - len(measured) if options.values else 0,
        read=options.read,
    )


def _side(path: Path, folder: Folder) -> Side:
    return Side(
        path=str(path),
        artifact=folder.artifact,
        tensors=len(folder.checkpoint.tensors),
        size_bytes=sum(unit.size for unit in folder.units.values()),
        packed=sum(unit.packed for unit in folder.units.values()),
    )


def _moved(one: Folder, other: Folder) -> int:
    return sum(
        unit.parts[0].file != other.units[name].parts[0].file
        for name, unit in one.units.items()
        if name in other.units
    )


def _roles(one: Folder, other: Folder, differing: set[str]) -> tuple[RoleSizes, ...]:
    classify = _classifier(one, other)
    sums: dict[str, list[int]] = defaultdict(lambda: [0] * 5)
    for place, units in ((0, one.units), (2, other.units)):
        _add_sizes(sums, place, units.values(), classify)
    for name in differing:
        sums[classify(name).role][4] += 1
    return tuple(RoleSizes(role, *sums[role]) for role in sorted(sums))


def _add_sizes(
    sums: dict[str, list[int]], place: int, units: Iterable[Unit], classify: Classifier
) -> None:
    for unit in units:
        row = sums[classify(unit.name).role]
        row[place] += 1
        row[place + 1] += unit.size


def _classifier(one: Folder, other: Folder) -> Classifier:
    folder = other if one.recipe is DENSE else one
    return folder.recipe.classifier(folder.checkpoint.config)
