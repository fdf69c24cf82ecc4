"""Quantization error of stored weights against the source they were made from.

For artifacts whose codes cannot be made again bit for bit: those of other tools, and
those of a scale rule that this version does not know.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mxconvert.events import Advanced
from mxconvert.quantize import FloatType
from mxconvert.source.rows import originals
from mxconvert.statistics import Window, measure_weight
from mxconvert.verify.report import Check, Collector, ErrorSummary

if TYPE_CHECKING:
    from mxconvert.events import Reporter
    from mxconvert.model import TensorInfo
    from mxconvert.quantize import Backend
    from mxconvert.source import SourceReader
    from mxconvert.verify.numeric import ArtifactReader, Unit


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
        rows, columns = source.shape
        by_columns = source.transposed
        window = Window(unit.weight, self.files, (rows, columns), by_columns=by_columns)
        return measure_weight(
            window,
            originals(self.reader, source),
            lambda codes, scales, out: self.backend.dequantize(codes, scales, FloatType.F32, out),
            advanced=lambda num_bytes: self.reporter(Advanced(num_bytes=num_bytes)),
        ).relative_rmse

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
