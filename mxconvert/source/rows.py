"""A matrix, or a part of one, row by row of its storage, but as it is in the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mxconvert.fp8 import dequantize_rows, stored_shape
from mxconvert.model import BLOCK_SIZE
from mxconvert.safetensors_format import DTYPE_BITS, num_elements
from mxconvert.source.gather import UNSIGNED, read_tensor, tensor_pieces
from mxconvert.source.scales import load_scales
from mxconvert.statistics import PIECE_ELEMENTS, Original, as_float64
from mxconvert.views import view_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from mxconvert.model import TensorInfo
    from mxconvert.source.reader import SourceReader

    Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a matrix; if it is stored transposed, some columns, whole blocks of them.

    Good until the next.

    Attributes:
        first: Number of the first row, or of the first column.
        raw: Their bytes as stored.
        values: ``[rows, columns]`` as `stored_values` gives them.
    """

    first: int
    raw: memoryview
    values: Array


def matrix_rows(
    reader: SourceReader,
    tensor: TensorInfo,
    elements: int,
    grid: NDArray[np.float32] | None = None,
) -> Iterator[Rows]:
    """Read a matrix in the order of its storage.

    Args:
        reader: Of the source.
        tensor: The matrix.
        elements: About how many to read at a time.
        grid: Its scales, if it has any.
    """
    columns = stored_shape(tensor)[1]
    transposed = tensor.transposed
    unit = BLOCK_SIZE if transposed else 1
    size = elements * DTYPE_BITS[tensor.dtype] // 8
    row = 0
    for raw in tensor_pieces(reader, tensor, size, unit):
        values = stored_values(tensor, grid, row, raw)
        yield Rows(row, raw, values.T if transposed else values)
        row += len(raw) * 8 // DTYPE_BITS[tensor.dtype] // columns


def stored_values(
    tensor: TensorInfo, grid: NDArray[np.float32] | None, first_row: int, data: memoryview
) -> Array:
    """Return stored rows: float32 of scaled FP8, else the bits as unsigned integers.

    Args:
        tensor: A matrix of whole bytes to an element.
        grid: Its scales, if it has any.
        first_row: Number of the first stored row in ``data``.
        data: The rows' bytes.
    """
    if grid is not None:
        return dequantize_rows(tensor, grid, first_row, data)
    kind = UNSIGNED[DTYPE_BITS[tensor.dtype] // 8]
    return np.frombuffer(data, kind).reshape(-1, stored_shape(tensor)[1])


def output_rows(reader: SourceReader, tensor: TensorInfo, first: int, count: int) -> bytearray:
    """Return rows of a tensor as they are in the output, row-major.

    Args:
        reader: Of the source.
        tensor: The tensor, or a part of one.
        first: Number of the first row, as `row_layout` counts them.
        count: How many.
    """
    size = row_layout(tensor)[1]
    if not tensor.transposed:
        rows = bytearray(count * size)
        read_tensor(reader, tensor, first * size, memoryview(rows))
        return rows
    part = _columns_of(tensor, first, count)
    stored = bytearray(count * size)
    read_tensor(reader, part, 0, memoryview(stored))
    kind = UNSIGNED[DTYPE_BITS[tensor.dtype] // 8]
    return bytearray(np.frombuffer(stored, kind).reshape(-1, count).T.tobytes())


def row_layout(tensor: TensorInfo) -> tuple[int, int]:
    """Return how many rows `output_rows` counts, and the bytes of one.

    Rows go over all dimensions but the last; a vector is one, and so is a tensor whose rows
    do not end between bytes.
    """
    bits = (tensor.shape[-1] if tensor.shape else 1) * DTYPE_BITS[tensor.dtype]
    return (1, tensor.size) if bits % 8 else (num_elements(tensor.shape[:-1]), bits // 8)


def _columns_of(tensor: TensorInfo, first: int, count: int) -> TensorInfo:
    """Return some rows of a transposed matrix, which are columns of what is stored."""
    if tensor.view is None:
        raise AssertionError(f"{tensor.name} is not transposed")
    *outer, (start, _, step) = tensor.view.selection
    part = (start + first * step, start + (first + count - 1) * step + 1, step)
    shape = (count, tensor.shape[1])
    return view_of(tensor.stored, tensor.name, (*outer, part), shape=shape, axes=tensor.view.axes)


def originals(reader: SourceReader, tensor: TensorInfo) -> Iterator[Original]:
    """Yield the values of a matrix, to be measured against.

    Raises:
        SourceError: It changes while it is read, or its scales are unfit.
        LocalError: It cannot be read.
    """
    grid = None if tensor.scale is None else load_scales(reader, tensor).grid
    dtype = tensor.dtype if grid is None else "F32"
    for rows in matrix_rows(reader, tensor, PIECE_ELEMENTS, grid):
        flat = np.ascontiguousarray(rows.values).reshape(-1)
        values = as_float64(flat.data, dtype).reshape(rows.values.shape)
        yield Original(rows.first, values, len(rows.raw))
