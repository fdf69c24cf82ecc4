"""Run the pipeline over the whole plan of Kimi-K3 without its bytes: what is left is overhead.

    python scripts/bench_kimi.py --folder DISK [--files 40] [--no-statistics] [--profile] [--json]

The source is the BF16 twin of Kimi-K3 (5.56 TB of sparse files), the plan the true one: 497,220
tensors in 1.56 TB. Engine, lanes, slots, journal, statistics, tensor list, index and manifest are
those of every run; only what takes bytes is replaced, by assignment in this process:

* reads leave the buffer as it is, and the kernel says that it has quantized;
* digests of content are constants, as many as there would be;
* weight files are sparse: they have their names and sizes, and their bytes are dropped;
* nobody asks whether 1.56 TB are free.

It prints the resident memory after each tenth of the files, and the CPU time per stored tensor,
of which the engine's part and the part before (opening, planning) and after it (the documents).
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mxconvert.bench.workspace import workspace
from mxconvert.digest import CHUNK_SIZE, ChunkDigest, FileDigest
from mxconvert.events import FileFinished, Started
from mxconvert.model import Options, OutputFile, Plan
from mxconvert.pipeline import (
    RunOptions,
    RunResult,
    destination,
    engine,
    job,
    quantize_checkpoint,
    run,
)
from mxconvert.pipeline.slots import resident_bytes
from mxconvert.plan import build_plan
from mxconvert.quantize import ErrorSums, NonFinite, Quantizer
from mxconvert.source import SourceReader, open_checkpoint
from tests.support.kimi_k3 import read_config, write_twin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from mxconvert.events import Event

MIB = 1 << 20
BLOCK_BYTES = 64
NO_DIGEST = "0" * 32


class NullReader(SourceReader):
    """Reads nothing."""

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Leave the buffer as it is."""


class NullQuantizer(Quantizer):
    """Quantizes nothing."""

    def quantize(
        self,
        source: memoryview,
        dtype: str,
        packed: memoryview,
        scales: memoryview,
        *,
        sums: ErrorSums | None = None,
    ) -> NonFinite:
        """Count the blocks."""
        del dtype, packed, scales
        if sums is not None:
            blocks = len(source) // BLOCK_BYTES
            sums.add(ErrorSums(elements=32 * blocks, blocks=blocks, exponents=(0, blocks, 0)))
        return NonFinite(0, -1)

    def scan(self, source: memoryview, dtype: str) -> NonFinite:
        """Find nothing."""
        del source, dtype
        return NonFinite(0, -1)


class NullHash:
    """Takes bytes and has a constant digest."""

    def update(self, data: object, /) -> None:
        """Drop the bytes."""

    def hexdigest(self) -> str:
        """Return zeros."""
        return NO_DIGEST


class NullRunning:
    """The digests of the tensor that is being committed."""

    def __init__(self) -> None:
        self.source = self.packed = NullHash()


class NullWriter:
    """A `WeightFileWriter` whose files are sparse."""

    def __init__(self, target: Path, size: int) -> None:
        self.target = target
        self._size = size
        self._written = 0

    def create(self) -> None:
        """Do nothing."""

    def append(self, views: Sequence[memoryview]) -> None:
        """Count the bytes."""
        self._written += sum(map(len, views))

    def hash_sha256(self, views: Sequence[memoryview]) -> None:
        """Do nothing."""

    def flush(self) -> FileDigest:
        """Return constant digests, one for each chunk."""
        if self._written != self._size:
            raise AssertionError(f"{self.target}: {self._written} bytes, planned {self._size}")
        chunks = -(-self._size // CHUNK_SIZE)
        digests = tuple(ChunkDigest(NO_DIGEST, "0" * 16) for _ in range(chunks))
        return FileDigest(self._size, "0" * 64, "0" * 16, digests)

    def publish(self) -> None:
        """Make the file, of holes."""
        fd = os.open(self.target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.ftruncate(fd, self._size)
        os.close(fd)

    def discard(self) -> None:
        """Do nothing."""


def replace_what_takes_bytes() -> None:
    """Put the stand-ins in place, in this process."""
    stand_ins: list[tuple[ModuleType, str, object]] = [
        (run, "SourceReader", NullReader),
        (run, "Quantizer", NullQuantizer),
        (job, "WeightFileWriter", NullWriter),
        (job, "_Running", NullRunning),
        (job, "xxh3_128", NullHash),
        (destination, "check_space", lambda *_: None),
    ]
    for module, name, stand_in in stand_ins:
        if not hasattr(module, name):
            raise AssertionError(f"{module.__name__} has no {name} to replace")
        setattr(module, name, stand_in)


class Watch:
    """Notes the resident memory after each tenth of the files, and when the engine ran."""

    def __init__(self) -> None:
        self.resident_mib: dict[str, float] = {}
        self.started = self.ended = 0.0
        self._total = self._done = 0
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Take an event of the run."""
        if isinstance(event, Started):
            self._total, self.started = event.total_files, time.process_time()
            self.resident_mib["0 %"] = resident_bytes() / MIB
        elif isinstance(event, FileFinished):
            with self._lock:
                self._done += 1
                tenth, before = (10 * n // self._total for n in (self._done, self._done - 1))
                self.ended = time.process_time()
                if tenth > before:
                    self.resident_mib[f"{10 * tenth} %"] = resident_bytes() / MIB


def profiled(call: Callable[[], Any]) -> Any:
    """Call with every worker thread under one profiler, by turns, and print what took long."""
    profiler = cProfile.Profile(time.thread_time)
    work = engine.Engine._work  # noqa: SLF001  (the thread's main function)

    def work_profiled(self: engine.Engine) -> None:
        profiler.runcall(work, self)

    engine.Engine._work = work_profiled  # type: ignore[method-assign]  # noqa: SLF001
    result = call()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    return result


def measure(work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run; return the figures."""
    source, target = work / "source", work / "target"
    write_twin(source, read_config())
    begin, wall = time.process_time(), time.perf_counter()
    checkpoint = open_checkpoint(source)
    plan = build_plan(checkpoint, Options())
    gc.freeze()  # as the command line does
    planned, watch = time.process_time(), Watch()
    options = RunOptions(
        jobs=1 if args.profile else args.jobs,
        statistics=not args.no_statistics,
        only=tuple(file.name for file in some(plan, args.files)),
    )

    def convert() -> RunResult:
        return quantize_checkpoint(checkpoint, plan, target, options, report=watch)

    result = profiled(convert) if args.profile else convert()
    end = time.process_time()
    made = some(plan, args.files)
    tensors, weights = (
        sum(measured(file) for file in made)
        for measured in (lambda file: file.num_tensors, lambda file: len(file.items))
    )
    return {
        "files": result.files_made,
        "source tensors": weights,
        "stored tensors": tensors,
        "source_tb": sum(file.source_size for file in made) / 1e12,
        "complete": result.artifact is not None,
        "wall_s": time.perf_counter() - wall,
        "cpu_s": {
            "open and plan": planned - begin,
            "engine": watch.ended - watch.started,
            "documents": end - watch.ended,
        },
        "engine_cpu_us_per_stored_tensor": (watch.ended - watch.started) / tensors * 1e6,
        "cpu_us_per_stored_tensor": (end - begin) / tensors * 1e6,
        "resident_mib": watch.resident_mib,
    }


def some(plan: Plan, count: int | None) -> tuple[OutputFile, ...]:
    """Return the first files of the plan, or all."""
    return plan.files[:count]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="on a disk with sparse files")
    parser.add_argument("--files", type=int, help="make only the first files of the plan")
    parser.add_argument("--jobs", type=int, help="worker threads [all processors]")
    parser.add_argument("--no-statistics", action="store_true")
    parser.add_argument("--profile", action="store_true", help="one worker, and what it spends")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    replace_what_takes_bytes()
    with workspace(args.folder) as work:
        result = measure(work, args)
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for name, value in result.items():
        pairs = value.items() if isinstance(value, dict) else [("", value)]
        for key, figure in pairs:
            text = figure if isinstance(figure, int) else f"{figure:.2f}"
            print(f"{name}  {key}: {text}" if key else f"{name}: {text}")


if __name__ == "__main__":
    main()
