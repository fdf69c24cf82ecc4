"""The measurements in order, within a budget of time and space."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mxconvert.bench.bounds import Bound, Rates, Workload, find_bounds
from mxconvert.bench.disk import (
    forget,
    read_cold,
    read_plainly,
    read_through,
    write_synced,
    write_through,
)
from mxconvert.bench.processor import ProcessorBench
from mxconvert.bench.source import Dimensions, write_source
from mxconvert.bench.stages import Stages
from mxconvert.bench.timing import Measurement, thread_counts
from mxconvert.bench.workspace import check_space, workspace
from mxconvert.doctor.folder import file_system, in_memory
from mxconvert.doctor.machine import cpu_model, processors
from mxconvert.errors import Interrupted
from mxconvert.events import Notice, ignore
from mxconvert.model import Options, ScaleRule
from mxconvert.pipeline import DEFAULT_MAX_MEMORY, RunOptions, quantize_checkpoint
from mxconvert.pipeline.slots import Needs, plan_budget, resident_bytes
from mxconvert.plan import build_plan
from mxconvert.quantize import explain_backend, load_backend
from mxconvert.source import open_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from mxconvert.events import Reporter
    from mxconvert.model import Checkpoint
    from mxconvert.quantize import Backend
    from mxconvert.stop import StopToken

SCHEMA_VERSION = 1
_MIB = 1 << 20
_TERABYTE = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to measure.

    Attributes:
        row_s: Seconds for each row of memory, kernels and digests.
        disk_s: Seconds for each row of the disk.
        disk_bytes: The most bytes of a file written to measure the disk.
        source_bytes: The most bytes of the generated checkpoint; a slow disk gets less.
        dims: Its shape.
    """

    row_s: float
    disk_s: float
    disk_bytes: int
    source_bytes: int
    dims: Dimensions

    @property
    def space(self) -> int:
        """The most bytes that lie in the folder at one time: checkpoint, output, one file."""
        return self.source_bytes + self.source_bytes // 2 + self.disk_bytes


FULL = Effort(
    row_s=0.4,
    disk_s=2.0,
    disk_bytes=512 * _MIB,
    source_bytes=1024 * _MIB,
    dims=Dimensions(experts=32, hidden=1024, inner=768),
)
QUICK = Effort(
    row_s=0.1,
    disk_s=0.5,
    disk_bytes=128 * _MIB,
    source_bytes=256 * _MIB,
    dims=Dimensions(experts=16, hidden=1024, inner=512),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure.

    Attributes:
        folder: An existing folder on the disk that would be written to.
        source: The checkpoint to be converted, which is only read; ``None``: none.
        checkpoint_bytes: Size to compute times for, if there is no ``source``.
        jobs: The most threads; ``None`` takes what this process may use.
        backend: ``auto``, ``llvm`` or ``numpy``.
        effort: How much to measure.
    """

    folder: Path
    source: Path | None = None
    checkpoint_bytes: int = _TERABYTE
    jobs: int | None = None
    backend: str = "auto"
    effort: Effort = FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """What was found.

    Attributes:
        machine: ``cpu``, ``processors``, ``jobs``, ``backend``, ``folder``, ``file_system``.
        measurements: Rates, in the order in which they were taken.
        cpu_seconds_per_gb: CPU seconds of each stage per GB of source.
        workload: What the bounds are for.
        bounds: The largest first; it is the least time.
        measured_seconds: The time at the end-to-end speed that was measured.
        seconds: How long bench took.
        space_bytes: How much it was ready to write.
    """

    machine: dict[str, Any]
    measurements: tuple[Measurement, ...]
    cpu_seconds_per_gb: dict[str, float]
    workload: Workload
    bounds: tuple[Bound, ...]
    measured_seconds: float
    seconds: float
    space_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``bench --json`` prints."""
        return {"type": "bench", "schema_version": SCHEMA_VERSION, **asdict(self)}


def run_bench(
    options: BenchOptions, *, report: Reporter = ignore, stop: StopToken | None = None
) -> BenchReport:
    """Measure this machine.

    Raises:
        LocalError: The folder cannot be written or has too little room.
        MissingExtraError: The backend cannot be loaded.
        SourceError: ``source`` is no checkpoint that can be converted.
        Interrupted: A signal; nothing is left in the folder.
    """
    run = _Run(options, load_backend(options.backend), stop)
    check_space(options.folder, options.effort.space)
    report(Notice(severity="info", code="bench-space", message=run.announcement()))
    try:
        with workspace(options.folder) as work:
            return run(work)
    except Interrupted as error:
        error.message, error.hint = "interrupted; nothing is left in the folder", None
        raise


@dataclass
class _Run:
    options: BenchOptions
    backend: Backend
    stop: StopToken | None
    rows: list[Measurement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin = time.monotonic()
        self.processors = processors()
        self.jobs = self.options.jobs or max(1, round(self.processors))
        self.given: Checkpoint | None = None
        self.workload = Workload.of_size(self.options.checkpoint_bytes)
        if self.options.source is not None:
            self.given = open_checkpoint(self.options.source)
            self.workload = Workload.of_plan(build_plan(self.given, Options()))

    def announcement(self) -> str:
        """Say what will be written."""
        space = self.options.effort.space // _MIB
        return f"writes up to {space} MiB below {self.options.folder} and removes them again"

    def __call__(self, work: Path) -> BenchReport:
        effort = self.options.effort
        self.rows += ProcessorBench(self.backend, self.jobs, effort.row_s).run()
        write = self._write_rows(work)
        source = work / "source"
        size = min(effort.source_bytes, int(write * 2 * effort.disk_s))
        write_source(source, effort.dims.sized(size))
        stages = Stages(self.backend, ScaleRule.MSE)
        stages.run(max(source.glob("*.safetensors")), work / "stages", effort.disk_s)
        checkpoint = open_checkpoint(source)
        read = self._read_rows(checkpoint)
        whole = self._whole_rows(checkpoint, work / "target")
        rates = Rates(
            disk_read=read,
            disk_write=write,
            one_disk=self._one_disk(),
            cpu_seconds=stages.per_own_byte(),
            processors=min(self.processors, self.jobs),
            lanes=self._lanes(),
        )
        return BenchReport(
            machine=self._machine(),
            measurements=tuple(self.rows),
            cpu_seconds_per_gb={k: v * 10**9 for k, v in stages.per_source_byte().items()},
            workload=self.workload,
            bounds=find_bounds(self.workload, rates),
            measured_seconds=self.workload.source_bytes / whole,
            seconds=time.monotonic() - self.begin,
            space_bytes=effort.space,
        )

    def _row(self, group: str, name: str, threads: int, speed: float) -> float:
        self.rows.append(
            Measurement(group=group, name=name, threads=threads, bytes_per_second=speed)
        )
        return speed

    def _write_rows(self, work: Path) -> float:
        """Return the bytes per second of a synced write."""
        effort, path = self.options.effort, work / "plain"
        write = self._row(
            "disk", "write, fsync", 1, write_synced(path, effort.disk_bytes, effort.disk_s)
        )
        forget(path)
        self._row("disk", "read, cold", 1, read_plainly(path))
        path.unlink()
        size = min(effort.disk_bytes, int(write * effort.disk_s))
        speed = write_through(work / "writer.safetensors", size)
        self._row("pipeline", "write, digests, fsync", 1, speed)
        return write

    def _read_rows(self, generated: Checkpoint) -> float:
        """Return the bytes per second of a cold read, of the checkpoint given if there is one."""
        effort, speed = self.options.effort, 0.0
        for file in generated.files:
            forget(generated.root / file.path)
        checkpoint = self.given or generated
        for threads in thread_counts(self.jobs):
            read = read_cold(checkpoint, threads, effort.source_bytes, effort.disk_s)
            speed = max(speed, self._row("pipeline", "read, cold", threads, read))
        for threads in thread_counts(self.jobs):
            for _ in range(2):  # the first one fills the cache
                read = read_through(
                    generated.root,
                    generated.files,
                    threads,
                    effort.source_bytes,
                    effort.disk_s,
                )
            self._row("pipeline", "read, cached", threads, read)
        return speed

    def _whole_rows(self, checkpoint: Checkpoint, target: Path) -> float:
        """Return source bytes per second of whole conversions, read from the disk."""
        for name, cold in (("quantize, cached", False), ("quantize, cold", True)):
            if cold:
                for file in checkpoint.files:
                    forget(checkpoint.root / file.path)
            speed = self._row("whole", name, self.jobs, self._quantize(checkpoint, target))
            shutil.rmtree(target)
        return speed

    def _quantize(self, checkpoint: Checkpoint, target: Path) -> float:
        result = quantize_checkpoint(
            checkpoint,
            build_plan(checkpoint, Options()),
            target,
            RunOptions(
                jobs=self.jobs,
                max_memory=DEFAULT_MAX_MEMORY + resident_bytes(),
                backend=self.options.backend,
            ),
            report=ignore,
            stop=self.stop,
        )
        return result.source_bytes / result.seconds

    def _one_disk(self) -> bool:
        folder = self.options.folder
        if in_memory(folder):
            return False
        source = self.options.source
        return source is None or source.stat().st_dev == folder.stat().st_dev

    def _lanes(self) -> int:
        """Return how many output files `quantize` writes at a time."""
        return plan_budget(self.jobs, DEFAULT_MAX_MEMORY, 0, Needs()).active_files

    def _machine(self) -> dict[str, Any]:
        return {
            "cpu": cpu_model(),
            "processors": self.processors,
            "jobs": self.jobs,
            "backend": explain_backend(self.options.backend),  # type: ignore[arg-type]
            "folder": str(self.options.folder.resolve()),
            "file_system": file_system(self.options.folder),
        }
