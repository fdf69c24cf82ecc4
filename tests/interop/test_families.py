"""Folders as transformers writes them convert and verify, whatever the family."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.interop.families import CONFIGS, EXPERTS, ROUTED
from tests.support import read_artifact, run_cli, snapshot
from tests.support.artifact import read_tensors

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("family", CONFIGS)
def test_quantize_then_verify_numeric(family, family_sources: dict[str, Path], tmp_path) -> None:
    """Every routed expert is packed, all else is kept byte for byte, the source is untouched."""
    source, target = family_sources[family], tmp_path / "out"
    before = snapshot(source)
    run_cli("quantize", source, target).ok()
    run_cli("verify", target, "--level", "numeric", "--source", source).ok()

    artifact = read_artifact(target)
    stored = {n: t for path in source.glob("*.safetensors") for n, t in read_tensors(path).items()}
    assert len(artifact.quantized) == ROUTED[family]
    assert set(artifact.quantized) | set(artifact.kept) == set(stored)
    for name in artifact.kept:
        ours = artifact.tensors[name]
        assert (ours.dtype, ours.shape, ours.data) == stored[name][1:], name
    assert snapshot(source) == before


@pytest.mark.parametrize("family", CONFIGS)
def test_inspect_reads_each_family_s_own_config_keys(
    family, family_sources: dict[str, Path]
) -> None:
    """Families name the number of experts differently, and releases differ within a family."""
    found = run_cli("inspect", family_sources[family], "--json").ok().json()
    assert found["num_experts"] == EXPERTS[family]
    assert found["experts_per_token"] == 2
    assert found["roles"]["expert"]["tensors"] == ROUTED[family]
    assert found["obstacle"] is None


@pytest.mark.parametrize("family", CONFIGS)
def test_plan_counts_what_transformers_wrote(family, family_sources: dict[str, Path]) -> None:
    """The plan says before any work what quantize then does."""
    plan = run_cli("plan", family_sources[family], "--json").ok().json()
    assert plan["num_experts"] == EXPERTS[family]
    assert plan["totals"]["quantized"]["tensors"] == ROUTED[family]
