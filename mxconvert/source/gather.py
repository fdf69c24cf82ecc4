"""Reading a tensor, or the part of one that a view selects, in the order of its storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mxconvert.safetensors_format import DTYPE_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxconvert.model import TensorInfo, View
    from mxconvert.source.reader import SourceReader

_STEP_BYTES = 4 * 1024 * 1024
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def read_tensor(reader: SourceReader, tensor: TensorInfo, begin: int, buffer: memoryview) -> None:
    """Fill ``buffer`` with the bytes of a tensor from byte ``begin`` of those it has.

    Of a view these are the selected elements in the order in which they are stored; begin
    and length have to be whole runs of it unless it is contiguous.

    Raises:
        SourceError: The file ends early or is not the one seen in preflight.
        LocalError: The operating system reports a read error.
    """
    view = tensor.view
    if view is None or _is_contiguous(view, tensor):
        reader.read_into(tensor.file, tensor.offset + begin, buffer)
        return
    item = DTYPE_BITS[tensor.dtype] // 8
    run = view.columns * item
    first, count = begin // run, len(buffer) // run
    for number in range(count):
        offset = tensor.offset + (first + number) * view.pitch
        target = buffer[number * run : (number + 1) * run]
        if view.step == 1:
            reader.read_into(tensor.file, offset, target)
        else:
            _read_stepped(reader, tensor.file, offset, target, view.step, item)


def tensor_pieces(reader: SourceReader, tensor: TensorInfo) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in the order of its storage, whole rows at a time.

    Each piece is a view of one buffer and good until the next.
    """
    columns = tensor.view.columns if tensor.view else max(1, (tensor.shape or (1,))[-1])
    run = max(1, columns * DTYPE_BITS[tensor.dtype] // 8)
    step = max(1, _STEP_BYTES // run) * run
    buffer = memoryview(bytearray(min(step, tensor.size)))
    for begin in range(0, tensor.size, step):
        data = buffer[: min(step, tensor.size - begin)]
        read_tensor(reader, tensor, begin, data)
        yield data


def _is_contiguous(view: View, tensor: TensorInfo) -> bool:
    run = view.columns * DTYPE_BITS[tensor.dtype] // 8
    return view.step == 1 and (view.rows == 1 or view.pitch == run)


def _read_stepped(  # noqa: PLR0917  (one place of a file, one of memory)
    reader: SourceReader, file: str, offset: int, target: memoryview, step: int, item: int
) -> None:
    """Read elements that lie ``step`` apart, with what lies between them."""
    elements = np.frombuffer(target, _UNSIGNED[item])
    span = np.empty((len(elements) - 1) * step + 1, _UNSIGNED[item])
    reader.read_into(file, offset, memoryview(span.data).cast("B"))
    elements[:] = span[::step]
