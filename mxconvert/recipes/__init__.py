"""Recipes: what tensor names mean in each model family."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mxconvert.errors import UsageError
from mxconvert.recipes.base import (
    LINEAR_ROLES,
    Classifier,
    Recipe,
    Role,
    Slot,
    config_int,
    head_is_tied,
    moe_sizes,
    nests_quantization,
    text_config,
)
from mxconvert.recipes.families import DENSE, FAMILIES
from mxconvert.recipes.generic import GENERIC, generic_recipe, refuse_unmatched

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mxconvert.model import TensorInfo

__all__ = [
    "GENERIC",
    "LINEAR_ROLES",
    "Classifier",
    "Recipe",
    "Role",
    "Slot",
    "config_int",
    "find_recipe",
    "head_is_tied",
    "looks_like_moe",
    "model_type",
    "moe_sizes",
    "nests_quantization",
    "recipe_names",
    "refuse_unmatched",
    "text_config",
]

_EXPERT_WORD = re.compile(r"(^|\.|_)experts?(\.|_|$)")
_EXPERT_COUNT = re.compile(r"(^|_)(num|n)_\w*experts$")


def recipe_names() -> list[str]:
    """Return the names that ``--recipe`` takes."""
    return [*(recipe.name for recipe in (*FAMILIES, DENSE)), GENERIC]


def model_type(config: Mapping[str, Any]) -> str | None:
    """Return the config's ``model_type``, the outermost one."""
    value = config.get("model_type") or text_config(config).get("model_type")
    return value if isinstance(value, str) else None


def find_recipe(
    config: Mapping[str, Any],
    name: str | None = None,
    *,
    expert_weights: Sequence[str] = (),
    tensors: Mapping[str, TensorInfo] = MappingProxyType({}),
) -> Recipe | None:
    """Return the named recipe, or the one whose family the config names, or ``None``.

    Args:
        config: The parsed config.json.
        name: Of a recipe.
        expert_weights: The user's templates, for the recipe ``generic``.
        tensors: All of them, for the recipe ``generic``.

    Raises:
        UsageError: No recipe is called ``name``, or the templates are wrong.
    """
    if name == GENERIC:
        matrices = (name for name, tensor in tensors.items() if len(tensor.shape) > 1)
        return generic_recipe(expert_weights, matrices)
    if name is not None:
        for recipe in (*FAMILIES, DENSE):
            if recipe.name == name:
                return recipe
        raise UsageError(
            f"--recipe {name}: no such recipe", hint=f"one of: {', '.join(recipe_names())}"
        )
    stated = (config.get("model_type"), text_config(config).get("model_type"))
    types = {value for value in stated if isinstance(value, str)}
    return next((recipe for recipe in FAMILIES if recipe.model_types & types), None)


def looks_like_moe(config: Mapping[str, Any], names: Mapping[str, Any]) -> bool:
    """Whether a checkpoint of no known family shows signs of routed experts."""
    keys = {*config, *text_config(config)}
    return any(map(_EXPERT_COUNT.search, keys)) or any(map(_EXPERT_WORD.search, names))
