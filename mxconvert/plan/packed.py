"""Sources that hold MXFP4 already: the same bytes under other names, shapes and dtypes.

Every layout of safetensors holds codes row by row with the even element in the low
nibble, and one E8M0 byte for each 32 (GGUF does not). So a weight is repacked by
renaming; where experts are stored together, by taking its rows.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mxconvert.errors import SourceError
from mxconvert.model import BLOCK_SIZE, PACKED_SUFFIX, SCALE_SUFFIX, TensorInfo
from mxconvert.patterns import WEIGHT_SUFFIX
from mxconvert.views import view_of, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_CODES = frozenset({"U8", "I8"})
_SCALES = frozenset({"U8", "F8_E8M0"})
_BYTE = "U8"
_RANK, _FUSED_RANK, _HALF = 2, 4, 16
_FUSED = re.compile(
    r"(?P<prefix>(?:.*\.)?layers\.\d{1,5}\.mlp\.experts)\."
    r"(?P<word>gate_up_proj|down_proj)_(?P<part>blocks|scales)"
)
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def repack(tensors: Mapping[str, TensorInfo]) -> Iterator[TensorInfo]:
    """Yield every tensor, codes and scales of MXFP4 weights as ``X.weight_packed``, U8
    ``[N, K/2]``, and ``X.weight_scale``, U8 ``[N, K/32]``.

    Known are compressed-tensors (as it is), Quark and the generic layout (``X.weight``
    beside ``X.weight_scale``), DeepSeek-V4 (``X.weight`` beside ``X.scale``) and gpt-oss
    (``..._blocks`` beside ``..._scales``, rows of gate and up alternating).

    Raises:
        SourceError: Codes of a fused tensor without scales, or of another shape.
    """  # noqa: D205
    renamed: dict[str, str] = {}
    for name, tensor in tensors.items():
        scale = _scale_beside(tensor, tensors)
        if scale is not None:
            module = name.removesuffix(WEIGHT_SUFFIX)
            renamed[name] = module + PACKED_SUFFIX
            renamed[scale.name] = module + SCALE_SUFFIX
    for name, tensor in tensors.items():
        match = _FUSED.fullmatch(name)
        if match is not None and tensor.dtype == _BYTE:
            yield from _rows(tensor, match["prefix"], match["word"], match["part"], tensors)
        elif name in renamed:
            selection = whole(tensor.shape)
            yield view_of(tensor, renamed[name], selection, shape=tensor.shape, dtype=_BYTE)
        else:
            yield tensor


def _scale_beside(codes: TensorInfo, tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """Return the scales of a weight that holds codes under a name of its own."""
    name = codes.name
    if not name.endswith(WEIGHT_SUFFIX) or codes.dtype not in _CODES or len(codes.shape) != _RANK:
        return None
    module = name.removesuffix(WEIGHT_SUFFIX)
    candidates = (module + SCALE_SUFFIX, f"{module}.scale")
    scale = next((tensors[each] for each in candidates if each in tensors), None)
    return scale if scale is not None and is_pair(codes, scale) else None


def is_pair(codes: TensorInfo, scale: TensorInfo) -> bool:
    """Whether two tensors have dtypes and shapes of the codes and scales of one MXFP4 weight."""
    if codes.dtype not in _CODES or scale.dtype not in _SCALES or len(codes.shape) != _RANK:
        return False
    rows, half = codes.shape
    return half * 2 % BLOCK_SIZE == 0 and scale.shape == (rows, half * 2 // BLOCK_SIZE)


def packed_modules(tensors: Mapping[str, TensorInfo]) -> set[str]:
    """Return the modules that are stored as a pair of codes and scales."""
    found = set()
    for name, codes in tensors.items():
        module = name.removesuffix(PACKED_SUFFIX)
        scale = tensors.get(module + SCALE_SUFFIX)
        if module != name and scale is not None and is_pair(codes, scale):
            found.add(module)
    return found


def _rows(
    tensor: TensorInfo, prefix: str, word: str, part: str, tensors: Mapping[str, TensorInfo]
) -> Iterator[TensorInfo]:
    """Yield the rows of each projection of each expert of a fused tensor of gpt-oss."""
    blocks = tensors.get(f"{prefix}.{word}_blocks")
    scales = tensors.get(f"{prefix}.{word}_scales")
    if blocks is None or scales is None:
        raise SourceError(
            f"{tensor.file}: tensor {tensor.name!r}: its blocks or scales are missing",
            hint="fetch the missing shard",
            code="missing-scale",
        )
    if len(blocks.shape) != _FUSED_RANK or blocks.shape != (*scales.shape, _HALF):
        raise SourceError(
            f"{tensor.file}: {blocks.name!r} has shape {list(blocks.shape)}, {scales.name!r} "
            f"{list(scales.shape)}; expected [E, N, K/32, 16] and [E, N, K/32]",
            code="fused-shape",
        )
    projections = _PROJECTIONS[word]
    suffix = PACKED_SUFFIX if part == "blocks" else SCALE_SUFFIX
    experts, rows, per_row = scales.shape
    width = per_row * _HALF if part == "blocks" else per_row
    for expert in range(experts):
        for position, projection in enumerate(projections):
            selection = whole(tensor.shape)
            selection[0] = (expert, expert + 1, 1)
            selection[1] = (position, rows, len(projections))
            name = f"{prefix}.{expert}.{projection}{suffix}"
            yield view_of(tensor, name, selection, shape=(rows // len(projections), width))
