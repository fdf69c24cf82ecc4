"""INT4 of compressed-tensors (``pack-quantized``): four bits and a scale for each group.

``X.weight_packed`` is I32 ``[N, K/8]``: element 8 i + j of a row is nibble j, the lowest
first, of word i, stored as its value plus 8 (compressed-tensors,
``compressors/pack_quantized``). ``X.weight_scale`` is ``[N, groups]``, ``X.weight_shape``
I64 ``[2]``. Kimi-K2-Thinking and its successors are published so.

MXFP4 of it rounds a second time, so it is read only where it is asked for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mxconvert.errors import SourceError, brief
from mxconvert.model import BLOCK_SIZE, INT4_DTYPE, PACKED_SUFFIX, SCALE_SUFFIX, BlockScale, Skipped
from mxconvert.patterns import WEIGHT_SUFFIX
from mxconvert.recipes import text_config
from mxconvert.views import view_of, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mxconvert.model import TensorInfo

WORD_DTYPE = "I32"
SHAPE_SUFFIX = ".weight_shape"
_PER_WORD = 8
_RANK = 2
_SCALES = frozenset({"BF16", "F16", "F32"})
_MORE = (".weight_zero_point", ".weight_g_idx")
_SCHEME: Mapping[str, object] = {"num_bits": 4, "type": "int", "symmetric": True}
_REPAIR = "only symmetric INT4 in groups or channels without reordering can be read"


def int4_modules(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the modules whose weights are packed integers."""
    return [
        name.removesuffix(PACKED_SUFFIX)
        for name, tensor in tensors.items()
        if name.endswith(PACKED_SUFFIX) and tensor.dtype == WORD_DTYPE
    ]


def unpack_int4(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> tuple[dict[str, TensorInfo], list[Skipped]]:
    """Return all tensors, packed integers as ``X.weight`` of ``INT4_DTYPE`` with scales.

    Returns:
        The tensors, and those whose content goes into no output.

    Raises:
        SourceError: Packed integers of another scheme, without scales, or of other shapes.
    """
    found, dropped = dict(tensors), list[Skipped]()
    modules = int4_modules(tensors)
    groups = _declared_groups(config) if modules else frozenset[int | None]()
    for module in modules:
        if module + WEIGHT_SUFFIX in tensors:
            raise SourceError(
                f"{module}{WEIGHT_SUFFIX} is stored both as INT4 and as "
                f"{tensors[module + WEIGHT_SUFFIX].dtype}",
                hint="remove one of both",
                code="ambiguous-experts",
            )
        del found[module + PACKED_SUFFIX]
        weight = found[module + WEIGHT_SUFFIX] = int4_weight(module, tensors)
        _check_group(weight, groups)
        found.pop(module + SCALE_SUFFIX)
        shape = found.pop(module + SHAPE_SUFFIX, None)
        if shape is not None:
            dropped.append(Skipped(shape.name, "shape of an INT4 weight", shape.size))
    return found, dropped


def int4_weight(module: str, tensors: Mapping[str, TensorInfo]) -> TensorInfo:
    """Return packed integers as a matrix ``[N, K]`` with its scales.

    Raises:
        SourceError: No scales, or shapes that do not fit.
    """
    words, name = tensors[module + PACKED_SUFFIX], module + WEIGHT_SUFFIX
    for suffix in _MORE:
        if module + suffix in tensors:
            scheme = "asymmetric" if suffix == _MORE[0] else "reordered (act-order)"
            raise SourceError(
                f"{words.file}: {name} is {scheme} INT4: it has {module + suffix}",
                hint=_REPAIR,
                code="already-quantized",
            )
    scale = tensors.get(module + SCALE_SUFFIX)
    if scale is None:
        raise SourceError(
            f"{words.file}: INT4 tensor {words.name!r} has no scale; looked for "
            f"{module}{SCALE_SUFFIX}",
            hint="without it the weights' magnitude is unknown; fetch the missing shard or file",
            code="missing-scale",
        )
    columns = words.shape[-1] * _PER_WORD if len(words.shape) == _RANK else 0
    groups = scale.shape[-1] if scale.shape else 0
    fits = (
        columns
        and columns % BLOCK_SIZE == 0
        and scale.dtype in _SCALES
        and scale.shape == (words.shape[0], groups)
        and groups
        and columns % groups == 0
    )
    if not fits:
        raise SourceError(
            f"{words.file}: INT4 tensor {words.name!r} of {list(words.shape)} words has scales "
            f"{scale.dtype}{list(scale.shape)}; expected I32 [N, K/8] and {', '.join(_SCALES)} "
            f"[N, groups], K a multiple of {BLOCK_SIZE} and of the groups",
            hint=_REPAIR,
            code="bad-scale",
        )
    stored = view_of(words, name, whole(words.shape), shape=words.shape)
    grid = BlockScale(scale, 1, columns // groups, tensors.get(module + SHAPE_SUFFIX))
    return replace(stored, dtype=INT4_DTYPE, shape=(words.shape[0], columns), scale=grid)


def _check_group(weight: TensorInfo, declared: frozenset[int | None]) -> None:
    """Refuse scales that share out a row otherwise than the config says.

    Their number alone does not tell: groups of 64 leave two for 96 columns, the last ragged.
    """
    scale = weight.scale
    if scale is None:
        raise AssertionError(weight.name)
    columns, group = weight.shape[1], scale.columns
    if group not in {size or columns for size in declared}:
        shown = " or ".join(
            f"each {size}" if size else "each row"
            for size in sorted(declared, key=lambda size: size or 0)
        )
        raise SourceError(
            f"{scale.tensor.file}: {scale.tensor.name!r} has {columns // group} scales for a row "
            f"of {columns}; config.json declares one for {shown}",
            hint="groups that are no whole part of a row cannot be read; else check that "
            "config.json belongs to the weights",
            code="bad-scale",
        )


def _declared_groups(config: Mapping[str, Any]) -> frozenset[int | None]:
    """Return how many elements of a row share a scale, ``None`` for all of them.

    Raises:
        SourceError: config.json declares anything but symmetric INT4 in groups or channels.
    """
    declared: Mapping[str, Any] = next(
        (
            part["quantization_config"]
            for part in (config, text_config(config))
            if isinstance(part.get("quantization_config"), dict)
        ),
        {},
    )
    groups = declared.get("config_groups")
    stated = list(_weights_of(groups if isinstance(groups, dict) else {}))
    found = [[weights.get(key) for key in (*_SCHEME, "actorder")] for weights in stated]
    wanted = [*_SCHEME.values(), None]
    if not found or any(values != wanted for values in found):
        raise SourceError(
            "weights are packed in I32 words, and config.json declares for them "
            f"{brief(found or declared)}, expected {', '.join((*_SCHEME, 'actorder'))} to be "
            f"{wanted}",
            hint=_REPAIR,
            code="already-quantized",
        )
    return frozenset(map(_group_size, stated))


def _group_size(weights: Mapping[str, Any]) -> int | None:
    """Return the elements that share a scale; without a strategy -1 means the whole row."""
    size, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy == "channel" or (strategy is None and size == -1):
        return None
    if strategy in {"group", None} and type(size) is int and size > 0:
        return size
    raise SourceError(
        f"config.json declares INT4 of strategy {brief(strategy)} with group_size {brief(size)}, "
        "expected groups or channels",
        hint=_REPAIR,
        code="already-quantized",
    )


def _weights_of(groups: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        yield weights if isinstance(weights, dict) else {}
