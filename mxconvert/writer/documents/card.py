"""``README.md``: a model card that says what was done, above the source's own card."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

from mxconvert.model import Activations, Scope

if TYPE_CHECKING:
    from mxconvert.model import Plan

CARD_NAME = "README.md"
_TAGS = ("mxfp4", "compressed-tensors", "mxconvert")
_FENCE = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_KEY = re.compile(r"^[A-Za-z_][\w-]*[ \t]*:(?:[ \t\r]|$)")
_CONTINUATION = re.compile(r"^(?:[ \t]|#|- |-$|$|[\]}])")
_GIB = 2**30
_MIB = 2**20

_RULES = {
    "mse": "least squared error over three exponents",
    "even": "as compressed-tensors chooses it",
    "floor": "as the OCP MX specification suggests",
    "rceil": "the smallest that avoids saturation",
}
_SCOPES = {
    Scope.EXPERTS: "the routed experts",
    Scope.LINEAR: "the routed experts and other linear layers",
}


class _Card(NamedTuple):
    front: list[str]
    body: str


def model_card(
    source_card: str | None, plan: Plan, *, version: str, base_model: str | None = None
) -> bytes:
    """Return the artifact's model card.

    The source's front matter is kept line by line (licence, language, metrics), and its
    text stands below ours, unchanged. Front matter that is not a plain YAML mapping is
    left where it is, in the text.

    Args:
        source_card: The source's README.md, if it has one.
        plan: What is written.
        version: Of mxconvert.
        base_model: What ``base_model`` should say unless the source's card says it.
    """
    card = _split(source_card or "")
    front = _front_matter(card.front, base_model, plain=plan.plain)
    section = _plain_section(plan, version) if plan.plain else _section(plan, version)
    text = f"---\n{''.join(line + chr(10) for line in front)}---\n\n{section}"
    if card.body.strip():
        text += f"\n---\n\n{card.body}"
    if not text.endswith("\n"):
        text += "\n"
    return text.encode(errors="replace")


def _split(text: str) -> _Card:
    text = text.removeprefix("\ufeff")
    match = _FENCE.match(text)
    if match is None:
        return _Card([], text)
    front = match.group(1).splitlines()
    if not _is_mapping(front):
        return _Card([], text)
    return _Card(front, text[match.end() :])


def _is_mapping(lines: list[str]) -> bool:
    """Whether lines look like a YAML mapping: keys at the margin, the rest below them."""
    first = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    return bool(_KEY.match(first)) and all(
        _KEY.match(line) or _CONTINUATION.match(line) for line in lines
    )


def _front_matter(lines: list[str], base_model: str | None, *, plain: bool) -> list[str]:
    front = lines if plain else _with_tags(lines)
    if base_model is None:
        return front
    # What the source was made from is no longer the parent: the source is.
    front = _without(front, ("base_model", "base_model_relation"))
    relation = [] if plain else ["base_model_relation: quantized"]
    return [*front, f"base_model: {json.dumps(base_model)}", *relation]


def _without(lines: list[str], keys: tuple[str, ...]) -> list[str]:
    """Return the lines of a mapping without some keys and what belongs to them."""
    kept, dropping = [], False
    for line in lines:
        if _KEY.match(line):
            dropping = line.split(":")[0].strip() in keys
        if not dropping:
            kept.append(line)
    return kept


def _with_tags(lines: list[str]) -> list[str]:
    """Add our tags to a block list, or as a new key; any other notation stays as it is."""
    at = next((i for i, line in enumerate(lines) if re.match(r"^tags[ \t]*:", line)), None)
    if at is None:
        return [*lines, "tags:", *(f"- {tag}" for tag in _TAGS)]
    following = lines[at + 1] if at + 1 < len(lines) else ""
    item = re.match(r"^([ \t]*)- ", following)
    if lines[at].split(":", 1)[1].strip() or item is None:
        return list(lines)
    end = at + 1
    while end < len(lines) and re.match(r"^[ \t]*- ", lines[end]):
        end += 1
    present = {line.strip().removeprefix("- ").strip("'\" ") for line in lines[at + 1 : end]}
    added = [f"{item.group(1)}- {tag}" for tag in _TAGS if tag not in present]
    return [*lines[:end], *added, *lines[end:]]


def _plain_section(plan: Plan, version: str) -> str:
    made = plan.dequantized
    return f"""\
# BF16 weights

Made by mxconvert {version}: {made.tensors} weights that were quantized are stored in BF16, \
{plan.copied.tensors - made.tensors} tensors are unchanged. Nothing is quantized any more, but no \
value is more precise than it was.

| | |
|---|---|
| Size | {_size(plan.total_size)}, from {_size(plan.copied.source_bytes)} |

Check that every byte is as it was made:

```sh
mxconvert verify .
```
"""


def _section(plan: Plan, version: str) -> str:
    options = plan.options
    rule = str(options.scale_rule)
    scope = _SCOPES[options.scope]
    before = plan.quantized.source_bytes + plan.copied.source_bytes
    activations = (
        "MXFP8, quantized while running"
        if options.activations is Activations.MXFP8
        else "not quantized"
    )
    return f"""\
# MXFP4 weights

Made by mxconvert {version}: {scope} are stored in MXFP4, everything else keeps its dtype.

| | |
|---|---|
| Format | compressed-tensors `mxfp4-pack-quantized`: E2M1, one E8M0 scale per 32 elements |
| Scale rule | `{rule}`{_explained(rule)} |
| Scope | `{options.scope}`: {plan.quantized.tensors} weights in MXFP4, {plan.copied.tensors} \
tensors unchanged |
| Activations | {activations} |
| Size | {_size(plan.total_size)}, from {_size(before)} |

Check that every byte is as it was made:

```sh
mxconvert verify .
```

Serve it:

```sh
vllm serve .
```
"""


def _explained(rule: str) -> str:
    return f" ({_RULES[rule]})" if rule in _RULES else ""


def _size(size: int) -> str:
    unit, name = (_GIB, "GiB") if size >= _GIB else (_MIB, "MiB")
    tenths = (size * 10 + unit // 2) // unit
    return f"{tenths // 10}.{tenths % 10} {name} ({size} bytes)"
