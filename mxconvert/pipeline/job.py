"""One output file on its way: convert pieces, commit them in order, publish."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mxconvert.digest import StreamingHash, xxh3_128
from mxconvert.events import Notice
from mxconvert.model import Action, quantized_names
from mxconvert.pipeline.convert import scatter
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
    from mxconvert.pipeline.convert import Converter
    from mxconvert.pipeline.pieces import Part, Piece
    from mxconvert.pipeline.slots import Slot
    from mxconvert.quantize import NonFinite


@dataclass(slots=True)
class FileResult:
    """What is known of a file once it is made.

    Attributes:
        digest: Of the whole file.
        outputs: XXH3-128 of each stored tensor, by name.
        sources: XXH3-128 of each source tensor, by the name of its item, and of scales.
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
    made: StreamingHash = field(default_factory=xxh3_128)


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
        self._held: dict[str, tuple[memoryview, memoryview]] = {}
        self._nonfinite: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def fail(self, error: MxConvertError) -> None:
        """Stop making this file; the first error stays."""
        with self._lock:
            if self.error is None:
                self.error = error

    def reserve(self, piece: Piece) -> None:
        """Make room for output of tensors that begin in ``piece`` and end later."""
        for part in piece.parts:
            if part.item.action is Action.QUANTIZE and part.begin == 0 and not part.last:
                packed, scale = part.item.outputs
                kept = packed.end - packed.begin if part.held else 0
                self._held[part.item.source.name] = (
                    memoryview(bytearray(kept)),
                    memoryview(bytearray(scale.end - scale.begin)),
                )

    # ------------------------------------------------------------------ any thread

    def convert(self, piece: Piece, slot: Slot, converter: Converter) -> None:
        """Read a piece and make its output in the slot.

        Raises:
            SourceError: The source changed, or a weight to be quantized is not finite.
        """
        for part in piece.parts:
            data = slot.input[part.at : part.at + part.size]
            converter.read(part, data)
            scale = part.item.source.scale
            if scale is not None and part.last:
                self._sources[scale.tensor.name] = converter.scales_digest(part.item.source)
            if part.item.action is Action.COPY:
                self._scan(part, data, converter)
            elif self._make(part, data, slot, converter):
                raise converter.nonfinite_error(part.item.source)

    def _scan(self, part: Part, data: memoryview, converter: Converter) -> None:
        found = converter.scan(part, data)
        if found:
            name, first = part.item.source.name, part.first_element + found.first
            with self._lock:
                count, earlier = self._nonfinite.get(name, (0, first))
                self._nonfinite[name] = (count + found.count, min(earlier, first))

    def _make(self, part: Part, data: memoryview, slot: Slot, converter: Converter) -> NonFinite:
        if part.item.action is Action.DEQUANTIZE:
            return converter.dequantize(part, data, self._widened(part, slot))
        packed, scales = self._targets(part, slot)
        sums = ErrorSums() if self._statistics is not None else None
        found = converter.quantize(part, data, packed, scales, sums)
        if self._statistics is not None and sums is not None:
            self._statistics.take(part, sums, packed, scales)
        if part.held and not part.whole:
            scatter(part, packed, scales, self._held[part.item.source.name])
        return found

    @staticmethod
    def _widened(part: Part, slot: Slot) -> memoryview:
        return slot.output[part.out_at : part.out_at + 2 * part.num_elements]

    def _targets(self, part: Part, slot: Slot) -> tuple[memoryview, memoryview]:
        """Return where a part's codes and scales are made."""
        middle = part.out_at + part.packed_size
        packed = slot.output[part.out_at : middle]
        if part.whole or part.held:
            return packed, slot.output[middle : middle + part.scales_size]
        scales = self._held[part.item.source.name][1]
        return packed, scales[part.first_block : part.first_block + part.scales_size]

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
        if part.item.action is Action.DEQUANTIZE:
            views = [self._widened(part, slot)]
            self._running.made.update(views[0])
        elif part.item.action is Action.QUANTIZE:
            views = self._commit_codes(part, slot)
        if part.last:
            self._close_tensor(part, views, report)
        return views

    def _commit_codes(self, part: Part, slot: Slot) -> list[memoryview]:
        if self._statistics is not None:
            self._statistics.merge(part)
        packed, scales = self._targets(part, slot)
        views = [packed]
        if part.last and not part.whole:
            codes, scales = self._held.pop(part.item.source.name)
            views = [codes] if part.held else [packed]
        elif part.held and not part.last:
            return []
        self._running.made.update(views[0])
        return [*views, scales] if part.last else views

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
        made = self._running.made.hexdigest()
        if item.action is Action.DEQUANTIZE:
            self._outputs[item.source.name] = made
            return
        scales = xxh3_128()
        scales.update(views[-1])
        packed_name, scales_name = quantized_names(item.source.name)
        self._outputs[packed_name] = made
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
        self._held.clear()


def _nonfinite_notice(tensor: TensorInfo, count: int, first: int) -> Notice:
    return Notice(
        severity="warning",
        code="non-finite-copied",
        message=f"{tensor.name}: {count} of {num_elements(tensor.shape)} values are NaN or "
        f"infinite, the first is element {first}; copied byte for byte",
    )
