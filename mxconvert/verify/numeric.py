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
from mxconvert.fp8 import to_bf16
from mxconvert.model import BLOCK_SIZE, Action, output_size
from mxconvert.provenance import Origins, UnknownOriginError, is_repacked
from mxconvert.safetensors_format import DTYPE_BITS
from mxconvert.source.gather import tensor_pieces
from mxconvert.source.rows import matrix_rows
from mxconvert.source.scales import load_scales
from mxconvert.statistics import PIECE_ELEMENTS, Place, StoredWeight, Window
from mxconvert.verify.report import Check, Collector
from mxconvert.verify.structure import PACKED, SCALE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mxconvert.events import Reporter
    from mxconvert.folder import Folder
    from mxconvert.manifest import TensorRecord
    from mxconvert.model import Checkpoint, TensorInfo
    from mxconvert.quantize import Quantizer
    from mxconvert.source import SourceReader
    from mxconvert.source.rows import Rows

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
    def is_quantized(self) -> bool:
        """Whether it is a weight that was none of MXFP4 before."""
        return self.packed and not is_repacked(self.records[0])

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
        self._origins = Origins(checkpoint.tensors, checkpoint.config)
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
        self._collector.look(unit.records[0].file, Check.NUMERIC)
        quantized = unit.is_quantized
        for record in unit.records[:1] if quantized else unit.records:
            source = self.source_of(record, packed=quantized)
            if source is None:
                continue
            try:
                digests = self._compare(unit if quantized else Unit((record,)), source)
            except OSError as error:
                self._fail("unreadable", record, f"cannot be read: {error.strerror}")
                continue
            what = "compared" if source.scale is None and not quantized else "recomputed"
            self._collector.count(f"tensors_{what}")
            self._check_digests(record, digests)

    def _compare(self, unit: Unit, source: TensorInfo) -> tuple[str, ...]:
        if unit.packed or source.scale is not None or source.transposed:
            return self._made_again(unit, source)
        return (self.compare_copy(unit, source),)

    def _check_digests(self, record: TensorRecord, digests: Iterable[str]) -> None:
        for source, found in zip(record.sources, digests, strict=True):
            if found != source.xxh3_128:
                what = f"XXH3-128 of source tensor {source.name!r}"
                self._fail("source-tensor", record, what, expected=source.xxh3_128, found=found)

    def _fail(self, code: str, record: TensorRecord, what: str, **values: object) -> None:
        message = f"{record.file}: tensor {record.name!r}: {what}"
        self._collector.fail(
            Check.NUMERIC, code, message, path=record.file, tensor=record.name, **values
        )

    def source_of(self, record: TensorRecord, *, packed: bool) -> TensorInfo | None:
        """Return what a tensor was made from, ``None`` after a finding.

        Args:
            record: The tensor; of a quantized weight its codes.
            packed: Whether it holds the codes of a quantized weight.
        """
        try:
            source = self._origins.weight(record) if packed else self._origins.copied(record)
        except UnknownOriginError as error:
            code = "no-source-tensor" if error.absent else "source-tensor"
            values = {"expected": error.expected, "found": error.found} if error.expected else {}
            self._fail(code, record, str(error), **values)
            return None
        if not packed and record.end - record.begin != output_size(source, _action(source)):
            self._fail("source-tensor", record, f"its size does not follow from {source.name!r}")
            return None
        return source

    def compare_copy(self, unit: Unit, source: TensorInfo) -> str:
        """Compare a copied tensor byte by byte; return the source tensor's XXH3-128.

        Raises:
            OSError: The artifact cannot be read.
        """
        record, hasher, begin, differs = unit.records[0], xxh3_128(), 0, False
        for original in tensor_pieces(self._reader, source, PIECE_BYTES):
            stored = bytearray(len(original))
            self._files.read_into(record.file, record.begin + begin, memoryview(stored))
            hasher.update(original)
            self._report(Advanced(num_bytes=len(original)))
            if stored != original and not differs:
                differs = True
                at = begin + _first_difference(stored, original)
                what = f"differs from source tensor {source.name!r}, first at byte {at}"
                self._fail("copy-differs", record, what)
            begin += len(original)
        return hasher.hexdigest()

    def _made_again(self, unit: Unit, source: TensorInfo) -> tuple[str, ...]:
        """Make what a matrix became and compare; return the digests of what it is made from."""
        scales = None if source.scale is None else load_scales(self._reader, source)
        grid, hasher, differs = None if scales is None else scales.grid, xxh3_128(), False
        compare = self._compare_codes(unit, source) if unit.packed else self._wide(unit, source)
        for rows in matrix_rows(self._reader, source, PIECE_ELEMENTS, grid):
            hasher.update(rows.raw)
            self._report(Advanced(num_bytes=len(rows.raw)))
            differs = differs or compare(rows)
        own = hasher.hexdigest()
        return (own,) if scales is None else (own, scales.digest)

    def _compare_codes(self, unit: Unit, source: TensorInfo) -> Callable[[Rows], bool]:
        """Return what quantizes rows, compares them and says whether they differ."""
        if self._quantizer is None:
            raise AssertionError("weights of an unknown scale rule are measured, not made again")
        quantizer, by_columns = self._quantizer, source.transposed
        height, width = source.shape
        window = Window(unit.weight, self._files, (height, width), by_columns=by_columns)
        dtype = source.dtype if source.scale is None else "F32"

        def compare(rows: Rows) -> bool:
            values = np.ascontiguousarray(rows.values)
            made = (bytearray(values.size // 2), bytearray(values.size // BLOCK_SIZE))
            quantizer.quantize(
                values.reshape(-1).data.cast("B"), dtype, memoryview(made[0]), memoryview(made[1])
            )
            stored = window.take(rows.first, values.shape)
            if stored == made:
                return False
            at = (0, rows.first) if by_columns else (rows.first, 0)
            self._name_block(unit, at, values.shape[1], made, stored)
            return True

        return compare

    def _wide(self, unit: Unit, source: TensorInfo) -> Callable[[Rows], bool]:
        """Return what dequantizes or transposes rows, compares them and says if they differ."""
        record, by_columns = unit.records[0], source.transposed
        height, width = source.shape
        item = 2 if source.scale is not None else DTYPE_BITS[source.dtype] // 8

        def read(first: int, count: int) -> bytearray:
            stored = bytearray(count * width * item)
            at = record.begin + first * width * item
            self._files.read_into(record.file, at, memoryview(stored))
            return stored

        everything = read(0, height) if by_columns else None

        def compare(rows: Rows) -> bool:
            values = rows.values if source.scale is None else to_bf16(rows.values)
            raw = read(rows.first, len(values)) if everything is None else everything
            stored = np.frombuffer(raw, values.dtype).reshape(-1, width)
            if by_columns:
                stored = stored[:, rows.first : rows.first + values.shape[1]]
            differing = np.argwhere(stored != values)
            if not len(differing):
                return False
            row, column = differing[0] + ((0, rows.first) if by_columns else (rows.first, 0))
            what = f"differs from what the source gives, first in row {row}, column {column}"
            self._fail("copy-differs", record, what)
            return True

        return compare

    def _name_block(
        self,
        unit: Unit,
        at: tuple[int, int],
        columns: int,
        made: Sequence[bytearray],
        stored: Sequence[bytearray],
    ) -> None:
        """Report the first block of a piece that differs.

        Args:
            unit: The weight.
            at: Row and column at which the piece begins.
            columns: Columns of the piece.
            made: Codes and scales as they should be.
            stored: As they are.
        """
        half = BLOCK_SIZE // 2
        codes = np.frombuffer(made[0], np.uint8) != np.frombuffer(stored[0], np.uint8)
        scales = np.frombuffer(made[1], np.uint8) != np.frombuffer(stored[1], np.uint8)
        place = int(np.argmax(codes.reshape(-1, half).any(axis=1) | scales))
        row, block = divmod(place, columns // BLOCK_SIZE)
        part = slice(place * half, (place + 1) * half)
        self._fail(
            "codes-differ",
            unit.records[0],
            f"differs from what the source gives, first in row {at[0] + row}, block "
            f"{at[1] // BLOCK_SIZE + block}: scale, codes",
            expected=f"{made[1][place]}, {made[0][part].hex()}",
            found=f"{stored[1][place]}, {stored[0][part].hex()}",
        )


def _action(source: TensorInfo) -> Action:
    return Action.COPY if source.scale is None else Action.DEQUANTIZE


def _first_difference(one: bytearray, other: memoryview) -> int:
    return int(np.argmax(np.frombuffer(one, np.uint8) != np.frombuffer(other, np.uint8)))
