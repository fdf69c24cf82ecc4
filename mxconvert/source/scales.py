"""Reading the scales of FP8, MXFP4 and INT4 weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mxconvert.digest import xxh3_128_hex
from mxconvert.errors import SourceError
from mxconvert.fp8 import decode_scales, scale_of, stored_shape
from mxconvert.safetensors_format import DTYPE_BITS
from mxconvert.source.gather import read_tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mxconvert.model import TensorInfo
    from mxconvert.source.reader import SourceReader


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a weight.

    Attributes:
        grid: float32 ``[ceil(N / rows), ceil(K / columns)]``.
        digest: XXH3-128 of their stored bytes.
    """

    grid: NDArray[np.float32]
    digest: str


def load_scales(reader: SourceReader, weight: TensorInfo) -> Scales:
    """Read the scales of a weight.

    Raises:
        SourceError: One is NaN, infinite or negative, or the weight says it has another
            shape.
    """
    _check_shape(reader, weight)
    scales, stored = read_scales(reader, weight), scale_of(weight).tensor
    values = scales.grid.reshape(-1)
    bad = ~np.isfinite(values) | (values < 0)
    if bad.any():
        first = int(np.argmax(bad))
        raise SourceError(
            f"{stored.file}: tensor {stored.name!r}: {int(bad.sum())} of {values.size} scales of "
            f"{weight.name} are NaN, infinite or negative; the first is number {first}: "
            f"{values[first]}",
            hint="mend the checkpoint",
            code="bad-scale",
        )
    return scales


def _check_shape(reader: SourceReader, weight: TensorInfo) -> None:
    """Compare the shape with the one that is stored beside packed integers, if one is."""
    declared = scale_of(weight).declared
    if declared is None:
        return
    raw = bytearray(declared.size)
    read_tensor(reader, declared, 0, memoryview(raw))
    kind = {4: "<i4", 8: "<i8"}.get(DTYPE_BITS[declared.dtype] // 8)
    stated = np.frombuffer(raw, kind).tolist() if kind else []
    if stated != list(weight.shape):
        raise SourceError(
            f"{declared.file}: tensor {declared.name!r} states the shape {stated}, the packed "
            f"integers of {weight.name} have {list(weight.shape)}",
            hint="only rows that fill their words can be read",
            code="bad-scale",
        )


def read_scales(reader: SourceReader, weight: TensorInfo) -> Scales:
    """Read the scales of a weight, whatever they are."""
    scale = scale_of(weight)
    stored = scale.tensor
    raw = bytearray(stored.size)
    read_tensor(reader, stored, 0, memoryview(raw))
    values = decode_scales(stored.dtype, raw)
    rows, columns = stored_shape(weight)
    grid: NDArray[np.float32] = values.reshape(-(-rows // scale.rows), -(-columns // scale.columns))
    return Scales(grid, xxh3_128_hex(raw))
