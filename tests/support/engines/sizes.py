"""Where vLLM needs other sizes than `tests.support.families.configs` has.

Its attention on CPUs has no heads of fewer than 32 elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.families.configs import Config

_HEAD: Config = {"head_dim": 32}
_TWO_HEADS: Config = {"num_attention_heads": 2, "num_key_value_heads": 2}
_AS_PUBLISHED: Config = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def _mrope(*sections: int) -> Config:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return {"rope_parameters": rope}


CHANGES: Mapping[str, Config] = {
    **dict.fromkeys(
        (
            "olmoe",
            "flex_olmo",
            "ernie4_5_moe",
            "dots1",
            "mixtral",
            "jamba",
            "granitemoe",
            "granitemoeshared",
            "granitemoehybrid",
        ),
        _TWO_HEADS,
    ),
    **dict.fromkeys(
        (
            "qwen3_next",
            "glm4_moe",
            "hunyuan_v1_moe",
            "exaone_moe",
            "cohere2_moe",
            "solar_open",
            "afmoe",
            "sarvam_moe",
            "minimax",
            "minimax_m2",
            "nemotron_h",
            "gemma4_text",
            "gpt_oss",
        ),
        _HEAD,
    ),
    "gemma4": {"text_config": _HEAD},
    "llama4": {"text_config": {**_HEAD, "interleave_moe_layer_step": 2}},
    "qwen3_5_moe_text": {**_HEAD, **_mrope(2, 1, 1)},
    "qwen3_5_moe": {
        "text_config": {**_HEAD, **_mrope(2, 1, 1)},
        "vision_config": {"deepstack_visual_indexes": []},
    },
    "qwen3_vl_moe": {"text_config": {**_HEAD, **_mrope(8, 4, 4)}},
    "glm4v_moe": {"text_config": {**_HEAD, **_mrope(4, 2, 2)}},
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa"), _AS_PUBLISHED),
    "qwen2_moe": {**_TWO_HEADS, **_HEAD},
    "lfm2_moe": {**_TWO_HEADS, **_HEAD},
    "phimoe": {**_TWO_HEADS, "attention_bias": True, "lm_head_bias": True},
    "llama4_text": {**_HEAD, "interleave_moe_layer_step": 2},
    "kimi_k25": {"text_config": _AS_PUBLISHED},
    "kimi_linear": {"q_lora_rank": None},
    "qwen3_moe": _HEAD,
    "mimo_v2_flash": {**_HEAD, "v_head_dim": 32},
    "qwen3_omni_moe": {"thinker_config": {"text_config": {**_HEAD, **_mrope(8, 4, 4)}}},
    "ernie4_5_vl_moe": {"text_config": {**_TWO_HEADS, **_mrope(4, 6, 6)}},
    "dbrx": {"n_heads": 2},
}

PUBLISHED: Mapping[str, Config] = {
    "afmoe": {
        "score_func": "sigmoid",
        "route_norm": True,
        "mup_enabled": False,
        "n_group": 1,
        "topk_group": 1,
    },
    "dbrx": {
        part: {"_name_or_path": None, "output_attentions": None}
        for part in ("attn_config", "ffn_config")
    },
    "ernie4_5_vl_moe": {
        "pixel_hidden_size": 32,
        "moe_layer_start_index": [1, 1],
        "moe_layer_end_index": [1, 1],
        "moe_layer_interval": 1,
        "moe_num_experts": [4, 4],
        "spatial_conv_size": 2,
        "temporal_conv_size": 2,
        "use_temporal_conv": True,
        "im_patch_id": 5,
        "vision_config": {"embed_dim": 32, "mlp_ratio": 160},
    },
    "kimi_linear": {
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "mla_use_nope": True,
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
    "longcat_flash": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
    },
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "qwen3_vl_moe": {"text_config": {"norm_topk_prob": True}},
    "qwen3_omni_moe": {
        "thinker_config": {
            "text_config": {"norm_topk_prob": True, "tie_word_embeddings": False},
            "vision_config": {"image_size": 16, "apply_vit_abs_pos_embed": True},
        }
    },
    "glm4v_moe": {"text_config": {"use_qk_norm": False}},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
        "sliding_window_size": 32,
        "attention_bias": False,
        "layernorm_epsilon": 1e-5,
    },
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "kimi_k25": {"architectures": ["KimiK25ForConditionalGeneration"]},
}
"""What config.json of the releases says and transformers does not write, or the reverse."""

STORED: Mapping[str, Mapping[str, str]] = {
    "kimi_k25": {
        "language_model.model.blocks.": "language_model.model.layers.",
        "model.mm_projector.": "mm_projector.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    },
    "ernie4_5_vl_moe": {"model.vision_model.": "vision_model."},
    "kimi_linear": {"model.layers.0.block_sparse_moe.": "model.layers.0.mlp."},
}
"""Beginnings of names as transformers writes them, and as the releases have them."""

FLAT = frozenset({"ernie4_5_vl_moe"})
"""Families whose releases have the language model's config beside that of the towers."""

TRANSPOSED = frozenset({"qwen3_vl_moe"})
"""Families whose releases hold the experts' tensors the other way round."""

NOT_STORED: Mapping[str, str] = {"longcat_flash": r"\.experts\.[45]\."}
"""Matrices of experts that do nothing, which the releases do not have."""
