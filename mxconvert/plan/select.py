"""Which tensors become MXFP4.

The default scope comes first, then the user's patterns, then what shapes forbid, and
last what engines demand: one scheme for all experts of a layer and for projections
that are merged at load time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mxconvert.errors import SourceError, UsageError
from mxconvert.model import BLOCK_SIZE, Options, Scope, TensorInfo
from mxconvert.patterns import WEIGHT_SUFFIX, compile_pattern, module_name
from mxconvert.plan.refuse import (
    check_completeness,
    refuse_quantized,
    refuse_transposed,
    refuse_unrecognised,
)
from mxconvert.recipes import LINEAR_ROLES, Recipe, Role, Slot, head_is_tied

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

FLOAT_DTYPES = frozenset({"BF16", "F16", "F32"})
_RANK = 2
_SHOWN = 4
_NOTHING = "nothing becomes MXFP4: the shapes of every candidate or of its siblings forbid it"


@dataclass(slots=True)
class Selection:
    """The verdict on every tensor.

    Attributes:
        slots: Tensor name -> what it is in the model.
        quantize: Names of the tensors that become MXFP4.
        notices: ``(code, message)`` of decisions the user should know.
    """

    slots: dict[str, Slot]
    quantize: set[str] = field(default_factory=set)
    notices: list[tuple[str, str]] = field(default_factory=list)


def select(
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    recipe: Recipe,
    options: Options,
    *,
    strict: bool,
    packed: AbstractSet[str] = frozenset(),
) -> Selection:
    """Decide which tensors become MXFP4.

    Args:
        tensors: All tensors by name.
        config: The parsed config.json.
        recipe: The model family.
        options: Scope and patterns.
        strict: Refuse what would otherwise be kept in high precision with a warning.
        packed: Modules that are MXFP4 already and stay as they are.

    Raises:
        SourceError: Already quantized, unrecognised layout, nothing to quantize.
        UsageError: A pattern that matches nothing.
    """
    refuse_quantized(tensors, config, packed)
    classify = recipe.classifier(config)
    chosen = Selection({name: classify(name) for name in tensors})
    mtp = {name for name, slot in chosen.slots.items() if classify.is_mtp(name, slot)}
    refuse_unrecognised(tensors, chosen.slots, config, recipe, options, mtp=mtp)
    incomplete = check_completeness(chosen.slots, mtp, config, recipe)
    _note(chosen, "incomplete-experts", incomplete, strict=strict)

    linear = {name: t for name, t in tensors.items() if _is_linear_shaped(t)}
    in_scope = {n for n in linear if n not in mtp and _in_scope(chosen.slots[n], options.scope)}
    included = _matching(options.include, "--include", tensors) & linear.keys()
    excluded = _matching(options.exclude, "--exclude", tensors)
    _refuse_include(included, chosen.slots)
    wanted = (in_scope | included) - excluded
    _refuse_dtypes(linear[name] for name in sorted(wanted))
    impossible = {name for name in wanted if not _convertible(linear[name])}
    chosen.quantize = wanted - impossible
    _note_empty(chosen, linear, impossible)
    if options.scope is Scope.LINEAR:
        _note_unknown(chosen, linear, included)
    _harmonise(chosen, linear, recipe, excluded=excluded, impossible=impossible, strict=strict)
    refuse_transposed(tensors, in_scope | chosen.quantize)
    if packed:
        chosen.notices.append(("repacked", _repacked(packed)))
    if not chosen.quantize and not packed:
        if not impossible:
            raise _nothing_to_quantize(tensors, recipe, options)
        _note(chosen, "nothing-quantized", [_NOTHING], strict=strict)
    return chosen


def _is_linear_shaped(tensor: TensorInfo) -> bool:
    return len(tensor.shape) == _RANK and tensor.name.endswith(WEIGHT_SUFFIX)


def _in_scope(slot: Slot, scope: Scope) -> bool:
    if scope is Scope.EXPERTS:
        return slot.role is Role.EXPERT
    return slot.role in LINEAR_ROLES


def _convertible(tensor: TensorInfo) -> bool:
    whole_blocks = tensor.shape[1] % BLOCK_SIZE == 0
    return _is_float(tensor) and tensor.size > 0 and whole_blocks


def _is_float(tensor: TensorInfo) -> bool:
    return tensor.dtype in FLOAT_DTYPES or tensor.scale is not None


def _refuse_dtypes(wanted: Iterable[TensorInfo]) -> None:
    unfit = [tensor for tensor in wanted if not _is_float(tensor)]
    if not unfit:
        return
    dtypes = ", ".join(sorted({tensor.dtype for tensor in unfit}))
    first = module_name(unfit[0].name)
    raise SourceError(
        f"{len(unfit)} weights to be quantized have the dtype {dtypes}, only "
        f"{', '.join(sorted(FLOAT_DTYPES))} can be: {_some({t.name for t in unfit})}",
        hint=f"keep them as they are with --exclude, for example --exclude '{first}', which "
        "extends to the weights that engines load with it",
        code="unsupported-dtype",
    )


def _matching(patterns: Iterable[str], option: str, names: Iterable[str]) -> set[str]:
    modules = {name: module_name(name) for name in names}
    found: set[str] = set()
    for pattern in patterns:
        matches = compile_pattern(pattern, option)
        hits = {name for name, module in modules.items() if matches(module)}
        if not hits:
            raise UsageError(
                f"{option} '{pattern}' matches none of the {len(modules)} tensors",
                hint="`mxconvert inspect SRC --tensors '*'` lists the names; a regular expression "
                "starts with re: and is matched from the start of the name",
                code="unmatched-pattern",
            )
        found |= hits
    return found


def _refuse_include(included: set[str], slots: Mapping[str, Slot]) -> None:
    for name in sorted(included):
        if slots[name].role is Role.EMBEDDING:
            raise UsageError(
                f"--include: {name} is an embedding; MXFP4 loaders dequantize Linear layers only",
                hint="leave embeddings out of --include",
            )


def _note_empty(chosen: Selection, linear: Mapping[str, TensorInfo], impossible: set[str]) -> None:
    empty = {name for name in impossible if not linear[name].size}
    if empty:
        chosen.notices.append(
            ("empty-weight", f"{_some(empty)}: no elements; kept as stored, not quantized")
        )


def _note_unknown(chosen: Selection, linear: Mapping[str, TensorInfo], included: set[str]) -> None:
    """Say which matrices are kept since nobody knows what they are."""
    unknown = {
        name
        for name in linear.keys() - included
        if chosen.slots[name].role is Role.OTHER and _convertible(linear[name])
    }
    if unknown:
        message = f"{len(unknown)} matrices of unknown purpose keep their dtype: {_some(unknown)}"
        chosen.notices.append(("unknown-kept", f"{message}; --include quantizes them"))


# ------------------------------------------------------------------ one scheme for all


def _harmonise(
    chosen: Selection,
    linear: Mapping[str, TensorInfo],
    recipe: Recipe,
    *,
    excluded: set[str],
    impossible: set[str],
    strict: bool,
) -> None:
    for where, members in _groups(chosen.slots, linear, recipe).items():
        inside = members & chosen.quantize
        if not inside or inside == members:
            _note_shapes(chosen, linear, members & impossible, where, strict=strict)
            continue
        unfit = {name for name in members - excluded if not _convertible(linear[name])}
        stopping = unfit | (members & excluded)
        if not stopping:
            chosen.quantize |= members
            chosen.notices.append(
                (
                    "extended-include",
                    (
                        f"{where}: {_some(inside)} is included, so all {len(members)} of the group "
                        "are quantized: engines load them under one scheme"
                    ),
                )
            )
            continue
        chosen.quantize -= members
        if not _note_shapes(chosen, linear, unfit, where, strict=strict):
            chosen.notices.append(
                (
                    "extended-exclude",
                    (
                        f"{where}: {_some(stopping)} keeps its dtype, so all {len(members)} of the "
                        "group do: engines load them under one scheme"
                    ),
                )
            )


def _groups(
    slots: Mapping[str, Slot], linear: Mapping[str, TensorInfo], recipe: Recipe
) -> dict[str, set[str]]:
    groups: dict[str, set[str]] = defaultdict(set)
    family = {part: group for group in recipe.siblings for part in group}
    expert = re.compile(recipe.expert or "$")
    for name in linear:
        slot = slots[name]
        parent, _, part = module_name(name).rpartition(".")
        match = expert.match(name) if slot.role is Role.EXPERT else None
        if match is not None:
            groups[_layer_of(match)].add(name)
        elif part in family:
            groups[f"{parent}.{{{','.join(family[part])}}}"].add(name)
        else:
            groups[module_name(name)].add(name)
    return groups


def _layer_of(expert: re.Match[str]) -> str:
    """Return what all experts of a layer have in common, in whatever order a name puts it."""
    start = min(expert.start("expert"), expert.start("projection"))
    shared = expert.string[:start].rstrip(".")
    return shared if expert.start("layer") < start else f"{shared} of layer {expert['layer']}"


def _note_shapes(
    chosen: Selection,
    linear: Mapping[str, TensorInfo],
    stopping: set[str],
    where: str,
    *,
    strict: bool,
) -> bool:
    ragged = {n for n in stopping if n in linear and linear[n].shape[1] % BLOCK_SIZE}
    if not ragged:
        return False
    first = linear[min(ragged)]
    message = (
        f"{where}: kept in high precision, since the input dimension of {_some(ragged)} is "
        f"{first.shape[1]}, not a multiple of {BLOCK_SIZE}"
    )
    _note(chosen, "ragged-input-dimension", [message], strict=strict)
    return True


def _note(chosen: Selection, code: str, messages: Iterable[str], *, strict: bool) -> None:
    for message in messages:
        if strict:
            raise SourceError(message, hint="--strict refuses this; drop it to go on", code=code)
        chosen.notices.append((code, message))


def _some(names: set[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def _repacked(packed: AbstractSet[str]) -> str:
    return (
        f"{len(packed)} weights of the source are MXFP4 already: they keep every code and scale, "
        "only names and shapes change"
    )


def _nothing_to_quantize(
    tensors: Mapping[str, TensorInfo], recipe: Recipe, options: Options
) -> SourceError:
    total = sum(tensor.size for tensor in tensors.values())
    hint = "widen the scope or the patterns"
    if recipe.expert is None and options.scope is Scope.EXPERTS:
        hint = "a dense model has no routed experts: pass --scope linear"
    return SourceError(
        f"nothing to quantize: all {len(tensors)} tensors ({total} bytes) would keep their "
        f"dtype with --scope {options.scope}",
        hint=hint,
        code="nothing-to-quantize",
    )


def tied_head(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str | None:
    """Return the module name of an output head that is tied and so not stored."""
    stored = any(name.endswith("lm_head.weight") for name in tensors)
    return "lm_head" if head_is_tied(config) and not stored else None
