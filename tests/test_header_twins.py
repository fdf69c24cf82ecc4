"""Published models at true scale: their names, and what planning makes of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.support import run_cli
from tests.support.header_twins import TWINS, Twin, digest

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
EACH = pytest.mark.parametrize("twin", TWINS, ids=[twin.name for twin in TWINS])


@EACH
def test_the_rule_gives_the_published_names_and_bytes(twin: Twin) -> None:
    """The stand-in is faithful: names by digest, bytes by the published total."""
    specs = twin.specs(twin.config)
    assert len(specs) == twin.tensors
    assert digest(specs) == twin.names_sha256
    assert sum(spec.size for spec in specs.values()) == twin.total_size
    experts = [spec for name, spec in specs.items() if ".experts." in name]
    assert len(experts) == twin.experts
    elements = sum(spec.shape[0] * spec.shape[1] for spec in experts)
    assert twin.expert_bytes == elements // 2 + elements // 32


@EACH
def test_its_plan(twin: Twin, tmp_path: Path) -> None:
    """Every expert's two tensors, every other name unchanged, in 1 GiB of memory."""
    result = run_cli("plan", twin.write(tmp_path / "source"), "--json", timeout=100).ok()
    plan, specs = result.json(), twin.specs(twin.config)
    totals = plan["totals"]
    assert totals["quantized"]["tensors"] == twin.experts
    assert totals["quantized"]["output_bytes"] == twin.expert_bytes
    experts = {name for name in specs if re.search(r"\.experts\.\d+\.", name)}
    expected = specs.keys() - experts
    expected |= {name + end for name in experts for end in ("_packed", "_scale")}
    assert plan["index"]["weight_map"].keys() == expected
    kept = sum(spec.size for name, spec in specs.items() if name not in experts)
    assert totals["copied"]["output_bytes"] == kept
    assert plan["index"]["metadata"]["total_size"] == kept + twin.expert_bytes
    assert result.max_rss <= GIB
