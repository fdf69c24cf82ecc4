"""Measure quantize against what this machine can do.

    python scripts/bench_quantize.py [--folder /dev/shm] [--gb 4] [--rss 2,16] [--json]

One run does all of it, so that the ratios hold on a noisy machine:

* stages: the CPU seconds that each stage takes per GB of source, measured alone, one
  thread, over the same pieces: read, source digest, kernel, write, chunk and tensor digests,
  SHA-256. Cores divided by their sum is the speed that nothing can exceed here;
* quantize: whole processes with all digests on, source and destination in ``--folder``,
  and their speed as a share of that bound (and, with ``--folder`` on a disk, of a plain
  copy with fsync of the same bytes);
* peak resident memory for each source size of ``--rss``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mxconvert.digest import ChunkHasher, xxh3_128
from mxconvert.pipeline.pieces import PIECE_SIZE
from mxconvert.quantize import Quantizer, load_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HIDDEN, INNER, EXPERTS, VOCAB = 2048, 768, 64, 4096
GB = 10**9
RUNS = 5


# ------------------------------------------------------------------------- the source


def layer_shapes(layer: int) -> dict[str, tuple[int, int]]:
    """Return the tensors of one MoE layer (a Qwen3-MoE of middling size)."""
    block = f"model.layers.{layer}"
    shapes = {f"{block}.self_attn.{p}_proj.weight": (HIDDEN, HIDDEN) for p in "qkvo"}
    shapes[f"{block}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
    for expert in range(EXPERTS):
        stem = f"{block}.mlp.experts.{expert}"
        shapes[f"{stem}.gate_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{stem}.up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{stem}.down_proj.weight"] = (HIDDEN, INNER)
    return shapes


def write_source(folder: Path, gigabytes: float) -> int:
    """Write a checkpoint of about that size; return the bytes of its tensors."""
    folder.mkdir(parents=True)
    per_layer = sum(2 * rows * columns for rows, columns in layer_shapes(0).values())
    layers = max(1, round(gigabytes * GB / per_layer))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    noise = np.random.default_rng(0).standard_normal(1 << 22).astype(np.float32) * 0.02
    pattern = (noise.view(np.uint32) >> 16).astype(np.uint16)  # BF16 by truncation
    total = 0
    for layer in range(layers):
        shapes = layer_shapes(layer)
        if layer == 0:
            shapes["model.embed_tokens.weight"] = (VOCAB, HIDDEN)
        path = folder / f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        total += write_shard(path, shapes, np.roll(pattern, layer * 7919))
    return total


def write_shard(path: Path, shapes: dict[str, tuple[int, int]], pattern: np.ndarray) -> int:
    """Write one shard whose values repeat ``pattern``; return the bytes of its tensors."""
    header, end = {}, 0
    for name, shape in sorted(shapes.items()):
        begin, end = end, end + 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        left = end
        while left:
            left -= file.write(pattern.tobytes()[:left])
    return end


# ------------------------------------------------------------------------- the stages


class Stages:
    """CPU seconds of each stage over the pieces of a shard, one thread."""

    def __init__(self, rule: str) -> None:
        self._quantizer = Quantizer(load_backend("auto"), rule)
        self._source = memoryview(bytearray(PIECE_SIZE))
        self._packed = memoryview(bytearray(PIECE_SIZE // 4))
        self._scales = memoryview(bytearray(PIECE_SIZE // 64))
        self.seconds: dict[str, float] = {}

    def _timed(self, stage: str, call: Callable[[], object]) -> None:
        start = time.thread_time()
        call()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.thread_time() - start

    def run(self, shard: Path, output: Path) -> dict[str, float]:
        """Return CPU seconds per GB of source, per stage."""
        pieces = shard.stat().st_size // PIECE_SIZE
        fd, out = os.open(shard, os.O_RDONLY), os.open(output, os.O_CREAT | os.O_WRONLY)
        source, made = xxh3_128(), xxh3_128()
        chunks, sha256 = ChunkHasher(), hashlib.sha256()
        self._quantizer.quantize(self._source, "BF16", self._packed, self._scales)  # compile
        for number in range(pieces):
            offset = number * PIECE_SIZE
            self._timed("read", lambda at=offset: os.preadv(fd, [self._source], at))
            self._timed("source digest", lambda: source.update(self._source))
            self._timed("kernel", self._convert)
            self._timed("write", lambda: os.writev(out, [self._packed, self._scales]))
            for view in (self._packed, self._scales):
                self._timed("tensor digest", lambda v=view: made.update(v))
                self._timed("chunk digests", lambda v=view: chunks.update(v))
                self._timed("SHA-256", lambda v=view: sha256.update(v))
        os.close(fd)
        os.close(out)
        output.unlink()
        return {k: v / (pieces * PIECE_SIZE) * GB for k, v in self.seconds.items()}

    def _convert(self) -> None:
        self._quantizer.quantize(self._source, "BF16", self._packed, self._scales)


# ------------------------------------------------------------------------ the process


def quantize(source: Path, target: Path, rule: str) -> dict[str, float]:
    """Run quantize as a process; return wall and CPU seconds and peak memory."""
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "mxconvert", "quantize", str(source), str(target)]
    start = time.perf_counter()
    child = subprocess.Popen([*command, "--scale-rule", rule, "--quiet"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"error: quantize ended with status {child.returncode}")
    return {
        "wall_s": wall,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_rss_mib": usage.ru_maxrss / 1024,
    }


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
        fd = os.open(shard, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def sizes(text: str) -> Iterator[float]:
    """Parse ``2,16``."""
    return (float(part) for part in text.split(",") if part)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))  # noqa: S108
    parser.add_argument("--gb", type=float, default=4)
    parser.add_argument("--rule", default="mse")
    parser.add_argument("--rss", default="")
    parser.add_argument("--cold", action="store_true", help="read from the disk, not its cache")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="mxconvert-bench-") as name:
        report(Path(name), args)


def report(work: Path, args: argparse.Namespace) -> None:
    """Measure and print."""
    cores = len(os.sched_getaffinity(0))
    source, target = work / "source", work / "target"
    total = write_source(source, args.gb)
    shard = max(source.glob("*.safetensors"))
    stages = Stages(args.rule).run(shard, work / "stage.out")
    bound = cores / sum(stages.values())
    runs, copies = [], []
    quantize(source, target, args.rule)  # warm
    for _ in range(RUNS):
        if args.cold:
            drop_cache(source)
            copies.append(plain_copy(source, target))
            drop_cache(source)
        runs.append(quantize(source, target, args.rule))
    wall = statistics.median(run["wall_s"] for run in runs)
    speed = total / GB / wall
    result = {
        "cores": cores,
        "source_gb": total / GB,
        "rule": args.rule,
        "stage_cpu_s_per_gb": stages,
        "bound_gb_s": bound,
        "quantize_gb_s": speed,
        "quantize_share_of_bound": speed / bound,
        "cpu_s_per_gb": statistics.median(run["cpu_s"] for run in runs) / (total / GB),
        "peak_rss_mib": max(run["peak_rss_mib"] for run in runs),
    }
    if copies:
        copy = statistics.median(copies)
        result |= {"plain_copy_gb_s": copy, "quantize_share_of_copy": speed / copy}
    shutil.rmtree(source)
    shutil.rmtree(target)
    result["rss_by_source_gb"] = {gb: rss(work, gb, args.rule) for gb in sizes(args.rss)}
    show(result, as_json=args.json)


def rss(work: Path, gigabytes: float, rule: str) -> float:
    """Return the peak resident memory in MiB for a source of that size."""
    source, target = work / "source", work / "target"
    write_source(source, gigabytes)
    peak = quantize(source, target, rule)["peak_rss_mib"]
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
