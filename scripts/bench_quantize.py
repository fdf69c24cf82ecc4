"""Measure quantize against what this machine can do.

    python scripts/bench_quantize.py [--folder /dev/shm] [--gb 8] [--rss 2,16] [--json]
    python scripts/bench_quantize.py --statistics 15 [--folder /dev/shm] [--gb 8] [--cold]

`mxconvert bench` gives the rates of this machine; this script measures whole processes.
One run does all of it, so that the ratios hold on a noisy machine:

* stages: the CPU seconds that each stage takes per GB of source, measured apart over the same
  pieces (`mxconvert.bench.stages`) on every core at once, since cores share caches, memory
  and clock; and what they add up to for the bytes that this checkpoint reads, quantizes and
  writes. Cores divided by that is the speed that nothing can exceed here. The bound from
  one core alone is printed beside it;
* quantize with all digests and statistics on, source and destination in ``--folder``: as a
  whole process, start of the interpreter included, and as the run times itself, each as a
  share of that bound (and, with ``--cold`` on a disk, of a plain
  copy with fsync of the same bytes);
* peak resident memory for each source size of ``--rss``.

With ``--statistics N`` it measures only what the error statistics cost: N pairs of whole
processes, without and with them, turn by turn in alternating order; the median of the pairs'
ratios, of wall time and of CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from mxconvert.bench.bounds import Workload, cpu_seconds
from mxconvert.bench.disk import forget
from mxconvert.bench.process import Usage, run_process
from mxconvert.bench.source import Dimensions, write_source
from mxconvert.bench.stages import Stages
from mxconvert.bench.workspace import workspace
from mxconvert.model import Options, ScaleRule
from mxconvert.pipeline.pieces import PIECE_SIZE
from mxconvert.pipeline.slots import usable_cores
from mxconvert.plan import build_plan
from mxconvert.quantize import load_backend
from mxconvert.source import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GB = 10**9
RUNS = 5


def quantize(source: Path, target: Path, rule: str, *options: str) -> tuple[Usage, float]:
    """Run quantize as a process of its own; also return the seconds that it states itself."""
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "mxconvert", "quantize", str(source), str(target), *options]
    with tempfile.TemporaryFile() as log:
        usage = run_process([*command, "--scale-rule", rule, "--json"], log=log)
        log.seek(0)
        lines = log.read().splitlines()
    if usage.status:
        sys.exit(f"error: quantize ended with status {usage.status}")
    return usage, json.loads(lines[-1])["seconds"]


def plain_copy(source: Path, target: Path) -> float:
    """Read the source once and write as many bytes as quantize would; return GB/s of source."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    start, done = time.perf_counter(), 0
    buffer = memoryview(bytearray(PIECE_SIZE))
    for shard in sorted(source.glob("*.safetensors")):
        out = os.open(target / shard.name, os.O_CREAT | os.O_WRONLY)
        with shard.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                os.write(out, buffer[: count * 17 // 64])
                done += count
        os.fsync(out)
        os.close(out)
    shutil.rmtree(target)
    return done / GB / (time.perf_counter() - start)


def drop_cache(source: Path) -> None:
    """Ask the kernel to forget the source, so that it is read from the disk."""
    for shard in source.glob("*.safetensors"):
        forget(shard)


def sizes(text: str) -> Iterator[float]:
    """Parse ``2,16``."""
    return (float(part) for part in text.split(",") if part)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))  # noqa: S108
    parser.add_argument("--gb", type=float, default=8)
    parser.add_argument("--rule", default="mse")
    parser.add_argument("--rss", default="")
    parser.add_argument("--cold", action="store_true", help="read from the disk, not its cache")
    parser.add_argument("--statistics", type=int, metavar="PAIRS", help="measure only their cost")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with workspace(args.folder) as work:
        if args.statistics:
            show(cost_of_statistics(work, args), as_json=args.json)
        else:
            report(work, args)


def cost_of_statistics(work: Path, args: argparse.Namespace) -> dict[str, object]:
    """Measure pairs of runs without and with error statistics; every other pair turned round."""
    source, target = work / "source", work / "target"
    total = write_source(source, Dimensions().sized(int(args.gb * GB)))
    quantize(source, target, args.rule)  # warm
    runs: dict[bool, list[tuple[Usage, float]]] = {False: [], True: []}
    for pair in range(args.statistics):
        for measured in (pair % 2 == 1, pair % 2 == 0):
            if args.cold:
                drop_cache(source)
            options = () if measured else ("--no-statistics",)
            runs[measured].append(quantize(source, target, args.rule, *options))
    result: dict[str, object] = {"source_gb": total / GB, "rule": args.rule}
    for name, figure in FIGURES.items():
        without, with_them = ([figure(run) for run in runs[measured]] for measured in (False, True))
        ratios = sorted(b / a for a, b in zip(without, with_them, strict=True))
        middle = statistics.quantiles(ratios, n=4)
        result[name] = {
            "without_s": statistics.median(without),
            "with_s": statistics.median(with_them),
            "ratio": middle[1],
            "ratio_lower_quartile": middle[0],
            "ratio_upper_quartile": middle[2],
        }
    return result


FIGURES: dict[str, Callable[[tuple[Usage, float]], float]] = {
    "process wall": lambda run: run[0].wall_s,
    "process CPU": lambda run: run[0].cpu_s,
    "process user time": lambda run: run[0].user_s,
    "conversion wall": lambda run: run[1],
}


def stages_on(threads: int, source: Path, work: Path, rule: str) -> Stages:
    """Measure the stages on some threads at once, each on a shard of its own."""
    shards = sorted(source.glob("*.safetensors"))
    runs = [Stages(load_backend("auto"), rule) for _ in range(threads)]

    def run(number: int) -> None:
        runs[number].run(shards[number % len(shards)], work / f"stage-{number}.out")

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))
    total = runs[0]
    for other in runs[1:]:
        total.source_bytes += other.source_bytes
        for stage, taken in other.seconds.items():
            total.seconds[stage] += taken
    return total


def report(work: Path, args: argparse.Namespace) -> None:
    """Measure and print."""
    cores = usable_cores()
    source, target = work / "source", work / "target"
    total = write_source(source, Dimensions().sized(int(args.gb * GB)))
    plan = build_plan(open_checkpoint(source), Options(scale_rule=ScaleRule(args.rule)))
    workload = Workload.of_plan(plan)
    alone = stages_on(1, source, work, args.rule)
    stages = stages_on(cores, source, work, args.rule)
    per_gb = {stage: taken * GB for stage, taken in stages.per_source_byte().items()}
    bound_alone = cores / cpu_seconds(workload, alone.per_own_byte()) * total / GB
    bound = cores / cpu_seconds(workload, stages.per_own_byte()) * total / GB
    runs, copies = [], []
    quantize(source, target, args.rule)  # warm
    for _ in range(RUNS):
        if args.cold:
            drop_cache(source)
            copies.append(plain_copy(source, target))
            drop_cache(source)
        runs.append(quantize(source, target, args.rule))
    speed = total / GB / statistics.median(usage.wall_s for usage, _ in runs)
    inner = total / GB / statistics.median(seconds for _, seconds in runs)
    result = {
        "cores": cores,
        "source_gb": total / GB,
        "rule": args.rule,
        "stage_cpu_s_per_gb": per_gb,
        "bound_gb_s": bound,
        "bound_if_cores_did_not_share_gb_s": bound_alone,
        "process_gb_s": speed,
        "process_share_of_bound": speed / bound,
        "conversion_gb_s": inner,
        "conversion_share_of_bound": inner / bound,
        "cpu_s_per_gb": statistics.median(usage.cpu_s for usage, _ in runs) / (total / GB),
        "peak_rss_mib": max(usage.peak_bytes for usage, _ in runs) / 2**20,
    }
    if copies:
        copy = statistics.median(copies)
        result |= {"plain_copy_gb_s": copy, "process_share_of_copy": speed / copy}
    shutil.rmtree(source)
    shutil.rmtree(target)
    result["rss_by_source_gb"] = {gb: rss(work, gb, args.rule) for gb in sizes(args.rss)}
    show(result, as_json=args.json)


def rss(work: Path, gigabytes: float, rule: str) -> float:
    """Return the peak resident memory in MiB for a source of that size."""
    source, target = work / "source", work / "target"
    write_source(source, Dimensions().sized(int(gigabytes * GB)))
    peak = quantize(source, target, rule)[0].peak_bytes / 2**20
    shutil.rmtree(source)
    shutil.rmtree(target)
    return peak


def show(result: dict[str, object], *, as_json: bool) -> None:
    """Print the result as JSON or as a list."""
    if as_json:
        print(json.dumps(result, indent=2))
        return
    for name, value in result.items():
        if isinstance(value, dict):
            for key, figure in value.items():
                print(f"{name}  {key}: {figure:.3f}")
        else:
            print(f"{name}: {value if isinstance(value, str | int) else f'{value:.3f}'}")


if __name__ == "__main__":
    main()
