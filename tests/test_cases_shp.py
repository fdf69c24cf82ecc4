"""Shapes that are ragged, scalar, empty or absent."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support import Model, Tensor, bf16_model, converted, encode, fused_model, refused
from tests.support.families.check import quantized
from tests.support.matching import check_declared
from tests.support.models import tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support import Artifact
    from tests.support.contract import Conversion


def experts_of(done: Conversion, layer: int) -> tuple[set[str], set[str]]:
    """Return the quantized and the kept expert weights of a layer."""
    part = f".layers.{layer}.mlp.experts."
    artifact = done.artifact
    return (
        {name for name in artifact.quantized if part in name},
        {name for name in artifact.kept if part in name},
    )


# ----------------------------------------------------------------------- ragged inputs


def ragged_layer(model: Model, layer: int, inner: int) -> Model:
    """Give the experts of one layer another inner size: the K of their down_proj."""
    shapes = {"gate": (inner, 64), "up": (inner, 64), "down": (64, inner)}
    changed = {
        name: tensor(name, shapes[name.split(".")[-2].removesuffix("_proj")])
        for name in model.tensors
        if f".layers.{layer}.mlp.experts." in name
    }
    return model.adding(changed)


@pytest.mark.parametrize("inner", [80, 16])
def test_a_ragged_layer_stays_in_high_precision(inner: int, model: Model, tmp_path: Path) -> None:
    """One projection whose K is no multiple of 32 keeps its whole MoE layer, with a warning."""
    source = ragged_layer(model, 1, inner).write(tmp_path / "source")
    done = converted(source, tmp_path / "out")
    assert [len(part) for part in experts_of(done, 0)] == [24, 0]
    assert [len(part) for part in experts_of(done, 1)] == [0, 24]
    [warning] = done.notices["ragged-input-dimension"]
    assert "layers.1.mlp.experts" in warning
    assert str(inner) in warning
    check_declared(done.artifact)
    says = ("layers.1.mlp.experts", str(inner), "multiple of 32", "--strict")
    refused(source, tmp_path / "strict", "--strict", says=says)


@pytest.mark.parametrize("inner", [80, 16])
def test_a_model_that_is_ragged_throughout_is_kept(inner: int, tmp_path: Path) -> None:
    """Nothing is padded: all is kept, declared as ignored and said aloud; strict refuses."""
    source = bf16_model(inner=inner).write(tmp_path / "source")
    done = converted(source, tmp_path / "out")
    assert not done.artifact.quantized
    assert len(done.artifact.kept) == 65
    assert len(done.notices["ragged-input-dimension"]) == 2
    assert "nothing" in done.notices["nothing-quantized"][0]
    check_declared(done.artifact)
    refused(source, tmp_path / "strict", "--strict", says=("multiple of 32", str(inner)))


def test_ragged_linears_outside_the_experts(model: Model, tmp_path: Path) -> None:
    """With all Linear weights in scope, a ragged one keeps its siblings with it."""
    ragged = {
        f"model.layers.0.self_attn.{p}_proj.weight": tensor(p, (32, 72)) for p in ("q", "k", "v")
    }
    source = model.adding(ragged).write(tmp_path / "source")
    done = converted(source, tmp_path / "out", "--scope", "linear")
    kept = set(done.artifact.kept)
    assert ragged.keys() <= kept
    assert "model.layers.0.self_attn.o_proj.weight" not in kept
    assert "model.layers.1.self_attn.q_proj.weight" not in kept
    assert "72" in done.notices["ragged-input-dimension"][0]
    check_declared(done.artifact)


# ------------------------------------------------------------------------ fused experts

FUSED_T = "model.layers.0.mlp.experts"


def both_ways(tmp_path: Path, change: Callable[[Model], Model] = lambda m: m) -> list[Artifact]:
    """Convert F-FUSED-T and F-FUSED-N, which hold the same matrices."""
    one = change(fused_model(transposed=True))
    two = change(fused_model(transposed=False)).configured(model_type="qwen3_5_moe_text")
    return [quantized(one, tmp_path / "T"), quantized(two, tmp_path / "N")]


def test_both_orientations_of_fused_experts(tmp_path: Path) -> None:
    """Blocks run along the inputs whichever dimension is stored last."""
    one, two = both_ways(tmp_path)
    names = {
        f"{FUSED_T}.{expert}.{part}_proj.weight"
        for expert in range(4)
        for part in ("gate", "up", "down")
    }
    assert set(one.quantized) == set(two.quantized) == names
    for name in names:
        assert [part.tobytes() for part in one.packed(name)] == [
            part.tobytes() for part in two.packed(name)
        ]
        shape = (64, 96) if "down" in name else (96, 64)
        assert one.values(name).shape == shape
    check_declared(one)
    check_declared(two)


def signed(model: Model) -> Model:
    """Give every gate row the value 1 and every up row -1, biases too."""
    changed = {}
    for name, stored in model.tensors.items():
        if "gate_up_proj" not in name:
            continue
        values = np.ones(stored.shape)
        if stored.shape[1] == 2 * 96 and len(stored.shape) == 3:
            values[:, 96:] = -1
        else:
            values[..., 1::2] = -1
        changed[name] = stored._replace(data=encode(values, "BF16"))
    return model.adding(changed)


def test_interleaved_and_contiguous_rows(tmp_path: Path) -> None:
    """Every gate decodes positive and every up negative, in matrices and biases."""
    for artifact in both_ways(tmp_path, signed):
        for name in (*artifact.quantized, *artifact.kept):
            if "gate_proj" in name:
                assert (artifact.values(name) == 1).all(), name
            elif "up_proj" in name:
                assert (artifact.values(name) == -1).all(), name


# ---------------------------------------------------------------------------- tied head


@pytest.mark.parametrize("stored", [False, True])
def test_a_tied_head(stored: bool, model: Model, tmp_path: Path) -> None:
    """No head is invented where the embedding serves as one, and the flag stays."""
    tied = model.configured(tie_word_embeddings=True)
    if not stored:
        tied = tied.without(lambda name: name == "lm_head.weight")
    source = tied.write(tmp_path / "source")
    done = converted(source, tmp_path / "out")
    artifact = done.artifact
    assert ("lm_head.weight" in artifact.tensors) == stored
    assert artifact.config["tie_word_embeddings"] is True
    embedding = "model.embed_tokens.weight"
    assert artifact.tensors[embedding].data == model.tensors[embedding].data
    assert "lm_head" in artifact.config["quantization_config"]["ignore"]


# ---------------------------------------------------------------------- scalar and empty


def test_scalars_keep_their_shape(model: Model, tmp_path: Path) -> None:
    """Rank 0 and one element are different shapes, and both survive."""
    extra = {
        "scale_factor": Tensor("F32", (), struct.pack("<f", 0.125)),
        "step": Tensor("I64", (), struct.pack("<q", 12345)),
        "flag": Tensor("BF16", (1,), b"\x80\x3f"),
    }
    done = converted(model.adding(extra).write(tmp_path / "source"), tmp_path / "out")
    for name, expected in extra.items():
        assert done.artifact.tensors[name][1:] == tuple(expected)


EMPTY = {
    "scaled_fp8": Tensor("F8_E4M3", (0,), b""),
    "x": Tensor("BF16", (0, 64), b""),
    "y": Tensor("BF16", (64, 0), b""),
    "z": Tensor("F32", (3, 0, 5), b""),
}


def test_empty_tensors_are_kept(model: Model, tmp_path: Path) -> None:
    """Markers without elements survive: at one offset, first and last in the file."""
    shards = {
        file: {"a" + n: t for n, t in EMPTY.items()} | shard | EMPTY
        for file, shard in list(model.shards.items())[:1]
    } | dict(list(model.shards.items())[1:])
    source = Model(config=model.config, shards=shards, sidecars=model.sidecars).write(
        tmp_path / "source"
    )
    done = converted(source, tmp_path / "out")
    for name, expected in EMPTY.items():
        assert done.artifact.tensors[name][1:] == tuple(expected)
        assert done.artifact.tensors["a" + name][1:] == tuple(expected)
    assert len(done.artifact.quantized) == 48


def test_a_file_of_nothing_but_empty_tensors(tmp_path: Path) -> None:
    """Even a shard without a single byte of data is converted and verified."""
    model = bf16_model(layers=1, experts=1)
    shards = {**model.shards, "empty.safetensors": dict(EMPTY)}
    source = Model(config=model.config, shards=shards, sidecars=model.sidecars).write(
        tmp_path / "source"
    )
    done = converted(source, tmp_path / "out", "--layout", "source")
    assert {done.artifact.tensors[name].file for name in EMPTY} == {"empty.safetensors"}


def test_an_empty_expert_weight_is_reported(model: Model, tmp_path: Path) -> None:
    """It is not quantized, and its layer with it, since engines load a layer as one."""
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    source = model.adding({name: Tensor("BF16", (0, 64), b"")}).write(tmp_path / "source")
    done = converted(source, tmp_path / "out")
    assert done.artifact.tensors[name].shape == (0, 64)
    assert name in done.notices["empty-weight"][0]
    assert [len(part) for part in experts_of(done, 0)] == [24, 0]
    assert [len(part) for part in experts_of(done, 1)] == [0, 24]
    text = " ".join(message for messages in done.notices.values() for message in messages)
    assert "layers.1.mlp.experts" in text
    assert "excluded" not in text
    check_declared(done.artifact)


def test_a_weight_of_one_row(model: Model, tmp_path: Path) -> None:
    """One output row, one block: the smallest weight there is."""
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    source = model.adding({name: tensor(name, (1, 32))}).write(tmp_path / "source")
    packed, scales = converted(source, tmp_path / "out").artifact.packed(name)
    assert packed.shape == (1, 16)
    assert scales.shape == (1, 1)


def test_what_the_user_excludes_is_no_ragged_surprise(model: Model, tmp_path: Path) -> None:
    """An explicit --exclude of the ragged layer is silent, and satisfies --strict."""
    source = ragged_layer(model, 1, 80).write(tmp_path / "source")
    pattern = "*.layers.1.mlp.experts.*"
    done = converted(source, tmp_path / "out", "--strict", "--exclude", pattern)
    assert done.notices == {}
    assert [len(part) for part in experts_of(done, 1)] == [0, 24]
