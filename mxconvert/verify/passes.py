"""One pass over the bytes of a file: digests of it, its chunks and its tensors."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mxconvert.digest import ChunkHasher, xxh3_128
from mxconvert.verify.structure import SCALE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mxconvert.digest import FileDigest, StreamingHash
    from mxconvert.manifest import FileEntry, TensorRecord
    from mxconvert.verify.place import Piece

_NAN_SCALE = re.compile(rb"\xff")


@dataclass(slots=True)
class Span:
    """One tensor of the file under way."""

    record: TensorRecord
    hasher: StreamingHash
    nan_at: int | None = None

    def update(self, offset: int, piece: memoryview) -> None:
        """Take the tensor's next bytes, which begin at ``offset`` of the file."""
        self.hasher.update(piece)
        if self.nan_at is None and self.record.name.endswith(SCALE):
            found = _NAN_SCALE.search(piece)
            if found is not None:
                self.nan_at = offset + found.start() - self.record.begin

    def copy(self) -> Span:
        """Return another one in the same state."""
        return Span(self.record, self.hasher.copy(), self.nan_at)


@dataclass(slots=True)
class TensorPass:
    """Hashes each tensor of a file while its bytes go by, and looks at scale bytes.

    Records must be sorted by their begin and must not overlap.
    """

    records: Sequence[TensorRecord]
    spans: list[Span] = field(default_factory=list)
    _next: int = 0
    _marked: tuple[int, Span | None] = (0, None)

    def update(self, offset: int, piece: memoryview) -> None:
        """Take the next bytes of the file, which begin at ``offset``."""
        stop = offset + len(piece)
        while self._next < len(self.records):
            record = self.records[self._next]
            if record.begin >= stop and record.end > record.begin:
                return
            if len(self.spans) == self._next:
                self.spans.append(Span(record, xxh3_128()))
            first, last = max(record.begin, offset), min(record.end, stop)
            if first < last:
                self.spans[self._next].update(first, piece[first - offset : last - offset])
            if record.end > stop:
                return
            self._next += 1

    def mark(self) -> None:
        """Note the state for `rewind`."""
        begun = len(self.spans) > self._next
        self._marked = self._next, self.spans[self._next].copy() if begun else None

    def rewind(self) -> None:
        """Go back to where `mark` was called last; once only."""
        self._next, begun = self._marked
        del self.spans[self._next :]
        if begun is not None:
            self.spans.append(begun)


class FilePass:
    """Digests a file's bytes in order; asks once for a chunk again that is not right.

    Attributes:
        offset: The byte that has to come next.
        tensors: The tensors so far.
        mended: Chunks that were right when they came again.
    """

    def __init__(self, entry: FileEntry, chunk_size: int, records: Sequence[TensorRecord]) -> None:
        self.offset = 0
        self.tensors = TensorPass(records)
        self.mended: list[int] = []
        self._entry = entry
        self._chunk_size = chunk_size
        self._chunks = ChunkHasher(chunk_size)
        self._sha = self._marked = hashlib.sha256()
        self._doubted = -1
        self._mark()

    def update(self, piece: Piece) -> bool:
        """Take the next bytes.

        Returns:
            Whether to go on; if not, bytes from `offset`, now less than before, have to
            come again.
        """
        view = memoryview(piece)
        while view:
            taken = view[: self._chunk_end - self.offset]
            self._sha.update(taken)
            self._chunks.update(taken)
            self.tensors.update(self.offset, taken)
            self.offset += len(taken)
            view = view[len(taken) :]
            if self.offset == self._chunk_end and not self._accept():
                return False
        return True

    def finish(self) -> FileDigest:
        """Return the digests of everything."""
        return self._chunks.finish(self._sha.hexdigest())

    def _mark(self) -> None:
        self._begin = self.offset
        self._chunk_end = min(self.offset + self._chunk_size, self._entry.size)
        self._marked = self._sha.copy()
        self.tensors.mark()

    def _accept(self) -> bool:
        """Keep the chunk that is complete if it is right, or was asked for again."""
        index = self._begin // self._chunk_size
        right = self._chunks.end_chunk() == self._entry.chunks[index]
        if not right and self._doubted != index:
            self._doubted = index
            self._chunks.take_back(self.offset - self._begin)
            self._sha = self._marked
            self.tensors.rewind()
            self.offset = self._begin
            return False
        if right and self._doubted == index:
            self.mended.append(index)
        self._mark()
        return True
