"""Checkpoints whose experts are INT4 as compressed-tensors packs them (Kimi-K2-Thinking)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.container import Tensor
from tests.support.models import Model, bf16_model
from tests.support.numbers import decode, encode

if TYPE_CHECKING:
    from numpy.typing import NDArray

WEIGHTS: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "actorder": None,
}


def declared(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS | weights}},
        "ignore": ["lm_head"],
    }


def is_expert(name: str) -> bool:
    return ".experts." in name and name.endswith(".weight")


def int4_model(*, group: int | None = 32, dtype: str = "BF16", ragged: bool = False) -> Model:
    """F-BF16 with its experts rounded to INT4, a scale for each ``group`` columns or each row.

    Args:
        group: Columns that share a scale; ``None`` for all of a row.
        dtype: Of scales.
        ragged: Whether the last group of a row may be shorter.
    """
    model = bf16_model()
    shards = {
        file: {
            new: made
            for name, tensor in tensors.items()
            for new, made in (
                packed(name, tensor, group, dtype, ragged=ragged)
                if is_expert(name)
                else {name: tensor}
            ).items()
        }
        for file, tensors in model.shards.items()
    }
    made = Model(config=model.config, shards=shards, sidecars=model.sidecars)
    strategy = "group" if group else "channel"
    return made.configured(quantization_config=declared(group_size=group, strategy=strategy))


def packed(
    name: str, tensor: Tensor, group: int | None, dtype: str, *, ragged: bool = False
) -> dict[str, Tensor]:
    """Round a matrix to INT4; words, scales and shape under the names of the format."""
    rows, columns = tensor.shape
    values = decode(tensor.data, tensor.dtype, tensor.shape)
    if ragged and group:
        values = np.pad(values, ((0, 0), (0, -columns % group)))
    values = values.reshape(rows, -1, group or columns)
    wanted = np.abs(values).max(axis=2) / 7.5
    scales = encode(wanted, dtype)
    exact = decode(scales, dtype, wanted.shape)
    codes = np.clip(np.rint(values / exact[..., None]), -8, 7).reshape(rows, -1)[:, :columns]
    nibbles = (codes + 8).astype(np.uint32).reshape(rows, columns // 8, 8)
    words = (nibbles << (4 * np.arange(8, dtype=np.uint32))).sum(axis=2, dtype=np.uint32)
    module = name.removesuffix(".weight")
    return {
        f"{module}.weight_packed": Tensor("I32", words.shape, words.astype("<u4").tobytes()),
        f"{module}.weight_scale": Tensor(dtype, wanted.shape, scales),
        f"{module}.weight_shape": Tensor("I64", (2,), np.array([rows, columns], "<i8").tobytes()),
    }


def matrix_of(model: Model, module: str) -> NDArray[np.float32]:
    """Return an expert's matrix, read bit by bit: nibble less 8, times its group's scale."""
    words, scales = (model.tensors[f"{module}.weight_{part}"] for part in ("packed", "scale"))
    rows, count = words.shape
    factors = decode(scales.data, scales.dtype, scales.shape).astype(np.float32)
    group = count * 8 // scales.shape[1]
    matrix = np.zeros((rows, count * 8), np.float32)
    for row in range(rows):
        for word in range(count):
            at = 4 * (row * count + word)
            bits = int.from_bytes(words.data[at : at + 4], "little")
            for nibble in range(8):
                column = 8 * word + nibble
                value = (bits >> (4 * nibble) & 15) - 8
                matrix[row, column] = np.float32(value) * factors[row, column // group]
    return matrix
