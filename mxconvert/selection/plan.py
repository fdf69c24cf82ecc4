"""What a selection takes of each file: all, nothing, or some tensors. Pure: no I/O.

Where experts lie in files of their own, files are taken whole or left. A file of which only
some tensors are wanted becomes a new one, with those tensors in their order.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from mxconvert.model import FileRole, OutputTensor
from mxconvert.safetensors_format import build_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mxconvert.manifest import FileEntry, Manifest, TensorRecord
    from mxconvert.selection.selection import Selection

WEIGHT_ROLES = frozenset({FileRole.DENSE, FileRole.EXPERTS, FileRole.MIXED})
_METADATA = {"format": "pt"}
_DIGITS = 12


@dataclass(frozen=True)
class PartFile:
    """A new file with some tensors of one of the artifact's.

    Attributes:
        source: The artifact's file.
        records: The wanted tensors as they lie in it, in their order.
    """

    source: FileEntry
    records: tuple[TensorRecord, ...]

    @cached_property
    def path(self) -> str:
        """Its name: that of the source, and a digest of the names of its tensors."""
        names = "\n".join(record.name for record in self.records)
        digest = hashlib.sha256(names.encode()).hexdigest()[:_DIGITS]
        path = PurePosixPath(self.source.path)
        return str(path.with_name(f"{path.stem}.part-{digest}{path.suffix}"))

    @cached_property
    def header(self) -> bytes:
        """Its first bytes: length and JSON of the safetensors format."""
        return build_header(self._outputs(), _METADATA)

    def _outputs(self) -> Iterator[OutputTensor]:
        position = 0
        for record in self.records:
            size = record.end - record.begin
            yield OutputTensor(record.name, record.dtype, record.shape, position, position + size)
            position += size

    @cached_property
    def moved(self) -> tuple[TensorRecord, ...]:
        """The tensors as they lie in the new file."""
        position, found = len(self.header), []
        for record in self.records:
            end = position + record.end - record.begin
            found.append(replace(record, file=self.path, begin=position, end=end))
            position = end
        return tuple(found)

    @property
    def size(self) -> int:
        """Bytes of the new file."""
        return len(self.header) + self.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(record.end - record.begin for record in self.records)


@dataclass(frozen=True)
class SelectionPlan:
    """What a selection takes.

    Attributes:
        selection: The selection.
        files: Files that are taken as they are, the index left out unless all is taken.
        parts: New files.
        index: The artifact's index, which is filtered; ``None`` if it has none.
        joint_bytes: Of tensors that hold experts which are not wanted together with some that
            are, and are taken whole.
    """

    selection: Selection
    files: tuple[FileEntry, ...]
    parts: tuple[PartFile, ...]
    index: FileEntry | None
    joint_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes to fetch, without the index."""
        return sum(entry.size for entry in self.files) + sum(part.num_bytes for part in self.parts)


def plan_selection(
    manifest: Manifest, selection: Selection, records: Callable[[], Iterable[TensorRecord]]
) -> SelectionPlan:
    """Return what a selection takes of an artifact.

    Args:
        manifest: Of the artifact.
        selection: What is wanted.
        records: Returns the tensor list; called only if some file has to be looked into.
    """
    index = next((entry for entry in manifest.files if entry.role is FileRole.INDEX), None)
    wanted = set(selection.experts)
    files, mixed = _sorted_out(manifest, selection, wanted, index)
    parts: list[PartFile] = []
    joint = 0
    for entry, held in _by_file(mixed, records):
        taken = [record for record in held if _is_wanted(record, wanted)]
        joint += sum(record.end - record.begin for record in taken if _is_joint(record, wanted))
        if len(taken) == len(held):
            files.append(entry)
        elif taken:
            parts.append(PartFile(entry, tuple(taken)))
    files.sort(key=lambda entry: entry.path)
    return SelectionPlan(selection, tuple(files), tuple(parts), index, joint)


def _sorted_out(
    manifest: Manifest, selection: Selection, wanted: set[int], index: FileEntry | None
) -> tuple[list[FileEntry], list[FileEntry]]:
    """Return the files that are taken whole, and those that have to be looked into."""
    dense = [entry for entry in manifest.files if entry.role is FileRole.DENSE]
    number, count = selection.dense_slice or (0, 1)
    left = {entry.path for at, entry in enumerate(dense) if at % count != number}
    whole, mixed = [], []
    for entry in manifest.files:
        if entry is index or entry.path in left:
            continue
        if entry.role is FileRole.MIXED:
            mixed.append(entry)
        elif entry.experts is None:
            whole.append(entry)
        else:
            held = set(range(entry.experts[0], entry.experts[1] + 1))
            if held <= wanted:
                whole.append(entry)
            elif held & wanted:
                mixed.append(entry)
    return whole, mixed


def _by_file(
    entries: list[FileEntry], records: Callable[[], Iterable[TensorRecord]]
) -> Iterator[tuple[FileEntry, list[TensorRecord]]]:
    if not entries:
        return
    found: defaultdict[str, list[TensorRecord]] = defaultdict(list)
    names = {entry.path for entry in entries}
    for record in records():
        if record.file in names:
            found[record.file].append(record)
    for entry in entries:
        yield entry, found[entry.path]


def _is_wanted(record: TensorRecord, wanted: set[int]) -> bool:
    if record.experts is None:
        return True
    return any(expert in wanted for expert in range(record.experts[0], record.experts[1] + 1))


def _is_joint(record: TensorRecord, wanted: set[int]) -> bool:
    if record.experts is None:
        return False
    held = range(record.experts[0], record.experts[1] + 1)
    return not all(expert in wanted for expert in held)
