"""Families that store all experts of a layer in one tensor.

Which way round each lies is read off the family's own code: whether it multiplies an
input by the matrix or by its transpose.
"""

from __future__ import annotations

from mxconvert.recipes.base import COMMON_SIBLINGS, Recipe
from mxconvert.recipes.fused import Fused
from mxconvert.recipes.patterns import GATE_UP_DOWN, JOINED_MLP, gate_up_down, per_expert, prefixed

GEMMA4 = Recipe(
    name="gemma4",
    title="Gemma 4 with experts",
    model_types=frozenset({"gemma4", "gemma4_text"}),
    expert=per_expert(""),
    projections=GATE_UP_DOWN,
    fused=gate_up_down("experts"),
)

# Published as [E, H, 2 I], and so in transformers 4.x; 5.x writes [E, 2 I, H].
QWEN3_VL_MOE = Recipe(
    name="qwen3-vl-moe",
    title="Qwen3-VL-MoE",
    model_types=frozenset({"qwen3_vl_moe", "qwen3_vl_moe_text"}),
    expert=per_expert("mlp"),
    projections=GATE_UP_DOWN,
    fused=gate_up_down(r"mlp\.experts", transposed=None),
    aliases=JOINED_MLP,
)

LLAMA4 = Recipe(
    name="llama4",
    title="Llama 4",
    model_types=frozenset({"llama4", "llama4_text"}),
    expert=per_expert("feed_forward"),
    projections=GATE_UP_DOWN,
    fused=gate_up_down(r"feed_forward\.experts", transposed=True),
)

GPT_OSS = Recipe(
    name="gpt-oss",
    title="gpt-oss",
    model_types=frozenset({"gpt_oss"}),
    expert=per_expert("mlp"),
    projections=GATE_UP_DOWN,
    fused=(
        *gate_up_down(r"mlp\.experts", transposed=True, interleaved=True),
        Fused(
            pattern=prefixed(r"mlp\.experts") + r"\.gate_up_proj_bias",
            projections=("gate_proj", "up_proj"),
            kind="bias",
            interleaved=True,
        ),
        Fused(
            pattern=prefixed(r"mlp\.experts") + r"\.down_proj_bias",
            projections=("down_proj",),
            kind="bias",
        ),
    ),
)

# Its experts have no names of their own; these are what engines look for one by one.
GRANITE_MOE = Recipe(
    name="granite-moe",
    title="Granite MoE",
    model_types=frozenset({"granitemoe", "granitemoeshared", "granitemoehybrid"}),
    expert=per_expert("block_sparse_moe"),
    projections=GATE_UP_DOWN,
    fused=(
        Fused(
            pattern=prefixed("block_sparse_moe") + r"\.input_linear\.weight",
            projections=("gate_proj", "up_proj"),
        ),
        Fused(
            pattern=prefixed("block_sparse_moe") + r"\.output_linear\.weight",
            projections=("down_proj",),
        ),
    ),
)

# An input is multiplied by the transposes of w1 and v1, but by w2 itself.
DBRX = Recipe(
    name="dbrx",
    title="DBRX",
    model_types=frozenset({"dbrx"}),
    expert=per_expert("ffn"),
    projections=("w1", "v1", "w2"),
    fused=tuple(
        Fused(
            pattern=prefixed(r"ffn\.experts") + rf"\.mlp\.{name}",
            projections=(name,),
            stacked=True,
            transposed=name == "w2",
        )
        for name in ("w1", "v1", "w2")
    ),
    siblings=(*COMMON_SIBLINGS, ("w1", "v1")),
)

STACKED: tuple[Recipe, ...] = (GEMMA4, QWEN3_VL_MOE, LLAMA4, GPT_OSS, GRANITE_MOE, DBRX)
