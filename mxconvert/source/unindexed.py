"""Stored tensors that the index does not list.

Three kinds: a second copy of the model (``consolidated*``, or files whose every tensor
an indexed name covers), forgotten weights (a draft layer in a file of its own), and
padding or duplicates inside indexed shards. The first is skipped with a line, the
second is refused unless the user decides, the third is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from mxconvert.errors import SourceError, brief
from mxconvert.model import Skipped, SourceFile, TensorInfo
from mxconvert.source.shards import read_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mxconvert.source.listing import Listing

_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What was decided about unindexed tensors."""

    files: tuple[SourceFile, ...] = ()
    tensors: Mapping[str, TensorInfo]
    skipped_files: tuple[Skipped, ...] = ()
    dropped: tuple[Skipped, ...] = ()
    notices: tuple[tuple[str, str], ...] = ()


def is_second_copy(name: str) -> bool:
    """Whether a file is by its name a second copy of the model."""
    path = PurePosixPath(name)
    return path.name.startswith("consolidated") or path.parts[0] == "original"


def choose_unindexed(
    listing: Listing,
    *,
    index_path: str,
    chosen: Mapping[str, TensorInfo],
    inside: Iterable[TensorInfo],
    unindexed: str | None,
) -> Extras:
    """Decide about every stored tensor that is not a chosen one.

    Args:
        listing: The folder.
        index_path: For messages.
        chosen: The indexed tensors.
        inside: Other tensors stored in indexed shards.
        unindexed: ``"include"``, ``"skip"`` or ``None``.

    Raises:
        SourceError: Weights that no option accounts for, or a name in two places.
    """
    decided = _Decisions(index_path, chosen, unindexed)
    for tensor in inside:
        decided.inside(tensor)
    indexed_files = {tensor.file for tensor in chosen.values()}
    for name in listing.weights:
        if name not in indexed_files:
            decided.file(listing, name)
    return decided.result()


class _Decisions:
    def __init__(
        self, index_path: str, chosen: Mapping[str, TensorInfo], unindexed: str | None
    ) -> None:
        self._index_path = index_path
        self._chosen = chosen
        self._unindexed = unindexed
        self._files: list[SourceFile] = []
        self._tensors: dict[str, TensorInfo] = {}
        self._skipped: list[Skipped] = []
        self._dropped: list[Skipped] = []
        self._notices: list[tuple[str, str]] = []

    def inside(self, tensor: TensorInfo) -> None:
        kept = self._chosen.get(tensor.name)
        if kept is not None:
            self._drop(tensor, f"duplicate in {tensor.file}; the index names {kept.file}")
        elif self._unindexed == "include":
            self._include(tensor)
        else:
            self._drop(tensor, f"in {tensor.file}, but not in {self._index_path}")

    def file(self, listing: Listing, name: str) -> None:
        size = listing.path(name).stat().st_size
        if is_second_copy(name) and self._unindexed != "include":
            self._skip(name, size, "second copy of the weights")
            return
        source_file, tensors = read_header(listing.root, name)
        new = [tensor for tensor in tensors if tensor.name not in self._chosen]
        if not new:
            self._skip(name, size, "every tensor in it copies an indexed one")
        elif self._unindexed == "skip":
            self._skip(name, size, "not in the index (--unindexed skip)")
        elif self._unindexed == "include":
            self._files.append(source_file)
            for tensor in new:
                self._include(tensor)
        else:
            names = [tensor.name for tensor in new]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise SourceError(
                f"{name}: {len(names)} tensors are not in {self._index_path}: "
                f"{', '.join(names[:_SHOWN])}{more}",
                hint="pass --unindexed include to convert them too, or --unindexed skip to "
                "leave the file out",
                code="unindexed-weights",
            )

    def _include(self, tensor: TensorInfo) -> None:
        other = self._tensors.setdefault(tensor.name, tensor)
        if other is not tensor:
            raise SourceError(
                f"tensor {brief(tensor.name)} is in {other.file} and in {tensor.file}, and the "
                "index names neither",
                hint="remove the file that does not belong to the model",
                code="ambiguous-shards",
            )

    def _drop(self, tensor: TensorInfo, reason: str) -> None:
        self._dropped.append(Skipped(tensor.name, reason, tensor.size))
        self._notices.append(("dropped-tensor", f"{tensor.name}: left out: {reason}"))

    def _skip(self, name: str, size: int, reason: str) -> None:
        self._skipped.append(Skipped(name, reason, size))
        self._notices.append(("skipped-weights", f"{name} ({size} bytes): skipped: {reason}"))

    def result(self) -> Extras:
        return Extras(
            files=tuple(self._files),
            tensors=self._tensors,
            skipped_files=tuple(self._skipped),
            dropped=tuple(self._dropped),
            notices=tuple(self._notices),
        )
