"""The model families whose experts are stored one 2-D matrix per expert and projection."""

from __future__ import annotations

from mxconvert.recipes.base import Recipe

_PER_EXPERT = (
    r"(?:.*\.)?layers\.(?P<layer>\d{1,5})\.{block}\.experts\.(?P<expert>\d{1,5})"
    r"\.(?P<projection>\w+)\.(?P<kind>weight|bias)$"
)
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

DENSE = Recipe(
    name="dense",
    title="dense model",
    model_types=frozenset(),
)

FAMILIES: tuple[Recipe, ...] = (QWEN_MOE, DEEPSEEK, GLM4_MOE, MIXTRAL, KIMI_K3)
