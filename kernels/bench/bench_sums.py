"""What the error statistics cost: quantizing a piece with and without them, turn by turn.

    PYTHONPATH=kernels python kernels/bench/bench_sums.py [--mib 8] [--rounds 60] [--json]

CPU time, which other work on the machine disturbs least; the median of the rounds. The piece stays
in the cache, as it does between reading and writing a checkpoint.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np
from _timing import BLOCK, describe_machine, median
from bench_cpu import make_source
from mxconvert_kernels import ErrorSums, FloatType, ScaleRule, explain_backend, get_backend
from mxconvert_kernels.histograms import histograms
from mxconvert_kernels.spec import WHOLE_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Row:
    dtype: str
    rule: str
    without: float
    """CPU seconds per GB of floats, as all of these."""
    with_sums: float
    extra: float
    histograms: float


def seconds(run: Callable[[], object]) -> float:
    start = thread_time()
    run()
    return thread_time() - start


def measure(name: str, dtype: FloatType, rule: ScaleRule, size_bytes: int, rounds: int) -> Row:
    backend = get_backend(name)
    source = make_source(dtype, size_bytes)
    blocks = size_bytes // (BLOCK * dtype.itemsize)
    packed, scales = np.zeros(blocks * 16, np.uint8), np.zeros(blocks, np.uint8)

    def quantize(sums: ErrorSums | None) -> None:
        backend.quantize(source, dtype, rule, packed, scales, sums=sums)

    quantize(None), quantize(ErrorSums())  # compiles
    times = [
        (
            seconds(lambda: quantize(None)),
            seconds(lambda: quantize(ErrorSums())),
            seconds(lambda: histograms(packed, scales)),
        )
        for _ in range(rounds)
    ]
    per_gb = 1e9 / size_bytes
    columns = [[per_gb * time[i] for time in times] for i in range(3)]
    extra = median([after - before for before, after in zip(columns[0], columns[1], strict=True)])
    figures = [median(columns[0]), median(columns[1]), extra, median(columns[2])]
    return Row(str(dtype), str(rule), *(round(figure, 4) for figure in figures))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What the error statistics cost.")
    parser.add_argument("--mib", type=int, default=8, help="size of the piece")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--backend", default="llvm")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    rows = [
        measure(options.backend, dtype, rule, options.mib << 20, options.rounds)
        for dtype in WHOLE_TYPES
        for rule in (ScaleRule.MSE, ScaleRule.EVEN)
    ]
    if options.json:
        document = {
            "machine": describe_machine(),
            "backend": explain_backend(options.backend),
            "mib": options.mib,
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(document, indent=2))
        return
    print(describe_machine(), explain_backend(options.backend), sep="\n")
    print(f"CPU seconds per GB of floats, pieces of {options.mib} MiB")
    print("type  rule    without    with   extra  histograms")
    for row in rows:
        print(
            f"{row.dtype:5} {row.rule:6} {row.without:8.4f} {row.with_sums:7.4f} "
            f"{row.extra:7.4f} {row.histograms:11.4f}"
        )


if __name__ == "__main__":
    main()
