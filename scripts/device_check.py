"""Check the GPU's kernels and the pipeline on a GPU: first the bits, then the speed.

    python scripts/device_check.py [--json FILE] [--mib 1024] [--gb 8] [--bits-only]

Every variant that the GPU has, every rule and source against the numpy backend, on sizes around
those of programs and on values around ties; matrices read in place; then the time of each kernel
beside a copy on the device of as many bytes; then `quantize` of a model of ``--gb`` from tmpfs to
tmpfs, on the CPU, on both and on the GPU alone, beside what binds it (`device_run`). Needs torch,
Triton and numpy, the last part also what the command needs; neither llvmlite nor a network.
Status 1 if a byte differs. With TRITON_INTERPRET=1 it checks the interpreter, with ``--gb 0.05``
and ``--bits-only``. Nobody has run it on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

import numpy as np
import torch
from mxconvert_kernels import BLOCK_SIZE, ErrorSums, FloatType, ScaleRule, get_backend
from mxconvert_kernels.gpu.backend import TritonBackend
from mxconvert_kernels.gpu.kinds import Variant
from mxconvert_kernels.gpu.launch import Launcher, Matrix, describe, nothing_found
from mxconvert_kernels.program_sums import SUMS
from mxconvert_kernels.spec import SCALED_TYPES, WHOLE_TYPES

from scripts.device_run import measure_runs, missing
from tests.kernels.blocks import random_bits, spread_bits
from tests.kernels.interpreter import INTERPRETING, fuse_multiply_add

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEVICE = torch.device("cpu" if INTERPRETING else "cuda")
BLOCK_COUNTS = (1, 2, 127, 128, 129, 1000) if INTERPRETING else (1, 127, 129, 4099, 70_001)
REPEATS = 20


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here as well")
    parser.add_argument("--mib", type=int, default=1024, help="of BF16, for the times")
    parser.add_argument("--gb", type=float, default=8, help="of the model; 0 leaves it out")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))  # noqa: S108
    parser.add_argument("--bits-only", action="store_true", help="no times of kernels")
    options = parser.parse_args()
    if INTERPRETING:
        fuse_multiply_add()
    results: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": "interpreter" if INTERPRETING else torch.cuda.get_device_name(),
        "versions": describe(),
    }
    results["bits"] = list(check_bits())
    wrong = [found for found in results["bits"] if found["wrong"]]
    print(f"{results['device']}, {results['versions']}, {results['date']}")
    print(f"bits: {len(results['bits'])} comparisons, {len(wrong)} differ")
    for found in wrong:
        print(f"  DIFFERS {found}")
    if not options.bits_only:
        results["copy_gb_s"], results["kernels"] = measure(options.mib << 20)
        print(f"device copy: {results['copy_gb_s']:.0f} GB/s read and written")
        print("| variant | kernel | GB/s of its traffic | of the copy |")
        print("|---|---|--:|--:|")
        for row in results["kernels"]:
            names = f"{row['variant']} | {row['kernel']}"
            print(f"| {names} | {row['gb_s']:.0f} | {row['share']:.2f} |")
    if options.gb:
        results["quantize"] = end_to_end(int(options.gb * 1e9), options.folder)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(bool(wrong) or not results.get("quantize", {}).get("same_artifact", True))


def end_to_end(size: int, folder: Path) -> dict[str, Any]:
    """Measure the whole command and print what it does."""
    if absent := missing():
        print(f"quantize: left out, {', '.join(absent)} not installed here")
        return {"left_out": absent}
    found = measure_runs(size, folder)
    print(f"quantize {found['source_gb']:.1f} GB from {folder} to {folder}, rule mse:")
    print("| on | GB/s | with start | of the bound | CPU s/GB | done by GPU |")
    print("|---|--:|--:|--:|--:|--:|")
    for row in found["runs"]:
        figures = (row["gb_s"], row["gb_s_with_start"], row["of_bound"], row["cpu_s_per_gb"])
        cells = " | ".join(f"{figure:.2f}" for figure in figures)
        print(f"| {row['run']} | {cells} | {row['on_gpu']:.0%} |")
    limits = ", ".join(f"{name} {rate:.1f}" for name, rate in found["limits_gb_s"].items())
    print(f"limits, GB/s of source: {limits}; {found['bound']} binds")
    print("the same artifact each time" if found["same_artifact"] else "THE ARTIFACTS DIFFER")
    return found


def variants() -> list[Variant]:
    """Return what the device can run, the best last."""
    best = Launcher.for_device(DEVICE).variant
    return [variant for variant in Variant if variant <= best]


# ------------------------------------------------------------------------------------- bits


def check_bits() -> Iterator[dict[str, Any]]:
    """Compare everything with the numpy backend."""
    reference = get_backend("numpy")
    for variant in variants():
        blocks = Launcher.for_device(DEVICE).blocks
        backend = TritonBackend(str(DEVICE), Launcher(variant, blocks))
        for count in BLOCK_COUNTS:
            for dtype in WHOLE_TYPES:
                for make in (random_bits, spread_bits):
                    bits = make(dtype, count, seed=count)
                    for rule in ScaleRule:
                        what = f"{dtype} {rule} {make.__name__} {count} blocks"
                        yield verdict(variant, what, compare(backend, reference, bits, dtype, rule))
            for dtype in SCALED_TYPES:
                for rule in ScaleRule:
                    wrong = compare_scaled(backend, reference, count, dtype, rule)
                    yield verdict(variant, f"{dtype} {rule} {count} blocks", wrong)
        every = np.repeat(np.arange(1 << 16, dtype=np.uint16), BLOCK_SIZE)
        every = every if not INTERPRETING else every[: 1 << 15]
        for rule in ScaleRule:
            wrong = compare(backend, reference, every, FloatType.BF16, rule)
            yield verdict(variant, f"every BF16 {rule}", wrong)
        yield verdict(variant, "transposed", compare_transposed(variant, blocks, reference))
    yield verdict(Variant.PORTABLE, "dequantize", compare_dequantized(backend, reference))


def verdict(variant: Variant, what: str, wrong: int) -> dict[str, Any]:
    """Return one line of the results."""
    return {"variant": variant.name.lower(), "what": what, "wrong": wrong}


def outputs(blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return room for codes and scales, filled with what nobody writes."""
    return np.full(blocks * 16, 0xA5, np.uint8), np.full(blocks, 0xA5, np.uint8)


def compare(one: Any, other: Any, bits: np.ndarray, dtype: FloatType, rule: ScaleRule) -> int:
    """Return how many bytes, counts and sums differ."""
    made, wanted = outputs(bits.size // BLOCK_SIZE), outputs(bits.size // BLOCK_SIZE)
    sums, expected = ErrorSums(), ErrorSums()
    found = one.quantize(bits, dtype, rule, *made, sums=sums)
    nonfinite = other.quantize(bits, dtype, rule, *wanted, sums=expected)
    counts = [
        (each.blocks, each.flushed, each.saturated, each.exponents, each.max_abs_err)
        for each in (sums, expected)
    ]
    close = np.allclose(
        (sums.sum_x2, sums.sum_q2, sums.sum_err2),
        (expected.sum_x2, expected.sum_q2, expected.sum_err2),
        rtol=1e-6,
        atol=0,
    )
    return differing(made, wanted) + (found != nonfinite) + (counts[0] != counts[1]) + (not close)


def differing(made: tuple[np.ndarray, ...], wanted: tuple[np.ndarray, ...]) -> int:
    """Return how many bytes differ."""
    return sum(int((a != b).sum()) for a, b in zip(made, wanted, strict=True))


def compare_scaled(one: Any, other: Any, count: int, dtype: FloatType, rule: ScaleRule) -> int:
    """Return how many bytes of quantized and of widened FP8 differ."""
    rng = np.random.default_rng(count)
    elements = rng.integers(0, 256, count * BLOCK_SIZE, np.uint8)
    factors = np.ldexp(rng.random(count) + 0.5, rng.integers(-140, 120, count)).astype(np.float32)
    made, wanted = outputs(count), outputs(count)
    wide, wider = np.zeros((2, count * BLOCK_SIZE), np.uint16)
    found = [
        (
            each.quantize_scaled(elements, dtype, rule, factors, *out),
            each.widen_scaled(elements, dtype, factors, bf16),
        )
        for each, out, bf16 in ((one, made, wide), (other, wanted, wider))
    ]
    return differing((*made, wide), (*wanted, wider)) + (found[0] != found[1])


def compare_transposed(variant: Variant, blocks: int, reference: Any) -> int:
    """Return how many bytes differ of a matrix that is read as it lies, every other column."""
    rows, columns = 77, 320
    bits = spread_bits(FloatType.BF16, rows * columns // BLOCK_SIZE, seed=5, top=130)
    stored = np.zeros((columns, 2 * rows + 6), np.uint16)
    stored[:, : 2 * rows : 2] = bits.reshape(rows, columns).T
    made, wanted = outputs(rows * columns // BLOCK_SIZE), outputs(rows * columns // BLOCK_SIZE)
    reference.quantize(bits, FloatType.BF16, ScaleRule.MSE, *wanted)
    packed, scales = (torch.from_numpy(each).to(DEVICE) for each in made)
    Launcher(variant, blocks).quantize(
        torch.from_numpy(stored.reshape(-1).view(np.uint8)).to(DEVICE),
        Matrix(rows, columns, row_pitch=2, column_pitch=stored.shape[1]),
        dtype=FloatType.BF16,
        rule=ScaleRule.MSE,
        packed=packed,
        scales=scales,
    )
    return differing((packed.cpu().numpy(), scales.cpu().numpy()), wanted)


def compare_dequantized(one: Any, other: Any) -> int:
    """Return how many bytes differ of every pair of codes under every scale."""
    packed = np.tile(np.arange(256, dtype=np.uint8), 256)
    scales = np.repeat(np.arange(256, dtype=np.uint8), 16)
    made, wanted = np.zeros((2, packed.size * 2), np.uint16)
    for each, out in ((one, made), (other, wanted)):
        each.dequantize(packed, scales, FloatType.BF16, out)
    return differing((made,), (wanted,))


# ------------------------------------------------------------------------------------- time


def seconds(launch: Callable[[], object]) -> float:
    """Return the median time of a launch."""
    for _ in range(3):
        launch()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    for begin, end in events:
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    time.sleep(0.01)
    return float(np.median([begin.elapsed_time(end) for begin, end in events])) / 1000


def measure(size: int) -> tuple[float, list[dict[str, Any]]]:
    """Return the device's copy rate and each kernel's, GB/s of bytes read and written."""
    blocks = size // 64
    source = torch.randn(blocks * BLOCK_SIZE, device=DEVICE).mul_(0.02).to(torch.bfloat16)
    source = source.view(torch.uint8)
    target = torch.empty_like(source)
    packed = torch.empty(blocks * 16, dtype=torch.uint8, device=DEVICE)
    scales = torch.empty(blocks, dtype=torch.uint8, device=DEVICE)
    copy = 2 * size / seconds(lambda: target.copy_(source)) / 1e9
    found = nothing_found(DEVICE)
    rows = []

    def add(variant: Variant, kernel: str, traffic: int, launch: Callable[[], object]) -> None:
        rate = traffic / seconds(launch) / 1e9
        rows.append(
            {"variant": variant.name.lower(), "kernel": kernel, "gb_s": rate, "share": rate / copy}
        )

    for variant in variants():
        launcher = Launcher(variant, Launcher.for_device(DEVICE).blocks)
        sums = torch.empty(launcher.programs(blocks) * SUMS, dtype=torch.float64, device=DEVICE)
        for rule in ScaleRule:
            for name, extra in (
                (f"quantize {rule}", {}),
                (f"quantize {rule}, found and sums", {"found": found, "sums": sums}),
            ):
                add(
                    variant,
                    name,
                    size + blocks * 17,
                    lambda rule=rule, extra=extra, launcher=launcher: launcher.quantize(
                        source,
                        Matrix.flat(blocks),
                        dtype=FloatType.BF16,
                        rule=rule,
                        packed=packed,
                        scales=scales,
                        **extra,
                    ),
                )
    launcher = Launcher.for_device(DEVICE)
    add(
        launcher.variant,
        "dequantize",
        size + blocks * 17,
        lambda: launcher.dequantize(packed, scales, target),
    )
    return copy, rows


if __name__ == "__main__":
    main()
