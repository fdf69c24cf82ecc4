"""One output file on its way: convert pieces, commit them in order, publish."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mxconvert.digest import StreamingHash, xxh3_128, xxh3_128_hex
from mxconvert.fp8 import scale_of
from mxconvert.model import CODES_DTYPE, Action, quantized_names
from mxconvert.pipeline.convert import output_elements, place_codes
from mxconvert.pipeline.devices.launches import Kind
from mxconvert.pipeline.lane import OrderedLane
from mxconvert.pipeline.notices import nonfinite_notice, zero_scales_notice
from mxconvert.pipeline.pieces import cut_file
from mxconvert.pipeline.statistics import FileStatistics
from mxconvert.plan.build import file_header
from mxconvert.quantize import ErrorSums, add_up
from mxconvert.writer import WeightFileWriter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mxconvert.digest import FileDigest
    from mxconvert.errors import MxConvertError
    from mxconvert.events import Reporter
    from mxconvert.model import OutputFile, TensorInfo
    from mxconvert.pipeline.convert import Converter
    from mxconvert.pipeline.devices.launches import Launch
    from mxconvert.pipeline.devices.ring import Outcome
    from mxconvert.pipeline.pieces import Part, Piece
    from mxconvert.pipeline.slots import Slot

_NAN_SCALE = 255


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
    scales: StreamingHash = field(default_factory=xxh3_128)


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
        self._pieces: Iterator[Piece] = cut_file(file, piece_size)
        self._next = next(self._pieces, None)
        self.commit_lane = OrderedLane()
        self.sha_lane = OrderedLane()
        self.error: MxConvertError | None = None
        self.outstanding = 0
        self.held = 0
        self.all_dispatched = False
        self._writer = WeightFileWriter(folder / file.name, file.size)
        self._running = _Running()
        self._outputs: dict[str, str] = {}
        self._sources: dict[str, str] = {}
        self._held: dict[str, memoryview] = {}
        self._nonfinite: dict[str, tuple[int, int]] = {}
        self._zero_scales: dict[str, int] = {}
        self._lock = threading.Lock()

    def fail(self, error: MxConvertError) -> None:
        """Stop making this file; the first error stays."""
        with self._lock:
            if self.error is None:
                self.error = error

    # ------------------------------------------------------------------ under the engine's lock

    @property
    def next_held(self) -> int:
        """Bytes of output that the next piece begins to hold back."""
        return sum(part.held_size for part in self._begun(self._next)) if self._next else 0

    def next_piece(self) -> Piece | None:
        """Return the next piece, with room for the output that it begins to hold back."""
        piece = self._next
        if piece is not None:
            for part in self._begun(piece):
                self._held[part.item.source.name] = memoryview(bytearray(part.held_size))
                self.held += part.held_size
            self._next = next(self._pieces, None)
        return piece

    @staticmethod
    def _begun(piece: Piece) -> Iterator[Part]:
        return (part for part in piece.parts if part.begin == 0 and part.held_size)

    def let_go(self, piece: Piece) -> None:
        """Count what a finished piece ends to hold back."""
        self.held -= sum(part.held_size for part in piece.parts if part.last)

    # ------------------------------------------------------------------ any thread

    def convert(self, piece: Piece, slot: Slot, converter: Converter) -> None:
        """Read a piece and make its output in the slot.

        Raises:
            SourceError: The source changed, or a weight that is or will be quantized is not
                finite.
        """
        for part in piece.parts:
            self._read(part, slot, converter)
            self._make_part(part, slot, converter)

    def read(self, piece: Piece, slot: Slot, converter: Converter) -> None:
        """Read a piece only; `make` or, after a device has made it, `take` comes next.

        Raises:
            SourceError: The source changed.
        """
        for part in piece.parts:
            self._read(part, slot, converter)

    def make(self, piece: Piece, slot: Slot, converter: Converter) -> None:
        """Make the output of a piece that was read.

        Raises:
            SourceError: A weight is not finite.
        """
        for part in piece.parts:
            self._make_part(part, slot, converter)

    def take(
        self,
        piece: Piece,
        slot: Slot,
        launches: tuple[Launch, ...],
        outcome: Outcome,
        converter: Converter,
    ) -> None:
        """Take what a device made of a piece, and make the rest.

        Raises:
            SourceError: A weight is not finite.
        """
        made = {id(part) for launch in launches for part in launch.parts}
        for launch in launches:
            self._take_launch(launch, slot, outcome, converter)
        for part in piece.parts:
            if id(part) not in made:
                self._make_part(part, slot, converter)

    def _take_launch(
        self, launch: Launch, slot: Slot, outcome: Outcome, converter: Converter
    ) -> None:
        bad = int(outcome.found[launch.number, 0])
        for part, begin, end in launch.programs(outcome.blocks_each):
            if launch.kind is Kind.QUANTIZE:
                if bad and _holds_nonfinite(part, slot):
                    raise converter.nonfinite_error(part.item)
                sums = add_up(outcome.sums[begin:end]) if launch.measure else None
                self._take_codes(part, slot, sums)
            elif launch.kind is Kind.DECODE:
                bad = converter.unfit(_scales(part, slot), self._output(part, slot))
        if bad:
            raise converter.nonfinite_error(launch.parts[0].item)

    def _take_codes(self, part: Part, slot: Slot, sums: ErrorSums | None) -> None:
        """Put codes and scales that lie in the slot where `commit` looks for them."""
        made, wanted = codes_in(slot, part), self._codes(part, slot)
        if part.transposed and not part.whole:
            rows = part.item.source.shape[0]
            place_codes(made, wanted, rows, part.first_element // rows)
        elif not part.whole:
            wanted[1][:] = made[1]
        self._measured(part, wanted, sums)

    def _read(self, part: Part, slot: Slot, converter: Converter) -> None:
        data = slot.input[part.at : part.at + part.size]
        converter.read(part, data)
        if part.stored_scales_size:
            converter.read_scales(part, _scales(part, slot))
        elif part.item.source.scale is not None and part.last:
            self._note_scales(part.item.source, converter)
        if part.item.action is Action.COPY:
            converter.check_scales(part, data)
            self._scan(part, data, converter)

    def _make_part(self, part: Part, slot: Slot, converter: Converter) -> None:
        data = slot.input[part.at : part.at + part.size]
        if self._make(part, data, slot, converter):
            raise converter.nonfinite_error(part.item)

    def _scan(self, part: Part, data: memoryview, converter: Converter) -> None:
        found = converter.scan(part, data)
        if found:
            source, stored = part.item.source, part.first_element + found.first
            first = int(output_elements(source, np.array([stored]))[0])
            with self._lock:
                count, earlier = self._nonfinite.get(source.name, (0, first))
                self._nonfinite[source.name] = (count + found.count, min(earlier, first))

    def _note_scales(self, weight: TensorInfo, converter: Converter) -> None:
        """Keep the digest of a weight's scales, and how many are zero."""
        scales = converter.scales_of(weight)
        self._sources[scale_of(weight).tensor.name] = scales.digest
        zeros = int(np.count_nonzero(scales.grid == 0))
        if zeros:
            self._zero_scales[weight.name] = zeros

    def _make(self, part: Part, data: memoryview, slot: Slot, converter: Converter) -> int:
        """Make a part's output; return how many of its values cannot be converted."""
        if part.item.action is not Action.QUANTIZE:
            output = self._output(part, slot)
            if part.stored_scales_size:
                return converter.decode(data, _scales(part, slot), output)
            return converter.widen(part, data, output) if output else 0
        packed, scales = self._codes(part, slot)
        sums = ErrorSums() if self._statistics is not None else None
        found = converter.quantize(part, data, packed, scales, sums)
        self._measured(part, (packed, scales), sums)
        return found

    def _measured(
        self, part: Part, codes: tuple[memoryview, memoryview], sums: ErrorSums | None
    ) -> None:
        if self._statistics is None or sums is None:
            return
        self._statistics.take(part, sums)
        if part.whole or not part.transposed:
            self._statistics.sample(*codes, part.first_block)

    def _output(self, part: Part, slot: Slot) -> memoryview:
        """Return where the output of a part is made, or of its whole tensor if that is held."""
        if part.transposed and not part.whole:
            return self._held[part.item.source.name]
        return slot.output[part.out_at : part.out_at + part.output_size]

    def _codes(self, part: Part, slot: Slot) -> tuple[memoryview, memoryview]:
        """Return where codes and scales are made, see `Converter.quantize`."""
        if part.whole:
            return codes_in(slot, part)
        held = self._held[part.item.source.name]
        if part.transposed:
            codes = part.item.outputs[0]
            middle = codes.end - codes.begin
            return held[:middle], held[middle:]
        packed, _ = codes_in(slot, part)
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
        if part.stored_scales_size:
            self._running.scales.update(_scales(part, slot))
        if part.item.action is Action.QUANTIZE:
            views = self._commit_codes(part, slot)
        elif part.output_size:
            views = [] if _waits(part) else [self._output(part, slot)]
            self._update_made(views)
        else:
            views = [data]
        if part.last:
            self._close_tensor(part, views, report)
            self._held.pop(part.item.source.name, None)
        return views

    def _update_made(self, views: list[memoryview]) -> None:
        for view in views:
            self._running.made.update(view)

    def _commit_codes(self, part: Part, slot: Slot) -> list[memoryview]:
        if self._statistics is not None:
            self._statistics.merge(part)
        if _waits(part):
            return []
        packed, scales = self._codes(part, slot)
        self._update_made([packed])
        if not part.last:
            return [packed]
        if not part.whole:
            if part.transposed and self._statistics is not None:
                self._statistics.sample(packed, scales, 0)
            scales = scales if part.transposed else self._held[part.item.source.name]
        return [packed, scales]

    def _close_tensor(self, part: Part, views: list[memoryview], report: Reporter) -> None:
        item, name = part.item, part.item.source.name
        digest = self._running.source.hexdigest()
        self._sources[name] = digest
        if item.source.dtype == CODES_DTYPE and item.source.scale is not None:
            self._sources[item.source.scale.tensor.name] = self._running.scales.hexdigest()
        made = self._running.made.hexdigest() if part.output_size else digest
        if item.action is Action.QUANTIZE:
            packed_name, scales_name = quantized_names(name)
            self._outputs[packed_name] = made
            self._outputs[scales_name] = xxh3_128_hex(views[-1])
        else:
            self._outputs[name] = made
        self._report_oddities(item.source, report)

    def _report_oddities(self, tensor: TensorInfo, report: Reporter) -> None:
        if tensor.name in self._nonfinite:
            count, first = self._nonfinite.pop(tensor.name)
            report(nonfinite_notice(tensor, count, first))
        if tensor.name in self._zero_scales:
            report(zero_scales_notice(tensor, self._zero_scales.pop(tensor.name)))

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


def codes_in(slot: Slot, part: Part) -> tuple[memoryview, memoryview]:
    """Return the place of a part's codes and scales in a slot."""
    return (
        slot.output[part.out_at : part.out_at + part.packed_size],
        slot.scales[part.scales_out_at : part.scales_out_at + part.scales_size],
    )


def _scales(part: Part, slot: Slot) -> memoryview:
    """Return the scales that MXFP4 is read with."""
    return slot.input[part.scales_at : part.scales_at + part.stored_scales_size]


def _holds_nonfinite(part: Part, slot: Slot) -> bool:
    """Whether a part's scales say so: the block of such an element gets 255."""
    _, scales = codes_in(slot, part)
    return bool((np.frombuffer(scales, np.uint8) == _NAN_SCALE).any())


def _waits(part: Part) -> bool:
    """Whether a part's output is written later, with that of the tensor's last part."""
    return part.transposed and not part.last
