"""Does anything load the result? Asked before any work."""

from __future__ import annotations

from mxconvert.errors import UsageError
from mxconvert.recipes import GENERIC
from mxconvert.recipes.engines import Engine, refusal, takers

_NESTED = "looks for quantization_config at the top level of config.json only"


def check_engines(
    recipe: str, engine: Engine | None, *, force: bool, nested: bool = False
) -> list[tuple[str, str]]:
    """Refuse what the wanted engine, or every engine, is known not to load.

    Args:
        recipe: Name of the family's recipe.
        engine: The engine that has to load it; ``None``: any.
        force: Turn the refusal into a notice.
        nested: The quantization_config will stand in ``text_config``.

    Returns:
        ``(code, message)`` of what was forced.

    Raises:
        UsageError: With the reason.
    """
    if engine is not None:
        why = refusal(engine, recipe)
        if why is None and nested and engine is Engine.TRANSFORMERS:
            why = _NESTED
        reasons = [] if why is None else [f"{engine} {why}"]
    else:
        reasons = [] if takers(recipe) else [f"{each} {refusal(each, recipe)}" for each in Engine]
    if not reasons:
        return []
    message = f"no engine is known to load the result for family {recipe}: {'; '.join(reasons)}"
    if engine is not None:
        others = ", ".join(each for each in takers(recipe) if each is not engine) or "none"
        shown = f"family {recipe}; known to load it: {others}"
        if recipe == GENERIC:
            shown = "of a family that nobody described; no engine was tried with it"
        message = f"--engine {engine}: {reasons[0]} ({shown})"
    if force:
        return [("unread-by-engine", message)]
    raise UsageError(
        message,
        hint="choose another --engine, or pass --force to make it nevertheless",
        code="unread-by-engine",
    )
