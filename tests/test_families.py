"""Every family of the list, from what transformers writes of it to what we make of it.

The headers in `tests/support/data/families` were written by transformers 4.x and 5.x; their
values are seeded here. Which tensors are experts and how the family reads them stands in
`tests.support.families`, apart from our recipes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mxconvert.errors import SourceError
from mxconvert.model import Options
from mxconvert.plan import build_plan
from mxconvert.plan.ignore import ignore_entries
from mxconvert.recipes.families import FAMILIES
from mxconvert.source import open_checkpoint
from tests.support import Model, decode, encode, refused, shell
from tests.support.cli import ROOT
from tests.support.container import Tensor
from tests.support.families.check import check_values, quantized, reader
from tests.support.families.expected import EXPECTED, expected
from tests.support.families.fixtures import Fixture, fixtures
from tests.support.families.readings import alternating_biases, columns, halves
from tests.support.matching import check_declared, matches

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.families.readings import Array, Stored

HEADERS = {fixture.label: fixture for fixture in fixtures()}
ROUTERS = re.compile(
    r"(\.gate|\.router|\.wg|classifier|expert_gate|norm\w*|embed\w*|embedding|head|wte)\.weight$"
)
"""Ends of names that no scope may quantize."""


def test_every_family_of_the_list_is_recorded() -> None:
    """A family without a header is a claim without a proof."""
    assert {fixture.family for fixture in HEADERS.values()} == {
        name.split(".")[0] for name in EXPECTED
    }
    kinds = {fixture.family for fixture in HEADERS.values() if fixture.kind == "5x"}
    assert kinds == {fixture.family for fixture in HEADERS.values()}


@pytest.mark.parametrize("fixture", HEADERS.values(), ids=list(HEADERS))
def test_a_family(fixture: Fixture, tmp_path: Path) -> None:
    """Its routed experts become MXFP4, each as its code reads it; all else is kept."""
    model, wanted = fixture.model(), expected(fixture.family, fixture.kind)
    stored = reader(model)
    artifact = quantized(model, tmp_path)
    weights = wanted.weights(stored)
    idle = idle_experts(fixture)
    assert set(artifact.quantized) == weights.keys() | idle
    for name, matrix in weights.items():
        check_values(artifact, name, matrix)

    split = {name for name in model.tensors if name.endswith(wanted.sources or ("\n",))}
    split = {name for name in split if ".experts." in name or "block_sparse_moe" in name}
    others = model.tensors.keys() - split - set(artifact.quantized)
    biases = bias_values(fixture, stored)
    assert set(artifact.kept) == others | biases.keys()
    for name in others:
        assert artifact.tensors[name][1:] == tuple(model.tensors[name]), name
    for name, values in biases.items():
        assert np.array_equal(artifact.values(name), values), name
    check_declared(artifact)


def idle_experts(fixture: Fixture) -> set[str]:
    """LongCat's experts that do nothing have matrices nevertheless, as transformers 5.x has it."""
    if fixture.family != "longcat_flash":
        return set()
    return {name for name in fixture.tensors if re.search(r"\.experts\.[45]\.", name)}


def bias_values(fixture: Fixture, stored: Stored) -> dict[str, Array]:
    if fixture.family != "gpt_oss":
        return {}
    return {
        f"{module}.{expert}.{name}.bias": values
        for module, expert in expected("gpt_oss", fixture.kind).experts()
        for name, values in alternating_biases(stored, module, expert).items()
    }


@pytest.mark.parametrize("label", [label for label in HEADERS if not label.endswith(".4x")])
def test_no_scope_touches_routers(label: str, tmp_path: Path) -> None:
    """With every Linear in scope, routers, norms, embeddings, heads and towers stay."""
    source = HEADERS[label].model().write(tmp_path / "source")
    plan = shell("plan", source, "--scope", "linear", "--json", "--force").ok().json()
    packed = [name for name in plan["index"]["weight_map"] if name.endswith("_packed")]
    wrong = [
        name
        for name in packed
        if ROUTERS.search(name.removesuffix("_packed"))
        or re.search(r"vision|visual|audio|patch|resampler", name)
    ]
    assert wrong == []
    experts = expected(*label.split(".")).weights(reader(HEADERS[label].model()))
    assert {name + "_packed" for name in experts} <= set(packed)


def test_the_documented_families_are_those_that_are_read() -> None:
    """Each recipe and each model_type stands in the tables, and no recipe that is not there."""
    text = (ROOT / "docs" / "models.md").read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    documented = {
        row[0].strip(" `"): set(re.findall(r"\w+", row[2])) for row in rows if len(row) > 2
    }
    assert documented == {recipe.name: recipe.model_types for recipe in FAMILIES}


# ------------------------------------------------------- as transformers 5.x has it in memory

USUAL = [
    label
    for label, fixture in HEADERS.items()
    if fixture.kind == "5x"
    and any(re.search(r"(mlp|feed_forward)\.experts\.0\.gate_proj", n) for n in fixture.tensors)
    and fixture.family not in ("ernie4_5_vl_moe", "longcat_flash", "qwen3_omni_moe")
]


def fused(model: Model) -> Model:
    """Store a model's experts as ``gate_up_proj`` [E, 2I, H] and ``down_proj`` [E, H, I]."""
    stored, parts = reader(model), re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight$")
    found = [match for match in map(parts.match, model.tensors) if match]
    made: dict[str, Tensor] = {}
    for module in {match[1] for match in found}:
        count = 1 + max(int(match[2]) for match in found if match[1] == module)
        gate, up, down = (
            np.stack([stored(f"{module}.{e}.{part}.weight") for e in range(count)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        for name, values in (("gate_up_proj", np.concatenate([gate, up], 1)), ("down_proj", down)):
            made[f"{module}.{name}"] = Tensor("BF16", values.shape, encode(values, "BF16"))
    return model.without(lambda name: parts.match(name) is not None).adding(made)


@pytest.mark.parametrize("label", USUAL)
def test_the_fused_form_gives_the_same_plan(label: str, tmp_path: Path) -> None:
    """Fused or not, the tensors that come out have the same names and sizes."""
    model = HEADERS[label].model()
    plans = [
        shell("plan", either.write(tmp_path / folder), "--json").ok().json()
        for folder, either in (("own", model), ("fused", fused(model)))
    ]
    own, joined = plans
    assert own["index"] == joined["index"]
    assert own["ignore"] == joined["ignore"]


@pytest.mark.parametrize("label", ["qwen3_moe.5x", "jamba.5x", "qwen3_omni_moe.5x"])
def test_the_fused_form_gives_the_same_bytes(label: str, tmp_path: Path) -> None:
    model = HEADERS[label].model()
    if label.startswith("qwen3_omni"):
        model = model.configured(thinker_config={}, talker_config={})
    own, joined = quantized(model, tmp_path / "own"), quantized(fused(model), tmp_path / "fused")
    assert own.tensors == joined.tensors


# -------------------------------------------------------------------- which way round it lies


def square(fixture: Fixture, inner: int) -> Model:
    """The same family with another inner size of its experts: 2I = H, or I = H."""
    config = {**fixture.config}
    text = {**config.get("text_config", config)}
    key = "moe_intermediate_size" if "moe_intermediate_size" in text else "intermediate_size"
    text[key] = inner
    config = {**config, "text_config": text} if "text_config" in config else text
    tensors = {
        name: (
            dtype,
            tuple({96: inner, 192: 2 * inner}.get(n, n) for n in shape) if expert(name) else shape,
        )
        for name, (dtype, shape) in fixture.tensors.items()
    }
    return fixture._replace(config=config, tensors=tensors).model()


def expert(name: str) -> bool:
    return ".experts." in name or "block_sparse_moe" in name


FUSED = [label for label in HEADERS if expected(*label.split(".")).sources and "dbrx" not in label]


@pytest.mark.parametrize("inner", [32, 64], ids=["2I = H", "I = H"])
@pytest.mark.parametrize("label", FUSED)
def test_square_shapes_are_read_by_family(label: str, inner: int, tmp_path: Path) -> None:
    """Where a shape cannot tell which way round it lies, the family and its other tensor do."""
    fixture = HEADERS[label]
    model, stored = square(fixture, inner), None
    stored = reader(model)
    artifact = quantized(model, tmp_path)
    weights = expected(fixture.family, fixture.kind).weights(stored)
    assert set(artifact.quantized) == weights.keys()
    for name, matrix in weights.items():
        check_values(artifact, name, matrix)


@pytest.mark.parametrize("label", [*FUSED, "dbrx.5x"])
def test_a_config_of_another_model_is_refused(label: str, tmp_path: Path) -> None:
    """Sizes in config.json that the tensors contradict stop the conversion."""
    fixture = HEADERS[label]
    wrong = square(fixture, 32).config
    if fixture.family == "dbrx":
        inner = {**fixture.config["ffn_config"], "ffn_hidden_size": 32}
        wrong = {**fixture.config, "ffn_config": inner}
    source = fixture._replace(config=wrong).model().write(tmp_path / "source")
    shape = "[384, 64]" if fixture.family == "dbrx" else "[4, "
    refused(source, tmp_path / "out", "--force", says=("config.json", "has shape", shape))
    with pytest.raises(SourceError) as raised:
        build_plan(open_checkpoint(source), Options(), force=True)
    assert raised.value.code == "fused-shape"


def swap(model: Model, name_end: str) -> Model:
    """Store every tensor of that name the other way round."""
    turned = {}
    for name, tensor in model.tensors.items():
        if name.endswith(name_end) and ".experts." in name:
            values = decode(tensor.data, *tensor[:2]).swapaxes(1, 2)
            turned[name] = Tensor(tensor.dtype, values.shape, encode(values, tensor.dtype))
    return model.adding(turned)


@pytest.mark.parametrize("label", ["llama4.5x", "gpt_oss.5x", "gemma4_text.5x"])
def test_the_other_way_round_is_refused(label: str, tmp_path: Path) -> None:
    """No family but Qwen3-VL-MoE is known in two forms, so another form is not guessed at."""
    source = swap(HEADERS[label].model(), "gate_up_proj").write(tmp_path / "source")
    refused(source, tmp_path / "out", "--force", says=("gate_up_proj", "has shape"))


def test_qwen3_vl_moe_either_way_round(tmp_path: Path) -> None:
    """The same matrices, as 4.x stores them and as 5.x does, give the same bytes."""
    first = HEADERS["qwen3_vl_moe.4x"].model()
    other = swap(swap(first, "gate_up_proj"), "down_proj")
    one, two = quantized(first, tmp_path / "4x"), quantized(other, tmp_path / "5x")
    assert one.tensors == two.tensors
    module = "model.language_model.layers.1.mlp.experts"
    assert all(
        np.array_equal(a, b)
        for a, b in zip(
            columns(reader(first), module, 3).values(),
            halves(reader(other), module, 3).values(),
            strict=True,
        )
    )


def test_qwen3_vl_moe_that_nothing_decides(tmp_path: Path) -> None:
    """2I = H and no down_proj that tells: refused, not guessed."""
    model = square(HEADERS["qwen3_vl_moe.4x"], 32)
    lone = model.without(lambda name: name.endswith("experts.down_proj"))
    says = ("[4, 64, 64]", "either may be meant")
    refused(lone.write(tmp_path / "source"), tmp_path / "out", says=says)


def test_experts_stored_twice_are_refused(tmp_path: Path) -> None:
    """Which of the two is meant, nobody can say."""
    model = HEADERS["qwen3_5_moe_text.fused"].model()
    extra = "model.layers.0.mlp.experts.0.up_proj.weight"
    both = model.adding({extra: HEADERS["qwen3_5_moe_text.5x"].model().tensors[extra]})
    refused(both.write(tmp_path / "source"), tmp_path / "out", says=(extra, "gate_up_proj"))


# ------------------------------------------------------------------------------- MTP layers


@pytest.mark.parametrize("label", ["qwen3_5_moe_text.fused", "qwen3_5_moe_text.5x"])
def test_an_mtp_layer_is_kept_as_it_is_stored(label: str, tmp_path: Path) -> None:
    """Its experts stay fused where they are; engines look for them under those names."""
    model = HEADERS[label].model()
    extra = {
        name.replace("model.layers.1", "mtp.layers.0"): tensor
        for name, tensor in model.tensors.items()
        if "layers.1.mlp" in name
    }
    artifact = quantized(model.adding(extra), tmp_path)
    assert extra.keys() <= set(artifact.kept)
    assert all(artifact.tensors[name][1:] == tuple(tensor) for name, tensor in extra.items())
    check_declared(artifact)


def test_kimi_k25_as_published(tmp_path: Path) -> None:
    """The release calls its layers ``layers``; transformers 5.24 writes ``blocks``."""
    model = HEADERS["kimi_k25.5x"].model().rename(lambda n: n.replace("l.blocks.", "l.layers."))
    artifact = quantized(model, tmp_path)
    assert set(artifact.quantized) == {
        f"language_model.model.layers.1.mlp.experts.{e}.{p}_proj.weight"
        for e in range(4)
        for p in ("gate", "up", "down")
    }
    check_declared(artifact)


def test_ernie_vl_as_published(tmp_path: Path) -> None:
    """The release gives a number of experts for each modality, in a flat config."""
    fixture = HEADERS["ernie4_5_vl_moe.5x"]
    flat = {**fixture.config["text_config"], "moe_num_experts": [4, 4]}
    model = fixture._replace(config={**flat, "model_type": "ernie4_5_moe_vl"}).model()
    source = model.write(tmp_path / "source")
    plan = shell("plan", source, "--json").ok().json()
    assert plan["num_experts"] == 8
    assert plan["totals"]["quantized"]["tensors"] == 24
    assert not [n for n in plan["notices"] if n["code"] == "incomplete-experts"]


# ------------------------------------------------------------------ names that loaders change


def test_towers_are_ignored_whole() -> None:
    """Loaders split and rename what is inside of a tower; one entry covers it under any name."""
    kept = ["vision_tower.encoder.blocks.0.wqkv", "mm_projector.proj.0", "model.layers.0.mlp.gate"]
    packed = ["model.layers.0.mlp.experts.0.up_proj"]
    assert ignore_entries(kept, packed) == (
        r"re:.*layers\.\d+\.mlp\.gate$",
        r"re:.*mm_projector\..*",
        r"re:.*vision_(model|tower)\..*",
    )


def test_a_tower_that_is_converted_in_part_is_not_ignored_whole() -> None:
    kept = ["visual.blocks.0.attn.qkv", "visual.blocks.0.mlp.fc1"]
    packed = ["model.visual.blocks.0.mlp.fc2"]
    entries = ignore_entries(kept, packed)
    assert all(any(matches(entry, module) for entry in entries) for module in kept)
    assert not any(matches(entry, packed[0]) for entry in entries)


@pytest.mark.parametrize(
    ("label", "module"),
    [
        ("sarvam_moe.5x", "model.layers.1.self_attn.k_proj"),
        ("sarvam_moe.5x", "model.layers.1.self_attn.o_proj"),
        ("phimoe.5x", "model.layers.1.mlp.router"),
        ("kimi_linear.5x", "model.layers.0.mlp.up_proj"),
        ("kimi_linear.5x", "model.layers.0.self_attn.forget_gate.f_a_proj"),
        ("qwen3_omni_moe.5x", "thinker.model.audio_tower.conv_out"),
        ("ernie4_5_vl_moe.5x", "model.vision_tower.blocks.0.attn.qkv"),
        ("jamba.5x", "model.layers.0.mixer.in_proj"),
        ("jamba.5x", "model.layers.1.q_proj"),
        ("granitemoehybrid.5x", "model.layers.0.mixer.in_proj"),
        ("lfm2_moe.5x", "model.layers.0.short_conv.out_proj"),
        ("ernie4_5_vl_moe.5x", "model.layers.1.mlp.text_experts_gate"),
        ("qwen3_moe.5x", "model.layers.0.mlp.gate_up_proj"),
        ("qwen3_vl_moe.5x", "language_model.model.layers.0.mlp.gate_up_proj"),
        ("longcat_flash.5x", "model.layers.0.self_attn.1.fused_qkv_a_proj"),
    ],
)
def test_what_a_loader_renames_is_ignored_under_its_name(
    label: str, module: str, tmp_path: Path
) -> None:
    """Otherwise it waits for packed weights there, and computes with what memory held."""
    source = HEADERS[label].model().write(tmp_path / "source")
    ignore = shell("plan", source, "--json").ok().json()["ignore"]
    assert any(matches(entry, module) for entry in ignore)
