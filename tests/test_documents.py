"""config.json, the index and the model card, as bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxconvert.model import (
    Action,
    Activations,
    FileRole,
    Item,
    Options,
    OutputFile,
    Plan,
    TensorInfo,
    Totals,
)
from mxconvert.writer.documents import config_json, index_json, model_card

IGNORE = ("lm_head", "re:.*mlp\\.gate$")


def item(name: str, dtype: str, size: int, begin: int = 0) -> Item:
    source = TensorInfo(name, dtype, (size,), "model.safetensors", 0, size)
    return Item(Action.COPY, source, begin, None, None)


def make_plan(*items: Item, options: Options | None = None) -> Plan:
    file = OutputFile(
        name="model-dense-00001-of-00001.safetensors",
        role=FileRole.DENSE,
        experts=None,
        layers=None,
        items=items,
        header_size=64,
        header_sha256="0" * 64,
        size=64 + sum(i.source.size for i in items),
    )
    return Plan(
        options=options or Options(),
        recipe="qwen_moe",
        num_experts=8,
        files=(file,),
        ignore=IGNORE,
        quantized=Totals(tensors=48, source_bytes=4 * 2**30, output_bytes=2**30),
        copied=Totals(tensors=2, source_bytes=300, output_bytes=300),
    )


PLAN = make_plan(item("norm", "BF16", 200), item("router.bias", "F32", 100, 200))


def written(config: dict, plan: Plan = PLAN) -> tuple[dict, list[str]]:
    data, notices = config_json(config, plan)
    assert data.endswith(b"}\n")
    return json.loads(data), [code for code, _ in notices]


def test_quantization_config_is_the_one_compressed_tensors_reads() -> None:
    config, notices = written({"model_type": "qwen3_moe", "dtype": "bfloat16"})
    assert config["quantization_config"] == {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "group",
                    "group_size": 32,
                    "symmetric": True,
                    "dynamic": False,
                    "scale_dtype": "torch.uint8",
                    "zp_dtype": None,
                    "observer": "minmax",
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": list(IGNORE),
    }
    assert notices == []


def test_mxfp8_activations_are_declared_dynamic_groups_of_32() -> None:
    plan = make_plan(item("norm", "BF16", 2), options=Options(activations=Activations.MXFP8))
    config, _ = written({}, plan)
    assert config["quantization_config"]["config_groups"]["group_0"]["input_activations"] == {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": True,
        "scale_dtype": "torch.uint8",
    }


def test_source_keys_keep_order_and_values() -> None:
    source = {"z": 1e-06, "a": [1, {"b": "é"}], "dtype": "bfloat16", "model_type": "x"}
    data, _ = config_json(source, PLAN)
    config = json.loads(data)
    assert list(config) == [*source, "quantization_config"]
    assert {key: config[key] for key in source} == source
    assert "é".encode() in data
    assert data.startswith(b'{\n  "z": 1e-06,\n')


def test_every_stale_quantization_config_goes() -> None:
    stale = {"quant_method": "fp8"}
    source = {
        "dtype": "bfloat16",
        "quantization_config": stale,
        "compression_config": stale,
        "text_config": {"quantization_config": stale, "x": [{"compression_config": stale}]},
    }
    config, notices = written(source)
    assert config["text_config"] == {"x": [{}]}
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "compression_config" not in config
    assert not notices
    assert source["text_config"]["quantization_config"] is stale


@pytest.mark.parametrize(
    ("source", "expected", "warned"),
    [
        ({"torch_dtype": "float16"}, {"torch_dtype": "float16"}, False),
        ({"dtype": "float16"}, {"dtype": "float16"}, False),
        ({"dtype": "float16", "torch_dtype": "float16"}, None, False),
        ({"dtype": "torch.float16", "torch_dtype": "float16"}, None, False),
        (
            {"dtype": "float16", "torch_dtype": "float32"},
            {"dtype": "float16", "torch_dtype": "float16"},
            True,
        ),
        (
            {"torch_dtype": None, "dtype": "float16"},
            {"dtype": "float16", "torch_dtype": "float16"},
            True,
        ),
        ({"torch_dtype": None}, {"torch_dtype": "bfloat16"}, True),
        ({"dtype": "uint8"}, {"dtype": "bfloat16"}, True),
        ({"dtype": "float8_e4m3fn"}, {"dtype": "bfloat16"}, True),
        ({}, {"dtype": "bfloat16"}, False),
        ({"transformers_version": "4.47.0"}, {"torch_dtype": "bfloat16"}, False),
        ({"transformers_version": "4.56.0.dev0"}, {"dtype": "bfloat16"}, False),
        ({"text_config": {"dtype": "float16"}}, {"text_config": {"dtype": "float16"}}, False),
        ({"text_config": {"dtype": None}}, {"text_config": {"dtype": "bfloat16"}}, True),
        (
            {"dtype": None, "text_config": {"dtype": "float16"}},
            {"dtype": "float16", "text_config": {"dtype": "float16"}},
            True,
        ),
        (
            {"dtype": "float16", "text_config": {"torch_dtype": None}},
            {"dtype": "float16", "text_config": {"torch_dtype": "float16"}},
            True,
        ),
    ],
)
def test_dtype_fields(source: dict, expected: dict | None, warned: bool) -> None:
    config, notices = written(source)
    del config["quantization_config"]
    assert config == {**source, **(source if expected is None else expected)}
    assert ("config-dtype" in notices) == warned


def test_majority_counts_bytes_of_unquantized_floats() -> None:
    plan = make_plan(item("a", "F32", 1), item("b", "F16", 9), item("c", "U8", 1000))
    assert written({}, plan)[0]["dtype"] == "float16"


def test_surrogates_do_not_break_the_config() -> None:
    config, _ = written({"name": "\ud800", "dtype": "bfloat16"})
    assert config["name"] == "\ud800"


def test_index_is_sorted_and_counts_tensor_bytes() -> None:
    data = index_json(PLAN)
    file = "model-dense-00001-of-00001.safetensors"
    assert json.loads(data) == {
        "metadata": {"total_size": 2**30 + 300},
        "weight_map": {"norm": file, "router.bias": file},
    }
    assert data.index(b'"norm"') < data.index(b'"router.bias"')
    assert data.endswith(b"}\n")


# ------------------------------------------------------------------------------ card


def card(source: str | None, base_model: str | None = None, plan: Plan = PLAN) -> str:
    return model_card(source, plan, version="1.2.3", base_model=base_model).decode()


def front(text: str) -> list[str]:
    lines = text.splitlines()
    assert lines[0] == "---"
    return lines[1 : lines.index("---", 1)]


def test_card_without_a_source_card() -> None:
    text = card(None)
    assert front(text) == ["tags:", "- mxfp4", "- compressed-tensors", "- mxconvert"]
    assert "mxconvert 1.2.3" in text
    assert "`mse`" in text
    assert "`experts`: 48 weights in MXFP4, 2 tensors unchanged" in text
    assert "1.0 GiB (1073742124 bytes), from 4.0 GiB" in text
    assert "mxconvert verify ." in text
    assert "vllm serve ." in text


def test_front_matter_and_text_are_kept() -> None:
    source = (
        "---\nlicense: apache-2.0\ntags:\n  - moe\n  - mxfp4\nlanguage:\n- en\n---\n"
        "\n# Tiny\n\nText.\n"
    )
    text = card(source, base_model="org/tiny")
    assert front(text) == [
        "license: apache-2.0",
        "tags:",
        "  - moe",
        "  - mxfp4",
        "  - compressed-tensors",
        "  - mxconvert",
        "language:",
        "- en",
        'base_model: "org/tiny"',
        "base_model_relation: quantized",
    ]
    assert text.endswith("\n\n# Tiny\n\nText.\n")


def test_base_model_given_wins_over_that_of_the_source_card() -> None:
    """The card of a fine-tune names its own parent, which is not what was converted."""
    source = "---\nbase_model:\n- org/other\nbase_model_relation: finetune\nlicense: mit\n---\nx"
    lines = front(card(source, base_model="org/tiny"))
    assert 'base_model: "org/tiny"' in lines
    assert "base_model_relation: quantized" in lines
    assert "license: mit" in lines
    assert "org/other" not in lines
    assert "org/other" in card(source)


def test_base_model_cannot_break_the_front_matter() -> None:
    text = card(None, base_model='a"\n---\nlicense: mit')
    assert 'base_model: "a\\"\\n---\\nlicense: mit"' in front(text)


@pytest.mark.parametrize(
    "source",
    [
        "---\nlicense: mit\n# no end",
        "---\n- a list\n- not a mapping\n---\nText",
        "---\n---\nText",
        "---\n\ttab: [unclosed\n---\nText",
        "text --- text",
        "---",
    ],
)
def test_malformed_front_matter_stays_in_the_text(source: str) -> None:
    text = card(source, base_model="org/tiny")
    assert 'base_model: "org/tiny"' in front(text)
    assert source in text


def test_windows_line_ends_and_byte_order_mark() -> None:
    text = card("\ufeff---\r\nlicense: mit\r\n---\r\nText\r\n")
    assert front(text)[0] == "license: mit"
    assert text.endswith("Text\r\n")


def test_flow_tags_are_left_alone() -> None:
    assert front(card("---\ntags: [a, b]\n---\n")) == ["tags: [a, b]"]


@given(st.text(), st.none() | st.text())
def test_card_never_fails(source: str, base_model: str | None) -> None:
    first = model_card(source, PLAN, version="1", base_model=base_model)
    assert first == model_card(source, PLAN, version="1", base_model=base_model)
    assert first.startswith(b"---\n")
    assert first.endswith(b"\n")
