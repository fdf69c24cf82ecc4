"""`dequantize`: plain BF16 from MXFP4 in any layout and from scaled FP8, run as `quantize` is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support import (
    Artifact,
    Model,
    Tensor,
    bf16_model,
    decode,
    decode_mxfp4,
    fail_cleanly,
    fp8_model,
    fused_model,
    read_artifact,
    run_cli,
    shell,
    snapshot,
)
from tests.support.contract import ROOMY, check_index
from tests.support.fp8 import bf16_of, dequantized
from tests.support.models import INDEX, tensor
from tests.support.numbers import unpack_codes
from tests.support.runs import arm, codes, events, final_names, partials

if TYPE_CHECKING:
    from pathlib import Path

GATE = "model.layers.0.mlp.experts.1.gate_proj"
PLAIN = {
    "name": "bfloat16", "quant_method": "none", "element": "bf16", "block_size": 1,
    "scale": "none", "scale_bias": 0, "nibble_order": "none", "scale_rule": "none",
}  # fmt: skip


def plain(source: Path, target: Path, *options: object) -> Artifact:
    """Dequantize; assert what holds for every result; return it."""
    before = snapshot(source)
    shell("dequantize", source, target, *ROOMY, *options).ok()
    assert snapshot(source) == before
    shell("verify", target, "--level", "numeric", "--source", source).ok()
    artifact = read_artifact(target)
    check_index(artifact)
    assert not artifact.quantized
    assert "quantization_config" not in json.dumps(artifact.config)
    assert artifact.manifest["format"] == PLAIN
    assert artifact.manifest["totals"]["quantized"]["source_tensors"] == 0
    return artifact


def quantized(source: Path, target: Path, *options: object) -> Artifact:
    shell("quantize", source, target, *ROOMY, "--no-statistics", *options).ok()
    return read_artifact(target)


def blocks(*scales: int, rows: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return random codes of ``rows`` rows, and the given scale bytes over and over."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, 16 * len(scales)), np.uint8)
    return packed, np.tile(np.array(scales, np.uint8), (rows, 1))


def with_experts(model: Model, packed: np.ndarray, scales: np.ndarray) -> Model:
    """Put one pair in the place of every expert's matrices, as compressed-tensors stores it."""
    shards: dict[str, dict[str, Tensor]] = {}
    for file, shard in model.shards.items():
        shards[file] = {}
        for name, stored in shard.items():
            if ".experts." not in name:
                shards[file][name] = stored
                continue
            shards[file][name + "_packed"] = Tensor("U8", packed.shape, packed.tobytes())
            shards[file][name + "_scale"] = Tensor("U8", scales.shape, scales.tobytes())
    config = model.config | {"quantization_config": {"quant_method": "compressed-tensors"}}
    return replace(model, shards=shards, config=config)


# ------------------------------------------------------------------------------- values


def test_an_artifact_becomes_its_values(model: Model, tmp_path: Path) -> None:
    """Each packed weight decodes exactly under its own name, all else keeps its bytes."""
    made = quantized(model.write(tmp_path / "source"), tmp_path / "packed")
    back = plain(tmp_path / "packed", tmp_path / "plain")
    assert back.tensors.keys() == model.tensors.keys()
    for name, stored in back.tensors.items():
        if name in made.quantized:
            assert stored.dtype == "BF16"
            assert stored.data == bf16_of(made.values(name))
        else:
            assert stored[1:] == made.tensors[name][1:]
    assert back.config == model.config


def _quark(name: str, stored: Tensor) -> tuple[str, Tensor]:
    return name.removesuffix("_packed"), stored


def _deepseek(name: str, stored: Tensor) -> tuple[str, Tensor]:
    if name.endswith("_packed"):
        return name.removesuffix("_packed"), stored._replace(dtype="I8")
    if name.endswith(".weight_scale"):
        return name.replace(".weight_scale", ".scale"), stored._replace(dtype="F8_E8M0")
    return name, stored


@pytest.mark.parametrize("rename", [_quark, _deepseek])
def test_other_names_of_a_pair_give_the_same_bytes(
    rename: Any, model: Model, tmp_path: Path
) -> None:
    """The layout of the source cannot be told from the weights of the result."""
    source = with_experts(model, *blocks(120, 121, rows=96))
    other = replace(
        source,
        shards={
            file: dict(rename(name, stored) for name, stored in shard.items())
            for file, shard in source.shards.items()
        },
    )
    one = plain(source.write(tmp_path / "a"), tmp_path / "plain-a")
    two = plain(other.write(tmp_path / "b"), tmp_path / "plain-b")
    assert one.tensors == two.tensors


def test_fused_blocks_of_gpt_oss_become_a_matrix_for_each_projection(tmp_path: Path) -> None:
    """Rows of gate and up alternate; biases are cut as the weights are."""
    model = fused_model(transposed=True)
    rng = np.random.default_rng(0)
    prefix = "model.layers.0.mlp.experts."
    tensors = {name: t for name, t in model.tensors.items() if name.endswith("_bias")}
    pairs = {}
    for word, rows, columns in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
        packed = rng.integers(0, 256, (4, rows, columns // 32, 16), np.uint8)
        scales = rng.integers(110, 130, (4, rows, columns // 32), np.uint8)
        pairs[word] = packed.reshape(4, rows, -1), scales
        tensors[f"{prefix}{word}_blocks"] = Tensor("U8", packed.shape, packed.tobytes())
        tensors[f"{prefix}{word}_scales"] = Tensor("U8", scales.shape, scales.tobytes())
    config = model.config | {"quantization_config": {"quant_method": "mxfp4"}}
    source = replace(model, shards={"model.safetensors": tensors}, config=config)
    back = plain(source.write(tmp_path / "source"), tmp_path / "plain")
    for expert in range(4):
        gate_up = decode_mxfp4(pairs["gate_up_proj"][0][expert], pairs["gate_up_proj"][1][expert])
        down = decode_mxfp4(pairs["down_proj"][0][expert], pairs["down_proj"][1][expert])
        for projection, expected in (
            ("gate_proj", gate_up[::2]), ("up_proj", gate_up[1::2]), ("down_proj", down),
        ):  # fmt: skip
            stored = back.tensors[f"{prefix}{expert}.{projection}.weight"]
            assert stored[1:] == ("BF16", expected.shape, bf16_of(expected))
        assert f"{prefix}{expert}.down_proj.bias" in back.tensors


def test_scaled_fp8_is_rounded_once(tmp_path: Path) -> None:
    """The value times its scale in float32, then BF16; the scales are gone."""
    model = fp8_model()
    back = plain(model.write(tmp_path / "source"), tmp_path / "plain")
    assert not [name for name in back.tensors if "scale" in name]
    for name, stored in model.tensors.items():
        if stored.dtype == "F8_E4M3":
            assert back.tensors[name].data == bf16_of(dequantized(model.tensors, name))


@pytest.mark.parametrize("fused", [False, True])
def test_a_plain_source_is_copied(fused: bool, tmp_path: Path) -> None:
    """Tensors that hold a layer's experts together stay together."""
    model = fused_model(transposed=True) if fused else bf16_model()
    back = plain(model.write(tmp_path / "source"), tmp_path / "plain")
    assert {name: stored[1:] for name, stored in back.tensors.items()} == {
        name: tuple(stored) for name, stored in model.tensors.items()
    }


@pytest.mark.parametrize("rule", ["mse", "even", "floor", "rceil"])
@settings(max_examples=4, deadline=None, phases=[Phase.generate])
@given(seed=st.integers(0, 2**32 - 1), sigma=st.sampled_from([1e-3, 0.02, 1.0, 1e4]))
def test_quantizing_again_loses_nothing(
    rule: str, seed: int, sigma: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Under the same rule the same values come back; even and floor give the same bytes.

    But for the sign of a zero: -0.0 has the code 0, a negative value that became 0 has 8.
    """
    root = tmp_path_factory.mktemp("again")
    model = bf16_model(layers=1, experts=2)
    values = {
        name: tensor(name, stored.shape, seed=seed, sigma=sigma) if ".experts." in name else stored
        for name, stored in model.tensors.items()
    }
    source = replace(model, shards={"model.safetensors": values}).write(root / "source")
    first = quantized(source, root / "first", "--scale-rule", rule)
    plain(root / "first", root / "plain")
    second = quantized(root / "plain", root / "second", "--scale-rule", rule)
    assert first.quantized == second.quantized
    for name in first.quantized:
        assert np.array_equal(first.values(name), second.values(name))
    if rule in ("even", "floor"):
        for name, stored in first.tensors.items():
            again = second.tensors[name]
            if name.endswith("_packed"):
                codes = unpack_codes(stored.array)
                assert np.array_equal(np.where(codes == 8, 0, codes), unpack_codes(again.array))
            else:
                assert again == stored


def test_every_code_under_every_finite_scale(model: Model, tmp_path: Path) -> None:
    """Down to 2^-128, which is below BF16's normal range, and up to 6 * 2^125."""
    packed = np.tile(np.arange(256, dtype=np.uint8), (253, 1)).reshape(253 * 16, 16)
    scales = np.repeat(np.arange(253, dtype=np.uint8), 16)[:, None]
    source = with_experts(model, packed, scales).write(tmp_path / "source")
    back = plain(source, tmp_path / "plain")
    stored = back.tensors[f"{GATE}.weight"]
    assert np.array_equal(decode(stored.data, "BF16", stored.shape), decode_mxfp4(packed, scales))


@pytest.mark.parametrize(("scale", "code"), [(253, 6), (254, 4), (255, 1)])
def test_what_bf16_cannot_hold_is_refused(
    scale: int, code: int, model: Model, tmp_path: Path
) -> None:
    """Naming tensor and block; what those scales can mean is taken."""
    packed, scales = np.zeros((4, 48), np.uint8), np.full((4, 3), 120, np.uint8)
    scales[2, 1] = scale
    packed[2, 20] = 0x22
    good = with_experts(model, packed, scales).write(tmp_path / "good")
    if scale < 255:
        plain(good, tmp_path / "plain")
    packed[2, 20] = code << 4
    bad = with_experts(model, packed, scales).write(tmp_path / "bad")
    result = shell("dequantize", bad, tmp_path / "out", *ROOMY)
    place = "(row 2, column 41, block 7)" if scale < 255 else "(row 2, column 32, block 7)"
    fail_cleanly(result, 5, ".experts.0.down_proj.weight", place)
    assert partials(tmp_path / "out") == []


# ---------------------------------------------------------------------------- the source


def test_a_scheme_that_cannot_be_read_is_refused(model: Model, tmp_path: Path) -> None:
    """As by quantize, before anything is written."""
    config = model.config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    source = replace(model, config=config).write(tmp_path / "source")
    fail_cleanly(shell("dequantize", source, tmp_path / "out"), 5, "gptq")
    assert not (tmp_path / "out").exists()


def test_a_weight_that_is_stored_twice_is_refused(model: Model, tmp_path: Path) -> None:
    source = with_experts(model, *blocks(120, rows=8))
    double = source.adding({f"{GATE}.weight": tensor("x", (8, 32))}).write(tmp_path / "source")
    fail_cleanly(shell("dequantize", double, tmp_path / "out"), 5, f"{GATE}.weight", "both")


def test_nested_copies_and_dtypes_of_the_config_are_mended(model: Model, tmp_path: Path) -> None:
    """No copy of the settings is left at any depth, and no dtype names what is gone."""
    source = with_experts(model, *blocks(120, rows=8))
    config = source.config | {"dtype": "uint8", "text_config": {"quantization_config": {}}}
    back = plain(replace(source, config=config).write(tmp_path / "source"), tmp_path / "out")
    assert back.config["dtype"] == "bfloat16"
    assert back.config["text_config"] == {}


def test_verify_finds_a_declared_quantization(model: Model, tmp_path: Path) -> None:
    """Whatever else says so: nothing of a plain artifact is packed."""
    plain(model.write(tmp_path / "source"), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(model.config | {"quantization_config": {}}))
    result = shell("verify", tmp_path / "out", "--json")
    assert result.status == 4
    assert "stale-quantization-config" in {f["code"] for f in result.json()["findings"]}


# ------------------------------------------------------------------------------- the run


@pytest.mark.parametrize("layout", ["experts", "layers", "source"])
def test_layouts(layout: str, model: Model, tmp_path: Path) -> None:
    """As quantize groups them; the same tensors in each."""
    quantized(model.write(tmp_path / "source"), tmp_path / "packed")
    back = plain(tmp_path / "packed", tmp_path / "plain", "--layout", layout)
    assert back.tensors.keys() == model.tensors.keys()
    names = final_names(tmp_path / "plain")
    if layout == "source":
        assert names == final_names(tmp_path / "packed")
    else:
        assert any(name.startswith(f"model-{layout[:5]}") for name in names)


@pytest.mark.parametrize("options", [("-j", "1"), ("-j", "4"), ("--backend", "numpy")])
def test_threads_and_kernels_do_not_matter(options: tuple[str, ...], tmp_path: Path) -> None:
    """Rows that do not divide a piece, matrices of many pieces, and small ones between them."""
    model = bf16_model(layers=1, experts=1)
    source = with_experts(model, *blocks(*range(100, 133), rows=2050, seed=1))
    folder = source.write(tmp_path / "source")
    plain(folder, tmp_path / "one")
    shell("dequantize", folder, tmp_path / "two", *ROOMY, *options).ok()
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A weight many times larger than the budget goes through in pieces."""
    model = bf16_model(layers=1, experts=1)
    folder = with_experts(model, *blocks(*[120] * 64, rows=8192)).write(tmp_path / "source")
    args = ("--max-memory", "128MiB", "--backend", "numpy", "--max-file-size", "1GiB")
    result = run_cli("dequantize", folder, tmp_path / "out", *args).ok()
    assert result.max_rss < 128 << 20
    assert max(path.stat().st_size for path in (tmp_path / "out").iterdir()) > 96 << 20


@pytest.mark.parametrize("point", ["engine.before-record:2", "writer.mid-append:5"])
def test_a_killed_run_resumes(point: str, model: Model, tmp_path: Path) -> None:
    """With the bytes of a run that nothing disturbed."""
    quantized(model.write(tmp_path / "source"), tmp_path / "packed")
    plain(tmp_path / "packed", tmp_path / "clean")
    env = arm(f"{point}=kill")
    args = ("dequantize", tmp_path / "packed", tmp_path / "out", "--json")
    assert run_cli(*args, env=env).status == -9
    done = run_cli(*args).ok()
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "clean")
    assert events(done, "started")[0]["what"] == "dequantize"
    assert "complete" in codes(run_cli(*args).ok())


def test_another_command_does_not_go_on(model: Model, tmp_path: Path) -> None:
    """What quantize began, dequantize does not finish; nor is one's artifact the other's."""
    source = model.write(tmp_path / "source")
    shell("quantize", source, tmp_path / "out", *ROOMY, "--only", "*dense*").ok()
    fail_cleanly(shell("dequantize", source, tmp_path / "out", *ROOMY), 2, "by quantize")
    plain(source, tmp_path / "plain")
    result = shell("quantize", source, tmp_path / "plain", *ROOMY)
    fail_cleanly(result, 2, "bfloat16")


def test_dry_run_writes_nothing(model: Model, tmp_path: Path) -> None:
    quantized(model.write(tmp_path / "source"), tmp_path / "packed")
    args = ("dequantize", tmp_path / "packed", tmp_path / "out", "--dry-run")
    text = shell(*args).ok().stdout
    assert "48 weights" in text
    assert "quantized  " not in text.replace("dequantized", "")
    planned = shell(*args, "--json").ok().json()
    assert planned["totals"]["dequantized"]["tensors"] == 48
    assert not (tmp_path / "out").exists()
    plain(tmp_path / "packed", tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX).read_bytes())
    assert planned["index"] == index


def test_summary_and_card_say_what_was_done(model: Model, tmp_path: Path) -> None:
    quantized(model.write(tmp_path / "source"), tmp_path / "packed")
    result = shell(
        "dequantize", tmp_path / "packed", tmp_path / "out", *ROOMY, "--json", "--base-model", "a/b"
    ).ok()
    summary = events(result, "summary")[0]
    assert summary["dequantized"]["tensors"] == 48
    assert summary["quantized"]["tensors"] == 0
    assert summary["error"] is None
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# BF16 weights" in card
    assert 'base_model: "a/b"\n' in card
    assert "base_model_relation" not in card
    assert "license: apache-2.0" in card
