"""CPU seconds of each stage of a conversion, measured alone on one thread.

Threads divide these seconds between them, so processors divided by their sum is a speed
that no conversion exceeds here, whatever the disk.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import TYPE_CHECKING

from mxconvert.digest import ChunkHasher, xxh3_128
from mxconvert.pipeline.pieces import PIECE_SIZE
from mxconvert.quantize import ErrorSums, Quantizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mxconvert.quantize import Backend

INPUT_STAGES = ("read", "source digest")
"""Their seconds are per byte of source."""
OUTPUT_STAGES = ("write", "tensor digest", "chunk digests", "SHA-256")
"""Their seconds are per byte of output."""
OUTPUT_SHARE = 17 / 64
"""Bytes of MXFP4 per byte of a 16-bit source: codes 1/4, scales 1/64."""


class Stages:
    """Runs the stages over the pieces of a shard.

    Attributes:
        seconds: CPU seconds per stage so far.
        source_bytes: Bytes of source that took them.
    """

    def __init__(self, backend: Backend, rule: str) -> None:
        self._quantizer = Quantizer(backend, rule)
        self._source = memoryview(bytearray(PIECE_SIZE))
        self._packed = memoryview(bytearray(PIECE_SIZE // 4))
        self._scales = memoryview(bytearray(PIECE_SIZE // 64))
        self.seconds: dict[str, float] = {}
        self.source_bytes = 0

    def run(self, shard: Path, output: Path, budget_s: float = float("inf")) -> None:
        """Convert a BF16 shard piece by piece, as the pipeline does; ``output`` is removed.

        Raises:
            OSError: A file cannot be read or written.
        """
        self._convert()  # compile
        source, made = xxh3_128(), xxh3_128()
        chunks, sha256 = ChunkHasher(), hashlib.sha256()
        deadline = time.perf_counter() + budget_s
        fd = os.open(shard, os.O_RDONLY | os.O_CLOEXEC)
        out = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            for offset in range(0, shard.stat().st_size - PIECE_SIZE + 1, PIECE_SIZE):
                self._timed("read", os.preadv, fd, [self._source], offset)
                self._timed("source digest", source.update, self._source)
                self._timed("kernel", self._convert)
                self._timed("write", os.writev, out, [self._packed, self._scales])
                for view in (self._packed, self._scales):
                    self._timed("tensor digest", made.update, view)
                    self._timed("chunk digests", chunks.update, view)
                    self._timed("SHA-256", sha256.update, view)
                self.source_bytes += PIECE_SIZE
                if time.perf_counter() > deadline:
                    break
        finally:
            os.close(fd)
            os.close(out)
            output.unlink()

    def _timed(self, stage: str, call: Callable[..., object], *args: object) -> None:
        begin = time.thread_time()
        call(*args)
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.thread_time() - begin

    def _convert(self) -> None:
        # With the error statistics, as a conversion does unless told otherwise.
        self._quantizer.quantize(self._source, "BF16", self._packed, self._scales, sums=ErrorSums())

    def per_source_byte(self) -> dict[str, float]:
        """Return CPU seconds per byte of source for each stage, all of it quantized."""
        return {stage: taken / self.source_bytes for stage, taken in self.seconds.items()}

    def per_own_byte(self) -> dict[str, float]:
        """Return CPU seconds per byte that the stage handles: source or output."""
        return {
            stage: taken / (OUTPUT_SHARE if stage in OUTPUT_STAGES else 1)
            for stage, taken in self.per_source_byte().items()
        }
