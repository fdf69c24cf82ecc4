"""A plan whose output holds nothing quantized: MXFP4 and scaled FP8 become BF16.

Pairs of codes and scales become one tensor of dtype ``F4`` with a scale for each 32
elements of a row, which is dequantized as FP8 is. Tensors that hold the experts of a layer
together stay whole unless there are quantized ones among them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mxconvert.errors import SourceError
from mxconvert.model import (
    BLOCK_SIZE,
    CODES_DTYPE,
    PACKED_SUFFIX,
    SCALE_SUFFIX,
    Action,
    BlockScale,
    Checkpoint,
    Options,
    Plan,
    TensorInfo,
    Totals,
)
from mxconvert.patterns import WEIGHT_SUFFIX
from mxconvert.plan.build import pieces_of, planned_file, resolve_recipe, totals_of
from mxconvert.plan.layout import group_pieces
from mxconvert.plan.logical import Logical, logical_tensors
from mxconvert.plan.refuse import refuse_quantized
from mxconvert.plan.scales import is_left_scale, left_scale
from mxconvert.plan.select import Selection
from mxconvert.views import view_of, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mxconvert.recipes import Recipe


def build_plain_plan(checkpoint: Checkpoint, options: Options) -> Plan:
    """Decide everything that will be written of a source without its quantization.

    Args:
        checkpoint: A source after preflight; only records are used, nothing is read.
        options: Layout, sizes, recipe and names; what concerns quantization has no effect.

    Raises:
        SourceError: A source that is quantized in a way that cannot be read.
        UsageError: Options that do not fit the source.
    """
    recipe = resolve_recipe(checkpoint, options)
    logical = plain_tensors(checkpoint.tensors, checkpoint.config, recipe)
    refuse_quantized(logical.tensors, checkpoint.config, frozenset())
    classify = recipe.classifier(checkpoint.config)
    chosen = Selection({name: classify(name) for name in logical.tensors})
    groups = group_pieces(pieces_of(logical.tensors, chosen), options)
    files = tuple(planned_file(group, logical.tensors, chosen) for group in groups)
    routed = [slot.expert for slot in chosen.slots.values() if slot.expert is not None]
    return Plan(
        options=replace(options, recipe=recipe.name),
        recipe=recipe.name,
        num_experts=max(routed, default=-1) + 1,
        files=files,
        ignore=(),
        quantized=Totals(),
        copied=totals_of(files, Action.COPY, Action.DEQUANTIZE),
        dropped=tuple(logical.dropped),
        plain=True,
    )


def plain_tensors(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], recipe: Recipe
) -> Logical:
    """Return the tensors of the model, those that are MXFP4 as matrices of their elements.

    Raises:
        SourceError: As `logical_tensors`, or a weight is stored both packed and plain.
    """
    logical = logical_tensors(tensors, config, recipe)
    found = dict(logical.tensors)
    for module in sorted(logical.packed):
        name = module + WEIGHT_SUFFIX
        codes, scale = found.pop(module + PACKED_SUFFIX), found.pop(module + SCALE_SUFFIX)
        if name in found:
            raise SourceError(
                f"{name} is stored both as MXFP4 and as {found[name].dtype}",
                hint="remove one of both",
                code="ambiguous-experts",
            )
        found[name] = _elements(codes, scale, name)
    if logical.packed:
        for name in filter(is_left_scale, list(found)):
            logical.dropped.append(left_scale(found.pop(name)))
    logical.tensors = dict(sorted(_joined(found).items()))
    return logical


def _elements(codes: TensorInfo, scale: TensorInfo, name: str) -> TensorInfo:
    """Return a pair as a matrix of 4-bit elements with scales."""
    if codes.view is None:
        codes = view_of(codes, name, whole(codes.shape), shape=codes.shape)
    rows, half = codes.shape
    if not codes.size:
        return replace(codes, name=name, dtype="BF16", shape=(rows, 2 * half))
    return replace(
        codes,
        name=name,
        dtype=CODES_DTYPE,
        shape=(rows, 2 * half),
        scale=BlockScale(scale, 1, BLOCK_SIZE),
    )


def _joined(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return tensors that were cut as they are stored, unless cut ones are quantized."""
    parts = {name: tensor for name, tensor in tensors.items() if _is_part(tensor)}
    if any(tensor.scale is not None for tensor in parts.values()):
        return dict(tensors)
    stored = {tensor.stored.name: tensor.stored for tensor in parts.values()}
    return {name: tensor for name, tensor in tensors.items() if name not in parts} | stored


def _is_part(tensor: TensorInfo) -> bool:
    return tensor.view is not None and list(tensor.view.selection) != whole(
        tensor.view.stored.shape
    )
