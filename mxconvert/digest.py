"""Digests of files while they stream past.

Three kinds, each for its own purpose:

* SHA-256 of the whole file stands against tampering and names the content;
* CRC64-NVME of each chunk, combined into that of the file, is what object stores
  check on the wire (`x-amz-checksum-crc64nvme`);
* XXH3-128 of each chunk and tensor finds accidents at memory speed.

All are written as lowercase hexadecimal, most significant byte first.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import xxhash

from mxconvert.crc import combine_crc64nvme, crc64nvme

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

CHUNK_SIZE = 16 * 1024 * 1024
"""Bytes per digest chunk; the last chunk of a file is shorter."""


@dataclass(frozen=True, slots=True)
class ChunkDigest:
    """Digests of one chunk: XXH3-128 and CRC64-NVME, hexadecimal."""

    xxh3_128: str
    crc64nvme: str


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Digests of a whole file and of its 16 MiB chunks."""

    size_bytes: int
    sha256: str
    crc64nvme: str
    chunks: tuple[ChunkDigest, ...]


class StreamingHash(Protocol):
    """The part of hashlib's interface that is used here."""

    def update(self, data: Buffer, /) -> None:
        """Take in more bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""

    def copy(self) -> StreamingHash:
        """Return another one that has taken in the same bytes."""


def xxh3_128() -> StreamingHash:
    """Return a new streaming XXH3-128."""
    return xxhash.xxh3_128()


def xxh3_128_hex(data: Buffer) -> str:
    """Return the XXH3-128 of ``data``."""
    return xxhash.xxh3_128_hexdigest(data)


class ChunkHasher:
    """XXH3-128 and CRC64-NVME of each chunk of a byte stream, in order."""

    def __init__(self, chunk_size: int = CHUNK_SIZE) -> None:
        self._chunk_size = chunk_size
        self._xxh = xxhash.xxh3_128()
        self._crc = 0
        self._room = chunk_size
        self._chunks: list[ChunkDigest] = []
        self._file_crc = self._crc_before = 0
        self.size_bytes = 0

    def update(self, data: Buffer) -> None:
        """Take the next bytes of the stream."""
        view = memoryview(data).cast("B")
        self.size_bytes += len(view)
        while len(view) >= self._room:
            self._take(view[: self._room])
            view = view[self._room :]
            self._room = 0
            self.end_chunk()
        if len(view):
            self._take(view)
            self._room -= len(view)

    def _take(self, view: memoryview) -> None:
        self._xxh.update(view)
        self._crc = crc64nvme(view, self._crc)

    def end_chunk(self) -> ChunkDigest:
        """End the chunk under way, if there is one, and return the last one's digests."""
        if self._room < self._chunk_size:
            length = self._chunk_size - self._room
            self._chunks.append(ChunkDigest(self._xxh.hexdigest(), f"{self._crc:016x}"))
            self._crc_before = self._file_crc
            self._file_crc = combine_crc64nvme(self._file_crc, self._crc, length)
            self._xxh = xxhash.xxh3_128()
            self._crc, self._room = 0, self._chunk_size
        return self._chunks[-1]

    def take_back(self, length: int) -> None:
        """Forget the chunk that was ended last, of ``length`` bytes; once only."""
        self._chunks.pop()
        self._file_crc = self._crc_before
        self.size_bytes -= length

    def finish(self, sha256: str) -> FileDigest:
        """Return the digests of the whole stream; ``sha256`` was computed beside."""
        if self._room < self._chunk_size:
            self.end_chunk()
        return FileDigest(self.size_bytes, sha256, f"{self._file_crc:016x}", tuple(self._chunks))


def digest_bytes(data: Buffer) -> FileDigest:
    """Return every digest of a small in-memory file."""
    chunks = ChunkHasher()
    chunks.update(data)
    return chunks.finish(hashlib.sha256(data).hexdigest())
