"""The tests' own base holds: fixtures, container, number formats."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors import deserialize

from tests.support import (
    Model,
    Tensor,
    bf16_model,
    decode,
    decode_mxfp4,
    encode,
    fp8_model,
    fused_model,
    mixtral_name,
    raw_safetensors,
    read_safetensors,
)


def test_f_bf16_has_the_described_tensors(model: Model) -> None:
    assert len(model.tensors) == 65
    assert sum(".experts." in name for name in model.tensors) == 48
    first, second = model.shards.values()
    assert all(name.startswith(("model.embed_tokens.", "model.layers.0.")) for name in first)
    assert all(not name.startswith("model.layers.0.") for name in second)


def test_values_depend_on_name_and_seed_alone(model: Model) -> None:
    bigger = bf16_model(layers=3, experts=9).tensors
    assert all(
        bigger[n] == t for n, t in model.tensors.items() if not n.endswith("mlp.gate.weight")
    )
    name = "model.norm.weight"
    assert bf16_model(seed=1).tensors[name] != model.tensors[name]


def test_the_library_opens_what_the_writer_wrote(model: Model, tmp_path) -> None:
    root = model.write(tmp_path / "source")
    for file, shard in model.shards.items():
        found = dict(deserialize((root / file).read_bytes()))
        assert {
            n: (e["dtype"], tuple(e["shape"]), bytes(e["data"])) for n, e in found.items()
        } == shard
        assert read_safetensors(root / file) == shard
    index = json.loads((root / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == model.weight_map


def test_the_writer_writes_what_it_is_told(tmp_path) -> None:
    entries = {"x": Tensor("U8", (3,), b"abc")}
    path = raw_safetensors(tmp_path / "x", entries, header=b"[1]", length=9, pad=1, tail=b"!")
    assert path.read_bytes() == (9).to_bytes(8, "little") + b"[1]abc!"


def test_reshaping_a_model_keeps_every_tensor(model: Model) -> None:
    for changed in (model.split(5), model.reshard(lambda name: f"{len(name)}.safetensors")):
        assert changed.tensors == model.tensors
    renamed = model.rename(mixtral_name)
    assert "model.layers.1.block_sparse_moe.experts.7.w2.weight" in renamed.tensors
    assert sorted(renamed.tensors.values()) == sorted(model.tensors.values())


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3"])
def test_every_finite_code_survives_decode_and_encode(dtype: str) -> None:
    width = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1}[dtype]
    codes = np.arange(1 << 16, dtype="<u4") << (16 if dtype == "F32" else 0)
    raw = codes.astype(f"<u{width}")[: 1 << (8 * min(width, 2))]
    values = decode(raw.tobytes(), dtype, raw.shape)
    finite = np.isfinite(values)
    assert encode(values[finite], dtype) == raw[finite].tobytes()


def test_bf16_rounds_ties_to_even() -> None:
    values = [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)]
    assert decode(encode(values, "BF16"), "BF16", (3,)).tolist() == [1.0, 1 + 2**-6, -1.0]


def test_refdec_knows_every_code_and_the_nibble_order() -> None:
    packed = np.tile(np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8), 2)[None]
    values = decode_mxfp4(packed, np.array([[128]], np.uint8))
    expected = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
    assert values.tolist() == [expected * 2]


def test_f_fp8_has_ragged_blocks_and_a_scale_for_each_weight() -> None:
    tensors = fp8_model().tensors
    weights = [name for name, value in tensors.items() if value.dtype == "F8_E4M3"]
    assert len(weights) == 8 + 3 + 3 + 12
    assert all(name + "_scale_inv" in tensors for name in weights)
    assert tensors["model.layers.1.mlp.experts.0.down_proj.weight_scale_inv"].shape == (2, 2)


def test_both_fused_layouts_hold_the_same_matrices() -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stored = [fused_model(transposed=which).tensors[name] for which in (True, False)]
    interleaved, halves = (decode(t.data, t.dtype, t.shape) for t in stored)
    assert interleaved.shape == (4, 64, 192)
    assert np.array_equal(interleaved[:, :, 0::2].swapaxes(1, 2), halves[:, :96])
    assert np.array_equal(interleaved[:, :, 1::2].swapaxes(1, 2), halves[:, 96:])
