"""Will an engine load it: declared schemes, siblings, sidecars, config, dtypes."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import Model, Tensor, bf16_model, converted, refused, shell
from tests.support.container import ABSENT, read_header
from tests.support.matching import check_declared
from tests.support.models import tensor

if TYPE_CHECKING:
    from pathlib import Path

# ------------------------------------------------------------------- declared and not


@pytest.mark.parametrize("layout", ["experts", "layers", "source"])
@pytest.mark.parametrize("scope", ["experts", "linear"])
def test_every_unquantized_linear_is_declared(
    layout: str, scope: str, model: Model, tmp_path: Path
) -> None:
    """Under the format's own matching rules: kept is ignored, packed is not, nothing is stale."""
    source = model.write(tmp_path / "source")
    done = converted(source, tmp_path / "out", "--layout", layout, "--scope", scope)
    check_declared(done.artifact)
    assert len(done.artifact.quantized) == (48 if scope == "experts" else 48 + 8)


def test_ignored_means_untouched(model: Model, tmp_path: Path) -> None:
    """What the user ignores keeps name and bytes, is declared, and is counted as kept."""
    source = model.write(tmp_path / "source")
    pattern = r"re:.*layers\.1\.mlp\.experts\..*"
    done = converted(source, tmp_path / "out", "--ignore", pattern)
    kept = [n for n in done.artifact.kept if ".layers.1.mlp.experts." in n]
    assert len(kept) == 24
    assert all(done.artifact.tensors[n].data == model.tensors[n].data for n in kept)
    assert done.summary["kept"]["tensors"] == 17 + 24
    check_declared(done.artifact)


# ---------------------------------------------------------------------------- siblings


def test_excluding_v_keeps_q_and_k(model: Model, tmp_path: Path) -> None:
    """Engines merge q, k and v: one scheme for all three, with a notice for each layer."""
    source = model.write(tmp_path / "source")
    options = ("--scope", "linear", "--ignore", "re:.*v_proj$")
    done = converted(source, tmp_path / "out", *options)
    kept = {f"model.layers.{n}.self_attn.{p}_proj.weight" for n in (0, 1) for p in "qkv"}
    assert kept <= set(done.artifact.kept)
    assert "model.layers.0.self_attn.o_proj.weight" in done.artifact.quantized
    notices = done.notices["extended-exclude"]
    assert len(notices) == 2
    assert "v_proj" in notices[0]
    check_declared(done.artifact)


def test_including_q_takes_k_and_v_along(model: Model, tmp_path: Path) -> None:
    """An include is extended to the siblings likewise."""
    source = model.write(tmp_path / "source")
    done = converted(source, tmp_path / "out", "--include", "model.layers.0.self_attn.q_proj")
    taken = {f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkv"}
    assert taken <= set(done.artifact.quantized)
    assert len(done.artifact.quantized) == 48 + 3
    assert "q_proj" in done.notices["extended-include"][0]
    check_declared(done.artifact)


def test_excluding_one_expert_weight_keeps_its_layer(model: Model, tmp_path: Path) -> None:
    """A fused MoE kernel has one scheme: the whole layer follows, with a notice."""
    source = model.write(tmp_path / "source")
    one = "model.layers.1.mlp.experts.3.up_proj"
    done = converted(source, tmp_path / "out", "--ignore", one)
    assert not [n for n in done.artifact.quantized if ".layers.1." in n]
    assert len(done.artifact.quantized) == 24
    [notice] = done.notices["extended-exclude"]
    assert one in notice
    check_declared(done.artifact)


def test_a_layer_without_v_is_no_error(model: Model, tmp_path: Path) -> None:
    """Some models share keys and values: a group may be incomplete."""
    source = model.without(lambda n: "layers.1.self_attn.v_proj" in n).write(tmp_path / "source")
    done = converted(source, tmp_path / "out", "--scope", "linear")
    assert "model.layers.1.self_attn.k_proj.weight" in done.artifact.quantized
    assert not done.notices
    check_declared(done.artifact)


# ---------------------------------------------------------------------------- sidecars

COPIED = {
    "modeling_x.py": b"raise SystemExit('executed')\n",
    "configuration_x.py": b"raise SystemExit('executed')\n",
    "tokenization_x.py": b"raise SystemExit('executed')\n",
    "tiktoken.model": b"aGVsbG8= 0\n",
    "preprocessor_config.json": b"{}\n",
    "additional_chat_templates/a.jinja": b"{{ a }}\n",
    "deep/er/still/notes.txt": b"",
    "LICENSE": b"text\r\n",
    "tokenizer_vocab.bin": bytes(range(256)) * 12288,
    "merges.txt": b"#version: 0.2\n",
    "vocab.json": b"{ }",
}
SKIPPED = {
    "pytorch_model.bin": b"x",
    "pytorch_model-00001-of-00002.bin": b"x",
    "pytorch_model.bin.index.json": b"{}",
    "model.gguf": b"x",
    "tf_model.h5": b"x",
    "consolidated.00.pth": b"x",
    "optimizer.pt": b"x",
    "trainer_state.json": b"{}",
    "training_args.bin": b"x",
    ".git/config": b"x",
    ".gitattributes": b"x",
    ".cache/huggingface/x.lock": b"x",
    "__pycache__/modeling_x.pyc": b"x",
    "original/params.json": b"{}",
    "hf_quant_config.json": b"{}",
    "quantization_config.json": b"{}",
    "quantize_config.json": b"{}",
    "quant_config.json": b"{}",
}


def test_sidecars_travel_and_leftovers_do_not(model: Model, tmp_path: Path) -> None:
    """All an engine may need is copied byte for byte and listed; caches and old weights stay."""
    model.sidecars.update(COPIED | SKIPPED)
    source = model.write(tmp_path / "source")
    target = tmp_path / "out"
    done = converted(source, target)
    for name, data in COPIED.items():
        assert (target / name).read_bytes() == data
    copied = {name for name in done.bytes if not name.endswith(".safetensors")}
    ours = {
        "config.json", "README.md", "model.safetensors.index.json", "mxconvert.manifest.json",
        "mxconvert.tensors.jsonl.zst",
    }  # fmt: skip
    standard = {
        "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert copied == COPIED.keys() | ours | standard
    listed = {entry["path"] for entry in done.artifact.manifest["files"]}
    assert listed == done.bytes.keys() - {"mxconvert.manifest.json"}
    reported = {
        entry["name"].split("/")[0]: entry["reason"] for entry in done.summary["skipped_files"]
    }
    assert {name.split("/")[0] for name in SKIPPED} == reported.keys()
    assert all(reported.values())


# ------------------------------------------------------------------------------ config


def test_the_config_can_be_read_one_way_only(model: Model, tmp_path: Path) -> None:
    """Weight-only MXFP4 in groups of 32, one group, no activations, no field of our own."""
    done = converted(model.write(tmp_path / "source"), tmp_path / "out")
    config = done.artifact.config
    declared = config.pop("quantization_config")
    assert config == model.config
    assert declared["quant_method"] == "compressed-tensors"
    assert declared["format"] == "mxfp4-pack-quantized"
    assert declared["quantization_status"] == "compressed"
    [group] = declared["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["input_activations"] is None
    assert group["output_activations"] is None
    weights = group["weights"]
    expected = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    assert expected.items() <= weights.items()
    assert weights["symmetric"] is True
    assert weights["dynamic"] is False
    assert declared.keys() <= {
        "quant_method", "format", "quantization_status", "kv_cache_scheme",
        "global_compression_ratio", "config_groups", "ignore", "version",
    }  # fmt: skip


def test_activations_are_declared_on_request(tmp_path: Path) -> None:
    """--activations changes the config, not a byte of the weights."""
    source = bf16_model(layers=1, experts=2).write(tmp_path / "source")
    plain = converted(source, tmp_path / "plain")
    asked = converted(source, tmp_path / "asked", "--activations", "mxfp8")
    [group] = asked.artifact.config["quantization_config"]["config_groups"].values()
    assert group["input_activations"]["num_bits"] == 8
    assert group["input_activations"]["dynamic"] is True
    assert asked.weights == plain.weights
    assert asked.id != plain.id


@pytest.mark.parametrize("metadata", [ABSENT, {"format": "mlx"}, {}])
def test_every_file_says_format_pt(metadata: object, tmp_path: Path) -> None:
    """Some loaders refuse files without it."""
    source = bf16_model(layers=1, experts=2).write(tmp_path / "source", metadata=metadata)
    done = converted(source, tmp_path / "out")
    for name in done.weights:
        said = read_header(tmp_path / "out" / name)[0]["__metadata__"]
        assert said["format"] == "pt"
        assert all(isinstance(k, str) and isinstance(v, str) for k, v in said.items())


DTYPES: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({"torch_dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, False),
    ({"dtype": "bfloat16"}, {"dtype": "bfloat16"}, False),
    ({"dtype": "float16"}, {"dtype": "float16"}, False),
    (
        {"torch_dtype": "bfloat16", "dtype": "bfloat16"},
        {"torch_dtype": "bfloat16", "dtype": "bfloat16"},
        False,
    ),
    (
        {"torch_dtype": "float32", "dtype": "bfloat16"},
        {"torch_dtype": "bfloat16", "dtype": "bfloat16"},
        True,
    ),
    (
        {"torch_dtype": None, "dtype": "bfloat16"},
        {"torch_dtype": "bfloat16", "dtype": "bfloat16"},
        True,
    ),
    ({"torch_dtype": None}, {"torch_dtype": "bfloat16"}, True),
    ({"dtype": "uint8"}, {"dtype": "bfloat16"}, True),
    ({"torch_dtype": "float8_e4m3fn"}, {"torch_dtype": "bfloat16"}, True),
    ({}, {"dtype": "bfloat16"}, False),
    (
        {"transformers_version": "4.51.0"},
        {"torch_dtype": "bfloat16", "transformers_version": "4.51.0"},
        False,
    ),
    (
        {"text_config": {"dtype": None}},
        {"text_config": {"dtype": "bfloat16"}},
        True,
    ),
    (
        {"text_config": {"dtype": "float16"}, "dtype": "float16"},
        {"text_config": {"dtype": "float16"}, "dtype": "float16"},
        False,
    ),
]


@pytest.mark.parametrize(("given", "written", "warned"), DTYPES, ids=[str(d[0]) for d in DTYPES])
def test_dtype_fields(
    given: dict[str, Any], written: dict[str, Any], *, warned: bool, tmp_path: Path
) -> None:
    """Kept where sane; a conflict or a storage type is settled with a warning; never null."""
    model = bf16_model(layers=1, experts=2)
    config = {k: v for k, v in model.config.items() if k != "dtype"}
    nested = dict(given)
    if "text_config" in nested:
        nested["text_config"] = {**config, **nested["text_config"]}
    source = Model(config=config | nested, shards=model.shards).write(tmp_path / "source")
    done = converted(source, tmp_path / "out")
    found = done.artifact.config
    if "text_config" in written:
        inner = found["text_config"]
        assert inner["dtype"] == written["text_config"]["dtype"]
        assert "torch_dtype" not in inner
    for key in ("dtype", "torch_dtype"):
        if key in written or "text_config" not in written:
            assert found.get(key) == written.get(key)
    assert ("config-dtype" in done.notices) == warned


# ------------------------------------------------------------------------------ dtypes


def test_unquantized_tensors_keep_their_dtype(model: Model, tmp_path: Path) -> None:
    """A router's F32 correction bias that BF16 would collapse stays F32, byte for byte."""
    extra = {
        "model.layers.1.mlp.gate.e_score_correction_bias": Tensor(
            "F32", (4,), struct.pack("<4f", *(6.80 + i / 256 for i in range(4)))
        ),
        "model.layers.0.A_log": tensor("A_log", (16,), "F32"),
        "model.layers.0.mamba.D": tensor("D", (16,), "F16"),
    }
    done = converted(model.adding(extra).write(tmp_path / "source"), tmp_path / "out")
    for name, expected in extra.items():
        assert done.artifact.tensors[name][1:] == tuple(expected)


# ------------------------------------------------------------------- quantized already

EXPERT = "model.layers.0.mlp.experts.0.gate_proj."
ALREADY: dict[str, tuple[dict[str, Any], dict[str, Tensor], tuple[str, ...]]] = {
    "INT4 pack-quantized": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {
            EXPERT + "weight_packed": Tensor("I32", (96, 8), bytes(96 * 8 * 4)),
            EXPERT + "weight_scale": Tensor("BF16", (96, 2), bytes(96 * 2 * 2)),
            EXPERT + "weight_shape": Tensor("I64", (2,), bytes(16)),
        },
        ("compressed-tensors", "pack-quantized"),
    ),
    "GPTQ": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {
            EXPERT + "qweight": Tensor("I32", (8, 96), bytes(8 * 96 * 4)),
            EXPERT + "qzeros": Tensor("I32", (1, 12), bytes(48)),
            EXPERT + "scales": Tensor("F16", (1, 96), bytes(192)),
        },
        ("gptq", "4"),
    ),
    "NVFP4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {
            EXPERT + "weight": Tensor("U8", (96, 32), bytes(96 * 32)),
            EXPERT + "weight_scale": Tensor("F8_E4M3", (96, 4), bytes(96 * 4)),
            EXPERT + "weight_scale_2": Tensor("F32", (), bytes(4)),
        },
        ("modelopt", "NVFP4"),
    ),
    "AWQ": (
        {"quant_method": "awq", "bits": 4},
        {EXPERT + "qweight": Tensor("I32", (64, 12), bytes(64 * 12 * 4))},
        ("awq",),
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {
            EXPERT + "weight": Tensor("U8", (3072, 1), bytes(3072)),
            EXPERT + "weight.absmax": Tensor("F32", (96,), bytes(384)),
        },
        ("bitsandbytes",),
    ),
}


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "undeclared"])
@pytest.mark.parametrize("scheme", ALREADY)
def test_a_source_in_another_scheme_is_refused(
    scheme: str, declared: bool, model: Model, tmp_path: Path
) -> None:
    """Named as found, never copied under an MXFP4 label, whether the config says so or not."""
    config, tensors, says = ALREADY[scheme]
    quantized = model.without(lambda name: name == EXPERT + "weight").adding(tensors)
    if declared:
        quantized = quantized.configured(quantization_config=config)
    source = quantized.write(tmp_path / "source")
    words = says if declared else ("quantized already", EXPERT)
    refused(source, tmp_path / "out", says=words)
    seen = shell("inspect", source, "--json").ok().json()
    assert seen["obstacle"]


def test_a_declared_scheme_alone_is_believed(model: Model, tmp_path: Path) -> None:
    """A config that declares a scheme over BF16 tensors is a contradiction to solve first."""
    source = model.configured(quantization_config={"quant_method": "fp8"}).write(tmp_path / "s")
    refused(source, tmp_path / "out", says=("quantized already", "fp8"))


def test_a_null_quantization_config_is_none(model: Model, tmp_path: Path) -> None:
    """`null` and an absent key are the same, and ours is the only one written."""
    nested = {"text_config": {"quantization_config": None}, "quantization_config": None}
    source = model.configured(**nested).write(tmp_path / "source")
    done = converted(source, tmp_path / "out")
    text = json.dumps(done.artifact.config)
    assert text.count('"quantization_config"') == 1
