"""Parts of stored tensors: which there are, and that their bytes are those of numpy's slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxconvert.model import TensorInfo
from mxconvert.source import gather
from mxconvert.source.gather import read_tensor, tensor_pieces
from mxconvert.source.rows import matrix_rows, output_rows, row_layout
from mxconvert.views import swapped, view_of, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mxconvert.model import Selection

KINDS = {"U8": np.uint8, "BF16": np.uint16, "F32": np.uint32, "I64": np.uint64}
LEAD = 24


@dataclass
class Memory:
    """A reader of one file that is in memory; counts what it is asked for."""

    data: bytes
    calls: int = 0
    read: int = 0

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        assert file == "f"
        assert offset >= LEAD
        assert offset + len(buffer) <= len(self.data) - LEAD
        buffer[:] = self.data[offset : offset + len(buffer)]
        self.calls += 1
        self.read += len(buffer)


def stored(shape: tuple[int, ...], dtype: str) -> tuple[Any, TensorInfo, NDArray[Any]]:
    """Return a reader, a tensor in its file, and the tensor's elements, all of them different."""
    count = int(np.prod(shape))
    values = (np.arange(count, dtype=np.uint64) * 2654435761 + 7).astype(KINDS[dtype])
    info = TensorInfo("t", dtype, shape, "f", LEAD, values.nbytes)
    return Memory(bytes(LEAD) + values.tobytes() + bytes(LEAD)), info, values.reshape(shape)


def cut(values: NDArray[Any], selection: Selection) -> NDArray[Any]:
    return values[tuple(slice(*part) for part in selection)]


def read_all(reader: Any, tensor: TensorInfo) -> bytes:
    buffer = bytearray(tensor.size)
    read_tensor(reader, tensor, 0, memoryview(buffer))
    return bytes(buffer)


# --------------------------------------------------------------------- every form there is

EXPERT, GATE, UP = (2, 3, 1), (0, 6, 1), (6, 12, 1)
FORMS: dict[str, tuple[tuple[int, ...], Selection, tuple[int, ...], tuple[int, ...] | None]] = {
    "expert of [E, N, K]": ((4, 12, 5), (EXPERT, (0, 12, 1), (0, 5, 1)), (12, 5), None),
    "upper rows": ((4, 12, 5), (EXPERT, UP, (0, 5, 1)), (6, 5), None),
    "every other row": ((4, 12, 5), (EXPERT, (1, 12, 2), (0, 5, 1)), (6, 5), None),
    "transposed expert": ((4, 5, 12), (EXPERT, (0, 5, 1), (0, 12, 1)), (12, 5), (0, 2, 1)),
    "transposed half": ((4, 5, 12), (EXPERT, (0, 5, 1), UP), (6, 5), (0, 2, 1)),
    "transposed, alternating": ((4, 5, 12), (EXPERT, (0, 5, 1), (1, 12, 2)), (6, 5), (0, 2, 1)),
    "half of a bias": ((4, 12), (EXPERT, GATE), (6,), None),
    "every other bias": ((4, 12), (EXPERT, (1, 12, 2)), (6,), None),
    "stacked": ((8, 5), ((4, 6, 1), (0, 5, 1)), (2, 5), None),
    "stacked, transposed": ((8, 5), ((4, 8, 1), (0, 5, 1)), (5, 4), (1, 0)),
    "blocks of codes": ((4, 6, 3, 16), (EXPERT, (1, 6, 2), (0, 3, 1), (0, 16, 1)), (3, 48), None),
    "some columns": ((7, 12), ((0, 7, 1), (3, 6, 1)), (7, 3), None),
    "one row": ((4, 12, 5), (EXPERT, (7, 8, 1), (0, 5, 1)), (1, 5), None),
    "one column, transposed": ((4, 5, 12), (EXPERT, (0, 5, 1), (7, 8, 1)), (1, 5), (0, 2, 1)),
    "one element": ((4, 12), (EXPERT, (5, 6, 1)), (1,), None),
    "nothing": ((4, 12, 5), (EXPERT, (3, 3, 1), (0, 5, 1)), (0, 5), None),
    "all of it": ((3, 4), ((0, 3, 1), (0, 4, 1)), (3, 4), None),
    "all of it, merged": ((3, 4, 5), ((0, 3, 1), (0, 4, 1), (0, 5, 1)), (12, 5), None),
}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_selection(form: str, dtype: str) -> None:
    shape, selection, out, axes = FORMS[form]
    reader, tensor, values = stored(shape, dtype)
    view = view_of(tensor, "part", selection, shape=out, axes=axes)
    expected = cut(values, selection)
    assert (view.name, view.dtype, view.shape, view.file) == ("part", dtype, out, "f")
    assert view.size == expected.nbytes
    assert read_all(reader, view) == expected.tobytes()
    assert view.stored == tensor
    if len(out) == 2 and view.size:
        rows = [rows.values.copy() for rows in matrix_rows(reader, view, 2)]
        made = np.concatenate(rows, axis=1 if axes else 0)
        assert np.array_equal(made, (expected.transpose(axes) if axes else expected).reshape(out))


REFUSED: dict[str, tuple[tuple[int, ...], str, Selection, dict[str, Any]]] = {
    "too few parts": ((4, 6), "BF16", ((0, 4, 1),), {"shape": (4,)}),
    "a scalar": ((), "BF16", (), {"shape": ()}),
    "past the end": ((4, 6), "BF16", ((0, 5, 1), (0, 6, 1)), {"shape": (5, 6)}),
    "before the begin": ((4, 6), "BF16", ((-1, 4, 1), (0, 6, 1)), {"shape": (5, 6)}),
    "backwards": ((4, 6), "BF16", ((3, 0, -1), (0, 6, 1)), {"shape": (3, 6)}),
    "no step": ((4, 6), "BF16", ((0, 4, 2), (0, 6, 1)), {"shape": (4, 6)}),
    "another number": ((4, 6), "BF16", ((0, 2, 1), (0, 6, 1)), {"shape": (3, 6)}),
    "two cuts": ((4, 6, 8), "BF16", ((0, 2, 1), (0, 3, 1), (0, 8, 1)), {"shape": (6, 8)}),
    "half a byte": ((4, 6), "F4", ((0, 4, 1), (0, 6, 1)), {"shape": (4, 6)}),
    "another width": ((4, 6), "BF16", ((0, 4, 1), (0, 6, 1)), {"shape": (4, 6), "dtype": "U8"}),
    "an unknown dtype": ((4, 6), "BF16", ((0, 4, 1), (0, 6, 1)), {"shape": (4, 6), "dtype": "X"}),
    "other axes": ((4, 6, 8), "BF16", whole((4, 6, 8)), {"shape": (192,), "axes": (2, 1, 0)}),
    "axes of a stack": ((4, 6, 8), "BF16", whole((4, 6, 8)), {"shape": (8, 24), "axes": (0, 2, 1)}),
    "axes of a vector": ((4,), "BF16", ((0, 4, 1),), {"shape": (4,), "axes": (0,)}),
    "not transposed": ((4, 6), "BF16", whole((4, 6)), {"shape": (4, 6), "axes": (1, 0)}),
}


@pytest.mark.parametrize("form", REFUSED)
def test_other_forms_are_refused(form: str) -> None:
    """A manifest of somebody else may say anything."""
    shape, dtype, selection, rest = REFUSED[form]
    tensor = TensorInfo("t", dtype, shape, "f", LEAD, 2)
    with pytest.raises(ValueError, match="part"):
        view_of(tensor, "part", selection, **rest)


# ----------------------------------------------------------------------------- any of them


@st.composite
def views(draw: st.DrawFn) -> tuple[Any, TensorInfo, NDArray[Any]]:
    """Return a reader, a view, and its elements in their stored order as numpy cuts them."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    dtype = draw(st.sampled_from(sorted(KINDS)))
    axis = draw(st.integers(0, len(shape) - 1))
    selection = whole(shape)
    for place in range(axis):
        start = draw(st.integers(0, shape[place] - 1))
        selection[place] = (start, start + 1, 1)
    for place in {axis, len(shape) - 1 if axis == len(shape) - 2 else axis}:
        start = draw(st.integers(0, shape[place] - 1))
        stop = draw(st.integers(start + 1, shape[place]))
        selection[place] = (start, stop, draw(st.integers(1, 3)))
    reader, tensor, values = stored(shape, dtype)
    expected = cut(values, selection)
    axes = None
    out: tuple[int, ...] = (expected.size,)
    if len(shape) > 1 and axis >= len(shape) - 2 and draw(st.booleans()):
        axes = swapped(len(shape))
        out = (expected.shape[-1], expected.shape[-2])
    return reader, view_of(tensor, "v", selection, shape=out, axes=axes), expected


@given(views(), st.sampled_from([1, 16, 64, 1 << 18]), st.data())
def test_reading_a_view_is_slicing(
    made: tuple[Any, TensorInfo, NDArray[Any]], span: int, data: st.DataObject
) -> None:
    """Whole, from any row on, in pieces of any size, whatever is read at a time."""
    reader, view, expected = made
    raw = expected.tobytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "_SPAN_BYTES", span)
        assert read_all(reader, view) == raw
        assert view.view is not None
        run = view.view.columns * expected.itemsize
        first = data.draw(st.integers(0, len(raw) // run))
        last = data.draw(st.integers(first, len(raw) // run))
        buffer = bytearray((last - first) * run)
        read_tensor(reader, view, first * run, memoryview(buffer))
        assert buffer == raw[first * run : last * run]
        rows, step = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 200))
        pieces = [bytes(piece) for piece in tensor_pieces(reader, view, step, rows)]
        assert b"".join(pieces) == raw
        assert all(len(piece) % (rows * run) == 0 for piece in pieces[:-1])
        assert all(len(piece) <= max(step, rows * run) for piece in pieces)
    if view.view.axes is not None:
        columns = [rows.values.copy() for rows in matrix_rows(reader, view, 40)]
        matrix = expected.reshape(expected.shape[-2:]).T
        assert np.array_equal(np.concatenate(columns, axis=1), matrix)


def test_a_long_vector_is_read_in_pieces() -> None:
    """Memory does not follow the largest dimension."""
    reader, tensor, values = stored((1000,), "F32")
    pieces = [bytes(piece) for piece in tensor_pieces(reader, tensor, 64)]
    assert max(map(len, pieces)) == 64
    assert b"".join(pieces) == values.tobytes()


def test_rows_that_lie_close_are_read_together() -> None:
    """One expert's half of a transposed matrix: not a call for each of its short rows."""
    reader, tensor, values = stored((2, 512, 64), "BF16")
    selection = ((1, 2, 1), (0, 512, 1), (1, 64, 2))
    view = view_of(tensor, "up", selection, shape=(32, 512), axes=(0, 2, 1))
    assert read_all(reader, view) == cut(values, selection).tobytes()
    assert reader.calls == 1
    assert reader.read <= 2 * view.size


@given(views(), st.data())
def test_rows_of_the_output(
    made: tuple[Any, TensorInfo, NDArray[Any]], data: st.DataObject
) -> None:
    """Any of them, also of what is stored transposed."""
    reader, view, expected = made
    assert view.view is not None
    values = expected.reshape(expected.shape[-2:]).T if view.view.axes else expected.reshape(1, -1)
    rows, size = row_layout(view)
    assert (rows, size) == (len(values), values[0].nbytes)
    first = data.draw(st.integers(0, rows - 1))
    count = data.draw(st.integers(1, rows - first))
    if not view.view.axes:
        first, count = 0, 1
    assert output_rows(reader, view, first, count) == values[first : first + count].tobytes()


def test_rows_that_lie_far_apart_are_read_one_by_one() -> None:
    """What lies between them is not read."""
    reader, tensor, values = stored((16, 64 * 1024), "F32")
    selection = ((0, 16, 1), (100, 200, 1))
    view = view_of(tensor, "v", selection, shape=(16, 100))
    assert read_all(reader, view) == cut(values, selection).tobytes()
    assert (reader.calls, reader.read) == (16, view.size)
