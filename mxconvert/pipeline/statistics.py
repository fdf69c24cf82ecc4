"""Quantization error of one output file, gathered while it is made.

Pieces are measured on any thread; their sums are merged in file order, so that a run
with the same piece size always writes the same numbers.
"""

from __future__ import annotations

import threading
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING

from mxconvert.model import Action
from mxconvert.quantize import SAMPLE_EVERY, ErrorSums, HistogramSampler
from mxconvert.statistics import Histograms, Sums, TensorStats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxconvert.model import OutputFile
    from mxconvert.pipeline.pieces import Part
    from mxconvert.recipes import Classifier

_SUMS = tuple(field.name for field in fields(Sums))
_figures = attrgetter(*_SUMS)


class FileStatistics:
    """Sums of each quantized tensor and histograms of the whole file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[tuple[str, int], ErrorSums] = {}
        self._tensors: dict[str, ErrorSums] = {}
        self._sampler = HistogramSampler()

    def take(self, part: Part, sums: ErrorSums) -> None:
        """Keep what was measured of a part; on any thread."""
        with self._lock:
            self._parts[part.item.source.name, part.begin] = sums

    def sample(self, packed: memoryview, scales: memoryview, first_block: int) -> None:
        """Count codes and scales of blocks that follow each other in the output; on any thread."""
        with self._lock:
            self._sampler.add(packed, scales, first_block)

    def merge(self, part: Part) -> None:
        """Add a part to its tensor; in file order."""
        name = part.item.source.name
        with self._lock:
            sums = self._parts.pop((name, part.begin))
        if part.begin == 0:
            self._tensors[name] = sums
        else:
            self._tensors[name].add(sums)

    def records(self, file: OutputFile, classify: Classifier) -> Iterator[TensorStats | Histograms]:
        """Yield the records of a finished file: its tensors in file order, then histograms."""
        for item in file.items:
            if item.action is not Action.QUANTIZE:
                continue
            source, slot = item.source, classify(item.source.name)
            yield TensorStats(
                name=source.name,
                file=file.name,
                layer=item.layer,
                expert=item.expert,
                projection=slot.projection,
                role=str(slot.role),
                shape=(source.shape[0], source.shape[1]),
                dtype=source.dtype,
                sums=Sums(**dict(zip(_SUMS, _figures(self._tensors[source.name]), strict=True))),
            )
        if self._tensors:
            counted = self._sampler.histograms()
            yield Histograms(
                file=file.name,
                codes=tuple(counted.codes.tolist()),
                scales={byte: n for byte, n in enumerate(counted.scales.tolist()) if n},
                sampled=f"every {SAMPLE_EVERY}th block of each weight",
            )
