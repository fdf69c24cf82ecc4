"""Tensors that lie in the folder already, in a file of the artifact or of another selection."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mxconvert.digest import xxh3_128
from mxconvert.transfer.pull.folder import (
    open_partial,
    open_plain,
    partial_path,
    plain_size,
    write_at,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mxconvert.manifest import FileEntry, Manifest, TensorRecord
    from mxconvert.selection import SelectionPlan
    from mxconvert.transfer.pull.context import PullContext

_PIECE = 2**20


def prefill(context: PullContext, entry: FileEntry, local: LocalTensors) -> None:
    """Begin a file of the artifact with its tensors that lie elsewhere.

    Chunks that these fill are noted as done; the pull of the file compares them.

    Raises:
        LocalError: It cannot be written.
    """
    target, pairs = context.target, list(local.of_file(entry))
    there = {plain_size(target, name) for name in (entry.path, partial_path(entry.path))}
    if not pairs or entry.size in there:
        return
    fd = open_partial(target, entry.path, entry.size)
    try:
        path = target / partial_path(entry.path)
        copied = [
            (record.begin, record.end)
            for record, _ in pairs
            if local.copy(record, fd, record.begin, path)
        ]
    finally:
        os.close(fd)
    noted = context.journal.chunk_map(entry)
    noted.open(set(_filled(copied, entry, context.chunk_size)))
    noted.close()


def _filled(ranges: list[tuple[int, int]], entry: FileEntry, chunk_size: int) -> Iterator[int]:
    """Yield the chunks of a file that ascending ranges of bytes fill."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    for index in range(len(entry.chunks)):
        begin, end = entry.chunk_range(index, chunk_size)
        if any(first <= begin and end <= last for first, last in joined):
            yield index


class LocalTensors:
    """Where tensors of the artifact may lie; what they hold is compared before it counts.

    Args:
        target: The folder.
        manifest: Of the artifact.
        held: What the folder held before, if that was a part.
    """

    def __init__(self, target: Path, manifest: Manifest, held: SelectionPlan | None) -> None:
        self._target = target
        self._sizes = {entry.path: entry.size for entry in manifest.files}
        self._moved: dict[str, TensorRecord] = {}
        self._parts = () if held is None else held.parts
        for part in self._parts:
            if plain_size(target, part.path) == part.size:
                self._moved |= {record.name: record for record in part.moved}

    def of_file(self, entry: FileEntry) -> Iterator[tuple[TensorRecord, TensorRecord]]:
        """Yield the tensors of a file that lie elsewhere: as they lie in it, and there."""
        for part in self._parts:
            if part.source.path == entry.path:
                for record in part.records:
                    if record.name in self._moved:
                        yield record, self._moved[record.name]

    def copy(self, record: TensorRecord, fd: int, at: int, path: Path) -> bool:
        """Copy a tensor to a file if it lies somewhere and is right.

        Args:
            record: As it lies in the artifact.
            fd: The file.
            at: Where it goes.
            path: Of the file, for errors.

        Raises:
            LocalError: It cannot be written.
        """
        places = [self._moved[record.name]] if record.name in self._moved else []
        if plain_size(self._target, record.file) == self._sizes.get(record.file):
            places.append(record)
        return any(self._copy(record, place, fd, at, path) for place in places)

    def _copy(
        self, record: TensorRecord, place: TensorRecord, fd: int, at: int, path: Path
    ) -> bool:
        hasher, begin = xxh3_128(), place.begin
        try:
            source = open_plain(self._target, place.file)
        except OSError:
            return False
        try:
            while begin < place.end:
                piece = os.pread(source, min(_PIECE, place.end - begin), begin)
                if not piece:
                    return False
                hasher.update(piece)
                write_at(fd, piece, at, path)
                begin, at = begin + len(piece), at + len(piece)
        except OSError:
            return False
        finally:
            os.close(source)
        return hasher.hexdigest() == record.xxh3_128
