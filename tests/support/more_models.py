"""F-FP8, F-FUSED-T and F-FUSED-N: the layouts beside one BF16 matrix for each expert.

Same rules as `models`: seeded, a few hundred KiB, values by name alone.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.container import Tensor
from tests.support.models import Model, Shards, shard_name, sidecars, tensor
from tests.support.numbers import encode

if TYPE_CHECKING:
    from numpy.typing import NDArray

FP8_BLOCK = 128
_HIDDEN = 256
_FP8_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "hidden_size": _HIDDEN,
    "intermediate_size": 384,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 192,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    },
    "tie_word_embeddings": False,
    "vocab_size": 128,
}


def _mlp(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, _HIDDEN),
        f"{prefix}.up_proj.weight": (inner, _HIDDEN),
        f"{prefix}.down_proj.weight": (_HIDDEN, inner),
    }


def _fp8_pair(name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """An E4M3 weight and its F32 scales, a distinct power of two for each block."""
    grid = tuple(math.ceil(dim / FP8_BLOCK) for dim in shape)
    exponents = -12 + np.arange(math.prod(grid)) % 5
    return {
        name: tensor(name, shape, "F8_E4M3", sigma=100.0),
        name + "_scale_inv": Tensor("F32", grid, encode(np.ldexp(1.0, exponents), "F32")),
    }


def fp8_model() -> Model:
    """F-FP8: DeepSeek-V3 style, every Linear in E4M3 with block scales; layer 0 is dense."""
    first, second = shard_name(1, 2), shard_name(2, 2)
    shards: Shards = {first: {}, second: {}}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shards[first][name] = tensor(name, (128, _HIDDEN))
    for layer, file in enumerate((first, second)):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shards[file][f"{prefix}{norm}.weight"] = tensor(prefix + norm, (_HIDDEN,))
        linears = {f"{prefix}self_attn.{p}_proj.weight": (_HIDDEN, _HIDDEN) for p in "qkvo"}
        linears |= _mlp(f"{prefix}mlp", 384) if layer == 0 else _moe(f"{prefix}mlp")
        for name, shape in linears.items():
            shards[file] |= _fp8_pair(name, shape)
    gate = "model.layers.1.mlp.gate."
    shards[second][gate + "weight"] = tensor(gate + "weight", (4, _HIDDEN))
    bias = encode(6.80 + np.arange(4) / 256, "F32")
    shards[second][gate + "e_score_correction_bias"] = Tensor("F32", (4,), bias)
    shards[second]["model.norm.weight"] = tensor("model.norm.weight", (_HIDDEN,))
    return Model(config=dict(_FP8_CONFIG), shards=shards, sidecars=sidecars("tiny-deepseek-fp8"))


def _moe(prefix: str) -> dict[str, tuple[int, ...]]:
    shapes = _mlp(f"{prefix}.shared_experts", 192)
    for expert in range(4):
        shapes |= _mlp(f"{prefix}.experts.{expert}", 192)
    return shapes


def _matrices(experts: int, rows: int, columns: int, name: str) -> NDArray[np.float64]:
    rng = np.random.default_rng([0, zlib.crc32(name.encode())])
    return rng.standard_normal((experts, rows, columns)) * 0.02


def fused_model(*, transposed: bool) -> Model:
    """F-FUSED-T (gpt-oss style: ``[E, in, out]``, gate and up interleaved) or F-FUSED-N.

    Both hold the same per-expert matrices; F-FUSED-N stores ``[E, out, in]``, gate over up.
    """
    experts, hidden, inner = 4, 64, 96
    gate, up, down = (
        _matrices(experts, *shape, name)
        for name, shape in (
            ("gate", (inner, hidden)),
            ("up", (inner, hidden)),
            ("down", (hidden, inner)),
        )
    )
    prefix = "model.layers.0.mlp.experts."
    if transposed:
        gate_up = np.stack([gate, up], axis=2).reshape(experts, 2 * inner, hidden)
        stored = {
            "gate_up_proj": gate_up.swapaxes(1, 2),
            "down_proj": down.swapaxes(1, 2),
            "gate_up_proj_bias": _matrices(experts, 1, 2 * inner, "gate_up_bias")[:, 0],
            "down_proj_bias": _matrices(experts, 1, hidden, "down_bias")[:, 0],
        }
    else:
        stored = {"gate_up_proj": np.concatenate([gate, up], axis=1), "down_proj": down}
    tensors = {
        prefix + name: Tensor("BF16", values.shape, encode(values, "BF16"))
        for name, values in stored.items()
    }
    kind = "gpt_oss" if transposed else "fused_moe"
    config = {
        "architectures": ["GptOssForCausalLM"],
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "model_type": kind,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "num_local_experts": experts,
    }
    return Model(config=config, shards={"model.safetensors": tensors}, sidecars=sidecars(kind))
