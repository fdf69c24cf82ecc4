"""The tensor list, file by file, in step with a walk over the files."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from mxconvert.errors import VerificationError
from mxconvert.manifest import TENSORS_NAME, TensorRecord, iter_tensors
from mxconvert.verify.report import Check, Collector

if TYPE_CHECKING:
    from collections.abc import Iterator


class RecordGroups:
    """Records of one file after the other; files must be asked for in sorted order.

    Attributes:
        complete: Whether the list could be read to its end so far.
        count: Records seen so far.
    """

    def __init__(self, data: bytes | None, collector: Collector | None) -> None:
        """Begin to read.

        Args:
            data: The list's bytes, ``None`` if it cannot be read.
            collector: Receives findings; ``None`` on a second pass over the same list.
        """
        self.complete = data is not None
        self.count = 0
        self._collector = collector
        records = iter_tensors(data) if data is not None else iter(())
        self._groups = groupby(records, key=attrgetter("file"))
        self._next = self._draw()

    def take(self, path: str) -> list[TensorRecord] | None:
        """Return a file's records, ``None`` if the list cannot be read up to there."""
        self._skip_before(path)
        if self._next is not None and self._next[0] == path:
            records = self._next[1]
            self._next = self._draw()
            return records
        return [] if self.complete else None

    def finish(self) -> None:
        """Take what is left."""
        self._skip_before(None)

    def _skip_before(self, path: str | None) -> None:
        while self._next is not None and (path is None or self._next[0] < path):
            file, records = self._next
            if self._collector is not None:
                message = f"{TENSORS_NAME}: {len(records)} tensors in {file!r}, no weight file"
                self._collector.fail(Check.STRUCTURE, "not-a-file", message, path=file)
            self._next = self._draw()

    def _draw(self) -> tuple[str, list[TensorRecord]] | None:
        if not self.complete:
            return None
        try:
            file, group = next(self._groups)
            records = list(group)
        except StopIteration:
            return None
        except VerificationError as error:
            self.complete = False
            if self._collector is not None:
                self._collector.fail(Check.STRUCTURE, error.code, error.message, path=TENSORS_NAME)
            return None
        self.count += len(records)
        return file, records


def records_of(data: bytes, usable: set[str]) -> Iterator[TensorRecord]:
    """Yield the records of files in ``usable``, up to where the list is damaged."""
    try:
        for record in iter_tensors(data):
            if record.file in usable:
                yield record
    except VerificationError:
        return
