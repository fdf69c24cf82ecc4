"""``--recipe generic``: the user says what expert weights are called."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.support import (
    Model,
    Tensor,
    bf16_model,
    converted,
    decode,
    fail_cleanly,
    fused_model,
    read_artifact,
    refused,
    shell,
    snapshot,
)
from tests.support.families.check import check_values
from tests.support.matching import check_declared
from tests.support.models import tensor

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

NAMES = "layers.{layer}.mlp.experts.{expert}.{projection}"
BANK = "layers.{layer}.moe.bank_{expert}.{projection}"
GATE_UP = "layers.{layer}.mlp.experts.gate_up_proj=gate_proj,up_proj"
DOWN = "layers.{layer}.mlp.experts.down_proj=down_proj"


def unknown(model: Model) -> Model:
    return model.configured(model_type="nobody_knows")


def generic(*templates: str) -> tuple[str, ...]:
    options = [option for text in templates for option in ("--expert-weights", text)]
    return ("--recipe", "generic", *options)


def values(tensor: Tensor) -> NDArray[np.float64]:
    return decode(tensor.data, tensor.dtype, tensor.shape)


def in_banks(name: str) -> str:
    """Experts as no engine calls them: without a module of their own."""
    name = re.sub(r"\.mlp\.experts\.(\d+)\.", r".moe.bank_\1.", name)
    return re.sub(r"(gate|up|down)_proj", r"fc_\1", name) if ".bank_" in name else name


def weights(folder: Path) -> dict[str, bytes]:
    return {n: data for n, data in snapshot(folder).items() if n.endswith(".safetensors")}


def test_the_refusal_of_an_unknown_family_leads_here(tmp_path: Path) -> None:
    source = unknown(bf16_model()).write(tmp_path / "source")
    says = ("nobody_knows", "generic", "--expert-weights", "{expert}")
    refused(source, tmp_path / "out", says=says)


def test_the_same_bytes_as_the_family_s_own_recipe(tmp_path: Path) -> None:
    """Named by a template or known: the same matrices in the same files."""
    known, other = bf16_model().write(tmp_path / "known"), tmp_path / "other"
    unknown(bf16_model()).write(other)
    shell("quantize", known, tmp_path / "A").ok()
    shell("quantize", other, tmp_path / "B", *generic(NAMES)).ok()
    assert weights(tmp_path / "A") == weights(tmp_path / "B")
    assert shell("verify", tmp_path / "B", "--source", other).ok()
    manifest = shell("plan", other, *generic(NAMES), "--json").ok().json()
    assert manifest["num_experts"] == 8


def test_names_that_nobody_uses(tmp_path: Path) -> None:
    """Every expert of a layer under one scheme, per-expert files, values by definition."""
    model = unknown(bf16_model()).rename(in_banks)
    source = model.write(tmp_path / "source")
    done = converted(source, tmp_path / "out", *generic(BANK))
    experts = {name for name in model.tensors if ".bank_" in name}
    assert len(experts) == 48
    assert set(done.artifact.quantized) == experts
    for name in experts:
        check_values(done.artifact, name, values(model.tensors[name]))
    check_declared(done.artifact)
    shell("verify", tmp_path / "out", "--source", source).ok()
    report = shell("report", tmp_path / "out", "--source", source, "--json").ok()
    assert '"expert": 7' in report.stdout


def test_a_norm_within_an_expert_is_kept(tmp_path: Path) -> None:
    """A template names matrices; vectors of an expert under such a name are no projection."""
    norms = {
        f"model.layers.{layer}.mlp.experts.{expert}.norm.weight": tensor(f"{expert}", (64,))
        for layer in range(2)
        for expert in range(8)
    }
    model = unknown(bf16_model()).adding(norms)
    done = converted(
        model.write(tmp_path / "source"), tmp_path / "out", *generic(NAMES), "--strict"
    )
    assert len(done.artifact.quantized) == 48
    assert norms.keys() <= set(done.artifact.kept)


def test_one_ragged_expert_keeps_its_layer_and_no_other(tmp_path: Path) -> None:
    """Groups follow the template, not the word experts."""
    model = unknown(bf16_model()).rename(in_banks)
    source = model.write(tmp_path / "source")
    kept = ("--exclude", "model.layers.1.moe.bank_3.fc_up")
    shell("quantize", source, tmp_path / "out", *generic(BANK), *kept).ok()
    packed = read_artifact(tmp_path / "out").quantized
    assert {int(re.search(r"layers\.(\d)", name)[1]) for name in packed} == {0}
    assert len(packed) == 24


@pytest.mark.parametrize(
    ("order", "template"),
    [
        (r"layers.\1.mlp.experts.\3.\2.", "layers.{layer}.mlp.experts.{projection}.{expert}"),
        (r"experts.\2.layers.\1.\3.", "experts.{expert}.layers.{layer}.{projection}"),
        (r"bank.\3.\2.of.\1.", "bank.{projection}.{expert}.of.{layer}"),
    ],
)
def test_a_layer_is_a_layer_in_any_order_of_names(
    order: str, template: str, tmp_path: Path
) -> None:
    """Engines load the experts of a layer under one scheme, gate, up and down together."""
    known = r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)\."
    model = unknown(bf16_model()).rename(lambda name: re.sub(known, order, name))
    source = model.write(tmp_path / "source")
    kept = "model." + re.sub(known, order, "layers.1.mlp.experts.3.up_proj.").rstrip(".")
    shell("quantize", source, tmp_path / "out", *generic(template), "--exclude", kept).ok()
    first = {re.sub(known, order, name) for name in bf16_model().tensors if ".0.mlp.ex" in name}
    assert len(first) == 24
    assert set(read_artifact(tmp_path / "out").quantized) == first
    check_declared(read_artifact(tmp_path / "out"))


@pytest.mark.parametrize("flags", ["", ":out-in"])
def test_fused_experts(flags: str, tmp_path: Path) -> None:
    """Split into names that engines ask for; which way round, the config's sizes say."""
    source = fused_model(transposed=False).write(tmp_path / "source")
    refused(source, tmp_path / "no", says=("--expert-weights",))
    options = generic(GATE_UP + flags, DOWN + flags)
    shell("quantize", source, tmp_path / "out", *options).ok()
    artifact = read_artifact(tmp_path / "out")
    assert len(artifact.quantized) == 12
    stored = fused_model(transposed=False).tensors
    gate_up = values(stored["model.layers.0.mlp.experts.gate_up_proj"])
    for expert in range(4):
        name = f"model.layers.0.mlp.experts.{expert}"
        check_values(artifact, f"{name}.gate_proj.weight", gate_up[expert, :96])
        check_values(artifact, f"{name}.up_proj.weight", gate_up[expert, 96:])
    shell("verify", tmp_path / "out", "--source", source).ok()


@pytest.mark.parametrize("turned", [False, True])
def test_diff_reads_the_source_as_the_artifact_did(turned: bool, tmp_path: Path) -> None:
    """By the templates in the manifest: the same weights in another format, none is absent."""
    source = fused_model(transposed=False).write(tmp_path / "source")
    shell("quantize", source, tmp_path / "out", *generic(GATE_UP, DOWN)).ok()
    pair = (source, tmp_path / "out")[:: -1 if turned else 1]
    found = json.loads(shell("diff", *pair, "--json").stdout)
    assert {status: count for status, count in found["counts"].items() if count} == {"form": 12}
    assert [one["role"] for one in found["roles"]] == ["expert"]


def test_transposed_and_interleaved_as_gpt_oss(tmp_path: Path) -> None:
    """The same codes and scales as from its own recipe."""
    model = fused_model(transposed=True).without(lambda name: name.endswith("_bias"))
    source = model.write(tmp_path / "source")
    shell("quantize", source, tmp_path / "A", "--force").ok()
    flags = ":in-out"
    options = generic(f"{GATE_UP}{flags}:interleaved", DOWN + flags)
    shell("quantize", source, tmp_path / "B", *options).ok()
    assert weights(tmp_path / "A") == weights(tmp_path / "B")


def test_the_wrong_way_round_is_refused(tmp_path: Path) -> None:
    source = fused_model(transposed=False).write(tmp_path / "source")
    options = generic(f"{GATE_UP}:in-out", f"{DOWN}:in-out")
    refused(source, tmp_path / "out", *options, says=("down_proj", "[4, 64, 96]"))


def test_missing_experts_are_named(tmp_path: Path) -> None:
    model = unknown(bf16_model()).without(lambda name: ".0.mlp.experts.5.up_proj" in name)
    source = model.write(tmp_path / "source")
    result = shell("plan", source, *generic(NAMES), "--json").ok()
    [notice] = [n for n in result.json()["notices"] if n["code"] == "incomplete-experts"]
    assert "layer 0: 1 of 8 experts lack weights (first: expert 5, up_proj)" in notice["message"]
    refused(source, tmp_path / "out", *generic(NAMES), "--strict", says=("expert 5",))


@pytest.mark.parametrize(
    ("templates", "says"),
    [
        ((), "which tensors are expert weights"),
        (("layers.{layer}.moe.{expert}.{projection}",), "matches none of the 65 tensors"),
        (("layers.{layer}.mlp.experts.{expert}",), "{layer}, {expert}, {projection} once each"),
        (("layers.{layer}.{layer}.{expert}.{projection}",), "once each"),
        (("layers.{layer}.{number}.{expert}.{projection}",), "no other field"),
        ((NAMES + ".weight",), "leave the dot or .weight"),
        ((NAMES, "layers.{layer}.moe.experts.{expert}.{projection}"), "names experts otherwise"),
        ((NAMES, NAMES), "names already"),
        (("layers.{layer}.mlp.w=gate,up",), "no projections"),
        (("layers.{layer}.mlp.w=w1,w1",), "no projections"),
        (("layers.{layer}.mlp.w=w1,w3:upside-down",), "after a colon"),
        (("layers.{layer}.mlp.w=w1,w3:in-out:out-in",), "after a colon"),
        (("layers.{layer}.mlp.w2=w2:interleaved",), "more than one projection"),
        (("layers.{layer}.mlp.experts.{projection}{expert}",), "two fields touch"),
        (("mlp.experts.e{layer}{expert}.{projection}",), "two fields touch"),
        (("",), "once each"),
    ],
)
def test_wrong_templates(templates: tuple[str, ...], says: str, tmp_path: Path) -> None:
    """Each names the option, the template and what is wrong with it."""
    source = unknown(bf16_model()).write(tmp_path / "source")
    result = shell("quantize", source, tmp_path / "out", *generic(*templates))
    fail_cleanly(result, 2, says, "--expert-weights")
    assert not (tmp_path / "out").exists()


def test_templates_without_the_recipe(tmp_path: Path) -> None:
    source = bf16_model().write(tmp_path / "source")
    result = shell("quantize", source, tmp_path / "out", "--expert-weights", NAMES)
    fail_cleanly(result, 2, "--expert-weights is for --recipe generic only")


def test_another_template_is_another_run(tmp_path: Path) -> None:
    """A resume with other templates is refused as with any other option."""
    source = unknown(bf16_model()).write(tmp_path / "source")
    first = ("--only", "model-dense-*")
    shell("quantize", source, tmp_path / "out", *generic(NAMES), *first).ok()
    other = "model.layers.{layer}.mlp.experts.{expert}.{projection}"
    result = shell("quantize", source, tmp_path / "out", *generic(other))
    assert result.status
    assert "--overwrite" in result.stderr
    shell("quantize", source, tmp_path / "out", *generic(NAMES)).ok()


def test_sizes_are_bounded_as_sizes(tmp_path: Path) -> None:
    """An inner size of 131,072 is one; numbers of experts and layers have five digits."""
    model = fused_model(transposed=False).configured(intermediate_size=131_072)
    source = model.write(tmp_path / "source")
    refused(source, tmp_path / "out", *generic(GATE_UP, DOWN), says=("[4, 64, 131072]",))
    source = model.configured(num_local_experts=131_072).write(tmp_path / "many")
    refused(source, tmp_path / "out", *generic(GATE_UP, DOWN), says=("at most 99999",))
