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
from mxconvert.plan.int4 import unpack_int4
from mxconvert.plan.packed import packed_modules, repack
from mxconvert.plan.scales import find_scale, is_left_scale, is_scale_name, left_scale
from mxconvert.plan.split import split_experts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mxconvert.model import Skipped, TensorInfo
    from mxconvert.recipes import Recipe

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
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    recipe: Recipe,
    *,
    int4: bool = True,
) -> Logical:
    """Return the tensors of the model.

    Args:
        tensors: Those that are stored, by name.
        config: The parsed config.json.
        recipe: The model family.
        int4: Read packed integers; else they stay as they are stored.

    Raises:
        SourceError: A fused tensor has another shape than the config says, an FP8 weight
            has no scale, or one of an unknown shape.
    """
    integers, shapes = unpack_int4(tensors, config) if int4 else (dict(tensors), [])
    unpacked = {tensor.name: tensor for tensor in repack(integers)}
    if len(unpacked) < len(integers):
        raise SourceError(
            "the checkpoint stores MXFP4 weights under two names",
            hint="remove one of both",
            code="ambiguous-experts",
        )
    found = dict(split_experts(unpacked, config, recipe))
    logical = _with_scales(found, config)
    logical.packed = packed_modules(logical.tensors)
    logical.dropped += shapes
    logical.tensors = dict(sorted(logical.tensors.items()))
    return logical


# ------------------------------------------------------------------------------ FP8 scales


def _with_scales(tensors: dict[str, TensorInfo], config: Mapping[str, Any]) -> Logical:
    used: set[str] = set()
    scaled: dict[str, TensorInfo] = {}
    for name, tensor in tensors.items():
        if _is_weight(tensor):
            scale = find_scale(tensor, tensors, config)
            used.add(scale.tensor.name)
            scaled[name] = replace(tensor, scale=scale)
    kept = {name: scaled.get(name, tensor) for name, tensor in tensors.items() if name not in used}
    left = list(filter(is_left_scale, kept)) if scaled else []
    return Logical(kept, dropped=[left_scale(kept.pop(name)) for name in left])


def _is_weight(tensor: TensorInfo) -> bool:
    """Whether an FP8 tensor is a weight; scales of other schemes (NVFP4) can be FP8 as well."""
    matrix = tensor.dtype in FP8_DTYPES and len(tensor.shape) >= _RANK and tensor.size > 0
    return matrix and not is_scale_name(tensor.name)
