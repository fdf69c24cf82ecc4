"""From stored tensors to the tensors of the model.

A checkpoint may store all experts of a layer in one tensor, and FP8 weights beside
scales of their own. Here each becomes a tensor under its own name that says where its
bytes lie (`View`) and what they are multiplied by (`BlockScale`); from then on nothing
else of the plan has to know how the source was stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mxconvert.errors import SourceError
from mxconvert.fp8 import FP8_DTYPES
from mxconvert.model import Skipped, TensorInfo
from mxconvert.plan.packed import packed_modules, repack
from mxconvert.plan.scales import SCALE_SUFFIXES, find_scale, is_left_scale
from mxconvert.recipes import moe_sizes
from mxconvert.views import swapped, view_of, whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from mxconvert.recipes import Recipe
    from mxconvert.recipes.fused import Fused

_RANK = 2


@dataclass(slots=True)
class Logical:
    """The tensors of the model.

    Attributes:
        tensors: By name, sorted by name.
        packed: Modules that are MXFP4 already.
        dropped: Stored tensors that the output has no use for.
    """

    tensors: dict[str, TensorInfo]
    packed: set[str] = field(default_factory=set)
    dropped: list[Skipped] = field(default_factory=list)


def logical_tensors(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], recipe: Recipe
) -> Logical:
    """Return the tensors of the model.

    Raises:
        SourceError: A fused tensor has another shape than the config says, an FP8 weight
            has no scale, or one of an unknown shape.
    """
    unpacked = {tensor.name: tensor for tensor in repack(tensors)}
    if len(unpacked) < len(tensors):
        raise SourceError(
            "the checkpoint stores MXFP4 weights under two names",
            hint="remove one of both",
            code="ambiguous-experts",
        )
    found = dict(_split(unpacked, config, recipe))
    logical = _with_scales(found, config)
    logical.packed = packed_modules(logical.tensors)
    logical.tensors = dict(sorted(logical.tensors.items()))
    return logical


# ---------------------------------------------------------------------------- fused experts


def _split(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], recipe: Recipe
) -> Iterator[tuple[str, TensorInfo]]:
    rules = {name: found for name in tensors if (found := _rule_of(name, recipe))}
    consumed = {name + rule.suffix for name, (rule, _) in rules.items()}
    owners: dict[str, str] = {}
    for name, tensor in tensors.items():
        if name in consumed:
            continue
        if name not in rules:
            yield name, tensor
            continue
        rule, prefix = rules[name]
        _check_shape(tensor, rule, config)
        for part in _parts(tensor, prefix, rule, tensors.get(name + rule.suffix)):
            other = owners.setdefault(part.name, name)
            if other != name or part.name in tensors:
                raise SourceError(
                    f"{part.name} is stored both on its own and in {name}"
                    if other == name
                    else f"{part.name} is in {other} and in {name}",
                    hint="the checkpoint stores its experts twice; remove one of both",
                    code="ambiguous-experts",
                )
            yield part.name, part


def _rule_of(name: str, recipe: Recipe) -> tuple[Fused, str] | None:
    for rule in recipe.fused:
        match = rule.regex.fullmatch(name)
        if match is not None:
            return rule, match["prefix"]
    return None


def _parts(
    tensor: TensorInfo, prefix: str, rule: Fused, scale: TensorInfo | None
) -> Iterator[TensorInfo]:
    total = tensor.shape[2 if rule.transposed else 1]
    for expert in range(tensor.shape[0]):
        for position, projection in enumerate(rule.projections):
            name = rule.name(prefix, expert, projection)
            yield _part(tensor, rule, name, expert, rule.rows(position, total))
            if scale is not None:
                yield _scale_part(scale, rule, f"{name}{SCALE_SUFFIXES[0]}", expert, position)


def _part(
    tensor: TensorInfo, rule: Fused, name: str, expert: int, rows: tuple[int, int, int]
) -> TensorInfo:
    selection = whole(tensor.shape)
    selection[0] = (expert, expert + 1, 1)
    count = len(range(*rows))
    if rule.kind == "bias":
        selection[1] = rows
        return view_of(tensor, name, selection, shape=(count,))
    selection[2 if rule.transposed else 1] = rows
    inputs = tensor.shape[1 if rule.transposed else 2]
    axes = swapped(len(tensor.shape)) if rule.transposed else None
    return view_of(tensor, name, selection, shape=(count, inputs), axes=axes)


def _scale_part(
    scale: TensorInfo, rule: Fused, name: str, expert: int, position: int
) -> TensorInfo:
    """Return the scales of one projection of one expert.

    Raises:
        SourceError: They cannot be told apart.
    """
    rank, count = 3, len(rule.projections)
    cut = 2 if rule.transposed else 1
    if len(scale.shape) != rank or rule.interleaved or scale.shape[cut] % count:
        raise SourceError(
            f"{scale.file}: tensor {scale.name!r} of shape {list(scale.shape)}: scales of fused "
            "experts in a layout that is not known",
            code="bad-scale",
        )
    selection = whole(scale.shape)
    selection[0] = (expert, expert + 1, 1)
    selection[cut] = rule.rows(position, scale.shape[cut])
    shape = [len(range(*part)) for part in selection[1:]]
    return view_of(scale, name, selection, shape=(shape[0], shape[1]))


def _check_shape(tensor: TensorInfo, rule: Fused, config: Mapping[str, Any]) -> None:
    """Compare a fused tensor with the sizes in the config.

    Raises:
        SourceError: It has another rank or other sizes.
    """
    sizes = moe_sizes(config)
    experts = sizes.experts
    count = len(rule.projections)
    inward = rule.projections[0].startswith(("down", "w2"))
    outputs = sizes.hidden if inward else sizes.inner and sizes.inner * count
    inputs = sizes.inner if inward else sizes.hidden
    expected: tuple[int | None, ...] = (experts, outputs, inputs)
    if rule.kind == "bias":
        expected = (experts, outputs)
    elif rule.transposed:
        expected = (experts, inputs, outputs)
    fits = len(expected) == len(tensor.shape) and all(
        want is None or want == have for want, have in zip(expected, tensor.shape, strict=True)
    )
    if fits and (rule.kind == "bias" or tensor.shape[2 if rule.transposed else 1] % count == 0):
        return
    shown = ", ".join("?" if want is None else str(want) for want in expected)
    raise SourceError(
        f"{tensor.file}: tensor {tensor.name!r} has shape {list(tensor.shape)}, config.json and "
        f"the layout of this family give [{shown}]",
        hint="check that config.json belongs to the weights; if it does, the layout is unknown: "
        "another --recipe may read it",
        code="fused-shape",
    )


# ------------------------------------------------------------------------------ FP8 scales


def _with_scales(tensors: dict[str, TensorInfo], config: Mapping[str, Any]) -> Logical:
    used: set[str] = set()
    scaled: dict[str, TensorInfo] = {}
    for name, tensor in tensors.items():
        if tensor.dtype in FP8_DTYPES and len(tensor.shape) >= _RANK and tensor.size:
            scale = find_scale(tensor, tensors, config)
            used.add(scale.tensor.name)
            scaled[name] = replace(tensor, scale=scale)
    kept = {name: scaled.get(name, tensor) for name, tensor in tensors.items() if name not in used}
    dropped = list(_left_scales(kept.values(), bool(scaled)))
    for entry in dropped:
        del kept[entry.name]
    return Logical(kept, dropped=dropped)


def _left_scales(tensors: Iterable[TensorInfo], is_fp8: bool) -> Iterator[Skipped]:
    """Yield scales of activations and caches: the output declares none."""
    if is_fp8:
        for tensor in tensors:
            if is_left_scale(tensor.name):
                yield Skipped(tensor.name, "scale of activations or the KV cache", tensor.size)
