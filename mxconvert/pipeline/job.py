"""One output file on its way: convert pieces, commit them in order, publish."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mxconvert.digest import StreamingHash, xxh3_128
from mxconvert.errors import SourceError
from mxconvert.events import Notice
from mxconvert.model import BLOCK_SIZE, Action, quantized_names
from mxconvert.pipeline.lane import OrderedLane
from mxconvert.pipeline.pieces import cut_file
from mxconvert.pipeline.statistics import FileStatistics
from mxconvert.plan.build import file_header
from mxconvert.quantize import ErrorSums
from mxconvert.safetensors_format import num_elements
from mxconvert.writer import WeightFileWriter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mxconvert.digest import FileDigest
    from mxconvert.errors import MxConvertError
    from mxconvert.events import Reporter
    from mxconvert.model import OutputFile, TensorInfo
    from mxconvert.pipeline.pieces import Part, Piece
    from mxconvert.pipeline.slots import Slot
    from mxconvert.quantize import NonFinite, Quantizer
    from mxconvert.source import SourceReader


@dataclass(slots=True)
class FileResult:
    """What is known of a file once it is made.

    Attributes:
        digest: Of the whole file.
        outputs: XXH3-128 of each stored tensor, by name.
        sources: XXH3-128 of each source tensor, by its name.
        statistics: Quantization error, if it was measured; no part of the file's record.
    """

    digest: FileDigest
    outputs: dict[str, str]
    sources: dict[str, str]
    statistics: FileStatistics | None = None


@dataclass(slots=True)
class _Running:
    """Digests of the tensor that is being committed."""

    source: StreamingHash = field(default_factory=xxh3_128)
    packed: StreamingHash = field(default_factory=xxh3_128)


class FileJob:
    """The state of one output file.

    `convert` may run on any thread in any order; `commit` and `hash_sha256` run in
    piece order through their lanes.
    """

    def __init__(
        self, file: OutputFile, folder: Path, piece_size: int, *, measure: bool = False
    ) -> None:
        self.file = file
        self._statistics = FileStatistics() if measure else None
        self.pieces: Iterator[Piece] = cut_file(file, piece_size)
        self.commit_lane = OrderedLane()
        self.sha_lane = OrderedLane()
        self.error: MxConvertError | None = None
        self.outstanding = 0
        self.all_dispatched = False
        self._writer = WeightFileWriter(folder / file.name, file.size)
        self._running = _Running()
        self._outputs: dict[str, str] = {}
        self._sources: dict[str, str] = {}
        self._scales: dict[str, memoryview] = {}
        self._nonfinite: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def fail(self, error: MxConvertError) -> None:
        """Stop making this file; the first error stays."""
        with self._lock:
            if self.error is None:
                self.error = error

    def reserve_scales(self, piece: Piece) -> None:
        """Make room for the scales of tensors that begin in ``piece`` and end later."""
        for part in piece.parts:
            if part.item.action is Action.QUANTIZE and part.begin == 0 and not part.last:
                scale = part.item.outputs[1]
                self._scales[part.item.source.name] = memoryview(bytearray(scale.end - scale.begin))

    # ------------------------------------------------------------------ any thread

    def convert(self, piece: Piece, slot: Slot, reader: SourceReader, quantizer: Quantizer) -> None:
        """Read a piece and make its output in the slot.

        Raises:
            SourceError: The source changed, or a weight to be quantized is not finite.
        """
        for part in piece.parts:
            source = part.item.source
            data = slot.input[part.at : part.at + part.size]
            reader.read_into(source.file, source.offset + part.begin, data)
            if part.item.action is Action.QUANTIZE:
                if self._quantize(part, data, slot, quantizer):
                    raise nonfinite_error(source, reader, quantizer, slot)
            elif found := quantizer.scan(data, source.dtype):
                first = part.begin // (source.size // num_elements(source.shape)) + found.first
                with self._lock:
                    count, earlier = self._nonfinite.get(source.name, (0, first))
                    entry = (count + found.count, min(earlier, first))
                    self._nonfinite[source.name] = entry

    def _quantize(
        self, part: Part, data: memoryview, slot: Slot, quantizer: Quantizer
    ) -> NonFinite:
        packed, scales = self._targets(part, slot)
        dtype = part.item.source.dtype
        if self._statistics is None:
            return quantizer.quantize(data, dtype, packed, scales)
        sums = ErrorSums()
        found = quantizer.quantize(data, dtype, packed, scales, sums=sums)
        self._statistics.take(part, sums, packed, scales)
        return found

    def _targets(self, part: Part, slot: Slot) -> tuple[memoryview, memoryview]:
        middle = part.out_at + part.packed_size
        packed = slot.output[part.out_at : middle]
        if part.whole:
            return packed, slot.output[middle : middle + part.scales_size]
        held = self._scales[part.item.source.name]
        return packed, held[part.first_block : part.first_block + part.scales_size]

    # ------------------------------------------------------------------ in order

    def commit(self, piece: Piece, slot: Slot, report: Reporter) -> list[memoryview]:
        """Write a piece's output at the end of the file; return what was written.

        Raises:
            LocalError: The operating system refuses.
        """
        views: list[memoryview] = []
        if piece.index == 0:
            self._writer.create()
            views.append(memoryview(file_header(self.file.items)))
        for part in piece.parts:
            views += self._commit_part(part, slot, report)
        self._writer.append(views)
        return views

    def _commit_part(self, part: Part, slot: Slot, report: Reporter) -> list[memoryview]:
        if part.begin == 0:
            self._running = _Running()
        data = slot.input[part.at : part.at + part.size]
        self._running.source.update(data)
        views = [data]
        if part.item.action is Action.QUANTIZE:
            packed, scales = self._targets(part, slot)
            self._running.packed.update(packed)
            if self._statistics is not None:
                self._statistics.merge(part)
            views = [packed]
            if part.last:
                held = self._scales.pop(part.item.source.name, scales)
                views.append(held)
        if part.last:
            self._close_tensor(part, views, report)
        return views

    def _close_tensor(self, part: Part, views: list[memoryview], report: Reporter) -> None:
        item = part.item
        digest = self._running.source.hexdigest()
        self._sources[item.source.name] = digest
        if item.action is Action.COPY:
            self._outputs[item.source.name] = digest
            if item.source.name in self._nonfinite:
                count, first = self._nonfinite.pop(item.source.name)
                report(_nonfinite_notice(item.source, count, first))
            return
        scales = xxh3_128()
        scales.update(views[-1])
        packed_name, scales_name = quantized_names(item.source.name)
        self._outputs[packed_name] = self._running.packed.hexdigest()
        self._outputs[scales_name] = scales.hexdigest()

    def hash_sha256(self, views: list[memoryview]) -> None:
        """Take committed bytes into the file's SHA-256."""
        self._writer.hash_sha256(views)

    # ------------------------------------------------------------------ the end

    def flush(self) -> FileResult:
        """Bring the file to the disk under its partial name.

        Raises:
            LocalError: The operating system refuses.
        """
        digest = self._writer.flush()
        return FileResult(digest, self._outputs, self._sources, self._statistics)

    def publish(self) -> None:
        """Give the file its final name.

        Raises:
            LocalError: The operating system refuses.
        """
        self._writer.publish()

    def discard(self) -> None:
        """Remove what was written."""
        self._writer.discard()
        self._scales.clear()


def nonfinite_error(
    tensor: TensorInfo, reader: SourceReader, quantizer: Quantizer, slot: Slot
) -> SourceError:
    """Scan a whole tensor and say what is wrong with it.

    The slot's input buffer is used for reading.
    """
    itemsize = tensor.size // num_elements(tensor.shape)
    step = len(slot.input) // itemsize * itemsize
    count, first = 0, -1
    for begin in range(0, tensor.size, step):
        data = slot.input[: min(step, tensor.size - begin)]
        reader.read_into(tensor.file, tensor.offset + begin, data)
        found = quantizer.scan(data, tensor.dtype)
        if found and first < 0:
            first = begin // itemsize + found.first
        count += found.count
    columns, total = tensor.shape[-1], num_elements(tensor.shape)
    return SourceError(
        f"{tensor.file}: tensor {tensor.name!r}: {count} of {total} values are NaN or "
        f"infinite; the first is element {first} (row {first // columns}, column "
        f"{first % columns}, block {first // BLOCK_SIZE})",
        hint="mend the checkpoint, or keep the tensor as it is with --exclude "
        f"'{tensor.name.removesuffix('.weight')}'; either way start over with --overwrite",
        code="non-finite",
    )


def _nonfinite_notice(tensor: TensorInfo, count: int, first: int) -> Notice:
    return Notice(
        severity="warning",
        code="non-finite-copied",
        message=f"{tensor.name}: {count} of {num_elements(tensor.shape)} values are NaN or "
        f"infinite, the first is element {first}; copied byte for byte",
    )
