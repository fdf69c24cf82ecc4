"""The numeric level: make every weight again from the source and compare bit for bit.

The numpy kernels are used, so that the result does not depend on the code that wrote the
artifact. Tensors go through in pieces of whole blocks; a large one is never in memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mxconvert.digest import xxh3_128
from mxconvert.events import Advanced
from mxconvert.model import BLOCK_SIZE
from mxconvert.statistics import ITEM_SIZES, PIECE_ELEMENTS, Place, StoredWeight
from mxconvert.verify.report import Check, Collector
from mxconvert.verify.structure import PACKED, SCALE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mxconvert.events import Reporter
    from mxconvert.folder import Folder
    from mxconvert.manifest import TensorRecord
    from mxconvert.model import Checkpoint, TensorInfo
    from mxconvert.quantize import Quantizer
    from mxconvert.source import SourceReader

PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Unit:
    """What is compared as one: a copied tensor, or codes and scales of one weight."""

    records: tuple[TensorRecord, ...]

    @property
    def packed(self) -> bool:
        """Whether the unit is a quantized weight."""
        return len(self.records) > 1

    @property
    def name(self) -> str:
        """The stored name, of the codes if there are two."""
        return self.records[0].name

    @property
    def weight(self) -> StoredWeight:
        """Where the codes and scales of a quantized weight lie."""
        codes, scales = self.records
        return StoredWeight(Place(codes.file, codes.begin), Place(scales.file, scales.begin))


def units_of(records: Iterable[TensorRecord]) -> Iterator[Unit]:
    """Pair each weight's codes with the scales that follow them."""
    codes: TensorRecord | None = None
    for record in records:
        if codes is not None:
            scales = codes.name.removesuffix(PACKED) + SCALE
            if record.name == scales and record.file == codes.file:
                yield Unit((codes, record))
                codes = None
                continue
            yield Unit((codes,))
            codes = None
        if record.name.endswith(PACKED):
            codes = record
        else:
            yield Unit((record,))
    if codes is not None:
        yield Unit((codes,))


class ArtifactReader:
    """Ranges of the artifact's files; may be shared between threads.

    A file is opened for each range, so that no number of files exhausts descriptors.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from a file of the artifact.

        Raises:
            OSError: It cannot be read, or ends early.
        """
        fd = self._folder.open(path)
        try:
            done = 0
            while done < len(buffer):
                count = os.preadv(fd, [buffer[done:]], offset + done)
                if count == 0:
                    raise OSError(0, f"it ends at byte {offset + done}")
                done += count
        finally:
            os.close(fd)


class NumericCheck:
    """Compares units with the source; one instance serves all threads."""

    def __init__(
        self,
        *,
        files: ArtifactReader,
        checkpoint: Checkpoint,
        reader: SourceReader,
        quantizer: Quantizer | None,
        collector: Collector,
        reporter: Reporter,
    ) -> None:
        self._files = files
        self._tensors = checkpoint.tensors
        self._reader = reader
        self._quantizer = quantizer
        self._collector = collector
        self._report = reporter

    def check(self, unit: Unit) -> None:
        """Make one unit again and compare.

        Raises:
            SourceError: The source changed since its headers were read.
            LocalError: The source cannot be read.
        """
        record = unit.records[0]
        self._collector.look(record.file, Check.NUMERIC)
        source = self.source_of(unit)
        if source is None:
            return
        try:
            hexdigest = (
                self._quantized(unit, source) if unit.packed else self.compare_copy(unit, source)
            )
        except OSError as error:
            self._fail("unreadable", record, f"cannot be read: {error.strerror}")
            return
        self._collector.count("tensors_recomputed" if unit.packed else "tensors_compared")
        stated = record.sources[0].xxh3_128
        if hexdigest != stated:
            what = f"XXH3-128 of source tensor {source.name!r}"
            self._fail("source-tensor", record, what, expected=stated, found=hexdigest)

    def _fail(self, code: str, record: TensorRecord, what: str, **values: object) -> None:
        message = f"{record.file}: tensor {record.name!r}: {what}"
        self._collector.fail(
            Check.NUMERIC, code, message, path=record.file, tensor=record.name, **values
        )

    def source_of(self, unit: Unit) -> TensorInfo | None:
        """Return the one whole source tensor of a unit, if it is one and fits."""
        record = unit.records[0]
        if len(record.sources) != 1 or record.sources[0].selection or record.sources[0].axes:
            self._collector.count("tensors_not_recomputed")
            self._collector.skip(
                "tensors made from several source tensors or from parts of one were not recomputed"
            )
            return None
        stated = record.sources[0]
        source = self._tensors.get(stated.name)
        if source is None:
            self._fail("no-source-tensor", record, f"the source lacks {stated.name!r}")
            return None
        expected, found = (stated.dtype, list(stated.shape)), (source.dtype, list(source.shape))
        if expected != found:
            what = f"dtype and shape of source tensor {source.name!r}"
            self._fail("source-tensor", record, what, expected=expected, found=found)
            return None
        if not self._sizes_fit(unit, source):
            self._fail("source-tensor", record, f"its size does not follow from {source.name!r}")
            return None
        return source

    @staticmethod
    def _sizes_fit(unit: Unit, source: TensorInfo) -> bool:
        sizes = [record.end - record.begin for record in unit.records]
        if not unit.packed:
            return sizes == [source.size]
        elements, rest = divmod(source.size, ITEM_SIZES.get(source.dtype, 1))
        blocks = elements // BLOCK_SIZE
        whole = source.dtype in ITEM_SIZES and not rest and not elements % BLOCK_SIZE
        return whole and sizes == [blocks * BLOCK_SIZE // 2, blocks]

    def compare_copy(self, unit: Unit, source: TensorInfo) -> str:
        """Compare a copied tensor byte by byte; return the source tensor's XXH3-128.

        Raises:
            OSError: The artifact cannot be read.
        """
        record, hasher, differs = unit.records[0], xxh3_128(), False
        for begin in range(0, source.size, PIECE_BYTES):
            count = min(PIECE_BYTES, source.size - begin)
            stored, original = bytearray(count), bytearray(count)
            self._files.read_into(record.file, record.begin + begin, memoryview(stored))
            self._reader.read_into(source.file, source.offset + begin, memoryview(original))
            hasher.update(original)
            self._report(Advanced(num_bytes=count))
            if stored != original and not differs:
                differs = True
                at = begin + _first_difference(stored, original)
                what = f"differs from source tensor {source.name!r}, first at byte {at}"
                self._fail("copy-differs", record, what)
        return hasher.hexdigest()

    def _quantized(self, unit: Unit, source: TensorInfo) -> str:
        if self._quantizer is None:
            raise AssertionError("weights of an unknown scale rule are measured, not made again")
        item, hasher, differs = ITEM_SIZES[source.dtype], xxh3_128(), False
        elements = source.size // item
        for begin in range(0, elements, PIECE_ELEMENTS):
            count = min(PIECE_ELEMENTS, elements - begin)
            original = bytearray(count * item)
            self._reader.read_into(source.file, source.offset + begin * item, memoryview(original))
            hasher.update(original)
            made = (bytearray(count // 2), bytearray(count // BLOCK_SIZE))
            self._quantizer.quantize(
                memoryview(original), source.dtype, memoryview(made[0]), memoryview(made[1])
            )
            stored = self._stored(unit, begin, count)
            self._report(Advanced(num_bytes=len(original)))
            if stored != made and not differs:
                differs = True
                self._name_block(unit, begin // BLOCK_SIZE, made, stored)
        return hasher.hexdigest()

    def _stored(self, unit: Unit, begin: int, count: int) -> tuple[bytearray, bytearray]:
        return unit.weight.read(self._files, begin // BLOCK_SIZE, count // BLOCK_SIZE)

    def _name_block(
        self,
        unit: Unit,
        before: int,
        made: Sequence[bytearray],
        stored: Sequence[bytearray],
    ) -> None:
        """Report the first block of a piece that differs."""
        half = BLOCK_SIZE // 2
        codes = np.frombuffer(made[0], np.uint8) != np.frombuffer(stored[0], np.uint8)
        scales = np.frombuffer(made[1], np.uint8) != np.frombuffer(stored[1], np.uint8)
        at = int(np.argmax(codes.reshape(-1, half).any(axis=1) | scales))
        row, block = divmod(before + at, unit.records[1].shape[-1])
        part = slice(at * half, (at + 1) * half)
        self._fail(
            "codes-differ",
            unit.records[0],
            f"differs from what the source gives, first in row {row}, block {block}: scale, codes",
            expected=f"{made[1][at]}, {made[0][part].hex()}",
            found=f"{stored[1][at]}, {stored[0][part].hex()}",
        )


def _first_difference(one: bytearray, other: bytearray) -> int:
    return int(np.argmax(np.frombuffer(one, np.uint8) != np.frombuffer(other, np.uint8)))
