"""Families that call an expert's matrices w1 (gate), w3 (up) and w2 (down)."""

from __future__ import annotations

from mxconvert.recipes.base import Recipe
from mxconvert.recipes.patterns import W123, per_expert


def _family(name: str, title: str, *model_types: str, block: str = "block_sparse_moe") -> Recipe:
    return Recipe(
        name=name,
        title=title,
        model_types=frozenset(model_types),
        expert=per_expert(block),
        projections=W123,
    )


W1_W2_W3: tuple[Recipe, ...] = (
    _family("mixtral", "Mixtral", "mixtral"),
    _family(
        "minimax",
        "MiniMax-Text-01, MiniMax-M1",
        "minimax",
        "minimax_m1",
        "minimax_text_01",
    ),
    _family("minimax-m2", "MiniMax-M2", "minimax_m2"),
    _family("phimoe", "Phi-3.5-MoE", "phimoe"),
    # In this order: the language model within Kimi-K3 calls itself kimi_linear.
    _family("kimi-k3", "Kimi-K3", "kimi_k3"),
    _family("kimi-linear", "Kimi-Linear", "kimi_linear"),
    _family("deepseek-v4", "DeepSeek-V4", "deepseek_v4", block="ffn"),
    _family("lfm2-moe", "LFM2-MoE", "lfm2_moe", block="feed_forward"),
)
