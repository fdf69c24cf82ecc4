"""Which tensors become MXFP4: expert names of several families, routers, patterns."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.support import (
    Model,
    bf16_model,
    converted,
    fused_model,
    mixtral_name,
    refused,
    shell,
)
from tests.support.contract import USAGE_STATUS
from tests.support.families.check import check_values, quantized, reader
from tests.support.families.readings import granite as granite_reading
from tests.support.matching import check_declared
from tests.support.models import tensor

if TYPE_CHECKING:
    from pathlib import Path


# ------------------------------------------------------------- routers and their doubles

DENSE_0 = {
    f"model.layers.0.mlp.{part}_proj.weight": tensor(f"dense {part}", shape)
    for part, shape in (("gate", (192, 64)), ("up", (192, 64)), ("down", (64, 192)))
}
SHARED_1 = {
    f"model.layers.1.mlp.shared_expert.{part}_proj.weight": tensor(f"shared {part}", shape)
    for part, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96)))
}
SHARED_GATE = "model.layers.1.mlp.shared_expert_gate.weight"


@pytest.fixture
def crowded(model: Model) -> Model:
    """A router, a dense gate_proj, a shared expert and its gate side by side."""
    return model.adding(DENSE_0 | SHARED_1 | {SHARED_GATE: tensor(SHARED_GATE, (1, 64))})


def test_routers_are_not_mistaken_for_gate_projections(crowded: Model, tmp_path: Path) -> None:
    """By default the routed experts alone are quantized; everything else keeps its bytes."""
    done = converted(crowded.write(tmp_path / "source"), tmp_path / "out")
    experts = {name for name in crowded.tensors if ".experts." in name}
    assert set(done.artifact.quantized) == experts
    assert len(experts) == 48
    check_declared(done.artifact)


def test_scope_linear_leaves_routers_alone(crowded: Model, tmp_path: Path) -> None:
    """All Linear weights, but never router, shared gate, embedding, norm or head."""
    done = converted(crowded.write(tmp_path / "source"), tmp_path / "out", "--scope", "linear")
    kept = {
        *(f"model.layers.{n}.mlp.gate.weight" for n in (0, 1)),
        *(f"model.layers.{n}.{norm}.weight" for n in (0, 1) for norm in NORMS),
        SHARED_GATE, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
    }  # fmt: skip
    assert set(done.artifact.kept) == kept
    assert DENSE_0.keys() | SHARED_1.keys() <= set(done.artifact.quantized)
    check_declared(done.artifact)


NORMS = ("input_layernorm", "post_attention_layernorm")


# --------------------------------------------------------------------- names of families


def mixtral(model: Model) -> Model:
    renamed = model.rename(mixtral_name)
    config = {k: v for k, v in model.config.items() if k != "num_experts"}
    config |= {"model_type": "mixtral", "num_local_experts": 8}
    return Model(config=config, shards=renamed.shards, sidecars=model.sidecars)


def test_mixtral_names(model: Model, tmp_path: Path) -> None:
    """w1, w2 and w3 are experts too, and give the codes of the same values."""
    source = mixtral(model).write(tmp_path / "source")
    artifact = converted(source, tmp_path / "out").artifact
    plain = converted(model.write(tmp_path / "plain"), tmp_path / "plain-out").artifact
    assert len(artifact.quantized) == 48
    for name in plain.quantized:
        for one, other in zip(plain.packed(name), artifact.packed(mixtral_name(name)), strict=True):
            assert one.tobytes() == other.tobytes()
    assert "model.layers.0.block_sparse_moe.gate.weight" in artifact.kept
    check_declared(artifact)


@pytest.mark.parametrize(
    ("model_type", "count_key"),
    [
        ("qwen2_moe", "num_experts"),
        ("deepseek_v3", "n_routed_experts"),
        ("deepseek_v2", "n_routed_experts"),
        ("kimi_k2", "n_routed_experts"),
        ("glm4_moe", "n_routed_experts"),
    ],
)
def test_families_with_the_usual_names(
    model_type: str, count_key: str, model: Model, tmp_path: Path
) -> None:
    """Every family that shares the common names finds its experts."""
    config = {k: v for k, v in model.config.items() if k != "num_experts"}
    config |= {"model_type": model_type, count_key: 8}
    source = Model(config=config, shards=model.shards).write(tmp_path / "source")
    assert len(converted(source, tmp_path / "out").artifact.quantized) == 48


def test_a_text_config_and_a_prefix(model: Model, tmp_path: Path) -> None:
    """A multimodal wrapper nests config and names; its vision tower is kept."""
    inner = model.rename(lambda name: f"language_model.{name}")
    vision = {f"vision_tower.blocks.0.mlp.{p}.weight": tensor(p, (64, 64)) for p in ("fc1", "fc2")}
    config = {"architectures": ["Wrapper"], "model_type": "wrapper", "text_config": model.config}
    wrapped = Model(config=config, shards=inner.shards).adding(vision)
    source = wrapped.write(tmp_path / "source")
    for scope in ("experts", "linear"):
        done = converted(source, tmp_path / scope, "--scope", scope)
        assert vision.keys() <= set(done.artifact.kept)
        assert sum(".experts." in name for name in done.artifact.quantized) == 48
        check_declared(done.artifact)


def test_a_recipe_can_be_named(model: Model, tmp_path: Path) -> None:
    """A fine-tune with a model_type of its own is converted when the family is told."""
    source = model.configured(model_type="my_moe").write(tmp_path / "source")
    says = ("unrecognised expert layout", "'my_moe'", "--recipe")
    refused(source, tmp_path / "refused", says=says)
    done = converted(source, tmp_path / "out", "--recipe", "qwen-moe")
    assert len(done.artifact.quantized) == 48
    result = refused(
        source, tmp_path / "no", "--recipe", "nope", status=USAGE_STATUS, says=("nope", "qwen-moe")
    )
    assert "deepseek" in result.stderr


# ----------------------------------------------------------------------- fused experts


def test_fused_experts_with_and_without_a_suffix(tmp_path: Path) -> None:
    """The name of the stored tensor may end in .weight; those of its parts always do, once."""
    plain = fused_model(transposed=False).configured(model_type="qwen3_5_moe_text")
    named = plain.rename(lambda name: f"{name}.weight")
    one, two = quantized(plain, tmp_path / "plain"), quantized(named, tmp_path / "named")
    assert one.quantized == two.quantized
    assert len(one.quantized) == 12
    assert one.tensors == two.tensors
    assert not [name for name in two.tensors if ".weight.weight" in name]


def granite() -> Model:
    """Granite's stacked linears, in a layer of a published config's keys."""
    block = "model.layers.0.block_sparse_moe."
    shapes = {
        "input_linear.weight": (4, 192, 64),
        "output_linear.weight": (4, 64, 96),
        "router.layer.weight": (4, 64),
    }
    config = {
        "architectures": ["GraniteMoeForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "model_type": "granitemoe",
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "num_local_experts": 4,
        "tie_word_embeddings": True,
    }
    tensors = {block + name: tensor(block + name, shape) for name, shape in shapes.items()}
    return Model(config=config, shards={"model.safetensors": tensors})


def test_granite_s_stacked_linears(tmp_path: Path) -> None:
    """input_linear is gate above up, output_linear is down; the router stays."""
    model = granite()
    artifact = quantized(model, tmp_path)
    stored = reader(model)
    module = "model.layers.0.block_sparse_moe.experts"
    for expert in range(4):
        for name, matrix in granite_reading(stored, module, expert).items():
            check_values(artifact, f"{module}.{expert}.{name}.weight", matrix)
    assert len(artifact.quantized) == 12
    assert artifact.kept == ["model.layers.0.block_sparse_moe.router.layer.weight"]
    check_declared(artifact)


def test_granite_of_another_config_is_refused(tmp_path: Path) -> None:
    """Half of the rows are the gate's only if the config agrees."""
    source = granite().configured(intermediate_size=192).write(tmp_path / "source")
    refused(source, tmp_path / "out", says=("input_linear", "[4, 192, 64]", "[4, 384, 64]"))


# --------------------------------------------------------------- experts in several shards


def test_experts_spread_over_shards_come_together(model: Model, tmp_path: Path) -> None:
    """Whatever the source's split and order, files and bytes are the same."""
    plain = converted(model.write(tmp_path / "plain"), tmp_path / "plain-out")
    names = list(model.tensors)
    random.Random(5).shuffle(names)
    parts = {"gate_proj": 1, "up_proj": 2, "down_proj": 3}
    shards: dict[str, dict[str, object]] = {
        f"model-{n:05d}-of-00004.safetensors": {} for n in range(1, 5)
    }
    for name in names:
        number = parts.get(name.split(".")[-2], 4) if ".experts." in name else 4
        shards[f"model-{number:05d}-of-00004.safetensors"][name] = model.tensors[name]
    spread = Model(config=model.config, shards=shards, sidecars=model.sidecars)  # type: ignore[arg-type]
    done = converted(spread.write(tmp_path / "source"), tmp_path / "out")
    assert done.weights == plain.weights
    files = {
        done.artifact.tensors[name + "_packed"].file
        for name in done.artifact.quantized
        if ".experts.5." in name
    }
    assert files == {"model-experts-00005-00005.safetensors"}


# ------------------------------------------------------------------- unknown and incomplete


def specialists(name: str) -> str:
    words = {"gate_proj": "alpha", "up_proj": "beta", "down_proj": "gamma"}
    if ".experts." not in name:
        return name
    name = name.replace(".mlp.experts.", ".ffn.specialists.")
    for ours, theirs in words.items():
        name = name.replace(ours, theirs)
    return name


@pytest.mark.parametrize("stated", [True, False], ids=["experts in config", "no word of experts"])
@pytest.mark.parametrize("model_type", ["unknown_moe", "qwen3_moe"])
def test_a_layout_nobody_recognises_is_refused(
    model_type: str, stated: bool, model: Model, tmp_path: Path
) -> None:
    """Nothing is copied in BF16 under an MXFP4 label: counts and bytes are told."""
    strange = model.rename(specialists).configured(model_type=model_type)
    if not stated:
        strange.config.pop("num_experts")
    source = strange.write(tmp_path / "source")
    size = sum(len(t.data) for t in model.tensors.values())
    result = refused(source, tmp_path / "out", says=("65 tensors", str(size)))
    assert "quantize" in result.stderr


def test_experts_of_an_unknown_inner_layout_are_refused(model: Model, tmp_path: Path) -> None:
    """A known family whose experts are stored otherwise is not half converted."""
    stacked = {"model.layers.1.mlp.experts.w13": tensor("w13", (8, 192, 64))}
    source = model.adding(stacked).write(tmp_path / "source")
    refused(source, tmp_path / "out", says=("1 tensors", "model.layers.1.mlp.experts.w13"))


@pytest.mark.parametrize("shape", [(64,), (1, 96, 64), ()])
def test_an_expert_weight_that_is_no_matrix_is_refused(
    shape: tuple[int, ...], model: Model, tmp_path: Path
) -> None:
    """It would stay in BF16 among packed siblings, which no engine loads."""
    name = "model.layers.1.mlp.experts.3.gate_proj.weight"
    source = model.adding({name: tensor(name, shape)}).write(tmp_path / "source")
    refused(source, tmp_path / "out", says=("1 tensors", name, "layout"))


def test_expert_biases_travel_with_their_expert(model: Model, tmp_path: Path) -> None:
    """A bias is stored beside its weight, in the file that the expert's rank loads."""
    biases = {
        f"model.layers.1.mlp.experts.3.{p}_proj.bias": tensor(p, (96,), "F32")
        for p in ("gate", "up")
    }
    done = converted(model.adding(biases).write(tmp_path / "source"), tmp_path / "out")
    for name, expected in biases.items():
        stored = done.artifact.tensors[name]
        assert stored[1:] == tuple(expected)
        assert stored.file == "model-experts-00003-00003.safetensors"
    check_declared(done.artifact)


def test_missing_experts_are_noticed(model: Model, tmp_path: Path) -> None:
    """An expert without its down_proj is named; strict refuses."""
    gone = "model.layers.1.mlp.experts.3.down_proj.weight"
    source = model.without(lambda name: name == gone).write(tmp_path / "source")
    done = converted(source, tmp_path / "out")
    [warning] = done.notices["incomplete-experts"]
    for part in ("layer 1", "1 of 8", "expert 3", "down_proj"):
        assert part in warning
    refused(source, tmp_path / "strict", "--strict", says=("layer 1", "expert 3"))


def test_the_report_counts_everything(model: Model, tmp_path: Path) -> None:
    """Quantized, kept and dropped, in tensors and bytes, stand at the end of every run."""
    source = model.write(tmp_path / "source")
    result = shell("quantize", source, tmp_path / "out").ok()
    for words in ("quantized", "48 weights", "kept", "17 tensors", "dropped", "0 tensors, 0 B"):
        assert words in result.stdout


# ---------------------------------------------------------------------------- patterns


@pytest.mark.parametrize("option", ["--ignore", "--exclude", "--include"])
@pytest.mark.parametrize("pattern", [r"re:.*mlp\.gatee$", "*.gatee.*", "model.layers.2.mlp.gate"])
def test_a_pattern_that_matches_nothing_is_an_error(
    option: str, pattern: str, model: Model, tmp_path: Path
) -> None:
    """A typo does not silently change what is quantized."""
    source = model.write(tmp_path / "source")
    refused(source, tmp_path / "out", option, pattern, status=USAGE_STATUS, says=(pattern[-9:],))


@pytest.mark.parametrize("option", ["--ignore", "--include"])
@pytest.mark.parametrize("pattern", ["re:(", "re:*", "re:", "", "re:[z-a]"])
def test_an_invalid_pattern_is_a_usage_error(
    option: str, pattern: str, model: Model, tmp_path: Path
) -> None:
    """Said as what it is, before anything is read or written."""
    source = model.write(tmp_path / "source")
    refused(source, tmp_path / "out", option, pattern, status=USAGE_STATUS, says=("clude",))


def test_what_patterns_mean(model: Model, tmp_path: Path) -> None:
    """Names, globs and regular expressions, on module names, from their start."""
    source = model.write(tmp_path / "source")
    o_proj = "model.layers.0.self_attn.o_proj"
    for number, pattern in enumerate(
        (o_proj, o_proj + ".weight", "*.0.*o_proj", r"re:.*\.0\..*o_proj$")
    ):
        done = converted(source, tmp_path / f"out-{number}", "--include", pattern)
        assert o_proj + ".weight" in done.artifact.quantized
        assert len(done.artifact.quantized) == 49
        check_declared(done.artifact)


def test_patterns_cannot_quantize_an_embedding(model: Model, tmp_path: Path) -> None:
    """Loaders would read it as Linear; refused by name."""
    source = model.write(tmp_path / "source")
    says = ("model.embed_tokens.weight", "embedding")
    options = ("--include", "*embed_tokens*")
    refused(source, tmp_path / "out", *options, status=USAGE_STATUS, says=says)


def test_excluding_everything_is_an_error(model: Model, tmp_path: Path) -> None:
    """A run that would quantize nothing by the user's own patterns does not start."""
    source = model.write(tmp_path / "source")
    refused(source, tmp_path / "out", "--exclude", "*", says=("nothing to quantize", "65 tensors"))


def test_a_dense_model_needs_the_linear_scope(tmp_path: Path) -> None:
    """Without experts the default has nothing to do, and says what would."""
    dense = bf16_model(experts=0)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    mlp = {
        f"model.layers.{n}.mlp.{p}_proj.weight": tensor(f"{n}{p}", s)
        for n in (0, 1)
        for p, s in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96)))
    }
    shards = dense.without(lambda name: ".mlp.gate." in name).shards
    source = Model(config=config, shards=shards).adding(mlp).write(tmp_path / "source")
    refused(source, tmp_path / "no", says=("nothing to quantize", "--scope linear"))
    done = converted(source, tmp_path / "out", "--scope", "linear")
    assert len(done.artifact.quantized) == 2 * (4 + 3)
    assert "lm_head.weight" in done.artifact.kept
    check_declared(done.artifact)
