"""The model families, as data."""

from __future__ import annotations

from mxconvert.recipes.base import Recipe
from mxconvert.recipes.fused import Fused

_PER_EXPERT = (
    r"(?:.*\.)?layers\.(?P<layer>\d{1,5})\.{block}\.experts\.(?P<expert>\d{1,5})"
    r"\.(?P<projection>\w+)\.(?P<kind>weight|bias|weight_packed|weight_scale)$"
)
_PREFIX = r"(?P<prefix>(?:.*\.)?layers\.(?P<layer>\d{1,5})\.{block}\.experts)"
_STACKED = r"(?P<prefix>(?:.*\.)?layers\.(?P<layer>\d{1,5})\.block_sparse_moe)"
_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
_W123 = ("w1", "w2", "w3")


def _per_expert(block: str) -> str:
    return _PER_EXPERT.replace("{block}", block)


QWEN_MOE = Recipe(
    name="qwen-moe",
    title="Qwen2-MoE, Qwen3-MoE",
    model_types=frozenset({"qwen2_moe", "qwen3_moe"}),
    expert=_per_expert("mlp"),
    projections=_GATE_UP_DOWN,
)

DEEPSEEK = Recipe(
    name="deepseek",
    title="DeepSeek-V2, DeepSeek-V3, Kimi-K2",
    model_types=frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2"}),
    expert=_per_expert("mlp"),
    projections=_GATE_UP_DOWN,
    mtp_after_last_layer=True,
)

GLM4_MOE = Recipe(
    name="glm4-moe",
    title="GLM-4.5, GLM-4.6, GLM-4.7",
    model_types=frozenset({"glm4_moe", "glm4_moe_lite"}),
    expert=_per_expert("mlp"),
    projections=_GATE_UP_DOWN,
    mtp_after_last_layer=True,
)

MIXTRAL = Recipe(
    name="mixtral",
    title="Mixtral",
    model_types=frozenset({"mixtral"}),
    expert=_per_expert("block_sparse_moe"),
    projections=_W123,
)

KIMI_K3 = Recipe(
    name="kimi-k3",
    title="Kimi-K3",
    model_types=frozenset({"kimi_k3", "kimi_linear"}),
    expert=_per_expert("block_sparse_moe"),
    projections=_W123,
)


def _fused(
    block: str, *, transposed: bool = False, interleaved: bool = False
) -> tuple[Fused, Fused]:
    """Return the rules for ``experts.gate_up_proj`` and ``experts.down_proj``."""
    prefix = _PREFIX.replace("{block}", block)
    return (
        Fused(
            pattern=prefix + r"\.gate_up_proj(\.weight)?",
            projections=("gate_proj", "up_proj"),
            transposed=transposed,
            interleaved=interleaved,
        ),
        Fused(
            pattern=prefix + r"\.down_proj(\.weight)?",
            projections=("down_proj",),
            transposed=transposed,
        ),
    )


QWEN3_5_MOE = Recipe(
    name="qwen3.5-moe",
    title="Qwen3.5-MoE",
    model_types=frozenset({"qwen3_5_moe", "qwen3_5_moe_text"}),
    expert=_per_expert("mlp"),
    projections=_GATE_UP_DOWN,
    fused=_fused("mlp"),
)

QWEN3_VL_MOE = Recipe(
    name="qwen3-vl-moe",
    title="Qwen3-VL-MoE",
    model_types=frozenset({"qwen3_vl_moe", "qwen3_vl_moe_text"}),
    expert=_per_expert("mlp"),
    projections=_GATE_UP_DOWN,
    fused=_fused("mlp", transposed=True),
)

LLAMA4 = Recipe(
    name="llama4",
    title="Llama 4",
    model_types=frozenset({"llama4", "llama4_text"}),
    expert=_per_expert("feed_forward"),
    projections=_GATE_UP_DOWN,
    fused=_fused("feed_forward", transposed=True),
)

GPT_OSS = Recipe(
    name="gpt-oss",
    title="gpt-oss",
    model_types=frozenset({"gpt_oss"}),
    expert=_per_expert("mlp"),
    projections=_GATE_UP_DOWN,
    fused=(
        *_fused("mlp", transposed=True, interleaved=True),
        Fused(
            pattern=_PREFIX.replace("{block}", "mlp") + r"\.gate_up_proj_bias",
            projections=("gate_proj", "up_proj"),
            kind="bias",
            interleaved=True,
        ),
        Fused(
            pattern=_PREFIX.replace("{block}", "mlp") + r"\.down_proj_bias",
            projections=("down_proj",),
            kind="bias",
        ),
    ),
)

GRANITE_MOE = Recipe(
    name="granite-moe",
    title="Granite MoE",
    model_types=frozenset({"granitemoe", "granitemoeshared", "granitemoehybrid"}),
    expert=_per_expert("block_sparse_moe"),
    projections=_W123,
    fused=(
        Fused(pattern=_STACKED + r"\.input_linear\.weight", projections=("w1", "w3")),
        Fused(pattern=_STACKED + r"\.output_linear\.weight", projections=("w2",)),
    ),
)

DENSE = Recipe(
    name="dense",
    title="dense model",
    model_types=frozenset(),
)

FAMILIES: tuple[Recipe, ...] = (
    QWEN_MOE,
    DEEPSEEK,
    GLM4_MOE,
    MIXTRAL,
    KIMI_K3,
    QWEN3_5_MOE,
    QWEN3_VL_MOE,
    LLAMA4,
    GPT_OSS,
    GRANITE_MOE,
)
