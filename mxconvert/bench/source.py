"""Write a Qwen3-MoE checkpoint of any size, fast: the weights repeat 4 Mi seeded values.

Names, shapes and config.json are a real model's, so that other tools take the folder too.
Memory is a few MB whatever the size.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Shapes = Mapping[str, tuple[int, ...]]

INDEX_NAME = "model.safetensors.index.json"
SIGMA = 0.02
_PERIOD = 1 << 22  # values before they repeat
_SHIFT = 7919  # a prime, so that no two layers hold the same rows
_HEAD_DIM = 128
_ONE = 0x3F80  # 1.0 in BF16


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The sizes of a Qwen3-MoE model; every layer is a MoE layer."""

    layers: int = 1
    experts: int = 64
    hidden: int = 2048
    inner: int = 768
    vocab: int = 4096

    def sized(self, num_bytes: int) -> Dimensions:
        """Return the same model with as many layers as fit into ``num_bytes``, at least one."""
        fixed, per_layer = _bytes(_outer_shapes(self)), _bytes(_layer_shapes(self, 0))
        return replace(self, layers=max(1, (num_bytes - fixed) // per_layer))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in BF16."""
        return _bytes(_outer_shapes(self)) + self.layers * _bytes(_layer_shapes(self, 0))


def _bytes(shapes: Shapes) -> int:
    return sum(2 * int(np.prod(shape)) for shape in shapes.values())


def _outer_shapes(dims: Dimensions) -> dict[str, tuple[int, ...]]:
    table = (dims.vocab, dims.hidden)
    return {
        "model.embed_tokens.weight": table,
        "model.norm.weight": (dims.hidden,),
        "lm_head.weight": table,
    }


def _layer_shapes(dims: Dimensions, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = dims.hidden, dims.inner
    shapes: dict[str, tuple[int, ...]] = {
        f"self_attn.{part}_proj": (hidden, hidden) for part in "qkvo"
    }
    shapes |= {f"self_attn.{part}_norm": (_HEAD_DIM,) for part in "qk"}
    shapes |= {f"{part}_layernorm": (hidden,) for part in ("input", "post_attention")}
    shapes["mlp.gate"] = (dims.experts, hidden)
    for expert in range(dims.experts):
        stem = f"mlp.experts.{expert}"
        shapes |= {f"{stem}.{part}_proj": (inner, hidden) for part in ("gate", "up")}
        shapes[f"{stem}.down_proj"] = (hidden, inner)
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}


def config(dims: Dimensions) -> dict[str, Any]:
    """Return config.json with the keys that loaders of such a model read."""
    heads = dims.hidden // _HEAD_DIM
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": dims.hidden,
        "initializer_range": SIGMA,
        "intermediate_size": 4 * dims.inner,
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": dims.inner,
        "norm_topk_prob": True,
        "num_attention_heads": heads,
        "num_experts": dims.experts,
        "num_experts_per_tok": min(8, dims.experts),
        "num_hidden_layers": dims.layers,
        "num_key_value_heads": heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": dims.vocab,
    }


def gaussian_bf16(count: int) -> NDArray[np.uint16]:
    """Return the bits of ``count`` seeded N(0, 0.02) values in BF16, repeating."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(min(count, _PERIOD), np.float32) * np.float32(SIGMA)
    return np.resize((values.view(np.uint32) >> 16).astype(np.uint16), count)


def write_source(folder: Path, dims: Dimensions) -> int:
    """Write the checkpoint, one shard for each layer.

    Args:
        folder: Made here; its parent exists.
        dims: The model.

    Returns:
        The bytes of its tensors.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir()
    pattern = gaussian_bf16(_PERIOD)
    weight_map: dict[str, str] = {}
    for layer in range(dims.layers):
        shapes = _layer_shapes(dims, layer) | (_outer_shapes(dims) if layer == 0 else {})
        name = f"model-{layer + 1:05d}-of-{dims.layers:05d}.safetensors"
        _write_shard(folder / name, shapes, np.roll(pattern, layer * _SHIFT))
        weight_map |= dict.fromkeys(shapes, name)
    index = {"metadata": {"total_size": dims.num_bytes}, "weight_map": weight_map}
    for name, document in (("config.json", config(dims)), (INDEX_NAME, index)):
        (folder / name).write_text(json.dumps(document, indent=2), encoding="utf-8")
    return dims.num_bytes


def _write_shard(path: Path, shapes: Shapes, pattern: NDArray[np.uint16]) -> None:
    ordered = dict(sorted(shapes.items()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in ordered.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for name, shape in ordered.items():
            for data in _values(name, 2 * int(np.prod(shape)), pattern):
                file.write(data)


def _values(name: str, size: int, pattern: NDArray[np.uint16]) -> Iterator[memoryview]:
    """Yield a tensor's bytes; norms are ones, as in a model that was just made."""
    if "norm" in name:
        yield np.full(size // 2, _ONE, np.uint16).data.cast("B")
        return
    raw = np.ascontiguousarray(pattern).data.cast("B")
    while size > 0:
        yield raw[:size]
        size -= len(raw)
