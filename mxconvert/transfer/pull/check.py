"""Comparing what lies on disk with the manifest."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from mxconvert.digest import xxh3_128
from mxconvert.errors import VerificationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mxconvert.digest import StreamingHash
    from mxconvert.manifest import FileEntry

_PIECE = 2**20


def is_chunk_right(fd: int, entry: FileEntry, index: int, chunk_size: int) -> bool:
    """Whether a file holds the bytes of a chunk, by XXH3-128."""
    hasher = xxh3_128()
    begin, end = entry.chunk_range(index, chunk_size)
    read = _feed(hasher, fd, begin, end, lambda: None)
    return read == end and hasher.hexdigest() == entry.chunks[index].xxh3_128


def compare_sha256(
    fd: int, entry: FileEntry, where: object, check: Callable[[], None], hint: str
) -> None:
    """Compare a whole file with its SHA-256.

    Args:
        fd: The file.
        entry: What it should be.
        where: What messages name.
        check: Called now and then; raises to end.
        hint: What to do if it differs.

    Raises:
        VerificationError: It differs.
    """
    hasher = hashlib.sha256()
    _feed(hasher, fd, 0, os.fstat(fd).st_size, check)
    found = hasher.hexdigest()
    if found != entry.sha256:
        raise VerificationError(
            f"{where}: SHA-256: expected {entry.sha256}, found {found}",
            hint=hint,
            code="digest",
        )


def _feed(hasher: StreamingHash, fd: int, begin: int, end: int, check: Callable[[], None]) -> int:
    """Hash bytes ``[begin, end)`` as far as the file goes; return where that is."""
    for piece in _pieces(fd, begin, end):
        hasher.update(piece)
        begin += len(piece)
        check()
    return begin


def _pieces(fd: int, begin: int, end: int) -> Iterator[bytes]:
    while begin < end:
        piece = os.pread(fd, min(_PIECE, end - begin), begin)
        if not piece:
            return
        begin += len(piece)
        yield piece
