"""`inspect`: what is in a checkpoint, and what would it become."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import Model, Tensor, bf16_model, converted, fused_model, shell
from tests.support.models import tensor

if TYPE_CHECKING:
    from pathlib import Path


def look(source: Path, *options: object) -> dict[str, Any]:
    document = shell("inspect", source, "--json", *options).ok().json()
    assert (document["type"], document["schema_version"]) == ("inspection", 1)
    return dict(document)


def parameters(model: Model, part: str = "") -> int:
    return sum(math.prod(t.shape) for name, t in model.tensors.items() if part in name)


def test_totals(model: Model, tmp_path: Path) -> None:
    """Counts, bytes, total and active parameters, in a known model."""
    seen = look(model.write(tmp_path / "source"))
    routed, total = parameters(model, ".experts."), parameters(model)
    assert seen["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (seen["model_type"], seen["recipe"]) == ("qwen3_moe", "qwen-moe")
    assert (seen["num_experts"], seen["experts_per_token"], seen["moe_layers"]) == (8, 2, 2)
    assert (seen["files"], seen["tensors"]) == (2, 65)
    assert seen["size_bytes"] == 2 * total
    assert seen["parameters"] == total
    assert seen["active_parameters"] == total - routed + routed * 2 // 8
    assert seen["dtypes"] == {"BF16": 65}
    assert seen["obstacle"] is None
    assert seen["surprises"] == []


@pytest.mark.parametrize("scope", ["experts", "linear"])
def test_the_promised_size_is_the_size(scope: str, model: Model, tmp_path: Path) -> None:
    """`mxfp4_bytes`, in total and by role, is what the conversion makes."""
    source = model.write(tmp_path / "source")
    seen = look(source, "--scope", scope)
    done = converted(source, tmp_path / "out", "--scope", scope)
    assert seen["mxfp4_bytes"] == done.artifact.index["metadata"]["total_size"]
    assert sum(role["mxfp4_bytes"] for role in seen["roles"].values()) == seen["mxfp4_bytes"]
    quantized = sum(role["quantized"] for role in seen["roles"].values())
    assert quantized == len(done.artifact.quantized)


def test_roles(model: Model, tmp_path: Path) -> None:
    """Each tensor has one role; the figures of all roles add up."""
    extra = {
        "model.layers.0.mlp.shared_expert.up_proj.weight": tensor("shared", (96, 64)),
        "model.layers.0.mlp.shared_expert_gate.weight": tensor("gate", (1, 64)),
        "model.layers.1.mlp.up_proj.weight": tensor("up", (96, 64)),
        "mtp.layers.0.eh_proj.weight": tensor("eh", (64, 128)),
        "visual.blocks.0.attn.qkv.weight": tensor("qkv", (192, 64)),
        "model.layers.1.mlp.gate.e_score_correction_bias": tensor("bias", (8,), "F32"),
    }
    seen = look(model.adding(extra).write(tmp_path / "source"))
    tensors = {name: role["tensors"] for name, role in seen["roles"].items()}
    assert tensors == {
        "expert": 48,
        "attention": 8,
        "embedding": 1,
        "output head": 1,
        "norm": 5,
        "router": 2 + 1 + 1,
        "shared expert": 1,
        "dense MLP": 1,
        "vision or audio": 1,
        "multi-token prediction": 1,
    }
    assert seen["roles"]["router"]["dtypes"] == ["BF16", "F32"]
    for field in ("tensors", "parameters", "size_bytes"):
        assert sum(role[field] for role in seen["roles"].values()) == seen[field]
    sizes = [role["size_bytes"] for role in seen["roles"].values()]
    assert sizes == sorted(sizes, reverse=True)


def test_active_parameters_without_a_word_of_them(model: Model, tmp_path: Path) -> None:
    """Unknown is told as unknown; in a dense model all are active."""
    model.config.pop("num_experts_per_tok")
    source = model.write(tmp_path / "source")
    assert look(source)["active_parameters"] is None
    assert "unknown active" in shell("inspect", source).ok().stdout
    dense = bf16_model(experts=0).without(lambda name: ".mlp." in name)
    dense = replace(dense, config={"model_type": "llama"})
    seen = look(dense.write(tmp_path / "dense"))
    assert seen["active_parameters"] == seen["parameters"] == parameters(dense)
    assert seen["recipe"] == "dense"
    assert seen["num_experts"] is None


OBSTACLES: dict[str, tuple[dict[str, Any], dict[str, Tensor], tuple[str, ...]]] = {
    "quantized": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"model.layers.0.mlp.experts.0.up_proj.qweight": Tensor("I32", (8, 96), bytes(3072))},
        ("gptq", "quantized already"),
    ),
    "an unknown family": ({"model_type": "unknown_moe"}, {}, ("unknown_moe", "--recipe")),
}


@pytest.mark.parametrize("what", OBSTACLES)
def test_an_obstacle_is_told_with_what_is_there(what: str, model: Model, tmp_path: Path) -> None:
    """A source that cannot be converted is described all the same, with status 0."""
    config, tensors, says = OBSTACLES[what]
    source = model.configured(**config).adding(tensors).write(tmp_path / "source")
    seen = look(source)
    assert all(word in seen["obstacle"] for word in says)
    assert seen["mxfp4_bytes"] is None
    assert seen["tensors"] == 65 + len(tensors)
    assert all(role["mxfp4_bytes"] is None for role in seen["roles"].values())
    text = shell("inspect", source).ok().stdout
    assert "cannot be converted: " in text


def test_surprises(model: Model, tmp_path: Path) -> None:
    """What a conversion would warn of is told here already."""
    source = model.write(
        tmp_path / "source",
        index={"metadata": {"total_size": 7}, "weight_map": model.weight_map},
    )
    [surprise] = look(source)["surprises"]
    assert "total_size is 7" in surprise
    assert "surprise: " in shell("inspect", source).ok().stdout


def test_the_page_for_people(model: Model, tmp_path: Path) -> None:
    """Model, parameters, experts, sizes and roles on one screen."""
    text = shell("inspect", model.write(tmp_path / "source")).ok().stdout
    for words in (
        "Qwen3MoeForCausalLM (qwen3_moe)",
        "8 in each of 2 layers, 2 used per token",
        "65 tensors in 2 files",
        "MXFP4, 156.67 kB",
        "stays",
    ):
        assert words in text
    assert len(text.splitlines()) < 25


def test_tensors_by_glob(model: Model, tmp_path: Path) -> None:
    """Names, dtypes, shapes and places, as a table or as JSON."""
    scalar = {"step": Tensor("I64", (), bytes(8))}
    source = model.adding(scalar).write(tmp_path / "source")
    found = shell("inspect", source, "--tensors", "*.experts.3.*", "--json").ok().json()
    assert len(found) == 6
    assert [entry["name"] for entry in found] == sorted(entry["name"] for entry in found)
    for entry in found:
        assert entry.keys() == {"name", "dtype", "shape", "file", "offset", "size"}
        raw = (source / entry["file"]).read_bytes()
        data = raw[entry["offset"] : entry["offset"] + entry["size"]]
        assert data == model.tensors[entry["name"]].data
        assert tuple(entry["shape"]) == model.tensors[entry["name"]].shape
    text = shell("inspect", source, "--tensors", "*").ok().stdout
    assert len(text.splitlines()) == 1 + 66
    assert "scalar" in text
    assert "96x64" in text
    assert shell("inspect", source, "--tensors", "nothing", "--json").ok().json() == []


def test_a_damaged_source_is_no_inspection(model: Model, tmp_path: Path) -> None:
    """Facts are not guessed from headers that cannot be read."""
    source = model.write(tmp_path / "source")
    with (source / "model-00002-of-00002.safetensors").open("r+b") as file:
        file.truncate(1000)
    result = shell("inspect", source)
    assert result.status == 5
    assert "model-00002-of-00002.safetensors" in result.stderr


def test_options_are_those_of_a_conversion(model: Model, tmp_path: Path) -> None:
    """A recipe by name, and weights the index forgot."""
    source = model.configured(model_type="mine").write(tmp_path / "source")
    assert look(source)["obstacle"]
    assert look(source, "--recipe", "qwen-moe")["obstacle"] is None
    bf16_model(layers=1, experts=1, seed=1).rename(lambda n: "mtp." + n).reshard(
        lambda _: "extra.safetensors"
    ).write(tmp_path / "extra")
    (tmp_path / "extra" / "extra.safetensors").rename(source / "extra.safetensors")
    assert shell("inspect", source).status == 5
    seen = look(source, "--recipe", "qwen-moe", "--unindexed", "include")
    assert seen["tensors"] > 65
    skipped = look(source, "--recipe", "qwen-moe", "--unindexed", "skip")
    assert skipped["tensors"] == 65
    assert "extra.safetensors" in skipped["surprises"][0]


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_that_are_stored_together_are_counted_one_by_one(
    transposed: bool, tmp_path: Path
) -> None:
    """Sizes and roles do not depend on how a release stores its experts."""
    model = fused_model(transposed=transposed)
    if not transposed:
        model = model.configured(model_type="qwen3_5_moe_text", num_hidden_layers=1)
    seen = look(model.write(tmp_path / "source"))
    biases = 4 * 3 if transposed else 0
    assert seen["roles"]["expert"]["tensors"] == 4 * 3 + biases
    assert (seen["num_experts"], seen["moe_layers"]) == (4, 1)
    assert seen["parameters"] == parameters(model)
