"""Memory is a budget, not a function of the model."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import pytest

from tests.support import bf16_model, fail_cleanly, run_cli, shell, snapshot
from tests.support.container import sparse_safetensors
from tests.support.models import INDEX, json_bytes, qwen3_moe_config, qwen3_moe_shapes, shard_name
from tests.support.runs import MANIFEST, Reference, final_names

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support import Result

MIB = 1024 * 1024
TOLERANCE = 1.1


def zeros(
    root: Path, *, layers: int, experts: int = 4, hidden: int = 1024, inner: int = 1024
) -> Path:
    """Write a Qwen3-MoE of zeros that takes no disk, a shard for each layer."""
    config = qwen3_moe_config(layers=layers, experts=experts, hidden=hidden, inner=inner, vocab=32)
    shards: dict[str, dict[str, tuple[str, tuple[int, ...], int]]] = {}
    for name, shape in qwen3_moe_shapes(config, qk_norm=False).items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        entry = ("BF16", shape, 2 * math.prod(shape))
        shards.setdefault(shard_name(layer + 1, layers), {})[name] = entry
    root.mkdir()
    for file, layout in shards.items():
        sparse_safetensors(root / file, layout)
    weight_map = {name: file for file, layout in shards.items() for name in layout}
    (root / INDEX).write_bytes(json_bytes({"metadata": {}, "weight_map": weight_map}))
    (root / "config.json").write_bytes(json_bytes(config))
    return root


def _quantize(source: Path, target: Path, *options: str) -> Result:
    return run_cli("quantize", source, target, "--quiet", *options).ok()


def test_peak_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """4 shards and 16 shards of 30 MB, one job: the same peak, far below the default budget."""
    small = _quantize(zeros(tmp_path / "s4", layers=4), tmp_path / "t4", "--jobs", "1")
    large = _quantize(zeros(tmp_path / "s16", layers=16), tmp_path / "t16", "--jobs", "1")
    assert large.max_rss <= small.max_rss * TOLERANCE
    assert large.max_rss <= 512 * MIB
    assert large.max_anon <= 3 * 2 * MIB + 400 * MIB  # three times the largest tensor, and 400


def _least(source: Path, target: Path) -> int:
    """Return the least budget in bytes that a refusal states."""
    result = run_cli("quantize", source, target, "--max-memory", "16MiB")
    fail_cleanly(result, 2, "--max-memory", f"{16 * MIB} bytes are too few")
    assert not (target / MANIFEST).exists()
    assert final_names(target) == set()
    match = re.search(r"it needs at least (\d+)\n", result.stderr)
    hint = re.search(r"pass --max-memory (\d+)MiB or more", result.stderr)
    assert match
    assert hint
    assert 0 <= int(hint[1]) * MIB - int(match[1]) < MIB
    return int(match[1])


def test_too_small_budget_states_the_least_that_works(reference: Reference, tmp_path: Path) -> None:
    """Refused before anything is made; what it names is enough (4 MiB more, as processes vary)."""
    target = tmp_path / "target"
    least = _least(reference.source, target)
    result = reference.rerun(target, "--max-memory", str(least + 4 * MIB))
    assert result.max_rss <= (least + 4 * MIB) * TOLERANCE


def test_many_jobs_stay_within_the_budget(tmp_path: Path) -> None:
    """One shard is 8 times larger than the others; fewer jobs run rather than more memory."""
    source = zeros(tmp_path / "source", layers=8)
    big = zeros(tmp_path / "big", layers=1, inner=8 * 1024)
    for model, name in ((source, "a"), (big, "b")):
        limit = _least(model, tmp_path / name) + 8 * MIB
        result = _quantize(model, tmp_path / name, "--jobs", "16", "--max-memory", str(limit))
        assert result.max_rss <= limit * TOLERANCE


def test_tensor_larger_than_the_budget_goes_through_in_pieces(tmp_path: Path) -> None:
    """A tensor of 256 MiB with room for a few MiB of it."""
    source = zeros(tmp_path / "source", layers=1, experts=1, hidden=2048, inner=64 * 1024)
    target = tmp_path / "target"
    limit = _least(source, target) + 4 * MIB
    assert limit < 256 * MIB
    result = _quantize(source, target, "--max-memory", str(limit))
    assert result.max_rss <= limit * TOLERANCE


@pytest.mark.parametrize("backend", ["llvm", "numpy"])
def test_pieces_of_any_size_make_the_same_bytes(tmp_path: Path, backend: str) -> None:
    """Tensors that are cut with a small budget and whole with a large one."""
    source = bf16_model(experts=2, layers=1, hidden=640, inner=1056).write(tmp_path / "source")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    _quantize(source, whole, "--backend", backend)
    least = _least(source, cut) + 4 * MIB
    result = _quantize(source, cut, "--backend", backend, "--max-memory", str(least))
    assert snapshot(cut) == snapshot(whole)
    assert result.max_rss <= least * TOLERANCE
    shell("verify", cut, "--level", "numeric", "--source", source).ok()


@pytest.mark.slow
def test_peak_at_full_size(tmp_path: Path) -> None:
    """4 and 16 shards of 64 MiB, then 16 jobs on 16 shards with one tensor of 512 MiB."""
    small = zeros(tmp_path / "s4", layers=4, experts=10)
    large = zeros(tmp_path / "s16", layers=16, experts=10)
    giant = zeros(tmp_path / "giant", layers=1, experts=1, hidden=2048, inner=128 * 1024)
    peaks = [
        _quantize(source, tmp_path / f"of-{source.name}", "--jobs", "1").max_rss
        for source in (small, large)
    ]
    assert peaks[1] <= peaks[0] * TOLERANCE
    for source in (large, giant):
        target = tmp_path / f"jobs-{source.name}"
        result = _quantize(source, target, "--jobs", "16", "--max-memory", "512MiB")
        assert result.max_rss <= 512 * MIB * TOLERANCE
