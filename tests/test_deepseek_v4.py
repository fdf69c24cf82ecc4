"""DeepSeek-V4 as it is published: experts in MXFP4, everything else in FP8."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mxconvert.fp8 import fp8_values
from tests.support import Model, Tensor, fail_cleanly, read_artifact, refused, shell, tensor
from tests.support.matching import check_declared
from tests.support.models import shard_name, sidecars
from tests.support.numbers import decode_mxfp4

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

HIDDEN, INNER, EXPERTS, LAYERS = 160, 96, 4, 2
CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "expert_dtype": "fp4",
    "hidden_size": HIDDEN,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": INNER,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "torch_dtype": "bfloat16",
}


def noise(name: str, count: int, low: int, high: int) -> NDArray[np.uint8]:
    seed = sum(name.encode())
    return np.random.default_rng([4, seed]).integers(low, high, count, np.uint8)


def mxfp4(name: str, rows: int, columns: int) -> dict[str, Tensor]:
    codes = noise(name, rows * columns // 2, 0, 256).astype(np.int8)
    scales = noise(name + "s", rows * columns // 32, 110, 130)
    return {
        f"{name}.weight": Tensor("I8", (rows, columns // 2), codes.tobytes()),
        f"{name}.scale": Tensor("F8_E8M0", (rows, columns // 32), scales.tobytes()),
    }


def fp8(name: str, rows: int, columns: int) -> dict[str, Tensor]:
    grid = (-(-rows // 128), -(-columns // 128))
    scales = noise(name + "s", grid[0] * grid[1], 115, 122)
    return {
        f"{name}.weight": tensor(f"{name}.weight", (rows, columns), "F8_E4M3", sigma=100.0),
        f"{name}.scale": Tensor("F8_E8M0", grid, scales.tobytes()),
    }


def experts(prefix: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for expert in range(EXPERTS):
        name = f"{prefix}.ffn.experts.{expert}"
        for word in ("w1", "w3"):
            found |= mxfp4(f"{name}.{word}", INNER, HIDDEN)
        found |= mxfp4(f"{name}.w2", HIDDEN, INNER)
    return found


def layer(prefix: str) -> dict[str, Tensor]:
    found = experts(prefix)
    found |= fp8(f"{prefix}.attn.wq_a", 64, HIDDEN) | fp8(f"{prefix}.attn.wkv", 32, HIDDEN)
    found |= fp8(f"{prefix}.ffn.shared_experts.w1", INNER, HIDDEN)
    for name, shape in {
        "attn_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
        "ffn.gate.weight": (EXPERTS, HIDDEN),
        "attn.indexer.weights_proj.weight": (8, HIDDEN),
    }.items():
        found[f"{prefix}.{name}"] = tensor(f"{prefix}.{name}", shape)
    found[f"{prefix}.ffn.gate.bias"] = tensor(f"{prefix}.gate.bias", (EXPERTS,), "F32")
    found[f"{prefix}.hc_attn_fn"] = tensor(f"{prefix}.hc_attn_fn", (8, HIDDEN), "F32")
    return found


def v4_model() -> Model:
    first, second = shard_name(1, 2), shard_name(2, 2)
    shards = {
        first: {"embed.weight": tensor("embed.weight", (64, HIDDEN)), **layer("layers.0")},
        second: {
            **layer("layers.1"),
            **layer("mtp.0"),
            "norm.weight": tensor("norm.weight", (HIDDEN,)),
            "head.weight": tensor("head.weight", (64, HIDDEN)),
        },
    }
    return Model(config=CONFIG, shards=shards, sidecars=sidecars("tiny-v4"))


def pairs(model: Model) -> list[str]:
    """Modules that are MXFP4 in the source."""
    return [n.removesuffix(".weight") for n, t in model.tensors.items() if t.dtype == "I8"]


def values_of(model: Model, module: str) -> NDArray[np.float64]:
    codes, scales = model.tensors[f"{module}.weight"], model.tensors[f"{module}.scale"]
    return decode_mxfp4(
        np.frombuffer(codes.data, np.uint8).reshape(codes.shape),
        np.frombuffer(scales.data, np.uint8).reshape(scales.shape),
    )


def fp8_bf16(model: Model, module: str) -> bytes:
    """The product of each value and its block's power of two, in BF16: it fits exactly."""
    weight, scale = model.tensors[f"{module}.weight"], model.tensors[f"{module}.scale"]
    rows, columns = weight.shape
    grid = np.frombuffer(scale.data, np.uint8).astype(int).reshape(scale.shape)
    steps = np.repeat(np.repeat(np.ldexp(1.0, grid - 127), 128, 0), 128, 1)[:rows, :columns]
    codes = np.frombuffer(weight.data, np.uint8).reshape(rows, columns)
    exact = (fp8_values("F8_E4M3")[codes] * steps).astype(np.float32)
    bits = exact.view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype("<u2").tobytes()


def test_refused_since_engines_read_it_as_it_is(tmp_path: Path) -> None:
    """Its own layout is what serves; ours would be hours of work for nothing."""
    source = v4_model().write(tmp_path / "source")
    says = ("deepseek-v4", "own MXFP4 layout", "--force")
    refused(source, tmp_path / "out", status=2, says=says)


@pytest.mark.parametrize("backend", ["llvm", "numpy"])
def test_every_code_and_scale_stays(backend: str, tmp_path: Path) -> None:
    """Repacked: names and dtypes change, bytes do not, those of its prediction layer too."""
    model = v4_model()
    source = model.write(tmp_path / "source")
    shell("quantize", source, tmp_path / "out", "--force", "--backend", backend).ok()
    artifact = read_artifact(tmp_path / "out")
    modules = pairs(model)
    assert len(modules) == 3 * EXPERTS * 3
    assert set(artifact.quantized) == {f"{module}.weight" for module in modules}
    for module in modules:
        codes, scales = artifact.packed(f"{module}.weight")
        assert codes.tobytes() == model.tensors[f"{module}.weight"].data
        assert scales.tobytes() == model.tensors[f"{module}.scale"].data
    for name, stored in model.tensors.items():
        module, _, word = name.rpartition(".")
        if module in modules or word == "scale":
            continue
        kept = artifact.tensors[name]
        if stored.dtype == "F8_E4M3":
            assert kept[1:] == ("BF16", stored.shape, fp8_bf16(model, module)), name
        else:
            assert kept[1:] == tuple(stored), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "expert_dtype" not in config
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    check_declared(artifact)
    manifest = json.loads((tmp_path / "out" / "mxconvert.manifest.json").read_text())
    assert manifest["format"]["scale_rule"] == "source"
    shell("verify", tmp_path / "out", "--source", source).ok()


def test_dequantize_is_exact(tmp_path: Path) -> None:
    """Every expert against an independent reading of codes and scales."""
    model = v4_model()
    source = model.write(tmp_path / "source")
    shell("dequantize", source, tmp_path / "out").ok()
    artifact = read_artifact(tmp_path / "out")
    assert {stored[1] for stored in artifact.tensors.values()} <= {"BF16", "F32"}
    assert not [name for name in artifact.tensors if name.endswith(".scale")]
    for module in pairs(model):
        assert np.array_equal(artifact.values(f"{module}.weight"), values_of(model, module))
    assert "quantization_config" not in artifact.config
    shell("verify", tmp_path / "out", "--source", source).ok()


def test_experts_by_range(tmp_path: Path) -> None:
    """Files hold ranges of experts, as in any family."""
    source = v4_model().write(tmp_path / "source")
    plan = shell("plan", source, "--force", "--experts-per-file", "2", "--json").ok().json()
    assert plan["num_experts"] == EXPERTS
    ranges = [file["experts"] for file in plan["files"] if file["role"] == "experts"]
    assert ranges == [[0, 1], [2, 3]]


W2 = "layers.0.ffn.experts.1.w2"
HALVES: dict[str, tuple[str, Tensor | None]] = {
    "no scales": (f"{W2}.scale", None),
    "no codes": (f"{W2}.weight", None),
    "scales of another dtype": (f"{W2}.scale", Tensor("F32", (HIDDEN, 3), bytes(4 * HIDDEN * 3))),
    "scales of another shape": (f"{W2}.scale", Tensor("F8_E8M0", (HIDDEN, 2), bytes(HIDDEN * 2))),
    "codes of another shape": (f"{W2}.weight", Tensor("I8", (HIDDEN, 32), bytes(HIDDEN * 32))),
}


@pytest.mark.parametrize("command", ["quantize", "dequantize"])
@pytest.mark.parametrize("half", HALVES)
def test_half_a_pair_is_refused(half: str, command: str, tmp_path: Path) -> None:
    """Codes without the scales that they need are no weights: copied, they would be noise."""
    name, instead = HALVES[half]
    model = v4_model().without(lambda stored: stored == name)
    source = model.adding({} if instead is None else {name: instead}).write(tmp_path / "source")
    force = ("--force",) if command == "quantize" else ()
    result = shell(command, source, tmp_path / "out", *force)
    fail_cleanly(result, 5, "quantized already", W2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["quantize", "dequantize"])
def test_a_scale_that_is_nan_is_refused(command: str, tmp_path: Path) -> None:
    """What is repacked would carry it on, and no engine says so."""
    model = v4_model()
    name = f"{W2}.scale"
    data = bytearray(model.tensors[name].data)
    data[7 * 3 + 2] = 255
    model = model.adding({name: model.tensors[name]._replace(data=bytes(data))})
    force = ("--force",) if command == "quantize" else ()
    source = model.write(tmp_path / "source")
    result = shell(command, source, tmp_path / "out", *force)
    fail_cleanly(result, 5, W2, "NaN", "row 7", "block 2" if command == "quantize" else "column 64")
    assert not (tmp_path / "out" / "mxconvert.manifest.json").exists()
