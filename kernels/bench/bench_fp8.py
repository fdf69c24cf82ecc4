"""FP8 with factors beside BF16: quantizing as many elements of both, turn by turn.

    PYTHONPATH=kernels python kernels/bench/bench_fp8.py [--elements 4] [--rounds 60] [--json]

CPU time, which other work on the machine disturbs least; medians of the rounds, and of the ratios
within a round. A piece of 4 Mi elements stays in the cache, as it does between reading and writing
a checkpoint; `--elements 64` comes from memory. "widen" turns FP8 into BF16, beside memcpy of what
it writes. The FP8 elements are Gaussian weights with a factor for each 128 x 128, as published
checkpoints have them: no power of two.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from time import perf_counter, thread_time
from typing import TYPE_CHECKING

import numpy as np
from _timing import BLOCK, copy_task, describe_machine, gaussian_bf16, median
from mxconvert_kernels import ErrorSums, FloatType, ScaleRule, explain_backend, get_backend
from mxconvert_kernels.spec import SCALED_TYPES
from mxconvert_kernels.units import magnitude_units

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mxconvert_kernels import Backend

    Run = Callable[[], object]

LARGEST = {FloatType.F8_E4M3: 448.0, FloatType.F8_E5M2: 57344.0}


@dataclass(frozen=True)
class Row:
    dtype: str
    kernel: str
    fp8: float
    """10 ** 9 elements in a second of CPU time, as is the next."""
    bf16: float
    ratio: float
    """Of the two, FP8 over BF16."""


def encode(bits: np.ndarray, dtype: FloatType) -> tuple[np.ndarray, np.ndarray]:
    """BF16 bits as FP8 bytes, each cut to the element below it, and the factors of blocks."""
    weights = (bits.astype(np.uint32) << 16).view(np.float32).reshape(-1, 128)
    largest = np.abs(weights).max(axis=1, keepdims=True)
    factors = largest / np.float32(LARGEST[dtype]) * np.float32(1.001)
    units = [magnitude_units(code, dtype) for code in range(128)]
    magnitudes = np.array([u * 2.0**-149 for u in units if u is not None], np.float32)
    scaled = weights / factors
    codes = np.searchsorted(magnitudes, np.abs(scaled), side="right") - 1
    elements = (codes | (scaled < 0) << 7).astype(np.uint8)
    return elements.ravel(), np.repeat(factors.ravel(), 128 // BLOCK)


def runs(backend: Backend, dtype: FloatType, bits: np.ndarray) -> Iterator[tuple[str, Run, Run]]:
    """What to time, by name: for FP8 and for BF16."""
    elements, factors = encode(bits, dtype)
    packed, scales = np.zeros(bits.size // 2, np.uint8), np.zeros(bits.size // BLOCK, np.uint8)
    for rule in ScaleRule:
        for sums in (None, ErrorSums()):
            yield (
                f"quantize {rule}" + (" + sums" if sums else ""),
                lambda rule=rule, sums=sums: backend.quantize_scaled(
                    elements, dtype, rule, factors, packed, scales, sums
                ),
                lambda rule=rule, sums=sums: backend.quantize(
                    bits, FloatType.BF16, rule, packed, scales, sums=sums
                ),
            )
    out = np.zeros_like(bits)
    copy = copy_task(np.zeros_like(bits), bits, 2 * BLOCK)
    yield (
        "widen",
        lambda: backend.widen_scaled(elements, dtype, factors, out),
        lambda: copy(0, len(factors)),
    )


def seconds(run: Run) -> float:
    start = thread_time()
    run()
    return thread_time() - start


def measure(backend: Backend, dtype: FloatType, bits: np.ndarray, rounds: int) -> Iterator[Row]:
    for name, fp8, bf16 in runs(backend, dtype, bits):
        fp8(), bf16()  # compiles
        times = [(seconds(fp8), seconds(bf16)) for _ in range(rounds)]
        ours, theirs = (median([time[i] for time in times]) for i in (0, 1))
        ratio = median([other / own for own, other in times])
        speeds = (round(bits.size / each / 1e9, 2) for each in (ours, theirs))
        yield Row(str(dtype), name, *speeds, round(ratio, 2))


def first_calls(name: str) -> dict[str, float]:
    """Milliseconds of the first call of each kernel, which compiles it."""
    backend = type(get_backend(name))()
    source, factors, packed, scales = bytes(BLOCK), bytes(4), bytearray(16), bytearray(1)
    dtype, found = FloatType.F8_E4M3, {}
    calls: dict[str, Run] = {
        f"{rule}{' + sums' if sums else ''}": lambda rule=rule, sums=sums: backend.quantize_scaled(
            source, dtype, rule, factors, packed, scales, sums
        )
        for rule in (ScaleRule.EVEN, ScaleRule.MSE)
        for sums in (None, ErrorSums())
    }
    calls["widen"] = lambda: backend.widen_scaled(source, dtype, factors, bytearray(2 * BLOCK))
    for kernel, call in calls.items():
        start = perf_counter()
        call()
        found[kernel] = round(1e3 * (perf_counter() - start), 1)
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="FP8 with factors beside BF16.")
    parser.add_argument("--elements", type=int, default=4, help="of a piece, in Mi")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--backend", default="llvm")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    backend = get_backend(options.backend)
    bits = gaussian_bf16(options.elements << 20)
    compiling = first_calls(options.backend)
    rows = [row for dtype in SCALED_TYPES for row in measure(backend, dtype, bits, options.rounds)]
    if options.json:
        document = {
            "machine": describe_machine(),
            "backend": explain_backend(options.backend),
            "mi_elements": options.elements,
            "first_calls_ms": compiling,
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(document, indent=2))
        return
    print(describe_machine(), explain_backend(options.backend), sep="\n")
    print("first calls, ms:", ", ".join(f"{name} {ms}" for name, ms in compiling.items()))
    print(f"10^9 elements per CPU second, pieces of {options.elements} Mi elements")
    print("type     kernel                  FP8   BF16  ratio")
    for row in rows:
        print(f"{row.dtype:8} {row.kernel:20} {row.fp8:6.2f} {row.bf16:6.2f} {row.ratio:6.2f}")


if __name__ == "__main__":
    main()
