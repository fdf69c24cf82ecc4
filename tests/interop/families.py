"""Small seeded models of four MoE families, written by transformers itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_COMMON: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
}
_GROUPED: Mapping[str, Any] = {
    "intermediate_size": 128,
    "moe_intermediate_size": 96,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {
        "head_dim": 16,
        "intermediate_size": 128,
        "moe_intermediate_size": 96,
        "num_experts": 8,
        "norm_topk_prob": True,
    },
    "mixtral": {"intermediate_size": 96, "num_local_experts": 4},
    "deepseek_v3": {
        **_GROUPED,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "glm4_moe": {**_GROUPED, "head_dim": 16},
}
ROUTED: Mapping[str, int] = {
    "qwen3_moe": 2 * 8 * 3,
    "mixtral": 2 * 4 * 3,
    "deepseek_v3": 1 * 4 * 3,
    "glm4_moe": 1 * 4 * 3,
}
"""Routed expert weights of each family's folder: MoE layers x experts x projections."""


def build(family: str, **changes: Any) -> Any:
    """Return a seeded BF16 model of a family; ``changes`` override config values."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_COMMON, **CONFIGS[family], **changes})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def write(family: str, folder: Path, **changes: Any) -> Path:
    """Save a seeded model with ``save_pretrained``, in several shards."""
    build(family, **changes).save_pretrained(folder, max_shard_size="100KB")
    return folder


EXPERTS: Mapping[str, int] = {"qwen3_moe": 8, "mixtral": 4, "deepseek_v3": 4, "glm4_moe": 4}
"""Routed experts of a layer."""
