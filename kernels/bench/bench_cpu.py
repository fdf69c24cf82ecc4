"""Throughput of the CPU kernels beside memcpy.

    PYTHONPATH=kernels python kernels/bench/bench_cpu.py [--mib 128] [--threads 1 2] [--json]

"+ sums" collects the error statistics too; `bench_sums.py` measures what they cost.
GB/s count the floats read by `quantize` and `scan` and written by `dequantize`; memcpy copies as
many bytes. The ratio is the median over rounds, each of which times both.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from _timing import (
    BLOCK,
    Pool,
    copy_task,
    describe_machine,
    gaussian_bf16,
    median,
)
from mxconvert_kernels import ErrorSums, FloatType, ScaleRule, explain_backend, get_backend
from mxconvert_kernels.histograms import histograms
from mxconvert_kernels.spec import WHOLE_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _timing import Task
    from mxconvert_kernels import Backend


@dataclass(frozen=True)
class Row:
    backend: str
    kernel: str
    dtype: str
    threads: int
    gb_per_s: float
    memcpy_gb_per_s: float
    ratio: float


def make_source(dtype: FloatType, size_bytes: int) -> np.ndarray:
    """Gaussian weights of a type, as bytes."""
    bits = gaussian_bf16(size_bytes // dtype.itemsize)
    if dtype is FloatType.BF16:
        return bits.view(np.uint8)
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    # Fill the mantissa bits that BF16 lacks, so that F32 is not BF16 in disguise.
    values *= np.float32(1.001)
    return values.astype(np.float16 if dtype is FloatType.F16 else np.float32).view(np.uint8)


def tasks(backend: Backend, dtype: FloatType, source: np.ndarray) -> Iterator[tuple[str, Task]]:
    """The kernels to time, by name."""
    width = BLOCK * dtype.itemsize
    blocks = source.size // width
    packed, scales = np.zeros(blocks * 16, np.uint8), np.zeros(blocks, np.uint8)
    out = np.zeros_like(source)

    def quantize_task(rule: ScaleRule, floats: np.ndarray, *, with_sums: bool = False) -> Task:
        def run(begin: int, end: int) -> None:
            backend.quantize(
                floats[begin * width : end * width],
                dtype,
                rule,
                packed[begin * 16 : end * 16],
                scales[begin:end],
                sums=ErrorSums() if with_sums else None,
            )

        return run

    def dequantize(begin: int, end: int) -> None:
        backend.dequantize(
            packed[begin * 16 : end * 16],
            scales[begin:end],
            dtype,
            out[begin * width : end * width],
        )

    def scan(begin: int, end: int) -> None:
        backend.scan(source[begin * width : end * width], dtype)

    yield "quantize mse, zeros", quantize_task(ScaleRule.MSE, np.zeros_like(source))
    for rule in ScaleRule:
        yield f"quantize {rule}", quantize_task(rule, source)
    for rule in (ScaleRule.MSE, ScaleRule.EVEN):
        yield f"quantize {rule} + sums", quantize_task(rule, source, with_sums=True)
    yield (
        "histograms",
        lambda begin, end: histograms(packed[begin * 16 : end * 16], scales[begin:end]),
    )
    yield "dequantize", dequantize
    yield "scan", scan


def measure(
    backend: Backend, dtype: FloatType, size_bytes: int, threads: int, rounds: int
) -> Iterator[Row]:
    """Rows for one backend, type and number of threads."""
    source = make_source(dtype, size_bytes)
    blocks = size_bytes // (BLOCK * dtype.itemsize)
    copy = copy_task(np.zeros_like(source), source, BLOCK * dtype.itemsize)
    pool = Pool(threads)
    for name, task in tasks(backend, dtype, source):
        task(0, 1)  # compiles
        pairs = [(pool.seconds(copy, blocks), pool.seconds(task, blocks)) for _ in range(rounds)]
        copy_s, task_s = (median([pair[i] for pair in pairs]) for i in (0, 1))
        yield Row(
            backend.name,
            name,
            str(dtype),
            threads,
            round(size_bytes / task_s / 1e9, 2),
            round(size_bytes / copy_s / 1e9, 2),
            round(median([copied / done for copied, done in pairs]), 2),
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Throughput of the CPU kernels beside memcpy.")
    parser.add_argument("--mib", type=int, default=128, help="size of the floats")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--backends", nargs="+", default=["llvm", "numpy"])
    parser.add_argument("--dtypes", nargs="+", type=FloatType, default=list(WHOLE_TYPES))
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    rows = [
        row
        for name in options.backends
        for threads in options.threads
        for dtype in options.dtypes
        for row in measure(get_backend(name), dtype, options.mib << 20, threads, options.rounds)
    ]
    backends = [explain_backend(name) for name in options.backends]
    if options.json:
        document = {
            "machine": describe_machine(),
            "backends": backends,
            "mib": options.mib,
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(document, indent=2))
        return
    print(describe_machine(), *backends, f"{options.mib} MiB of floats", sep="\n")
    print(f"{'backend':8} {'threads':>7} {'type':5} {'kernel':20} {'GB/s':>6} {'memcpy':>6} ratio")
    for row in rows:
        print(
            f"{row.backend:8} {row.threads:7} {row.dtype:5} {row.kernel:20} "
            f"{row.gb_per_s:6.2f} {row.memcpy_gb_per_s:6.2f} {row.ratio:5.2f}"
        )


if __name__ == "__main__":
    main()
