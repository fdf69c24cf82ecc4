"""A recipe in the user's own words, for families that nobody has described.

``--expert-weights`` takes a template of the names of expert weights, without ``.weight``:

* one matrix per expert: ``layers.{layer}.moe.experts.{expert}.{projection}``;
* all experts of a layer in one tensor, and the projections that it holds, in their order:
  ``layers.{layer}.moe.experts.gate_up_proj=gate_proj,up_proj[:out-in|:in-out][:interleaved]``.

A template begins at any part of a name. Which way round a fused tensor lies follows from
the sizes in config.json unless it is said: ``out-in`` is ``[E, N, K]``, ``in-out`` is
``[E, K, N]``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mxconvert.errors import UsageError
from mxconvert.recipes.base import Recipe
from mxconvert.recipes.fused import Fused
from mxconvert.recipes.patterns import GATE_UP_DOWN, W123

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

GENERIC: Final = "generic"
OPTION: Final = "--expert-weights"
_EXAMPLE: Final = "'layers.{layer}.moe.experts.{expert}.{projection}'"

_NUMBER = r"\d{1,5}"
_FIELDS = {"layer": _NUMBER, "expert": _NUMBER, "projection": r"\w+"}
_FIELD = re.compile(r"\{(.*?)\}")
_KIND = r"\.(?P<kind>weight|bias|weight_packed|weight_scale)$"
_ORIENTATIONS = {"out-in": False, "in-out": True}
_INTERLEAVED = "interleaved"


@dataclass(frozen=True, slots=True)
class _Names:
    """What one template says: a pattern of experts' names, and how they are fused, if so."""

    expert: str
    projections: tuple[str, ...] = ()
    fused: Fused | None = None


def generic_recipe(templates: Sequence[str], names: Iterable[str]) -> Recipe:
    """Return the recipe that templates describe.

    Args:
        templates: Of ``--expert-weights``.
        names: Of matrices, in which the projections of unfused experts are looked up; a norm
            within an expert is none.

    Raises:
        UsageError: No template, or one that cannot be read or contradicts another.
    """
    if not templates:
        raise UsageError(
            f"--recipe {GENERIC}: which tensors are expert weights?",
            hint=f"say it with {OPTION} {_EXAMPLE}; `mxconvert inspect SRC --tensors '*'` "
            "lists the names",
        )
    parsed = [_parse(template) for template in templates]
    expert = parsed[0].expert
    for template, other in zip(templates, parsed, strict=True):
        if other.expert != expert:
            raise _bad(template, f"it names experts otherwise than {templates[0]!r} does")
    regex = re.compile(expert)
    found = {match["projection"] for match in map(regex.match, names) if match}
    stated = [word for one in parsed for word in one.projections]
    return Recipe(
        name=GENERIC,
        title="as the user describes it",
        model_types=frozenset(),
        expert=expert,
        projections=tuple(sorted({*stated, *found})),
        fused=tuple(one.fused for one in parsed if one.fused is not None),
    )


def refuse_unmatched(templates: Sequence[str], names: Iterable[str]) -> None:
    """Refuse templates that name nothing, or the same as another.

    Raises:
        UsageError: Naming the template.
    """
    listed = list(names)
    owners: dict[str, int] = {}
    for place, template in enumerate(templates):
        one = _parse(template)
        regex = re.compile(one.expert) if one.fused is None else one.fused.regex
        match = regex.match if one.fused is None else regex.fullmatch
        hits = [name for name in listed if match(name)]
        if not hits:
            raise UsageError(
                f"{OPTION} {template!r} matches none of the {len(listed)} tensors",
                hint="`mxconvert inspect SRC --tensors '*'` lists the names; the template is "
                "one without .weight",
                code="unmatched-pattern",
            )
        for name in hits:
            owner = owners.setdefault(name, place)
            if owner != place:
                raise _bad(template, f"{name} is what {templates[owner]!r} names already")


def _parse(template: str) -> _Names:
    name, fused, words = template.partition("=")
    fields = _FIELD.findall(name)
    wanted = {"layer"} if fused else _FIELDS.keys()
    if set(fields) != wanted or len(fields) != len(wanted):
        shown = ", ".join(f"{{{field}}}" for field in _FIELDS if field in wanted)
        raise _bad(template, f"it has to hold {shown} once each, and no other field")
    if "}{" in name:
        raise _bad(template, "two fields touch, so that nobody knows where one ends")
    if name.endswith((".weight", ".")) or name.startswith("."):
        raise _bad(template, "it names a module: leave the dot or .weight at its end away")
    if not fused:
        return _Names(rf"(?:.*\.)?{_regex(name)}{_KIND}")
    return _parse_fused(template, name, words)


def _parse_fused(template: str, name: str, words: str) -> _Names:
    listed, *flags = words.split(":")
    projections = tuple(listed.split(","))
    if not any(set(projections) <= set(known) for known in (GATE_UP_DOWN, W123)) or len(
        set(projections)
    ) != len(projections):
        known = " or ".join(", ".join(group) for group in (GATE_UP_DOWN, W123))
        raise _bad(template, f"{listed!r} are no projections: some of {known}, with commas")
    unknown = set(flags) - {*_ORIENTATIONS, _INTERLEAVED}
    ways = [_ORIENTATIONS[flag] for flag in flags if flag in _ORIENTATIONS]
    if unknown or len(ways) > 1:
        raise _bad(template, "after a colon may stand out-in or in-out, and interleaved")
    if _INTERLEAVED in flags and len(projections) == 1:
        raise _bad(template, "interleaved is for tensors of more than one projection")
    parent, _, _ = name.rpartition(".")
    prefix = rf"(?P<prefix>(?:.*\.)?{_regex(parent)})"
    rule = Fused(
        pattern=prefix + re.escape(name[len(parent) :]) + r"(\.weight)?",
        projections=projections,
        transposed=ways[0] if ways else None,
        interleaved=_INTERLEAVED in flags,
    )
    experts = parent if parent.endswith(".experts") else f"{parent}.experts"
    expert = rf"(?:.*\.)?{_regex(experts)}\.(?P<expert>{_NUMBER})\.(?P<projection>\w+){_KIND}"
    return _Names(expert, projections, rule)


def _regex(name: str) -> str:
    """Return the regular expression of a template's literal text and fields."""
    parts = _FIELD.split(name)  # text and fields in turn
    return "".join(
        f"(?P<{part}>{_FIELDS[part]})" if place % 2 else re.escape(part)
        for place, part in enumerate(parts)
    )


def _bad(template: str, why: str) -> UsageError:
    return UsageError(
        f"{OPTION} {template!r}: {why}",
        hint=f"for example {OPTION} {_EXAMPLE}, or "
        "'layers.{layer}.moe.experts.gate_up_proj=gate_proj,up_proj' for fused ones",
        code="bad-pattern",
    )
