"""Families that store a gate, an up and a down matrix for each expert.

transformers 5.x holds the experts of all of them fused in memory, as ``[E, 2 I, H]`` and
``[E, H, I]``, and writes them so on demand; that form is read too.
"""

from __future__ import annotations

from dataclasses import replace

from mxconvert.recipes.base import Recipe
from mxconvert.recipes.patterns import GATE_UP_DOWN, JOINED_MLP, gate_up_down, per_expert


def _family(name: str, title: str, *model_types: str, block: str = "mlp", mtp: bool) -> Recipe:
    return Recipe(
        name=name,
        title=title,
        model_types=frozenset(model_types),
        expert=per_expert(block),
        projections=GATE_UP_DOWN,
        fused=gate_up_down(rf"{block}\.experts"),
        mtp_after_last_layer=mtp,
    )


PER_EXPERT: tuple[Recipe, ...] = (
    replace(
        _family("qwen-moe", "Qwen2-MoE, Qwen3-MoE", "qwen2_moe", "qwen3_moe", mtp=False),
        aliases=JOINED_MLP,
    ),
    _family("qwen3-next", "Qwen3-Next", "qwen3_next", mtp=False),
    _family(
        "qwen3-omni-moe",
        "Qwen3-Omni-MoE",
        "qwen3_omni_moe",
        "qwen3_omni_moe_thinker",
        "qwen3_omni_moe_text",
        mtp=False,
    ),
    _family("qwen3.5-moe", "Qwen3.5-MoE", "qwen3_5_moe", "qwen3_5_moe_text", mtp=False),
    _family(
        "deepseek",
        "DeepSeek-V2, DeepSeek-V3, DeepSeek-V3.2, Kimi-K2, Kimi-K2.5, Kimi-VL",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "kimi_k2",
        "kimi_k25",
        "kimi_vl",
        mtp=True,
    ),
    _family(
        "glm4-moe",
        "GLM-4.5 to GLM-4.7, with vision and lite",
        "glm4_moe",
        "glm4_moe_lite",
        "glm4v_moe",
        "glm4v_moe_text",
        mtp=True,
    ),
    _family("glm5-moe", "GLM-5", "glm_moe_dsa", mtp=True),
    _family("olmoe", "OLMoE, FlexOlmo", "olmoe", "flex_olmo", mtp=False),
    _family("ernie4.5-moe", "ERNIE 4.5", "ernie4_5_moe", mtp=True),
    _family("hunyuan-moe", "Hunyuan-A13B", "hunyuan_v1_moe", mtp=False),
    _family("dots1", "dots.llm1", "dots1", mtp=False),
    _family("longcat-flash", "LongCat-Flash", "longcat_flash", mtp=False),
    _family("mimo-v2", "MiMo-V2-Flash", "mimo_v2_flash", mtp=True),
    _family("exaone-moe", "EXAONE-MoE", "exaone_moe", mtp=True),
    _family("cohere2-moe", "Cohere2-MoE", "cohere2_moe", mtp=False),
    _family("solar-open", "Solar-Open", "solar_open", mtp=True),
    _family("afmoe", "AFMoE (Trinity)", "afmoe", mtp=False),
    _family(
        "bailing-moe",
        "Bailing (Ling, Ring)",
        "bailing_moe",
        "bailing_moe_v2",
        "bailing_moe_linear",
        "bailing_hybrid",
        mtp=True,
    ),
    _family("sarvam-moe", "Sarvam", "sarvam_moe", "sarvam_mla", mtp=True),
    replace(
        _family("jamba", "Jamba", "jamba", block="feed_forward", mtp=False),
        aliases=((r"\.self_attn\.(\w+)", r".\1"),),
    ),
    Recipe(
        name="ernie4.5-vl-moe",
        title="ERNIE 4.5 VL",
        model_types=frozenset({"ernie4_5_vl_moe", "ernie4_5_vl_moe_text", "ernie4_5_moe_vl"}),
        expert=per_expert("mlp"),
        projections=GATE_UP_DOWN,
        expert_sets=2,
        aliases=(
            (r"\.mlp\.gate", ".mlp.text_experts_gate"),
            (r"\.mlp\.gate", ".mlp.vision_experts_gate"),
        ),
        mtp_after_last_layer=True,
    ),
    Recipe(
        name="nemotron-h",
        title="Nemotron-H with experts (Nemotron 3)",
        model_types=frozenset({"nemotron_h"}),
        expert=per_expert("mixer"),
        projections=("up_proj", "down_proj"),
    ),
)
