"""Checkpoints in FP8 as DeepSeek-V3 and others publish them: what scales mean, where they are."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support import (
    Model,
    Tensor,
    converted,
    decode,
    encode,
    fail_cleanly,
    fp8_model,
    read_artifact,
    refused,
    refused_until,
    shell,
    snapshot,
    stopped,
)
from tests.support.families.check import check_values
from tests.support.fp8 import bf16_of, dequantized, is_scaled
from tests.support.matching import check_declared
from tests.support.models import tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support import Artifact
    from tests.support.contract import Conversion

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
LATENT = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
SCALE = "_scale_inv"


def scales(shape: tuple[int, ...], dtype: str = "F32", *, first: int = -12) -> Tensor:
    """Return scales, distinct powers of two as far as five go."""
    exponents = first + np.arange(math.prod(shape)) % 5
    return Tensor(dtype, shape, encode(np.ldexp(1.0, exponents).reshape(shape), dtype))


def fp8_weight(name: str, shape: tuple[int, int]) -> dict[str, Tensor]:
    grid = (-(-shape[0] // 128), -(-shape[1] // 128))
    return {name: tensor(name, shape, "F8_E4M3", sigma=100.0), name + SCALE: scales(grid)}


def with_values(
    model: Model, name: str, change: Callable[[np.ndarray], object], dtype: str | None = None
) -> Model:
    """Change values of a tensor in place."""
    stored = model.tensors[name]
    values = decode(stored.data, stored.dtype, stored.shape).copy()
    change(values)
    dtype = dtype or stored.dtype
    return model.adding({name: Tensor(dtype, stored.shape, encode(values, dtype))})


def with_byte(model: Model, name: str, at: tuple[int, int], byte: int) -> Model:
    stored = model.tensors[name]
    data = bytearray(stored.data)
    data[at[0] * stored.shape[1] + at[1]] = byte
    return model.adding({name: stored._replace(data=bytes(data))})


def check_weights(model: Model, artifact: Artifact) -> None:
    """Each weight of the source is there, element by element, and nothing of FP8 is left."""
    for name, stored in model.tensors.items():
        if not is_scaled(stored):
            continue
        values = dequantized(model.tensors, name)
        if name in artifact.quantized:
            check_values(artifact, name, values)
        else:
            assert artifact.tensors[name][1:] == ("BF16", stored.shape, bf16_of(values))
    assert not [name for name in artifact.tensors if name.endswith((SCALE, ".scale"))]
    assert not [name for name in artifact.index["weight_map"] if SCALE in name]
    assert not {stored.dtype for stored in artifact.tensors.values()} & {"F8_E4M3", "F8_E5M2"}
    check_declared(artifact)


# ------------------------------------------------------------------------- ragged blocks


@pytest.mark.parametrize("scope", ["experts", "linear"])
def test_ragged_blocks(scope: str, tmp_path: Path) -> None:
    """Last blocks of 64 columns and of 72 rows have scales of their own."""
    model = fp8_model().adding(fp8_weight(LATENT, (200, 256)))
    done = converted(model.write(tmp_path / "source"), tmp_path / "out", "--scope", scope)
    assert (LATENT in done.artifact.quantized) == (scope == "linear")
    assert len(done.artifact.quantized) == (12 if scope == "experts" else 27)
    check_weights(model, done.artifact)
    assert done.summary["kept"]["tensors"] == len(done.artifact.kept)


@pytest.mark.parametrize("block", [(64, 32), (32, 96), (256, 256), (1, 128)])
def test_blocks_of_another_size(block: tuple[int, int], tmp_path: Path) -> None:
    """weight_block_size says how large a block is."""
    model = fp8_model()
    grids = {
        name + SCALE: scales((-(-s.shape[0] // block[0]), -(-s.shape[1] // block[1])))
        for name, s in model.tensors.items()
        if is_scaled(s)
    }
    declared = model.config["quantization_config"] | {"weight_block_size": list(block)}
    model = model.adding(grids).configured(quantization_config=declared)
    target = tmp_path / "out"
    source = model.write(tmp_path / "source")
    shell("quantize", source, target, "--max-memory", "8GiB").ok()
    shell("verify", target, "--level", "numeric", "--source", source).ok()
    artifact = read_artifact(target)
    for name, stored in model.tensors.items():
        if is_scaled(stored):
            values = dequantized(model.tensors, name, block)
            if name in artifact.quantized:
                check_values(artifact, name, values)
            else:
                assert artifact.tensors[name].data == bf16_of(values)


def test_a_declared_block_that_the_scales_contradict(tmp_path: Path) -> None:
    """Which of both is right nobody knows."""
    declared = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    source = fp8_model().configured(quantization_config=declared).write(tmp_path / "source")
    refused(source, tmp_path / "out", says=("weight_scale_inv", "[64, 64]", "config.json"))


# ------------------------------------------------------------------------ where scales are


def test_scales_in_another_shard(tmp_path: Path) -> None:
    """All of them in a third file: the same bytes, and no scale is stored."""
    model = fp8_model()
    apart = model.reshard(
        lambda name: (
            "model-00003-of-00003.safetensors"
            if name.endswith(SCALE)
            else f"model-0000{1 + (name in model.shards['model-00002-of-00002.safetensors'])}"
            "-of-00003.safetensors"
        )
    )
    assert len(apart.shards) == 3
    one = converted(model.write(tmp_path / "one"), tmp_path / "one-out")
    two = converted(apart.write(tmp_path / "two"), tmp_path / "two-out")
    assert one.weights == two.weights
    check_weights(model, two.artifact)


@pytest.mark.parametrize("name", [EXPERT, QUERY], ids=["quantized", "kept"])
def test_a_missing_scale(name: str, tmp_path: Path) -> None:
    """Said before anything is written, with the names that were looked for; found, a run succeeds.

    A scale under a name that nobody knows is a missing one.
    """
    model = fp8_model()
    odd = model.rename(lambda old: old if old != name + SCALE else name + "_factor")
    for number, lacking in enumerate((model.without(lambda old: old == name + SCALE), odd)):
        source, target = tmp_path / f"source-{number}", tmp_path / f"out-{number}"
        lacking.write(source)
        module = name.removesuffix(".weight")
        says = (name, name + SCALE, name + "_scale", module + ".scale")

        def mend(source: Path = source) -> None:
            model.write(source)

        refused_until(mend, source, target, says=says)


@pytest.mark.parametrize("command", ["quantize", "dequantize"])
@pytest.mark.parametrize("name", [EXPERT, QUERY], ids=["quantized", "kept"])
def test_two_scales_of_a_weight(name: str, command: str, tmp_path: Path) -> None:
    """Which of them counts nobody knows."""
    other = name.removesuffix(".weight") + ".scale"
    model = fp8_model().adding({other: scales((2, 2))})
    result = shell(command, model.write(tmp_path / "source"), tmp_path / "out")
    fail_cleanly(result, 5, name + SCALE, other, "2 scales", "twice")
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------- names and dtypes of scales


def named(
    pattern: str, dtype: str = "F32", shape: Callable[[int, int], tuple[int, ...]] | None = None
) -> Model:
    """F-FP8 with scales of another name, dtype or shape."""
    model = fp8_model()
    added = {}
    for name, stored in model.tensors.items():
        if is_scaled(stored):
            module = name.removesuffix(".weight")
            size = model.tensors[name + SCALE].shape if shape is None else shape(*stored.shape)
            added[pattern.format(name=name, module=module)] = scales(size, dtype)
    return model.without(lambda name: name.endswith(SCALE)).adding(added)


KINDS: dict[str, Callable[[], Model]] = {
    "DeepSeek's own code": lambda: named("{module}.scale", "F8_E8M0"),
    "compressed-tensors, per channel": lambda: named("{name}_scale", "BF16", lambda n, _: (n, 1)),
    "per channel, flat": lambda: named("{name}_scale", "F32", lambda n, _: (n,)),
    "per tensor": lambda: named("{name}_scale", "F32", lambda *_: ()),
    "per tensor, one element": lambda: named("{name}_scale_inv", "F16", lambda *_: (1,)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_scales(kind: str, tmp_path: Path) -> None:
    """Every name, dtype and shape of them multiplies."""
    model = KINDS[kind]()
    done = converted(model.write(tmp_path / "source"), tmp_path / "out")
    check_weights(model, done.artifact)


@pytest.mark.parametrize("stated", [{}, {"scale_fmt": "ue8m0"}], ids=["silent", "ue8m0"])
def test_powers_of_two_called_scale(stated: dict[str, Any], tmp_path: Path) -> None:
    """E8M0 bytes beside the weight give what the same scales in F32 give, whatever config says."""
    model = named("{module}.scale", "F8_E8M0")
    declared = model.config["quantization_config"] | stated
    done = converted(
        model.configured(quantization_config=declared).write(tmp_path / "source"), tmp_path / "out"
    )
    usual = converted(fp8_model().write(tmp_path / "usual"), tmp_path / "usual-out")
    assert done.weights == usual.weights


def test_the_nan_of_e8m0_is_refused(tmp_path: Path) -> None:
    name = EXPERT.removesuffix(".weight") + ".scale"
    model = named("{module}.scale", "F8_E8M0")
    model = model.adding({name: model.tensors[name]._replace(data=b"\x73\x74\xff\x75")})
    says = (name, "1 of 4 scales", EXPERT, "number 2", "nan")
    stopped(model.write(tmp_path / "source"), tmp_path / "out", says=says)


def test_e5m2(tmp_path: Path) -> None:
    """The other FP8 with more range; its infinity is refused."""
    model = fp8_model()
    rng = np.random.default_rng(3)
    for name in (EXPERT, QUERY):
        codes = rng.integers(0, 0x7B, model.tensors[name].shape).astype(np.uint8)
        model = model.adding({name: Tensor("F8_E5M2", codes.shape, codes.tobytes())})
    done = converted(model.write(tmp_path / "source"), tmp_path / "out")
    check_weights(model, done.artifact)
    bad = with_byte(model, EXPERT, (3, 64), 0x7C).write(tmp_path / "bad")
    stopped(bad, tmp_path / "bad-out", says=(EXPERT, "row 3, column 64", "block 26"))


def test_scales_of_activations_are_dropped_and_listed(tmp_path: Path) -> None:
    """The output declares none; `verify` says that they have no use."""
    one = Tensor("F32", (), encode([0.5], "F32"))
    extra = {
        "model.layers.0.self_attn.q_proj.input_scale": one,
        "model.layers.0.self_attn.k_proj.k_scale": one,
        "model.layers.0.self_attn.v_scale": one,
    }
    source = fp8_model().adding(extra).write(tmp_path / "source")
    done = converted(source, tmp_path / "out")
    dropped = {entry["name"] for entry in done.summary["dropped_tensors"]}
    assert dropped == extra.keys()
    plan = shell("plan", source, "--json").ok().json()
    assert {entry["name"] for entry in plan["dropped"]} == dropped
    text = shell("quantize", source, tmp_path / "again").ok().stdout
    assert "3 tensors, 12 B (scale of activations or the KV cache)" in text
    checked = shell("verify", tmp_path / "out", "--level", "numeric", "--source", source).ok()
    assert "3 scales of activations" in checked.stdout + checked.stderr


@pytest.mark.parametrize("name", ["model.conv.weight", "model.layers.0.kernel"])
def test_fp8_that_is_no_matrix(name: str, tmp_path: Path) -> None:
    """How scales apply to it is unknown."""
    extra = {name: tensor(name, (4, 3, 3), "F8_E4M3"), name + SCALE: scales((1,))}
    source = fp8_model().adding(extra).write(tmp_path / "source")
    refused(source, tmp_path / "out", says=(name, "[4, 3, 3]", "matrices only"))


@pytest.mark.parametrize(
    "scale",
    [scales((3, 2)), scales((2, 2, 1)), scales((2, 3)), Tensor("F64", (2, 2), bytes(32))],
    ids=["rows", "rank", "columns", "dtype"],
)
def test_scales_that_do_not_fit(scale: Tensor, tmp_path: Path) -> None:
    source = fp8_model().adding({EXPERT + SCALE: scale}).write(tmp_path / "source")
    shown = scale.dtype if scale.dtype == "F64" else str(list(scale.shape))
    refused(source, tmp_path / "out", says=(EXPERT + SCALE, shown))


# ------------------------------------------------------------------------- not finite, zero


def edited(model: Model, at: tuple[int, int], value: float) -> Model:
    return with_values(model, EXPERT + SCALE, lambda v: v.__setitem__(at, value))


BAD: dict[str, tuple[Callable[[Model], Model], tuple[str, ...]]] = {
    "NaN 7F": (
        lambda m: with_byte(with_byte(m, EXPERT, (130, 70), 0x7F), EXPERT, (191, 0), 0x7F),
        (EXPERT, "2 of 49152", "row 130, column 70", f"block {130 * 8 + 2}"),
    ),
    "NaN FF": (lambda m: with_byte(m, EXPERT, (0, 0), 0xFF), (EXPERT, "1 of 49152", "block 0")),
    "NaN in a kept weight": (
        lambda m: with_byte(m, QUERY, (200, 33), 0xFF),
        (QUERY, "1 of 65536", "row 200, column 33"),
    ),
    "scale NaN": (
        lambda m: edited(m, (0, 1), math.nan),
        (EXPERT + SCALE, "1 of 4 scales", "number 1"),
    ),
    "scale Inf": (
        lambda m: edited(m, (1, 0), math.inf),
        (EXPERT + SCALE, "1 of 4 scales", "number 2"),
    ),
    "scale negative": (
        lambda m: edited(m, (1, 1), -0.25),
        (EXPERT + SCALE, "1 of 4 scales", "number 3"),
    ),
    "scale zero": (
        lambda m: edited(m, (0, 0), 0.0),
        (EXPERT + SCALE, "a scale is 0", EXPERT),
    ),
    "overflow": (
        lambda m: with_byte(edited(m, (0, 0), 2.0**119.25), EXPERT, (5, 5), 0x7E),
        (EXPERT, "NaN or infinite"),
    ),
}


@pytest.mark.parametrize("backend", ["auto", "numpy"])
@pytest.mark.parametrize("kind", BAD)
def test_what_is_not_finite_is_refused(kind: str, backend: str, tmp_path: Path) -> None:
    """In weights and scales; other files are finished; mended, a rerun gives the usual bytes."""
    change, says = BAD[kind]
    model = fp8_model()
    source, target = change(model).write(tmp_path / "source"), tmp_path / "out"
    stopped(source, target, "--backend", backend, says=says)
    model.write(source)
    done = converted(source, target, "--overwrite", "--backend", backend)
    clean = converted(model.write(tmp_path / "clean"), tmp_path / "clean-out")
    assert done.weights == clean.weights


def test_a_zero_scale_over_zeros(tmp_path: Path) -> None:
    """A dead block is no error, but worth a warning; it decodes to zero."""

    def clear(values: np.ndarray) -> None:
        values[:128, 128:] = 0

    model = with_values(edited(fp8_model(), (0, 1), 0.0), EXPERT, clear)
    done = converted(model.write(tmp_path / "source"), tmp_path / "out")
    [warning] = done.notices["zero-scale"]
    assert f"{EXPERT}: 1 of 4 scales in {EXPERT}{SCALE} are 0" in warning
    assert not done.artifact.values(EXPERT)[:128, 128:].any()
    assert done.artifact.values(EXPERT)[:128, :128].any()


# --------------------------------------------------------------------- what the config says


def test_the_declaration_stays_where_it_was(tmp_path: Path) -> None:
    """In `text_config` only, as Kimi-K3's; verify looks there, transformers would not."""
    model = fp8_model()
    inner = {**model.config, "model_type": "deepseek_v3"}
    outer = {key: value for key, value in model.config.items() if key != "quantization_config"}
    source = replace(model, config={**outer, "text_config": inner}).write(tmp_path / "source")
    shell("plan", source, "--engine", "vllm").ok()
    claim = shell("plan", source, "--engine", "transformers")
    fail_cleanly(claim, 2, "--engine transformers", "top level of config.json", "vllm", "--force")
    done = converted(source, tmp_path / "out")
    assert "quantization_config" not in done.artifact.config
    declared = done.artifact.config["text_config"]["quantization_config"]
    assert declared["quant_method"] == "compressed-tensors"
    assert json.dumps(done.artifact.config).count('"quantization_config"') == 1
    shell("verify", tmp_path / "out").ok()


def nested(model: Model) -> Model:
    """The language model's config inside another, the old declaration in both."""
    inner = {**model.config, "model_type": "deepseek_v3"}
    return replace(model, config={**model.config, "text_config": inner})


@pytest.mark.parametrize("change", [lambda m: m, nested], ids=["flat", "nested"])
def test_the_old_declaration_goes(change: Callable[[Model], Model], tmp_path: Path) -> None:
    """One scheme is declared, ours; nothing is in FP8, as that would need another."""
    model = change(fp8_model())
    declared = model.config["quantization_config"] | {
        "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate"]
    }
    sidecars = {**model.sidecars, "hf_quant_config.json": b'{"quantization": {}}\n'}
    model = replace(model.configured(quantization_config=declared), sidecars=sidecars)
    done = converted(model.write(tmp_path / "source"), tmp_path / "out")
    text = json.dumps(done.artifact.config)
    assert text.count('"quantization_config"') == 1
    for old in ("fp8", "e4m3", "weight_block_size", "modules_to_not_convert", 'dynamic"'):
        assert old not in text.replace('"dynamic": false', "")
    assert done.artifact.config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "hf_quant_config.json" not in snapshot(tmp_path / "out")
    for name in ("lm_head.weight", "model.layers.1.mlp.gate.weight"):
        assert done.artifact.tensors[name][1:] == tuple(model.tensors[name])
    check_weights(model, done.artifact)


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"torch_dtype": "float8_e4m3fn"}, {"torch_dtype": "bfloat16"}),
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": None}, {"dtype": "bfloat16"}),
        ({}, {"dtype": "bfloat16"}),
    ],
)
def test_dtype_fields(given: dict[str, Any], written: dict[str, Any], tmp_path: Path) -> None:
    """What the config says is never null and no FP8."""
    model = fp8_model()
    config = {key: value for key, value in model.config.items() if key != "dtype"} | given
    done = converted(replace(model, config=config).write(tmp_path / "source"), tmp_path / "out")
    found = {key: done.artifact.config.get(key) for key in ("dtype", "torch_dtype")}
    assert {key: value for key, value in found.items() if value is not None} == written


def test_other_dtypes_stay(tmp_path: Path) -> None:
    """A router's F32 bias that BF16 would collapse, norms, what is no weight: byte for byte."""
    model = fp8_model()
    extra = {
        "model.layers.0.A_log": tensor("A_log", (16,), "F32"),
        "scaled_fp8": Tensor("F8_E4M3", (0,), b""),
        "step": Tensor("I64", (), bytes(8)),
        "flag": Tensor("F8_E4M3", (4,), b"\x01\x02\x7f\xff"),
    }
    done = converted(model.adding(extra).write(tmp_path / "source"), tmp_path / "out")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    for name, stored in {**extra, bias: model.tensors[bias]}.items():
        assert done.artifact.tensors[name][1:] == tuple(stored)
    assert len(set(done.artifact.values(bias))) == 4


@pytest.mark.parametrize("inner", [80, 16])
def test_a_ragged_layer_becomes_bf16(inner: int, tmp_path: Path) -> None:
    """Experts that cannot be MXFP4 are not left in FP8 either."""
    model = fp8_model()
    added: dict[str, Tensor] = {}
    for name in model.tensors:
        if ".mlp.experts." in name and name.endswith(".weight"):
            added |= fp8_weight(name, (256, inner) if "down_proj" in name else (inner, 256))
    source = model.adding(added).configured(moe_intermediate_size=inner)
    written = source.write(tmp_path / "source")
    done = converted(written, tmp_path / "out", "--scope", "linear")
    assert ".mlp.experts." not in " ".join(done.artifact.quantized)
    [warning] = done.notices["ragged-input-dimension"]
    assert str(inner) in warning
    check_weights(source, done.artifact)


def test_multi_token_prediction(tmp_path: Path) -> None:
    """Layer 2 is the draft layer: all of it is there, as BF16, and declared so."""
    model = fp8_model()
    prefix = "model.layers.2."
    added = fp8_weight(prefix + "eh_proj.weight", (256, 512))
    for name in ("enorm", "hnorm", "shared_head.norm"):
        added[f"{prefix}{name}.weight"] = tensor(name, (256,))
    added[prefix + "shared_head.head.weight"] = tensor("head", (128, 256))
    added[prefix + "mlp.gate.weight"] = tensor("gate", (4, 256))
    for name, stored in model.tensors.items():
        if name.startswith("model.layers.1.mlp.experts.") and is_scaled(stored):
            added |= fp8_weight(name.replace(".1.", ".2.", 1), (stored.shape[0], stored.shape[1]))
    model = model.adding(added).configured(num_nextn_predict_layers=1)
    done = converted(model.write(tmp_path / "source"), tmp_path / "out")
    weights = {name for name in added if not name.endswith(SCALE)}
    assert weights <= set(done.artifact.kept)
    assert len(done.artifact.quantized) == 12
    check_weights(model, done.artifact)


# ------------------------------------------------------------------------------- no detour


@pytest.mark.parametrize(("rule", "byte"), [("floor", 127), ("even", 127), ("rceil", 128)])
def test_products_are_not_squeezed_through_bf16(rule: str, byte: int, tmp_path: Path) -> None:
    """1.0 times 6.998046875 is below 7, to which BF16 would round it."""

    def one(values: np.ndarray) -> None:
        values[:] = 0
        values[0, 0] = 1

    model = with_values(fp8_model(), EXPERT, one)
    model = with_values(model, EXPERT + SCALE, lambda values: values.fill(6.998046875))
    source = model.write(tmp_path / "source")
    done = converted(source, tmp_path / "out", "--scale-rule", rule)
    assert done.artifact.packed(EXPERT)[1][0, 0] == byte
    assert done.artifact.values(EXPERT)[0, 0] == 6


# --------------------------------------------------------------- what is said, and measured


def test_inspect_plan_and_report(tmp_path: Path) -> None:
    """What becomes of FP8 weights is said in every place, and their error is measured."""
    source = fp8_model().write(tmp_path / "source")
    seen = shell("inspect", source, "--json").ok().json()
    assert seen["obstacle"] is None
    roles = seen["roles"]
    assert (roles["expert"]["quantized"], roles["attention"]["dequantized"]) == (12, 8)
    assert roles["attention"]["mxfp4_bytes"] == 2 * 8 * 256 * 256
    table = shell("inspect", source).ok().stdout
    assert "BF16, 1.05 MB" in table
    plan = shell("plan", source, "--json").ok().json()
    assert plan["totals"]["dequantized"]["tensors"] == 14
    assert plan["totals"]["copied"]["tensors"] == 23
    text = shell("plan", source).ok().stdout
    for words in ("9 tensors, 135.70 kB, byte for byte", "14 FP8 weights", "-> 1.93 MB"):
        assert words in text
    target = tmp_path / "out"
    done = converted(source, target)
    assert done.summary["dequantized"] == plan["totals"]["dequantized"]
    own = shell("report", target, "--json").ok().json()["total"]
    measured = shell("report", target, "--source", source, "--json").ok().json()["total"]
    for figure in ("relative_rmse", "sqnr_db", "cosine", "max_abs_err"):
        assert own[figure] == pytest.approx(measured[figure], rel=1e-6)
    assert (own["elements"], own["flushed"]) == (measured["elements"], measured["flushed"])


def test_same_artifact_whatever_the_way(tmp_path: Path) -> None:
    """Layouts, jobs, backends, budgets: the weights' bytes are the same."""
    source = fp8_model().write(tmp_path / "source")
    first: Conversion = converted(source, tmp_path / "out")
    for number, options in enumerate(
        (("--jobs", "1"), ("--jobs", "5"), ("--backend", "numpy"), ("--no-statistics",))
    ):
        assert converted(source, tmp_path / str(number), *options).id == first.id
