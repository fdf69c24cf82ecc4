"""The results as a table, and whether they are what `mxconvert.recipes.engines` claims."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mxconvert.recipes.engines import Engine, refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    """Return 1 if anything is otherwise than is claimed, or nothing could be found out."""
    return int(bool(faults(results)))


def faults(results: dict[str, Any]) -> list[str]:
    """Return what contradicts the claims of `mxconvert.recipes.engines`, in words.

    That a family is not in this vLLM or transformers is no fault; that none is, or that a source
    fails for another reason, is: then the check has checked nothing.
    """
    found, loaded = [f"{name}: not in this transformers" for name in results.get("missing", ())], 0
    ran = [name for name, each in results["families"].items() if each.get("vllm") is not None]
    for name, each in results["families"].items():
        if each.get("served", {}).get("equal") is False:
            found.append(f"{name}: served other tokens")
        found += [f"{name}: {what}" for what in (*_of_vllm(each), *_of_sglang(each))]
        loaded += each.get("vllm") is not None and each["vllm"].get("stage") != "source"
    if ran and not loaded:
        found.append("vLLM has loaded no source at all")
    return found


def _of_vllm(each: dict[str, Any]) -> Iterator[str]:
    """Yield what vLLM refuses though it is said to load it, loads though not, or loads wrongly."""
    result = each.get("vllm")
    if result is None:
        return
    if result.get("stage") == "source":
        if not any(words in result.get("error", "") for words in _MISSING):
            yield f"vLLM does not load the source: {_brief(result.get('error', ''))}"
        return
    loads = not result.get("error")
    if result.get("wrong"):
        yield f"vLLM loads it otherwise: {_brief(result['wrong'][0])}"
    if loads != (refusal(Engine.VLLM, each["recipe"]) is None):
        yield f"vLLM {'loads' if loads else 'refuses'} it, against what is claimed"


def _of_sglang(each: dict[str, Any]) -> Iterator[str]:
    """Yield what SGLang's rules say against what is claimed."""
    result = each.get("sglang")
    if result is None or "recipe" not in each:
        return
    if names := result.get("not_ignored"):
        yield f"SGLang would quantize {names[0]} and {len(names) - 1} more that are kept"
    takes = result["verdict"] == "takes"
    if takes and refusal(Engine.SGLANG, each["recipe"]) is not None:
        yield "SGLang takes it, against what is claimed"
