"""One tensor for each projection of each expert, from tensors that hold all of a layer.

The family says which way round a fused tensor lies, and the sizes in config.json must
agree. Where releases of a family differ, the sizes decide; where they allow both, since
2 I = H, the other fused tensor of the same layer tells. Nothing is guessed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mxconvert.errors import SourceError
from mxconvert.plan.scales import SCALE_SUFFIXES, block_sizes
from mxconvert.recipes import moe_sizes
from mxconvert.views import swapped, view_of, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mxconvert.model import TensorInfo
    from mxconvert.recipes import Recipe
    from mxconvert.recipes.base import MoESizes
    from mxconvert.recipes.fused import Fused

_READABLE = "give a checkpoint in BF16, or one that stores the projections apart"

Rules = dict[str, tuple["Fused", str]]
"""By name of a fused tensor: its rule and the prefix of its experts."""


def split_experts(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], recipe: Recipe
) -> Iterator[tuple[str, TensorInfo]]:
    """Yield every tensor under its name; parts of fused ones, but not of MTP layers.

    Raises:
        SourceError: A fused tensor has another shape than the config says, or its experts
            are stored twice.
    """
    rules = _resolved(_rules(tensors, config, recipe), tensors, moe_sizes(config))
    consumed = {name + rule.suffix for name, (rule, _) in rules.items()}
    owners: dict[str, str] = {}
    for name, tensor in tensors.items():
        if name in consumed:
            continue
        if name not in rules:
            yield name, tensor
            continue
        rule, prefix = rules[name]
        scale = tensors.get(name + rule.suffix)
        if scale is not None:
            _check_cut(tensor, rule, scale, config)
        for part in _parts(tensor, prefix, rule, scale, _count(tensor, rule, config)):
            _refuse_twice(part.name, name, owners.setdefault(part.name, name), tensors)
            yield part.name, part


def _rules(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], recipe: Recipe) -> Rules:
    classify = recipe.classifier(config)
    found: Rules = {}
    for name in tensors if recipe.fused else ():
        for rule in recipe.fused:
            match = rule.regex.fullmatch(name)
            if match is not None and not classify.is_mtp(name, classify(name)):
                found[name] = rule, match["prefix"]
    return found


def _refuse_twice(part: str, name: str, owner: str, tensors: Mapping[str, TensorInfo]) -> None:
    if owner == name and part not in tensors:
        return
    raise SourceError(
        f"{part} is in {owner} and in {name}"
        if owner != name
        else f"{part} is stored both on its own and in {name}",
        hint="the checkpoint stores its experts twice; remove one of both",
        code="ambiguous-experts",
    )


# ----------------------------------------------------------------------------- orientation


def _resolved(rules: Rules, tensors: Mapping[str, TensorInfo], sizes: MoESizes) -> Rules:
    """Return the rules with `transposed` decided.

    Raises:
        SourceError: A tensor has another rank or other sizes, or may lie either way.
    """
    fits = {name: _ways(tensors[name], rule, sizes) for name, (rule, _) in rules.items()}
    sure: dict[str, set[bool]] = {}
    for name, (rule, prefix) in rules.items():
        if rule.kind == "weight" and len(fits[name]) == 1:
            sure.setdefault(prefix, set()).update(fits[name])
    decided: Rules = {}
    for name, (rule, prefix) in rules.items():
        ways = fits[name] if len(fits[name]) == 1 else fits[name] & sure.get(prefix, set())
        if len(ways) != 1:
            raise _misfit(tensors[name], rule, sizes)
        decided[name] = replace(rule, transposed=next(iter(ways))), prefix
    return decided


def _ways(tensor: TensorInfo, rule: Fused, sizes: MoESizes) -> set[bool]:
    """Return which values of `transposed` the shape of a tensor allows."""
    tried = (False, True) if rule.transposed is None else (rule.transposed,)
    return {way for way in tried if _fits(tensor, rule, sizes, transposed=way)}


def _fits(tensor: TensorInfo, rule: Fused, sizes: MoESizes, *, transposed: bool) -> bool:
    expected = rule.shape(sizes, transposed=transposed)
    agree = len(expected) == len(tensor.shape) and all(
        want is None or want == have for want, have in zip(expected, tensor.shape, strict=True)
    )
    if not agree or (rule.stacked and not sizes.experts):
        return False
    if rule.stacked:
        return tensor.shape[0] % (sizes.experts or 1) == 0
    cut = 2 if transposed and rule.kind == "weight" else 1
    return tensor.shape[cut] % len(rule.projections) == 0


def _misfit(tensor: TensorInfo, rule: Fused, sizes: MoESizes) -> SourceError:
    ways = (False, True) if rule.transposed is None else (rule.transposed,)
    shown = " or ".join(_shown(rule.shape(sizes, transposed=way)) for way in ways)
    return SourceError(
        f"{tensor.file}: tensor {tensor.name!r} has shape {list(tensor.shape)}, config.json and "
        f"the layout of this family give {shown}"
        + (", so that either may be meant" if len(_ways(tensor, rule, sizes)) > 1 else ""),
        hint="check that config.json belongs to the weights; if it does, the layout is unknown: "
        "another --recipe may read it",
        code="fused-shape",
    )


def _shown(shape: tuple[int | None, ...]) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


# ----------------------------------------------------------------------------------- parts


def _count(tensor: TensorInfo, rule: Fused, config: Mapping[str, Any]) -> int:
    return (moe_sizes(config).experts or 1) if rule.stacked else tensor.shape[0]


def _parts(
    tensor: TensorInfo, prefix: str, rule: Fused, scale: TensorInfo | None, count: int
) -> Iterator[TensorInfo]:
    for expert in range(count):
        for position, projection in enumerate(rule.projections):
            name = rule.name(prefix, expert, projection)
            if rule.stacked:
                yield _stacked_part(tensor, rule, name, expert, count)
            else:
                yield _part(tensor, rule, name, expert, position)
            if scale is not None:
                yield _scale_part(scale, rule, f"{name}{SCALE_SUFFIXES[0]}", expert, position)


def _part(tensor: TensorInfo, rule: Fused, name: str, expert: int, position: int) -> TensorInfo:
    selection = whole(tensor.shape)
    selection[0] = (expert, expert + 1, 1)
    cut = 2 if rule.transposed and rule.kind == "weight" else 1
    selection[cut] = rows = rule.rows(position, tensor.shape[cut])
    count = len(range(*rows))
    if rule.kind == "bias":
        return view_of(tensor, name, selection, shape=(count,))
    axes = swapped(len(tensor.shape)) if rule.transposed else None
    return view_of(tensor, name, selection, shape=(count, tensor.shape[3 - cut]), axes=axes)


def _stacked_part(
    tensor: TensorInfo, rule: Fused, name: str, expert: int, count: int
) -> TensorInfo:
    share, columns = tensor.shape[0] // count, tensor.shape[1]
    selection = [(expert * share, (expert + 1) * share, 1), (0, columns, 1)]
    if not rule.transposed:
        return view_of(tensor, name, selection, shape=(share, columns))
    return view_of(tensor, name, selection, shape=(columns, share), axes=swapped(2))


def _check_cut(
    tensor: TensorInfo, rule: Fused, scale: TensorInfo, config: Mapping[str, Any]
) -> None:
    """Refuse blocks of scales of which nobody knows whether they begin anew at a projection.

    Joined after they were quantized, projections have blocks of their own; quantized when they
    were joined, a block may hold rows of two. In 2 x 96 rows with blocks of 128 both make two.

    Raises:
        SourceError: Both fit the shapes, and mean different values.
    """
    count, cut = len(rule.projections), 2 if rule.transposed else 1
    if count == 1 or len(scale.shape) != len(tensor.shape):
        return
    rows, block = tensor.shape[cut], block_sizes(config)[cut - 1]
    own, joined = count * -(-(rows // count) // block), -(-rows // block)
    if rows // count % block and own == joined == scale.shape[cut]:
        raise SourceError(
            f"{scale.file}: {scale.name!r} has {own} blocks for {rows} rows of "
            f"{', '.join(rule.projections)}; blocks of {block} may begin anew at each of them or "
            "run on from one into the next",
            hint=_READABLE,
            code="bad-scale",
        )


def _scale_part(
    scale: TensorInfo, rule: Fused, name: str, expert: int, position: int
) -> TensorInfo:
    """Return the scales of one projection of one expert.

    Raises:
        SourceError: They cannot be told apart.
    """
    rank, count = 3, len(rule.projections)
    cut = 2 if rule.transposed else 1
    unknown = len(scale.shape) != rank or rule.interleaved or rule.stacked
    if unknown or scale.shape[cut] % count:
        raise SourceError(
            f"{scale.file}: tensor {scale.name!r} of shape {list(scale.shape)}: scales of fused "
            "experts in a layout that is not known",
            hint=_READABLE,
            code="bad-scale",
        )
    selection = whole(scale.shape)
    selection[0] = (expert, expert + 1, 1)
    selection[cut] = rule.rows(position, scale.shape[cut])
    shape = [len(range(*part)) for part in selection[1:]]
    return view_of(scale, name, selection, shape=(shape[0], shape[1]))
