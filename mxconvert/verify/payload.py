"""Which bytes of an artifact are compared with digests, and comparing them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.events import Started
from mxconvert.model import FileRole
from mxconvert.sample import Sample
from mxconvert.verify.digests import DigestCheck, DigestTask
from mxconvert.verify.listing import RecordGroups
from mxconvert.verify.report import Level

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxconvert.events import Reporter
    from mxconvert.manifest import FileEntry, Manifest
    from mxconvert.verify.options import VerifyOptions
    from mxconvert.verify.place import Mapper, Place
    from mxconvert.verify.report import Collector

SMALL = 64 * 2**20
"""Bytes up to which a file that holds no weights is read whole where weights are not."""

_WEIGHTS = frozenset({FileRole.DENSE, FileRole.EXPERTS, FileRole.MIXED})
_WEIGHT_SUFFIX = ".safetensors"


def is_weight(entry: FileEntry) -> bool:
    """Whether a file holds tensors."""
    return entry.role in _WEIGHTS or entry.path.endswith(_WEIGHT_SUFFIX)


@dataclass(frozen=True, slots=True)
class _Part:
    """A file to read: whole, or only some chunks."""

    entry: FileEntry
    chunks: range | None = None

    def size(self, chunk_size: int) -> int:
        """Return the bytes to read."""
        size = self.entry.size
        if self.chunks is None:
            return size
        return sum(min(chunk_size, size - index * chunk_size) for index in self.chunks)


@dataclass(frozen=True, slots=True)
class Payload:
    """Compares bytes with digests, as many as the options ask for."""

    place: Place
    options: VerifyOptions
    collector: Collector
    report: Reporter
    map_files: Mapper

    def check(self, manifest: Manifest, usable: set[str], listed: bytes | None) -> None:
        """Read files, or chunks of them, and compare.

        Args:
            manifest: What the artifact is.
            usable: Paths of files that are worth reading.
            listed: The tensor list, if it can be read.
        """
        parts = [part for part in self._parts(manifest) if part.entry.path in usable]
        size = sum(part.size(manifest.chunk_size) for part in parts)
        self.report(Started(what="verify", total_bytes=size, total_files=len(parts)))
        check = DigestCheck(self.place, manifest.chunk_size, self.collector, self.report)

        def tasks() -> Iterator[DigestTask]:
            groups = RecordGroups(listed, None)
            for part in parts:
                yield DigestTask(part.entry, groups.take(part.entry.path) or (), part.chunks)

        for _ in self.map_files(check.check, tasks()):
            pass

    def _parts(self, manifest: Manifest) -> Iterator[_Part]:
        if self.options.level is Level.STRUCTURE:
            return self._small(manifest)
        if self.options.level is Level.DIGEST and self.options.sample is not None:
            return self._sampled(manifest, Sample.parse(self.options.sample))
        return map(_Part, manifest.files)

    def _small(self, manifest: Manifest) -> Iterator[_Part]:
        self.collector.skip("no byte of the weights was compared with a digest")
        for entry in manifest.files:
            if not is_weight(entry) and entry.size <= SMALL:
                yield _Part(entry)
            elif not is_weight(entry):
                self.collector.skip(f"{entry.path} is large and was not compared with a digest")

    def _sampled(self, manifest: Manifest, sample: Sample) -> Iterator[_Part]:
        number, parts = sample.number, sample.parts
        self.collector.skip(
            f"only part {number} of {parts} of the chunks was compared, and no SHA-256 of a weight "
            f"file; --sample N/{parts} selects another part"
        )
        position = 0
        for entry in manifest.files:
            count = len(entry.chunks)
            chunks = sample.within(position, count)
            position += count
            if not is_weight(entry) and entry.size <= SMALL:
                yield _Part(entry)
            elif chunks:
                yield _Part(entry, chunks)
