"""Evaluate a written quantization_config as the loaders of compressed-tensors do.

Their rule (``match_name``): an entry is a module's full name, or ``re:`` and a regular
expression that matches from the start of the name, not necessarily to its end.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.artifact import Artifact


def matches(entry: str, module: str) -> bool:
    """Whether an entry of ``ignore`` or ``targets`` names a module."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    return entry == module


def check_declared(artifact: Artifact) -> None:
    """Assert that ``ignore`` names every kept Linear, no packed one, and nothing stale.

    Every rank-2 ``.weight`` counts as a Linear, as the file alone does not tell; a head
    that is tied to the embedding may be named without being stored.
    """
    declared = artifact.config["quantization_config"]
    [group] = declared["config_groups"].values()
    assert group["targets"] == ["Linear"]
    plain = {
        name.removesuffix(".weight")
        for name in artifact.kept
        if name.endswith(".weight") and len(artifact.tensors[name].shape) == 2
    }
    packed = {name.removesuffix(".weight") for name in artifact.quantized}
    ignore = declared["ignore"]
    for module in plain:
        assert any(matches(entry, module) for entry in ignore), f"{module} is not ignored"
    for module in packed:
        assert not any(matches(entry, module) for entry in ignore), f"{module} is ignored"
    called = {new for module in plain for new in renamings(module)}
    spoken_for = plain | called | ({"lm_head"} if _may_tie(artifact.config) else set())
    for entry in ignore:
        assert any(matches(entry, module) for module in spoken_for), f"{entry} is stale"
    assert len(ignore) == len(set(ignore))


RENAMED = {
    ".attention.query_key_value": [f".self_attn.{part}_proj" for part in "qkv"],
    ".attention.dense": [".self_attn.o_proj"],
    ".attention.f_proj": [".self_attn.forget_gate.f_proj"],
    ".attention.": [".self_attn."],
    ".self_attn.f_": [".self_attn.forget_gate.f_"],
    ".block_sparse_moe.gate": [".mlp.gate", ".mlp.router"],
    ".block_sparse_moe.": [".mlp."],
    ".mamba.": [".mixer."],
    ".conv.": [".short_conv."],
    ".q_a_proj": [".fused_qkv_a_proj"],
    ".self_attn.": ["."],
    ".mlp.gate": [".mlp.text_experts_gate", ".mlp.vision_experts_gate"],
    ".mlp.gate_proj": [".mlp.gate_up_proj"],
}
"""What transformers and vLLM call parts of modules whose stored names they change."""


def renamings(module: str) -> list[str]:
    """Return what transformers may call a module that is stored under another name."""
    return [module.replace(old, new) for old, called in RENAMED.items() for new in called]


def _may_tie(config: dict[str, Any]) -> bool:
    """Whether the head may be the embedding; a family may do so without its config saying it."""
    parts = [config, config.get("text_config", {})]
    said = [part.get("tie_word_embeddings") for part in parts]
    return True in said or False not in said
