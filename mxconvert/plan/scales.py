"""Which stored tensor scales an FP8 weight, and how."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mxconvert.errors import SourceError, brief
from mxconvert.fp8 import stored_shape
from mxconvert.model import BlockScale, Skipped, TensorInfo
from mxconvert.recipes import text_config
from mxconvert.safetensors_format import num_elements

if TYPE_CHECKING:
    from collections.abc import Mapping

SCALE_SUFFIXES = ("_scale_inv", "_scale")
_USUAL_BLOCK = (128, 128)
_MATRIX = 2
_SCALE_DTYPES = frozenset({"F32", "BF16", "F16", "F8_E8M0"})
_LEFT = re.compile(
    r"\.(input_scale|output_scale|k_scale|v_scale|q_scale|prob_scale|activation_scale"
    r"|input_activation_scale|kv_scale|attn\.k_scale|attn\.v_scale)$"
)


def is_left_scale(name: str) -> bool:
    """Whether a tensor scales activations or a cache in an FP8 checkpoint."""
    return _LEFT.search(name) is not None


def left_scale(tensor: TensorInfo) -> Skipped:
    """Return the record of a scale that the output has no use for, since it declares none."""
    return Skipped(tensor.name, "scale of activations or the KV cache", tensor.size)


def is_scale_name(name: str) -> bool:
    """Whether a tensor is called as scales are."""
    return name.endswith((*SCALE_SUFFIXES, ".scale", "_scales", "_scale_2"))


def scale_names(name: str) -> tuple[str, ...]:
    """Return the names that the scales of a weight may have, the likeliest first.

    ``X.weight_scale_inv`` (DeepSeek-V3 and its kin), ``X.weight_scale``
    (compressed-tensors), ``X.scale`` (DeepSeek's own code); all of them multiply.
    """
    module = name.removesuffix(".weight")
    own = tuple(name + suffix for suffix in SCALE_SUFFIXES)
    return (*own, f"{module}.scale") if module != name else own


def find_scale(
    weight: TensorInfo, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> BlockScale:
    """Return the scale of an FP8 weight.

    Raises:
        SourceError: There is none, or more than one, or its shape or dtype is of no known kind.
    """
    tried = scale_names(weight.name)
    stored = [name for name in tried if name in tensors]
    if len(stored) > 1:
        raise SourceError(
            f"{weight.file}: FP8 tensor {weight.name!r} has {len(stored)} scales: "
            f"{', '.join(stored)}",
            hint="the checkpoint stores its scales twice; remove all but one",
            code="bad-scale",
        )
    found = tensors[stored[0]] if stored else None
    if found is None:
        raise SourceError(
            f"{weight.file}: FP8 tensor {weight.name!r} has no scale; looked for "
            f"{', '.join(tried)}",
            hint="without it the weights' magnitude is unknown; fetch the missing shard or file",
            code="missing-scale",
        )
    if found.dtype not in _SCALE_DTYPES:
        raise SourceError(
            f"{found.file}: tensor {found.name!r}: scales of dtype {found.dtype}, expected one of "
            f"{', '.join(sorted(_SCALE_DTYPES))}",
            hint="this kind of FP8 cannot be read",
            code="bad-scale",
        )
    return block_scale(weight, found, config)


def block_scale(weight: TensorInfo, scale: TensorInfo, config: Mapping[str, Any]) -> BlockScale:
    """Return how stored scales apply to a weight, by their shapes.

    Raises:
        SourceError: In no known way.
    """
    if len(weight.shape) != _MATRIX:
        raise SourceError(
            f"{weight.file}: FP8 tensor {weight.name!r} has shape {list(weight.shape)}; how scales "
            "apply is known for matrices only",
            hint="models with such tensors cannot be converted",
            code="bad-scale",
        )
    rows, columns = stored_shape(weight)
    elements = num_elements(scale.shape)
    shape = tuple(size for size in scale.shape if size != 1) if elements > 1 else ()
    if elements == 1:
        return BlockScale(scale, rows, columns)
    if scale.shape in ((rows, 1), (rows,)):
        return BlockScale(scale, 1, columns)
    block = _declared_block(config)
    height, width = block or _USUAL_BLOCK
    grid = (-(-rows // height), -(-columns // width))
    if scale.shape == grid or (1 in grid and shape == tuple(n for n in grid if n != 1)):
        return BlockScale(scale, height, width)
    stated = list(block) if block else "none"
    raise SourceError(
        f"{scale.file}: tensor {scale.name!r} has shape {list(scale.shape)}; for a weight of "
        f"{[rows, columns]} it is neither one per tensor, nor one per row, nor one per block of "
        f"{list(block or _USUAL_BLOCK)} (weight_block_size in config.json: {stated})",
        hint="check that config.json belongs to the weights",
        code="bad-scale",
    )


def block_sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and columns that share a scale: as config.json says, else 128 x 128.

    Raises:
        SourceError: config.json says something else than two sizes.
    """
    return _declared_block(config) or _USUAL_BLOCK


def _declared_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    for part in (config, text_config(config)):
        declared = part.get("quantization_config")
        block = declared.get("weight_block_size") if isinstance(declared, dict) else None
        if block is None:
            continue
        fits = (
            isinstance(block, list)
            and len(block) == len(_USUAL_BLOCK)
            and all(type(size) is int and size > 0 for size in block)
        )
        if not fits:
            raise SourceError(
                f"config.json: weight_block_size is {brief(block)}, expected two sizes",
                hint="correct config.json",
            )
        return block[0], block[1]
    return None
