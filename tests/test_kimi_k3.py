"""The reference model at true scale: 497,220 tensors, 1.56 TB, planned on a small machine."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import pytest

from tests.support import run_cli
from tests.support.container import read_header
from tests.support.kimi_k3 import (
    EXPERT_BYTES,
    EXPERT_WEIGHTS,
    NAMES_SHA256,
    OFFICIAL_TENSORS,
    SHARDS,
    TOTAL_SIZE,
    TWIN_TENSORS,
    Specs,
    official_specs,
    read_config,
    twin_shards,
    write_twin,
)

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


@pytest.fixture(scope="module")
def twin_specs() -> Specs:
    return {n: s for _, specs in twin_shards(read_config()) for n, s in specs.items()}


def digest(names: object) -> str:
    return hashlib.sha256("".join(f"{name}\n" for name in sorted(names)).encode()).hexdigest()


def test_the_rule_gives_the_published_names_and_bytes(twin_specs: Specs) -> None:
    """The stand-in is faithful: names by digest, bytes by the published total."""
    official = official_specs(twin_specs)
    assert len(official) == OFFICIAL_TENSORS
    assert digest(official) == NAMES_SHA256
    assert sum(spec.size for spec in official.values()) == TOTAL_SIZE
    experts = [spec for name, spec in official.items() if name not in twin_specs]
    assert len(experts) == 2 * EXPERT_WEIGHTS
    assert sum(spec.size for spec in experts) == EXPERT_BYTES


def test_the_twin_has_one_weight_for_each_pair(twin_specs: Specs) -> None:
    assert len(twin_specs) == TWIN_TENSORS
    assert sum(1 for _ in twin_shards(read_config())) == SHARDS


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi") / "Kimi-K3-BF16"
    write_twin(folder, read_config())
    return folder


@pytest.mark.slow
def test_plan_of_the_twin(twin: Path, record_property) -> None:
    """Planning it gives the published tensors and bytes, in seconds and in 1 GiB."""
    result = run_cli("plan", twin, "--json", timeout=300).ok()
    record_property("seconds", result.seconds)
    record_property("max_rss", result.max_rss)
    print(f"plan: {result.seconds:.1f} s, {result.max_rss / GIB:.2f} GiB")  # noqa: T201

    plan = result.json()
    assert plan["num_experts"] == 896
    totals = plan["totals"]
    assert totals["quantized"]["tensors"] == EXPERT_WEIGHTS
    assert totals["quantized"]["output_bytes"] == EXPERT_BYTES
    assert totals["copied"]["tensors"] == TWIN_TENSORS - EXPERT_WEIGHTS
    assert totals["copied"]["output_bytes"] == TOTAL_SIZE - EXPERT_BYTES
    assert digest(plan["index"]["weight_map"]) == NAMES_SHA256
    assert plan["index"]["metadata"]["total_size"] == TOTAL_SIZE
    assert sum(file["tensors"] for file in plan["files"]) == OFFICIAL_TENSORS
    experts = [file for file in plan["files"] if file["role"] == "experts"]
    assert len(experts) == 448
    assert all(file["size"] <= 5 * GIB for file in plan["files"])
    assert result.max_rss <= GIB


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_file_of_the_twin_within_the_memory_budget(twin: Path, tmp_path: Path) -> None:
    """3.2 GB of two experts' weights, from 92 shards, in the memory that was granted."""
    name, budget = "model-experts-00000-00001.safetensors", GIB // 2
    target = tmp_path / "out"
    result = run_cli(
        "quantize", twin, target, "--only", name, "--max-memory", budget, timeout=540
    ).ok()
    print(f"one file: {result.seconds:.0f} s, {result.max_rss / GIB:.2f} GiB")  # noqa: T201
    assert result.max_rss <= budget

    assert [path.name for path in target.glob("*.safetensors")] == [name]
    header, base = read_header(target / name)
    assert (target / name).stat().st_size == base + EXPERT_BYTES // 448
    names = header.keys() - {"__metadata__"}
    assert len(names) == 92 * 2 * 3 * 2
    assert all(re.search(r"\.experts\.[01]\.w[123]\.weight_(packed|scale)$", n) for n in names)
    (target / name).unlink()
