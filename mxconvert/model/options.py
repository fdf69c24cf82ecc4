"""What a conversion is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ScaleRule(StrEnum):
    """How a block's scale exponent is chosen, see ``docs/explanation/numerics.md``."""

    MSE = "mse"
    EVEN = "even"
    FLOOR = "floor"
    RCEIL = "rceil"


class Unindexed(StrEnum):
    """What happens to stored tensors that the index does not list."""

    INCLUDE = "include"
    SKIP = "skip"


class Scope(StrEnum):
    """Which weights are quantized by default."""

    EXPERTS = "experts"
    LINEAR = "linear"


class Layout(StrEnum):
    """How output tensors are grouped into files."""

    EXPERTS = "experts"
    LAYERS = "layers"
    SOURCE = "source"


class Activations(StrEnum):
    """What the written config says about activations."""

    NONE = "none"
    MXFP8 = "mxfp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every option that changes output bytes. All of them are in the manifest."""

    scale_rule: ScaleRule = ScaleRule.MSE
    scope: Scope = Scope.EXPERTS
    layout: Layout = Layout.EXPERTS
    activations: Activations = Activations.NONE
    recipe: str | None = None
    expert_weights: tuple[str, ...] = ()
    from_int4: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    experts_per_file: int | None = None
    max_file_size: int | None = None
    unindexed: Unindexed | None = None
    base_model: str | None = None
