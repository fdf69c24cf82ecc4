"""Rates of memory, kernels and digests, on buffers as large as the pipeline's pieces."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from mxconvert.bench.source import gaussian_bf16
from mxconvert.bench.timing import Measurement, median_rate, run_on_threads, thread_counts
from mxconvert.crc import crc64nvme
from mxconvert.digest import xxh3_128_hex
from mxconvert.model import ScaleRule
from mxconvert.pipeline.pieces import PIECE_SIZE
from mxconvert.quantize import Quantizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mxconvert.quantize import Backend

_PIECES = 16  # 64 MiB: more than most caches, as a stream of pieces is


class ProcessorBench:
    """Measures what needs no disk.

    Args:
        backend: The kernels.
        threads: The most threads to use.
        budget_s: Seconds for each row.
    """

    def __init__(self, backend: Backend, threads: int, budget_s: float) -> None:
        self._backend = backend
        self._threads = threads
        self._budget_s = budget_s
        count = max(_PIECES, threads)
        bits = gaussian_bf16(count * PIECE_SIZE // 2).view(np.uint8)
        self._sources = [part.data for part in np.split(bits, count)]
        self._targets = [np.zeros(PIECE_SIZE, np.uint8).data for _ in self._sources]
        self._items = range(count)

    def run(self) -> Iterator[Measurement]:
        """Yield the rows."""
        for threads in thread_counts(self._threads):
            yield self._row("memory", "memcpy", threads, self._copy)
        for rule in ScaleRule:
            quantizer = Quantizer(self._backend, str(rule))
            for threads in thread_counts(self._threads):
                yield self._row("kernel", f"BF16, {rule}", threads, self._kernel(quantizer))
        digests: dict[str, Callable[[memoryview], object]] = {
            "XXH3-128": xxh3_128_hex,
            "CRC64-NVME": crc64nvme,
            "SHA-256": lambda view: hashlib.sha256(view).digest(),
        }
        for name, digest in digests.items():
            yield self._row("digest", name, 1, self._digest(digest))

    def _row(
        self, group: str, name: str, threads: int, work: Callable[[int], object]
    ) -> Measurement:
        items = self._items if self._backend.name == "llvm" else self._items[: max(threads, 2)]
        work(0)  # compiles, and touches the pages

        def once() -> int:
            run_on_threads(threads, work, items)
            return len(items) * PIECE_SIZE

        speed = median_rate(once, self._budget_s)
        return Measurement(group=group, name=name, threads=threads, bytes_per_second=speed)

    def _copy(self, item: int) -> None:
        np.copyto(np.asarray(self._targets[item]), np.asarray(self._sources[item]))

    def _digest(self, digest: Callable[[memoryview], object]) -> Callable[[int], object]:
        return lambda item: digest(self._sources[item])

    def _kernel(self, quantizer: Quantizer) -> Callable[[int], object]:
        def convert(item: int) -> None:
            target = self._targets[item]
            codes, scales = PIECE_SIZE // 4, PIECE_SIZE // 64
            quantizer.quantize(
                self._sources[item], "BF16", target[:codes], target[codes : codes + scales]
            )

        return convert
