"""Our kernels beside torchao's `to_mx` and compressed-tensors' MXFP4 compressor.

    PYTHONPATH=kernels python kernels/bench/bench_peers.py [--mib 128] [--rounds 3] [--threads 1]

Needs torch and, for each peer, its package; a missing peer is left out. Every entry quantizes the
same BF16 weights; the bytes are compared with ours before anything is timed. The peers run on the
whole tensor and on pieces of 8 MiB, which is their best case.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import numpy as np
import torch
from _timing import BLOCK, Pool, copy_task, describe_machine, gaussian_bf16, median
from mxconvert_kernels import FloatType, ScaleRule, get_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    Compressor = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

COLUMNS = 4096
PIECE_BYTES = 8 << 20


def torchao(rule: ScaleRule) -> Compressor:
    from torchao.prototype.mx_formats.mx_tensor import (  # noqa: PLC0415
        ScaleCalculationMode,
        to_mx,
    )

    mode = ScaleCalculationMode[rule.name]

    def compress(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales, packed = to_mx(weight, torch.float4_e2m1fn_x2, BLOCK, mode)
        return packed.view(torch.uint8), scales.view(torch.uint8)

    return compress


def compressed_tensors() -> Compressor:
    from compressed_tensors.compressors.mxfp4.base import (  # noqa: PLC0415
        MXFP4PackedCompressor,
    )
    from compressed_tensors.quantization import (  # noqa: PLC0415
        QuantizationArgs,
        QuantizationScheme,
    )
    from compressed_tensors.quantization.utils.mxfp_utils import (  # noqa: PLC0415
        generate_mx_scales,
    )

    args = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="group",
        group_size=BLOCK,
        symmetric=True,
        scale_dtype=torch.uint8,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def compress(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        maxima = weight.view(weight.shape[0], -1, BLOCK).abs().amax(-1)
        scales = (2.0 ** (generate_mx_scales(maxima).float() - 127)).to(torch.bfloat16)
        state = {"weight": weight, "weight_scale": scales}
        result = MXFP4PackedCompressor.compress(state, scheme)
        return result["weight_packed"], result["weight_scale"]

    return compress


def find_peers() -> dict[str, tuple[ScaleRule, Compressor]]:
    """The peers that are installed, each with the rule of ours that it follows."""
    makers: dict[str, tuple[ScaleRule, Callable[[], Compressor]]] = {
        "torchao to_mx FLOOR": (ScaleRule.FLOOR, lambda: torchao(ScaleRule.FLOOR)),
        "torchao to_mx EVEN": (ScaleRule.EVEN, lambda: torchao(ScaleRule.EVEN)),
        "compressed-tensors": (ScaleRule.EVEN, compressed_tensors),
    }
    found = {}
    for name, (rule, make) in makers.items():
        try:
            found[name] = rule, make()
        except ImportError as error:
            print(f"{name}: left out ({error})", file=sys.stderr)
    return found


class Ours:
    """Our kernel on the same weights."""

    def __init__(self, bits: np.ndarray) -> None:
        self.bits = bits
        self.packed = np.zeros(bits.size // 2, np.uint8)
        self.scales = np.zeros(bits.size // BLOCK, np.uint8)
        self.backend = get_backend()

    def run(self, rule: ScaleRule, begin: int, end: int) -> None:
        self.backend.quantize(
            self.bits[begin * BLOCK : end * BLOCK],
            FloatType.BF16,
            rule,
            self.packed[begin * BLOCK // 2 : end * BLOCK // 2],
            self.scales[begin:end],
        )


def check(
    name: str, ours: Ours, rule: ScaleRule, compress: Compressor, weight: torch.Tensor
) -> None:
    """Stop if the peer's bytes differ from ours."""
    piece = weight[:256]
    ours.run(rule, 0, ours.scales.size)
    packed, scales = compress(piece)
    if not (
        np.array_equal(packed.numpy().ravel(), ours.packed[: packed.numel()])
        and np.array_equal(scales.numpy().ravel(), ours.scales[: scales.numel()])
    ):
        raise SystemExit(f"{name}: its bytes differ from ours")


def peer_seconds(compress: Compressor, weight: torch.Tensor, rounds: int, rows: int) -> float:
    """Median wall time over the whole tensor, `rows` rows at a time."""
    pieces = weight.split(rows)
    pool = Pool(1)

    def run(_begin: int, _end: int) -> None:
        for piece in pieces:
            compress(piece)

    return median([pool.seconds(run, 1) for _ in range(rounds)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Our kernels beside other libraries'.")
    parser.add_argument("--mib", type=int, default=128, help="size of the BF16 weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    size_bytes = options.mib << 20
    bits = gaussian_bf16(size_bytes // 2)
    weight = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(-1, COLUMNS)
    ours, pool = Ours(bits), Pool(options.threads)
    blocks = ours.scales.size

    def report(name: str, seconds: float, factor: str = "") -> None:
        print(f"{name:36} {size_bytes / seconds / 1e9:8.3f} GB/s {factor}")

    print(f"{describe_machine()}, torch {torch.__version__}, threads {options.threads}")
    copy = copy_task(np.zeros_like(bits), bits, BLOCK * 2)
    report("memcpy", median([pool.seconds(copy, blocks) for _ in range(9)]))
    for name, (rule, compress) in find_peers().items():
        check(name, ours, rule, compress, weight)
        our_s = median(
            [pool.seconds(lambda b, e, r=rule: ours.run(r, b, e), blocks) for _ in range(9)]
        )
        report(f"ours, {rule}", our_s)
        for label, rows in (("", len(weight)), (" in pieces", PIECE_BYTES // (2 * COLUMNS))):
            seconds = peer_seconds(compress, weight, options.rounds, rows)
            report(name + label, seconds, f"ours is {seconds / our_s:.0f} times as fast")


if __name__ == "__main__":
    main()
