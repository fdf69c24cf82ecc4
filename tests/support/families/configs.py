"""Configs of small models of each family, as transformers takes them.

All have four experts, hidden size 64 and inner size 96, so that no two dimensions of an
expert agree, and a dense first layer where the family has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

HIDDEN, INNER, EXPERTS = 64, 96, 4
Config = dict[str, Any]

_COMMON: Config = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PLAIN: Config = {**_COMMON, "num_experts_per_tok": 2}
_HEAD: Config = {"head_dim": 16}
_DENSE_FIRST: Config = {"first_k_dense_replace": 1}
_QWEN: Config = {
    **_PLAIN,
    **_HEAD,
    "intermediate_size": 128,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
}
_GROUPED: Config = {
    **_PLAIN,
    "intermediate_size": 128,
    "moe_intermediate_size": INNER,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: Config = {
    **_GROUPED,
    **_DENSE_FIRST,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_INDEXER: Config = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
_LINEAR: Config = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_LOCAL: Config = {**_PLAIN, "intermediate_size": INNER, "num_local_experts": EXPERTS}
_MLP_TYPES: Config = {"mlp_layer_types": ["dense", "sparse"]}
_ROPE: Config = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE: Config = {"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}}
_TOWER: Config = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_LLAMA_TOWER: Config = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
_AUDIO_TOWER: Config = {
    "num_mel_bins": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "d_model": 32,
    "output_dim": HIDDEN,
    "downsample_hidden_size": 16,
}
_TALKER: Config = {
    "text_config": {
        **_QWEN,
        **_MROPE,
        "num_hidden_layers": 1,
        "shared_expert_intermediate_size": 64,
    },
    "code_predictor_config": {
        **_COMMON,
        **_HEAD,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "num_code_groups": 2,
    },
    "thinker_hidden_size": HIDDEN,
    "spatial_merge_size": 2,
    "accept_hidden_layer": 1,
    "num_code_groups": 2,
}
_QWEN35: Config = {**_QWEN, **_LINEAR, "shared_expert_intermediate_size": 64}
_GEMMA: Config = {
    **_COMMON,
    **_HEAD,
    "intermediate_size": 128,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "top_k_experts": 2,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
_LLAMA4: Config = {
    **_LOCAL,
    **_HEAD,
    "intermediate_size_mlp": 128,
    "moe_layers": [1],
}

CONFIGS: Mapping[str, Config] = {
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 64, "mlp_only_layers": [0]},
    "qwen3_moe": {**_QWEN, "mlp_only_layers": [0]},
    "qwen3_next": {**_QWEN35, "mlp_only_layers": [0]},
    "deepseek_v2": {**_LATENT, "topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_LATENT, **_INDEXER},
    "glm4_moe": {**_GROUPED, **_HEAD, **_DENSE_FIRST},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": {**_LATENT, **_INDEXER},
    "olmoe": {**_PLAIN, "intermediate_size": INNER, "num_experts": EXPERTS},
    "flex_olmo": {**_PLAIN, "intermediate_size": INNER, "num_experts": EXPERTS},
    "ernie4_5_moe": {
        **_COMMON,
        "intermediate_size": 128,
        "moe_intermediate_size": INNER,
        "moe_k": 2,
        "moe_num_experts": EXPERTS,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "hunyuan_v1_moe": {
        **_COMMON,
        **_HEAD,
        "intermediate_size": INNER,
        "num_experts": EXPERTS,
        "moe_topk": 2,
    },
    "dots1": {**_GROUPED, **_DENSE_FIRST, "layer_types": ["full_attention", "full_attention"]},
    "longcat_flash": {
        **{key: value for key, value in _LATENT.items() if key not in _GROUPED},
        **_COMMON,
        "num_key_value_heads": 4,
        "num_layers": 2,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "ffn_hidden_size": 128,
        "expert_ffn_hidden_size": INNER,
        "n_routed_experts": EXPERTS,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "mimo_v2_flash": {
        **_GROUPED,
        **_HEAD,
        **_MLP_TYPES,
        "v_head_dim": 16,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "exaone_moe": {
        **_QWEN,
        **_DENSE_FIRST,
        "num_shared_experts": 1,
        "layer_types": ["full_attention", "full_attention"],
    },
    "cohere2_moe": {
        **_PLAIN,
        **_HEAD,
        **_MLP_TYPES,
        "intermediate_size": INNER,
        "num_experts": EXPERTS,
        "num_shared_experts": 1,
        "prefix_dense_intermediate_size": 128,
    },
    "solar_open": {**_GROUPED, **_HEAD},
    "afmoe": {**_QWEN, "num_dense_layers": 1, "num_shared_experts": 1},
    "bailing_hybrid": {
        **{key: value for key, value in _LATENT.items() if key != "n_routed_experts"},
        "num_local_experts": EXPERTS,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "sarvam_moe": {**_GROUPED, **_HEAD, **_DENSE_FIRST},
    "sarvam_mla": _LATENT,
    "mixtral": _LOCAL,
    "minimax": {**_LOCAL, **_HEAD, "layer_types": ["linear_attention", "full_attention"]},
    "minimax_m2": {**_LOCAL, **_HEAD},
    "phimoe": _LOCAL,
    "kimi_linear": {
        **{key: value for key, value in _LATENT.items() if key != "n_routed_experts"},
        **_MLP_TYPES,
        "num_local_experts": EXPERTS,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2_moe": {
        **_QWEN,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
    },
    "jamba": {
        **_PLAIN,
        "intermediate_size": INNER,
        "num_experts": EXPERTS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "nemotron_h": {
        **_GROUPED,
        **_HEAD,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "mlp", "attention", "moe"],
        "moe_shared_expert_intermediate_size": 128,
        "moe_latent_size": 32,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
        "use_mamba_kernels": False,
    },
    "qwen3_5_moe_text": {**_QWEN35, **_MROPE},
    "qwen3_5_moe": {"text_config": {**_QWEN35, **_MROPE}, "vision_config": _TOWER},
    "gemma4_text": _GEMMA,
    "llama4_text": _LLAMA4,
    "qwen3_vl_moe": {
        "text_config": {**_QWEN, **_MROPE, "mlp_only_layers": [0]},
        "vision_config": _TOWER,
    },
    "qwen3_omni_moe": {
        "thinker_config": {
            "text_config": {**_QWEN, **_MROPE, "mlp_only_layers": [0]},
            "vision_config": _TOWER,
            "audio_config": _AUDIO_TOWER,
        },
        "talker_config": _TALKER,
        "code2wav_config": {
            "codebook_size": 8,
            "hidden_size": 32,
            "decoder_dim": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_quantizers": 2,
            "upsample_rates": [2],
            "upsampling_ratios": [2],
        },
        "enable_audio_output": True,
    },
    "gemma4": {
        "text_config": {**_GEMMA},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "position_embedding_size": 16,
        },
        "audio_config": None,
    },
    "llama4": {"text_config": _LLAMA4, "vision_config": _LLAMA_TOWER},
    "kimi_k25": {
        "text_config": {**_LATENT, "model_type": "deepseek_v3"},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 4,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
        },
        "projection_hidden_size": 32,
    },
    "glm4v_moe": {
        "text_config": {
            **_GROUPED,
            **_HEAD,
            **_DENSE_FIRST,
            "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {**_TOWER, "image_size": 16, "attention_bias": False},
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            **_COMMON,
            "intermediate_size": 128,
            "moe_intermediate_size": [INNER, 32],
            "moe_k": 2,
            "moe_num_experts": EXPERTS,
            "moe_num_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse"],
            "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
        },
        "vision_config": {key: _TOWER[key] for key in ("depth", "hidden_size", "num_heads")},
    },
    "gpt_oss": {
        **_LOCAL,
        **_HEAD,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granitemoe": _LOCAL,
    "granitemoeshared": {**_LOCAL, "shared_intermediate_size": 64},
    "granitemoehybrid": {
        **_LOCAL,
        "shared_intermediate_size": 64,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_state": 8,
    },
    "dbrx": {
        "d_model": HIDDEN,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 128,
        "vocab_size": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "hidden_size": HIDDEN,
            "ffn_hidden_size": INNER,
            "moe_num_experts": EXPERTS,
            "moe_top_k": 2,
        },
    },
}
"""By the outermost ``model_type``."""
