"""Regular expressions and rules that families share."""

from __future__ import annotations

from mxconvert.recipes.fused import Fused

# transformers 5.24 writes Kimi-K2.5's layers as blocks; DBRX calls its own so.
_LAYER = r"(?:layers|blocks)\.(?P<layer>\d{1,5})"
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
W123 = ("w1", "w2", "w3")

# vLLM 0.32 asks about a dense layer by the name of the two matrices that it joins.
JOINED_MLP = ((r"\.mlp\.(gate|up)_proj", ".mlp.gate_up_proj"),)


def per_expert(block: str) -> str:
    """Return the pattern of ``layers.N.BLOCK.experts.E.PROJECTION.weight``.

    Args:
        block: Module of the layer that holds the experts; empty if that is the layer.
    """
    middle = rf"\.{block}" if block else ""
    return (
        rf"(?:.*\.)?{_LAYER}{middle}\.experts\.(?P<expert>\d{{1,5}})"
        r"\.(?P<projection>\w+)\.(?P<kind>weight|bias|weight_packed|weight_scale)$"
    )


def prefixed(module: str) -> str:
    """Return the pattern of a module of a layer, as the prefix of fused tensors."""
    return rf"(?P<prefix>(?:.*\.)?{_LAYER}\.{module})"


def gate_up_down(
    module: str, *, transposed: bool | None = False, interleaved: bool = False
) -> tuple[Fused, Fused]:
    """Return the rules for ``MODULE.gate_up_proj`` and ``MODULE.down_proj``."""
    prefix = prefixed(module)
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
