"""Quantization error of stored weights against the source they were made from.

For artifacts whose codes cannot be made again bit for bit: those of other tools, and
those of a scale rule that this version does not know.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mxconvert.events import Advanced
from mxconvert.quantize import FloatType
from mxconvert.verify.numeric import ITEM_SIZES, PIECE_ELEMENTS, ArtifactReader, Unit, read_blocks
from mxconvert.verify.report import Check, Collector, ErrorSummary
from mxconvert.verify.structure import BLOCK_SIZE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mxconvert.events import Reporter
    from mxconvert.model import TensorInfo
    from mxconvert.quantize import Backend
    from mxconvert.source import SourceReader

_BF16_SHIFT = 16


def as_float64(data: bytearray, dtype: str) -> NDArray[np.float64]:
    """Return little-endian elements of a kernel dtype as float64."""
    if dtype == "BF16":
        bits = np.frombuffer(data, "<u2").astype(np.uint32) << _BF16_SHIFT
        return bits.view(np.float32).astype(np.float64)
    return np.frombuffer(data, "<f2" if dtype == "F16" else "<f4").astype(np.float64)


@dataclass(slots=True)
class ErrorCheck:
    """Measures units against source tensors; one instance serves all threads.

    Attributes:
        limit: Largest relative RMSE of a tensor that passes.
    """

    files: ArtifactReader
    reader: SourceReader
    backend: Backend
    collector: Collector
    reporter: Reporter
    limit: float
    _errors: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, unit: Unit, source: TensorInfo) -> None:
        """Decode one weight and compare it with the source.

        Raises:
            SourceError: The source changed since its headers were read.
            LocalError: The source cannot be read.
        """
        record = unit.records[0]
        self.collector.look(record.file, Check.NUMERIC)
        try:
            error = self._measure(unit, source)
        except OSError as failure:
            self._fail("unreadable", unit, f"cannot be read: {failure.strerror}")
            return
        self.collector.count("tensors_measured")
        with self._lock:
            self._errors[record.name] = error
        if not error <= self.limit:
            limit = f"at most {self.limit} allowed"
            what = f"relative RMSE against {source.name!r} is {error:.4f}, {limit}"
            self._fail("error-too-large", unit, what)

    def _fail(self, code: str, unit: Unit, what: str) -> None:
        record = unit.records[0]
        message = f"{record.file}: tensor {record.name!r}: {what}"
        self.collector.fail(Check.NUMERIC, code, message, path=record.file, tensor=record.name)

    def _measure(self, unit: Unit, source: TensorInfo) -> float:
        item = ITEM_SIZES[source.dtype]
        elements = source.size // item
        wrong = total = 0.0
        for begin in range(0, elements, PIECE_ELEMENTS):
            count = min(PIECE_ELEMENTS, elements - begin)
            original = bytearray(count * item)
            self.reader.read_into(source.file, source.offset + begin * item, memoryview(original))
            codes, scales = read_blocks(
                self.files, unit.records, begin // BLOCK_SIZE, count // BLOCK_SIZE
            )
            decoded = bytearray(count * 4)
            self.backend.dequantize(codes, scales, FloatType.F32, decoded)
            expected = as_float64(original, source.dtype)
            wrong += float(np.square(as_float64(decoded, "F32") - expected).sum())
            total += float(np.square(expected).sum())
            self.reporter(Advanced(num_bytes=len(original)))
        if total == 0:
            return 0.0 if wrong == 0 else math.inf
        return math.sqrt(wrong / total)

    def summary(self) -> ErrorSummary | None:
        """Return mean and maximum over all tensors measured."""
        if not self._errors:
            return None
        worst = max(sorted(self._errors), key=lambda name: self._errors[name])
        return ErrorSummary(
            tensors=len(self._errors),
            mean=math.fsum(self._errors.values()) / len(self._errors),
            maximum=self._errors[worst],
            worst_tensor=worst,
        )
