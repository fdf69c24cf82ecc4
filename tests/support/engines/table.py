"""The results as a table, and whether they are what `mxconvert.recipes.engines` claims."""

from __future__ import annotations

from typing import Any

from mxconvert.recipes.engines import Engine, refusal

_MISSING = ("does not recognize this architecture", "vLLM has no other way to handle it")


def verdict(found: dict[str, Any] | None) -> str:
    """Say in words what vLLM made of a family."""
    if found is None:
        return "not run"
    error = found.get("error", "")
    if found.get("stage") == "source":
        missing = any(words in error for words in _MISSING)
        return "not in this vLLM" if missing else f"source not loaded: {_brief(error)}"
    if error:
        return f"refused: {_brief(error)}"
    if found["wrong"]:
        return f"differs: {_brief(found['wrong'][0])} (and {len(found['wrong']) - 1} more)"
    equal = found["equal"]
    return (
        f"equal: {equal['packed']} packed parameters, {equal['plain']} others, "
        f"{equal['modules']} schemes ({found['class']})"
    )


def _brief(words: str) -> str:
    return " ".join(words.split())[:150]


def _served(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return "same tokens" if found["equal"] else _brief(found.get("error", "other tokens"))


def table(results: dict[str, Any]) -> str:
    """Return a Markdown table, a family on a line."""
    lines = ["| family | vLLM | served | SGLang |", "|---|---|---|---|"]
    for family, found in results["families"].items():
        sglang = found.get("sglang", {}).get("verdict", "not run")
        cells = (family, verdict(found.get("vllm")), _served(found.get("served")), sglang)
        lines.append("| " + " | ".join(cells).replace("\n", " ") + " |")
    return "\n".join(lines)


def exit_status(results: dict[str, Any]) -> int:
    """Return 1 if vLLM loads something otherwise than is claimed, or served tokens differ."""
    for found in results["families"].values():
        if found.get("served", {}).get("equal") is False or _contradicts(found):
            return 1
    return 0


def _contradicts(found: dict[str, Any]) -> bool:
    """Whether vLLM refuses what it is said to load, loads what it is not, or loads it wrongly."""
    result = found.get("vllm")
    if result is None or result.get("stage") == "source":  # not ours to load
        return False
    loads = not result.get("error")
    claimed = refusal(Engine.VLLM, found["recipe"]) is None
    return bool(result.get("wrong")) or loads != claimed
