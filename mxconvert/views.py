"""Parts of stored tensors as tensors of their own: one expert of a fused matrix.

A view is given as a manifest gives it: per stored dimension ``(start, stop, step)``, and
the order of the dimensions in the output. It is read row by row of the *stored* tensor,
whatever the order in the output, so that each stored byte is read once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mxconvert.model import TensorInfo, View
from mxconvert.safetensors_format import DTYPE_BITS, num_elements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mxconvert.model import Selection

_BITS_PER_BYTE = 8
_MATRIX = 2


def swapped(rank: int) -> tuple[int, ...]:
    """Return the order of dimensions of a transposed matrix behind leading dimensions."""
    return (*range(rank - 2), rank - 1, rank - 2)


def whole(shape: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the selection of everything."""
    return [(0, size, 1) for size in shape]


def view_of(
    tensor: TensorInfo,
    name: str,
    selection: Selection,
    *,
    shape: tuple[int, ...],
    dtype: str | None = None,
    axes: tuple[int, ...] | None = None,
) -> TensorInfo:
    """Return a part of a stored tensor under a name of its own.

    Args:
        tensor: The stored tensor, of whole bytes to an element and at least one dimension.
        name: What the part is called.
        selection: Per stored dimension ``(start, stop, step)``. At most one dimension may
            be cut with a step or to a part, beside leading ones that are cut to one
            element and, if no other follows it, the last one.
        shape: The part's shape in the output: the selected dimensions, those of one
            element left out, neighbours merged if ``axes`` is ``None``.
        dtype: What it is called in the output, if not as stored; of the same width.
        axes: Order of the stored dimensions in the output, as `swapped` gives it, if the
            output is a transposed matrix.

    Raises:
        ValueError: A selection of another form.
    """
    lengths = [len(range(*part)) for part in selection]
    _check(name, tensor, selection, dtype or tensor.dtype)
    _check_shape(name, lengths, shape, axes)
    item = DTYPE_BITS[tensor.dtype] // _BITS_PER_BYTE
    strides = [item * num_elements(tensor.shape[i + 1 :]) for i in range(len(selection))]
    offset = tensor.offset + sum(
        part[0] * stride for part, stride in zip(selection, strides, strict=True)
    )
    rows = next((i for i, n in enumerate(lengths) if n > 1), len(lengths) - 1)
    inner = selection[rows + 1 :]
    _check_inner(name, inner, tensor.shape[rows + 1 :])
    last = len(selection) - 1
    if rows == last:  # a vector, perhaps with a step
        count, pitch = 1, 0
        columns, step = lengths[last], selection[last][2]
    else:
        count, pitch = lengths[rows], strides[rows] * selection[rows][2]
        columns, step = num_elements(lengths[rows + 1 :]), inner[-1][2]
    return TensorInfo(
        name=name,
        dtype=dtype or tensor.dtype,
        shape=shape,
        file=tensor.file,
        offset=offset,
        size=num_elements(shape) * item,
        view=View(
            stored=replace(tensor, view=None, scale=None),
            selection=tuple(selection),
            axes=axes,
            rows=count,
            pitch=pitch,
            columns=columns,
            step=step,
        ),
    )


def _check(name: str, tensor: TensorInfo, selection: Selection, dtype: str) -> None:
    bits = DTYPE_BITS[tensor.dtype]
    inside = len(selection) == len(tensor.shape) > 0 and all(
        0 <= start <= stop <= size and step > 0
        for (start, stop, step), size in zip(selection, tensor.shape, strict=True)
    )
    if not inside or bits % _BITS_PER_BYTE or DTYPE_BITS.get(dtype) != bits:
        raise ValueError(
            f"{name}: no part {selection} of {tensor.dtype}{list(tensor.shape)} as {dtype}"
        )


def _check_shape(
    name: str, lengths: Sequence[int], shape: tuple[int, ...], axes: tuple[int, ...] | None
) -> None:
    fits = num_elements(lengths) == num_elements(shape)
    if axes is not None:
        outer = num_elements(lengths[:-_MATRIX])
        fits = axes == swapped(len(lengths)) and len(axes) >= _MATRIX and outer == 1
        fits = fits and shape == (lengths[-1], lengths[-2])
    if not fits:
        raise ValueError(f"{name}: {list(lengths)} elements with axes {axes} are not {shape}")


def _check_inner(name: str, inner: Selection, shape: Sequence[int]) -> None:
    whole_dims = all(part == (0, size, 1) for part, size in zip(inner, shape, strict=True))
    if not whole_dims and len(inner) > 1:
        raise ValueError(f"{name}: cannot read selection {inner} of {shape}")
