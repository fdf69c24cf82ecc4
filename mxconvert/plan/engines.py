"""Does anything load the result? Asked before any work."""

from __future__ import annotations

from mxconvert.errors import UsageError
from mxconvert.recipes.engines import Engine, refusal, takers


def check_engines(recipe: str, engine: Engine | None, *, force: bool) -> list[tuple[str, str]]:
    """Refuse what the wanted engine, or every engine, is known not to load.

    Args:
        recipe: Name of the family's recipe.
        engine: The engine that has to load it; ``None``: any.
        force: Turn the refusal into a notice.

    Returns:
        ``(code, message)`` of what was forced.

    Raises:
        UsageError: With the reason.
    """
    if engine is not None:
        why = refusal(engine, recipe)
        reasons = [] if why is None else [f"{engine} {why}"]
    else:
        reasons = [] if takers(recipe) else [f"{each} {refusal(each, recipe)}" for each in Engine]
    if not reasons:
        return []
    message = f"no engine is known to load the result for family {recipe}: {'; '.join(reasons)}"
    if engine is not None:
        others = ", ".join(takers(recipe)) or "none"
        message = f"--engine {engine}: {reasons[0]} (family {recipe}; known to load it: {others})"
    if force:
        return [("unread-by-engine", message)]
    raise UsageError(
        message,
        hint="choose another --engine, or pass --force to make it nevertheless",
        code="unread-by-engine",
    )
