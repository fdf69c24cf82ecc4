"""Reading a tensor, or the part of one that a view selects, in the order of its storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mxconvert.safetensors_format import DTYPE_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxconvert.model import TensorInfo, View
    from mxconvert.source.reader import SourceReader

STEP_BYTES = 4 * 1024 * 1024
"""Bytes of a piece of `tensor_pieces`, unless one row is larger."""

_SPAN_BYTES = 256 * 1024
_WASTE = 8  # bytes read for a byte that is wanted, at most, if not row by row
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""An integer type for each width of elements, in bytes: what is moved is not computed with."""


def read_tensor(reader: SourceReader, tensor: TensorInfo, begin: int, buffer: memoryview) -> None:
    """Fill ``buffer`` with the bytes of a tensor from byte ``begin`` of those it has.

    Of a view these are the selected elements in the order in which they are stored; begin
    and length have to be whole runs of it unless it is contiguous.

    Raises:
        SourceError: The file ends early or is not the one seen in preflight.
        LocalError: The operating system reports a read error.
    """
    view = tensor.view
    if view is None or _is_contiguous(tensor):
        reader.read_into(tensor.file, tensor.offset + begin, buffer)
        return
    item = _item(tensor)
    run = view.columns * item
    span = ((view.columns - 1) * view.step + 1) * item
    first, last = begin // run, (begin + len(buffer)) // run
    close = view.pitch <= _WASTE * span
    together = max(1, (_SPAN_BYTES - span) // max(view.pitch, 1) + 1) if close else 1
    for row in range(first, last, together):
        count = min(together, last - row)
        target = buffer[(row - first) * run : (row - first + count) * run]
        offset = tensor.offset + row * view.pitch
        if count == 1 and view.step == 1:
            reader.read_into(tensor.file, offset, target)
        else:
            _read_rows(reader, tensor.file, offset, view, target)


def tensor_pieces(
    reader: SourceReader, tensor: TensorInfo, step_bytes: int = STEP_BYTES, rows: int = 1
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in the order of its storage.

    Each piece is a view of one buffer and good until the next. It is a multiple of ``rows``
    runs (rows of a matrix as stored), but the last. Vectors and scalars are cut anywhere.

    Args:
        reader: Of the source.
        tensor: The tensor.
        step_bytes: The most bytes of a piece, unless that is less than ``rows`` runs.
        rows: See above.
    """
    run = max(1, rows * _run(tensor))
    step = max(1, step_bytes // run) * run
    buffer = memoryview(bytearray(min(step, tensor.size)))
    for begin in range(0, tensor.size, step):
        data = buffer[: min(step, tensor.size - begin)]
        read_tensor(reader, tensor, begin, data)
        yield data


def _item(tensor: TensorInfo) -> int:
    return DTYPE_BITS[tensor.stored.dtype] // 8


def _run(tensor: TensorInfo) -> int:
    """Return the bytes that are not cut."""
    if tensor.view is not None:
        return tensor.view.columns * _item(tensor)
    return tensor.shape[-1] * DTYPE_BITS[tensor.dtype] // 8 if len(tensor.shape) > 1 else 8


def _is_contiguous(tensor: TensorInfo) -> bool:
    view = tensor.view
    if view is None:
        return True
    return view.step == 1 and (view.rows == 1 or view.pitch == view.columns * _item(tensor))


def _read_rows(
    reader: SourceReader, file: str, offset: int, view: View, target: memoryview
) -> None:
    """Read runs that lie close to each other, with what lies between them."""
    item = DTYPE_BITS[view.stored.dtype] // 8
    rows = len(target) // (view.columns * item)
    size = (rows - 1) * view.pitch + ((view.columns - 1) * view.step + 1) * item
    span = np.empty(size, np.uint8)
    reader.read_into(file, offset, memoryview(span.data))
    wanted: np.ndarray = np.ndarray(
        (rows, view.columns), UNSIGNED[item], span.data, 0, (view.pitch, view.step * item)
    )
    np.frombuffer(target, UNSIGNED[item]).reshape(rows, view.columns)[:] = wanted
