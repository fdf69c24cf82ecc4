"""Measure what many tensors cost: planning, memory, and time per tensor.

    python scripts/bench_scale.py [--folder /dev/shm] [--tensors 232670] [--kimi FOLDER] [--json]

* `--tensors N`: a checkpoint of N BF16 weights of one block each in 96 shards, and one of
  half as many: plan and quantize as whole processes. Twice the tensors should take about
  twice the time; what is left of it per tensor is overhead, since there are no bytes.
* the names of Kimi-K3, all 249,924 of them, over matrices of one small size: plan and
  quantize, so that names, headers, journal and tensor list are as large as they get.
* `--kimi FOLDER`: the true plan of Kimi-K3 (5.56 TB, sparse) in a folder on a disk: one
  and four output files of 3.2 GB are made; the peak memory should be the same.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mxconvert.bench.process import run_process
from mxconvert.bench.workspace import workspace
from tests.support.container import sparse_safetensors
from tests.support.kimi_k3 import read_config, twin_config, twin_shards, write_twin
from tests.support.models import INDEX, json_bytes, qwen3_moe_config

EXPERTS, SHARDS = 384, 96
PROJECTIONS = ("down_proj", "gate_proj", "up_proj")
MIB = 1 << 20
ROWS, COLUMNS = 32, 64

Entry = tuple[str, tuple[int, ...], int]


def write(folder: Path, shards: dict[str, dict[str, Entry]], config: dict[str, Any]) -> int:
    """Write a sparse checkpoint; return how many tensors it has."""
    folder.mkdir(parents=True)
    for file, entries in shards.items():
        sparse_safetensors(folder / file, dict(sorted(entries.items())))
    weight_map = {name: file for file, entries in shards.items() for name in entries}
    index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_bytes(json_bytes(index))
    (folder / "config.json").write_bytes(json_bytes(config))
    return len(weight_map)


def write_tiny(folder: Path, tensors: int) -> int:
    """Write about that many weights of one block each."""
    layers = max(1, round(tensors / (EXPERTS * len(PROJECTIONS))))
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"
        for layer in range(layers)
        for expert in range(EXPERTS)
        for projection in PROJECTIONS
    ]
    per_shard = -(-len(names) // SHARDS)
    shards = {
        f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors": dict.fromkeys(
            names[number * per_shard : (number + 1) * per_shard], ("BF16", (1, 32), 64)
        )
        for number in range(SHARDS)
    }
    config = qwen3_moe_config(layers=layers, experts=EXPERTS, hidden=32, inner=32, vocab=32)
    return write(folder, shards, config)


def write_kimi_names(folder: Path) -> int:
    """Write Kimi-K3's names over small matrices."""
    small = {1: (COLUMNS,), 2: (ROWS, COLUMNS)}
    shards: dict[str, dict[str, Entry]] = {}
    for file, specs in twin_shards(read_config()):
        shards[file] = {}
        for name, spec in specs.items():
            shape = small.get(len(spec.shape), spec.shape)
            elements = 1
            for dim in shape:
                elements *= dim
            shards[file][name] = ("BF16", shape, 2 * elements)
    return write(folder, shards, twin_config(read_config()))


def run(*arguments: object) -> dict[str, float]:
    """Run mxconvert as a process."""
    usage = run_process([sys.executable, "-m", "mxconvert", *map(str, arguments)])
    if usage.status:
        sys.exit(f"error: mxconvert {' '.join(map(str, arguments))}: status {usage.status}")
    return {"wall_s": usage.wall_s, "cpu_s": usage.cpu_s, "peak_mib": usage.peak_bytes / MIB}


def measure(work: Path, tensors: int) -> dict[str, Any]:
    """Plan and quantize a checkpoint; return the figures."""
    source, target = work / "source", work / "target"
    planned = run("plan", source, "--json")
    made = run("quantize", source, target, "--quiet", "--max-memory", "1GiB")
    shutil.rmtree(source)
    shutil.rmtree(target)
    per_tensor = made["cpu_s"] / tensors * 1e6
    return {"tensors": tensors, "plan": planned, "quantize": made, "cpu_us_per_tensor": per_tensor}


def measure_true_plan(work: Path) -> dict[str, Any]:
    """Make one and four files of the true plan from sparse shards; return the figures."""
    source = work / "source"
    write_twin(source, read_config())
    figures: dict[str, Any] = {}
    for label, last in (("one file", 0), ("four files", 6)):
        target = work / "target"
        only = [
            argument
            for first in range(0, last + 1, 2)
            for argument in ("--only", f"model-experts-{first:05d}-*")
        ]
        figures[label] = run("quantize", source, target, "--quiet", *only)
        shutil.rmtree(target)
    return figures


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))  # noqa: S108
    parser.add_argument("--tensors", type=int, default=232_670)
    parser.add_argument("--kimi", type=Path, metavar="FOLDER")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    with workspace(args.folder) as work:
        for label, count in (("half", args.tensors // 2), ("full", args.tensors)):
            result[label] = measure(work, write_tiny(work / "source", count))
        result["kimi names"] = measure(work, write_kimi_names(work / "source"))
    half, full = (result[label]["quantize"]["cpu_s"] for label in ("half", "full"))
    result["twice the tensors take"] = full / half
    if args.kimi is not None:
        with workspace(args.kimi) as work:
            result["true kimi plan"] = measure_true_plan(work)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)


def show(result: dict[str, Any], prefix: str = "") -> None:
    """Print nested figures, one to a line."""
    for name, value in result.items():
        if isinstance(value, dict):
            show(value, f"{prefix}{name}: ")
        else:
            print(f"{prefix}{name} {value if isinstance(value, int) else f'{value:.2f}'}")


if __name__ == "__main__":
    main()
