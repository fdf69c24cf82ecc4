"""`quantize` from memory to memory, GPU beside CPU, and which limit binds; see `device_check`.

Limits, in GB/s of source: what the link to the GPU copies in (and, for what comes back, out);
what tmpfs gives and takes; and the cores, divided by the CPU seconds that the run itself took
for each GB.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mxconvert.bench.process import run_process
from mxconvert.bench.source import Dimensions, write_source
from mxconvert.pipeline.slots import usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable

GB = 10**9
OUTPUT_SHARE = 17 / 64
NEEDED = ("awscrt", "zstandard", "xxhash", "typer", "rich")
_COPY_BYTES = 1 << 28
_SMALL = Dimensions(experts=4, hidden=256, inner=128, vocab=256)
_PROGRAM = ["-m", "mxconvert"]
if os.environ.get("TRITON_INTERPRET") == "1":
    _PROGRAM = [
        "-c",
        (
            "from tests.kernels.interpreter import fuse_multiply_add as fuse; fuse(); "
            "from mxconvert.cli import main; main()"
        ),
    ]
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Run:
    """One run of the command.

    Attributes:
        name: What was asked for.
        wall_s: Of the whole process.
        seconds: As the run states it.
        cpu_s: User and system time.
        artifact: The id.
        devices: What each GPU did.
    """

    name: str
    wall_s: float
    seconds: float
    cpu_s: float
    artifact: str
    devices: list[dict[str, Any]]


def missing() -> list[str]:
    """Return the packages that the whole command needs and that are not here."""
    return [name for name in NEEDED if find_spec(name) is None]


def measure_runs(size: int, folder: Path, repeat: int = 2) -> dict[str, Any]:
    """Quantize a model of ``size`` bytes each way; return times, limits and what binds."""
    work = Path(tempfile.mkdtemp(dir=folder))
    try:
        source = work / "source"
        shape = Dimensions(experts=128) if size > GB else _SMALL
        total = write_source(source, shape.sized(size))
        ways = {
            "cpu": ("--device", "cpu"),
            "gpu and cpu": ("--device", "all"),
            "gpu alone": ("--backend", "triton"),
        }
        runs = [
            min((_quantize(name, source, work, options) for _ in range(repeat)), key=_seconds)
            for name, options in ways.items()
        ]
        limits = _limits(work, total, runs[-1])
    finally:
        shutil.rmtree(work)
    bound = min(limits, key=lambda name: limits[name])
    return {
        "source_gb": total / GB,
        "same_artifact": len({run.artifact for run in runs}) == 1,
        "runs": [_row(run, total, limits[bound]) for run in runs],
        "limits_gb_s": limits,
        "bound": bound,
    }


def _seconds(run: Run) -> float:
    return run.seconds


def _quantize(name: str, source: Path, work: Path, options: tuple[str, ...]) -> Run:
    target = work / "target"
    command = [sys.executable, *_PROGRAM, "quantize", str(source), str(target)]
    path = os.pathsep.join([str(_ROOT), str(_ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryFile() as log:
        usage = run_process(
            [*command, *options, "--max-memory", "4GiB", "--json"],
            env={**os.environ, "PYTHONPATH": path},
            log=log,
        )
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines()
    shutil.rmtree(target, ignore_errors=True)
    if usage.status:
        raise RuntimeError(f"quantize {' '.join(options)} ended with {usage.status}: {lines[-3:]}")
    found = json.loads(lines[-1])
    return Run(
        name, usage.wall_s, found["seconds"], usage.cpu_s, found["artifact"], found["devices"]
    )


def _row(run: Run, total: int, bound: float) -> dict[str, Any]:
    rate = total / GB / run.seconds
    return {
        "run": run.name,
        "gb_s": rate,
        "gb_s_with_start": total / GB / run.wall_s,
        "of_bound": rate / bound,
        "cpu_s_per_gb": run.cpu_s / (total / GB),
        "on_gpu": sum(use["source_bytes"] for use in run.devices) / total,
        "given_up": [use["error"] for use in run.devices if use["error"]],
    }


def _limits(folder: Path, total: int, run: Run) -> dict[str, float]:
    """Return what binds, in GB/s of source."""
    tmpfs = _tmpfs(folder)
    found = {"tmpfs": tmpfs, "cores": usable_cores() * total / GB / run.cpu_s}
    if torch.cuda.is_available():
        found |= _link()
    return found


def _tmpfs(folder: Path) -> float:
    """Return the GB/s at which all cores together read from tmpfs and write the output's share."""
    threads = usable_cores()
    buffers = [memoryview(bytearray(_COPY_BYTES // 4)) for _ in range(threads)]
    sources = [folder / f"rate-{number}" for number in range(threads)]
    for name, buffer in zip(sources, buffers, strict=True):
        name.write_bytes(buffer)

    def pass_through(name: Path, buffer: memoryview) -> None:
        with name.open("rb", buffering=0) as file:
            file.readinto(buffer)
        with name.with_suffix(".out").open("wb", buffering=0) as file:
            file.write(buffer[: int(len(buffer) * OUTPUT_SHARE)])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(pass_through, sources, buffers))  # the pages are there then
        begin = time.perf_counter()
        list(pool.map(pass_through, sources, buffers))
        seconds = time.perf_counter() - begin
    return threads * len(buffers[0]) / GB / seconds


def _link() -> dict[str, float]:
    """Return what the link copies from pinned memory, and back, each alone."""
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    copy_in = _rate(lambda: device.copy_(host, non_blocking=True))
    copy_out = _rate(lambda: host.copy_(device, non_blocking=True))
    return {"link, in": copy_in, "link, out": copy_out / OUTPUT_SHARE}


def _rate(copy: Callable[[], object]) -> float:
    copy()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(8):
        copy()
    end.record()
    end.synchronize()
    return 8 * _COPY_BYTES / GB / (begin.elapsed_time(end) / 1000)
