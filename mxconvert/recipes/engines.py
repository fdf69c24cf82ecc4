"""Which engines take the result, for each family.

Read from their code (vLLM 0.33, SGLang 0.5.23, TensorRT-LLM, transformers 5.24) and, with
vLLM 0.32 and transformers, run: see ``docs/models.md``. ``compressed-tensors`` with
``mxfp4-pack-quantized`` and one matrix per expert is what is written; an engine that does
not know it for a family may refuse, or skip the experts without a word and answer with noise.
"""

from __future__ import annotations

from enum import StrEnum


class Engine(StrEnum):
    """An engine that ``--engine`` names."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"
    TRANSFORMERS = "transformers"


_OWN_LAYOUT = "reads this family in its own MXFP4 layout only"
_FUSED = "looks for the experts of this family in fused tensors, and initialises them anew"

_FUSED_ONLY = "looks for the experts of this family in fused tensors only"
_DROPPED = "takes no model of this family since 0.24"
_CONVERSION = "stops at the names of this family once its experts are packed"

_REFUSALS: dict[tuple[Engine, str], str] = {
    (Engine.VLLM, "gpt-oss"): _OWN_LAYOUT,
    (Engine.TRANSFORMERS, "gpt-oss"): _OWN_LAYOUT,
    (Engine.VLLM, "deepseek-v4"): _OWN_LAYOUT,
    (Engine.TRANSFORMERS, "deepseek-v4"): _FUSED,
    (Engine.VLLM, "dbrx"): _FUSED_ONLY,
    (Engine.VLLM, "minimax"): _DROPPED,
    (Engine.TRANSFORMERS, "qwen3-vl-moe"): _FUSED,
    (Engine.TRANSFORMERS, "granite-moe"): _FUSED,
    (Engine.TRANSFORMERS, "gemma4"): _FUSED,
    (Engine.TRANSFORMERS, "dbrx"): _FUSED,
    (Engine.TRANSFORMERS, "kimi-k3"): _CONVERSION,
    (Engine.TRANSFORMERS, "kimi-linear"): _CONVERSION,
    (Engine.TRANSFORMERS, "bailing-moe"): _CONVERSION,
    (Engine.TRANSFORMERS, "ernie4.5-vl-moe"): _CONVERSION,
}
_SGLANG_TAKES = frozenset({"kimi-k3"})
_SGLANG_LINEAR = "has no scheme for Linear weights in MXFP4"
_SGLANG = "skips packed experts of this family without an error; it takes Kimi-K3 only"
_TRTLLM = "does not read compressed-tensors' MXFP4"


def refusal(engine: Engine, recipe: str) -> str | None:
    """Return why an engine does not take the result, ``None`` if nothing is known against it."""
    if engine is Engine.TRTLLM:
        return _TRTLLM
    if engine is Engine.SGLANG and recipe not in _SGLANG_TAKES:
        return _SGLANG_LINEAR if recipe == "dense" else _SGLANG
    return _REFUSALS.get((engine, recipe))


def takers(recipe: str) -> tuple[Engine, ...]:
    """Return the engines that nothing is known against."""
    return tuple(engine for engine in Engine if refusal(engine, recipe) is None)
