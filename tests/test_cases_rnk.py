"""Cases RNK: each rank its own experts, as the people who reported them would check it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from mxconvert.manifest import MANIFEST_NAME, RECORD_NAME
from tests.convert_base import fused
from tests.pull_base import QUICK, contents
from tests.rank_base import assert_part, expert_of, make, pull, stored
from tests.support import bf16_model, fail_cleanly, fused_model

if TYPE_CHECKING:
    from tests.pull_base import Place


# ------------------------------------------------------------------------------ RNK-01


@pytest.mark.parametrize(
    ("experts", "world", "counts"),
    [
        (30, 8, [4, 4, 4, 4, 4, 4, 3, 3]),
        (10, 4, [3, 3, 2, 2]),
        (13, 6, [3, 2, 2, 2, 2, 2]),
        (5, 2, [3, 2]),
    ],
)
def test_rnk_01_the_remainder_is_spread(
    place: Place, experts: int, world: int, counts: list[int]
) -> None:
    """Contiguous, balanced; a dry run prints the mapping and the result keeps it."""
    model = bf16_model(layers=1, experts=experts, hidden=32, inner=32)
    made = make(place, model, "--experts-per-file", 5 if experts % 5 == 0 else 1)
    options = ("--rank", world - 1, "--world-size", world)
    result = pull(place, made, place.target, *options, "--dry-run", "--json").ok()
    found = json.loads(result.stdout)
    assert not place.target.exists()
    held = [_numbers(rank["experts"]) for rank in found["ranks"]]
    assert [len(some) for some in held] == counts
    assert [number for some in held for number in some] == list(range(experts))
    assert [rank["wanted"] for rank in found["ranks"]] == [False] * (world - 1) + [True]
    text = pull(place, made, place.target, *options, "--dry-run").ok().stdout
    assert "rank" in text
    assert "wanted" in text
    pull(place, made, place.target, *options).ok()
    record = json.loads((place.target / RECORD_NAME).read_bytes())
    assert _numbers(record["selection"]["experts"]) == held[-1]


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


# ------------------------------------------------------------------------------ RNK-02


@pytest.mark.parametrize("placement", ["linear", "round-robin"])
def test_rnk_02_the_ranks_cover_the_model(place: Place, placement: str) -> None:
    """Disjoint experts, all of them; codes, scales and biases together; all else everywhere."""
    made = make(place, bf16_model(layers=1, experts=16, hidden=32, inner=32))
    for world in (1, 2, 3, 5, 8, 16):
        _covers(place, made, world, 16, placement)


def test_rnk_02_with_biases(place: Place) -> None:
    made = make(place, fused("gpt_oss", transposed=True), "--force")
    assert any("bias" in name for name in made.tensors if expert_of(name) is not None)
    count = 1 + max(n for n in map(expert_of, made.tensors) if n is not None)
    for world in range(2, count + 1):
        _covers(place, made, world, count, "linear")


def _covers(place: Place, made, world: int, count: int, placement: str) -> None:
    seen: dict[int, set[str]] = {}
    for rank in range(world):
        target = place.folder / f"{world}-{rank}"
        options = ("--rank", rank, "--world-size", world, "--placement", placement)
        pull(place, made, target, *options).ok()
        if world == 1:
            assert contents(target) == {
                name: data
                for name, data in contents(made.folder).items()
                if name != ".mxconvert-report.jsonl.zst"
            }
            return
        experts = {n for n in map(expert_of, stored(target)) if n is not None}
        assert_part(made, target, experts)
        for number in experts:
            assert number not in seen, "two ranks hold it"
            seen[number] = {name for name in stored(target) if expert_of(name) == number}
    assert set(seen) == set(range(count))
    sizes = {len(names) for names in seen.values()}
    assert len(sizes) == 1, "each expert comes with as many tensors"


# ------------------------------------------------------------------------------ RNK-03

BAD = {
    "a negative rank": ("--rank", "-1", "--world-size", "4"),
    "a rank that does not exist": ("--rank", "4", "--world-size", "4"),
    "no ranks": ("--rank", "0", "--world-size", "0"),
    "more ranks than experts": ("--rank", "0", "--world-size", "9"),
    "no number": ("--rank", "one", "--world-size", "4"),
    "a rank alone": ("--rank", "1"),
    "a world alone": ("--world-size", "4"),
    "a placement alone": ("--placement", "linear"),
    "an unknown placement": ("--rank", "0", "--world-size", "2", "--placement", "random"),
    "experts backwards": ("--experts", "5-2"),
    "an expert that does not exist": ("--experts", "8"),
    "no experts": ("--experts", ""),
    "experts and ranks": ("--experts", "1", "--rank", "0", "--world-size", "2"),
    "half a node": ("--node", "0", "--nodes", "2"),
    "a node that does not exist": ("--node", "2", "--nodes", "2", "--gpus-per-node", "2"),
    "no GPUs": ("--node", "0", "--nodes", "2", "--gpus-per-node", "0"),
    "a slice that does not exist": ("--slice", "4/4"),
    "no slice": ("--slice", "1"),
    "a part and a glob": ("--rank", "0", "--world-size", "2", "--include", "*.json"),
}


def test_rnk_03_bad_arguments(place: Place) -> None:
    """A mistake in the command, with what is valid; nothing is fetched."""
    made = make(place, bf16_model(layers=1, experts=8, hidden=32, inner=32))
    for name, options in BAD.items():
        result = pull(place, made, place.target, *options)
        assert result.status == 2, f"{name}: {result.status}\n{result.stderr}"
        assert not place.target.exists(), name
    for options, text in (
        (("--rank", "4", "--world-size", "4"), "expected 0 to 3"),
        (("--rank", "0", "--world-size", "9"), "expected 1 to 8"),
        (("--experts", "8"), "0 to 7"),
        (("--node", "2", "--nodes", "2", "--gpus-per-node", "2"), "expected 0 to 1"),
    ):
        fail_cleanly(pull(place, made, place.target, *options), 2, text)


def test_rnk_03_a_dense_model(place: Place) -> None:
    """No silent full download."""
    place.publish(change=lambda m: replace(m, model=replace(m.model, num_experts=0)))
    for options in (("--rank", 0, "--world-size", 2), ("--experts", "0")):
        fail_cleanly(place.pull(None, *options), 2, "no routed experts")
    assert not place.target.exists()
    assert place.fetched("*.safetensors") == 0


# ------------------------------------------------------------------------------ RNK-04


@pytest.mark.parametrize("kind", ["fused", "apart"])
@pytest.mark.parametrize("layout", ["experts", "layers"])
def test_rnk_04_fused_sources(place: Place, kind: str, layout: str) -> None:
    """Experts that were stored together are fetched one by one, in either layout."""
    model = fused_model(transposed=True) if kind == "fused" else bf16_model(experts=4)
    made = make(place, model, "--layout", layout, "--force")
    place.proxy.log.clear()
    result = pull(place, made, place.target, "--rank", 1, "--world-size", 2, "--json").ok()
    assert_part(made, place.target, {2, 3})
    held = sum(len(data) for data in stored(place.target).values())
    fetched = place.fetched("*.safetensors")
    headers = sum(made.weights.values()) - sum(map(len, made.tensors.values()))
    assert held <= fetched <= held + headers
    assert "joint-experts" not in result.stdout


# ------------------------------------------------------------------------------ RNK-05


@pytest.mark.parametrize("per_file", [1, 4, 16])
def test_rnk_05_bytes_are_saved(place: Place, per_file: int) -> None:
    """At most 2 % more than the rank's own bytes come over the wire, counted at the server."""
    model = bf16_model(layers=1, experts=64, hidden=64, inner=64, vocab=4096)
    made = make(place, model, "--experts-per-file", per_file)
    experts = made.expert_bytes()
    others = sum(map(len, made.tensors.values())) - experts
    headers = sum(made.weights.values()) - experts - others
    for jobs in (1, 16):
        target = place.folder / f"jobs-{jobs}"
        place.proxy.settle()
        place.proxy.log.clear()
        pull(place, made, target, "--rank", 3, "--world-size", 8, "-j", jobs).ok()
        fetched = place.fetched("*.safetensors")
        assert_part(made, target, set(range(24, 32)))
        assert fetched <= 1.02 * (others + experts / 8) + headers


# ----------------------------------------------------------------------------- a fleet


def test_a_fleet_covers_the_artifact_once(place: Place) -> None:
    """Eight processes, one for each rank of two groups of four: each group gets all, once."""
    made = make(place, bf16_model(layers=2, experts=8, hidden=32, inner=32))
    command = [sys.executable, "-m", "mxconvert", "pull", made.url]
    environment = {**os.environ, **place.proxy.environment()}
    running = [
        subprocess.Popen(
            [
                *command, str(place.folder / f"{group}-{rank}"), *QUICK,
                "--rank", str(rank), "--world-size", "4", "--quiet",
            ],
            env=environment,
        )
        for group in range(2)
        for rank in range(4)
    ]  # fmt: skip
    assert [process.wait(60) for process in running] == [0] * 8
    for group in range(2):
        held = [
            {n for n in map(expert_of, stored(place.folder / f"{group}-{rank}")) if n is not None}
            for rank in range(4)
        ]
        assert sorted(number for some in held for number in some) == list(range(8))
        for rank, experts in enumerate(held):
            assert_part(made, place.folder / f"{group}-{rank}", experts)
    sizes = made.weights
    for name in sizes:
        if "experts" in name:
            assert place.fetched(name) == 2 * sizes[name], "once for each group"


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_node_holds_its_ranks(place: Place, nodes: int) -> None:
    """``--node`` is the union of its ranks; MANIFEST unchanged."""
    made = make(place, bf16_model(layers=1, experts=8, hidden=32, inner=32))
    each = 4 // nodes
    held = []
    for node in range(nodes):
        target = place.folder / f"node-{node}"
        pull(place, made, target, "--node", node, "--nodes", nodes, "--gpus-per-node", each).ok()
        held += sorted({n for n in map(expert_of, stored(target)) if n is not None})
        assert (target / MANIFEST_NAME).read_bytes() == (made.folder / MANIFEST_NAME).read_bytes()
    assert held == list(range(8))
