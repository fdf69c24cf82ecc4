"""FP8 experts of a layer in one tensor: which scale belongs to which projection's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support import Model, Tensor, decode, encode, fused_model, read_artifact, refused, shell
from tests.support.families.check import check_values
from tests.support.fp8 import one_rounding, spread
from tests.support.models import tensor

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

PREFIX = "model.layers.0.mlp.experts"
EXPERTS, HIDDEN = 3, 160
TYPES = {False: "qwen3_5_moe_text", True: "qwen3_vl_moe_text"}


def scales(*shape: int) -> Tensor:
    values = np.ldexp(1.0, -12 + np.arange(np.prod(shape)) % 7).reshape(shape)
    return Tensor("F32", shape, encode(values, "F32"))


def cells(size: int, block: int) -> int:
    return -(-size // block)


def fp8_fused(inner: int, block: int, rows: int, *, transposed: bool = False) -> Model:
    """Experts ``[E, 2 I, H]`` or ``[E, H, 2 I]`` with ``rows`` blocks of scales along 2 I."""
    way = -1 if transposed else 1
    shapes = {
        "gate_up_proj": ((2 * inner, HIDDEN)[::way], (rows, cells(HIDDEN, block))[::way]),
        "down_proj": ((HIDDEN, inner)[::way], (cells(HIDDEN, block), cells(inner, block))[::way]),
    }
    tensors: dict[str, Tensor] = {}
    for word, (shape, grid) in shapes.items():
        name = f"{PREFIX}.{word}"
        tensors[name] = tensor(name, (EXPERTS, *shape), "F8_E4M3", sigma=100.0)
        tensors[f"{name}_scale_inv"] = scales(EXPERTS, *grid)
    config = fused_model(transposed=False).config | {
        "hidden_size": HIDDEN,
        "model_type": TYPES[transposed],
        "moe_intermediate_size": inner,
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [block, block]},
    }
    return Model(config=config, shards={"model.safetensors": tensors})


def values_of(model: Model, word: str, expert: int, block: int) -> NDArray[np.float64]:
    """Return a fused matrix as stored, blocks running over all of it."""
    stored, scale = model.tensors[f"{PREFIX}.{word}"], model.tensors[f"{PREFIX}.{word}_scale_inv"]
    codes = decode(stored.data, stored.dtype, stored.shape)[expert]
    factors = decode(scale.data, scale.dtype, scale.shape)[expert]
    return one_rounding(codes * spread(factors, (block, block), codes.shape))


@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize(("inner", "block"), [(128, 128), (96, 32), (256, 128)])
def test_blocks_that_end_with_a_projection(
    inner: int, block: int, transposed: bool, tmp_path: Path
) -> None:
    """Each row has the scale that the whole tensor gives it."""
    model = fp8_fused(inner, block, cells(2 * inner, block), transposed=transposed)
    source = model.write(tmp_path / "source")
    shell("quantize", source, tmp_path / "out", "--force").ok()
    artifact = read_artifact(tmp_path / "out")
    assert len(artifact.quantized) == 3 * EXPERTS
    for expert in range(EXPERTS):
        both = values_of(model, "gate_up_proj", expert, block)
        down = values_of(model, "down_proj", expert, block)
        if transposed:
            both, down = both.T, down.T
        for word, wanted in (("gate", both[:inner]), ("up", both[inner:]), ("down", down)):
            check_values(artifact, f"{PREFIX}.{expert}.{word}_proj.weight", wanted)
    shell("verify", tmp_path / "out", "--source", source).ok()


@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("command", ["quantize", "dequantize"])
def test_blocks_that_may_cross_from_gate_to_up(
    command: str, transposed: bool, tmp_path: Path
) -> None:
    """2 x 96 rows have two blocks of 128 however they were made; the values would differ."""
    source = fp8_fused(96, 128, 2, transposed=transposed).write(tmp_path / "source")
    says = ("gate_up_proj_scale_inv", "2 blocks for 192 rows", "gate_proj, up_proj", "BF16")
    if command == "quantize":
        refused(source, tmp_path / "out", "--force", says=says)
        return
    result = shell(command, source, tmp_path / "out")
    assert result.status == 5
    assert all(text in result.stderr for text in says)
    assert not (tmp_path / "out").exists()


def test_blocks_of_each_projection_s_own(tmp_path: Path) -> None:
    """2 x 64 rows with two blocks of 128: running on, they would have one."""
    model = fp8_fused(64, 128, 2)
    shell("quantize", model.write(tmp_path / "source"), tmp_path / "out").ok()
    artifact = read_artifact(tmp_path / "out")
    for expert in range(EXPERTS):
        stored = model.tensors[f"{PREFIX}.gate_up_proj"]
        codes = decode(stored.data, stored.dtype, stored.shape)[expert]
        scale = model.tensors[f"{PREFIX}.gate_up_proj_scale_inv"]
        factors = decode(scale.data, scale.dtype, scale.shape)[expert]
        wanted = one_rounding(codes * spread(factors, (64, 128), codes.shape))
        check_values(artifact, f"{PREFIX}.{expert}.gate_proj.weight", wanted[:64])
        check_values(artifact, f"{PREFIX}.{expert}.up_proj.weight", wanted[64:])


def test_an_odd_number_of_blocks(tmp_path: Path) -> None:
    """They run on across the boundary: no projection has blocks of its own."""
    source = fp8_fused(192, 128, 3).write(tmp_path / "source")
    refused(source, tmp_path / "out", says=("gate_up_proj_scale_inv", "[3, 3, 2]"))
