"""Write a small Qwen3-MoE checkpoint folder with random weights, using numpy only.

Names, shapes, dtypes and config.json are what transformers' ``save_pretrained`` writes
(`tests/test_demo_model.py` holds it to that). The weights are seeded: two runs write the
same bytes.

    python scripts/demo_model.py FOLDER
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.container import Tensor, raw_safetensors
from tests.support.models import (
    INDEX,
    json_bytes,
    qwen3_moe_config,
    qwen3_moe_shapes,
    shard_name,
    sidecars,
    tensor,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DIMENSIONS = {"layers": 4, "experts": 16, "hidden": 512, "inner": 256, "vocab": 8192}
HEADS = 8
TOP_K = 4
TRANSFORMERS = "5.24.0"
"""The release whose spelling of the config is followed."""

SHARD_BYTES = 32 << 20


def demo_config() -> dict[str, Any]:
    """Return config.json as transformers 5 spells it."""
    config = qwen3_moe_config(**DIMENSIONS, heads=HEADS, top_k=TOP_K)
    config["num_local_experts"] = config.pop("num_experts")
    config["transformers_version"] = TRANSFORMERS
    return dict(sorted(config.items()))


def demo_shapes() -> dict[str, tuple[int, ...]]:
    """Return every tensor's shape, in the order of their names as a person counts."""
    config = demo_config()
    shapes = qwen3_moe_shapes(config | {"num_experts": config["num_local_experts"]}, qk_norm=True)
    return dict(sorted(shapes.items(), key=lambda pair: _natural(pair[0])))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _shards(shapes: Mapping[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    """Split in order into shards of at most `SHARD_BYTES`."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = SHARD_BYTES
    for name, shape in shapes.items():
        size = _bytes(shape)
        if size > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = shape
        room -= size
    return shards


def _bytes(shape: tuple[int, ...]) -> int:
    count = 2  # bytes of a BF16 element
    for dim in shape:
        count *= dim
    return count


def _tensors(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    for name, shape in shapes.items():
        if len(shape) == 1:  # norms start at one
            yield name, Tensor("BF16", shape, b"\x80\x3f" * shape[0])
        else:
            yield name, tensor(name, shape)


def write_demo_model(folder: Path) -> int:
    """Write the folder and return the bytes of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(demo_shapes())
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(shards, start=1):
        file = shard_name(number, len(shards))
        raw_safetensors(folder / file, dict(_tensors(shapes)))
        weight_map |= dict.fromkeys(shapes, file)
    total = sum(map(_bytes, demo_shapes().values()))
    metadata = {"total_parameters": total // 2, "total_size": total}
    documents = {
        "config.json": json_bytes(demo_config()),
        INDEX: json_bytes({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}),
        **sidecars("demo-qwen3-moe"),
    }
    for name, data in documents.items():
        (folder / name).write_bytes(data)
    return total


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    total = write_demo_model(folder)
    print(f"wrote {folder}: {len(demo_shapes())} tensors, {total:,} bytes")


if __name__ == "__main__":
    main()
