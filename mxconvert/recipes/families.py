"""The model families, as data."""

from __future__ import annotations

from mxconvert.recipes.base import Recipe
from mxconvert.recipes.per_expert import PER_EXPERT
from mxconvert.recipes.stacked import STACKED
from mxconvert.recipes.w123 import W1_W2_W3

DENSE = Recipe(
    name="dense",
    title="dense model",
    model_types=frozenset(),
)

FAMILIES: tuple[Recipe, ...] = (*PER_EXPERT, *W1_W2_W3, *STACKED)
