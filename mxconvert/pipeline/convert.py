"""What happens to the bytes of one part: copied, transposed, quantized or dequantized.

Plain weights go to the kernels as they are stored. What has to be dequantized or transposed
first goes through in chunks that stay in cache; `chunk_bytes` says what they take.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from mxconvert.errors import SourceError
from mxconvert.fp8 import (
    block_factors,
    has_bf16,
    has_block_factors,
    scale_of,
    stored_shape,
    to_bf16,
)
from mxconvert.model import BLOCK_SIZE, CODES_DTYPE, SCALE_SUFFIX, Action
from mxconvert.quantize import ErrorSums
from mxconvert.safetensors_format import DTYPE_BITS, num_elements
from mxconvert.source.gather import read_tensor, tensor_pieces
from mxconvert.source.rows import stored_values
from mxconvert.source.scales import load_scales, read_scales

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from mxconvert.model import Item, TensorInfo
    from mxconvert.pipeline.pieces import Part
    from mxconvert.quantize import NonFinite, Quantizer
    from mxconvert.source import SourceReader
    from mxconvert.source.scales import Scales

    Array = NDArray[Any]

CHUNK_ELEMENTS = 128 * 1024
"""Elements that are dequantized or transposed at a time, unless 32 rows are more."""

_E8M0_STORED, _E8M0_NAN = "U8", 255
_SCALES_KEPT = 1024 * 1024
_FLOAT_BYTES = 16  # float32 values, their factors, the product's transpose and a mask


class Converter:
    """Reads and converts parts; one instance serves all threads."""

    def __init__(self, reader: SourceReader, quantizer: Quantizer) -> None:
        self._reader = reader
        self._quantizer = quantizer
        self._lock = threading.Lock()
        self._scales: dict[str, Scales] = {}

    @property
    def rule(self) -> str:
        """The scale rule."""
        return self._quantizer.rule

    def read(self, part: Part, data: memoryview) -> None:
        """Read a part's source bytes, in the order of their storage."""
        read_tensor(self._reader, part.item.source, part.begin, data)

    def read_scales(self, part: Part, scales: memoryview) -> None:
        """Read the scales of a part that is MXFP4."""
        read_tensor(self._reader, scale_of(part.item.source).tensor, part.first_block, scales)

    def scan(self, part: Part, data: memoryview) -> NonFinite:
        """Count what is not finite in a part that is copied."""
        return self._quantizer.scan(data, part.item.source.dtype)

    @staticmethod
    def check_scales(part: Part, data: memoryview) -> None:
        """Look at E8M0 scales that are copied, those of weights that are MXFP4 already.

        Raises:
            SourceError: One is NaN (byte 255), so that its block has no values.
        """
        tensor = part.item.source
        if tensor.dtype != _E8M0_STORED or not tensor.name.endswith(SCALE_SUFFIX):
            return
        bad = np.flatnonzero(np.frombuffer(data, np.uint8) == _E8M0_NAN)
        if bad.size:
            row, block = divmod(part.first_element + int(bad[0]), tensor.shape[-1])
            raise SourceError(
                f"{tensor.file}: tensor {tensor.stored.name!r}: scales of {tensor.name!r} are 255, "
                f"which is NaN; the first is row {row}, block {block}",
                hint="mend the checkpoint: MXFP4 is copied as it is, never made again",
                code="non-finite",
            )

    def quantize(
        self,
        part: Part,
        data: memoryview,
        packed: memoryview,
        scales: memoryview,
        sums: ErrorSums | None,
    ) -> int:
        """Quantize a part; return how many of its values are not finite.

        Args:
            part: Of a matrix; of a transposed one, whole multiples of 32 stored rows.
            data: Its bytes as stored.
            packed: For the codes of the part; of a transposed one those of the whole matrix.
            scales: For the scales, likewise.
            sums: What quantization does to the values is added here.
        """
        source = part.item.source
        if source.scale is None and not part.transposed:
            return self._quantizer.quantize(data, source.dtype, packed, scales, sums=sums).count
        if part.transposed:
            return self._quantize_transposed(part, data, (packed, scales), sums)
        return self._quantize_scaled(part, data, (packed, scales), sums)

    def _quantize_scaled(
        self,
        part: Part,
        data: memoryview,
        out: tuple[memoryview, memoryview],
        sums: ErrorSums | None,
    ) -> int:
        """Quantize rows of scaled FP8 that are stored as they are written."""
        source = part.item.source
        factors = self.factors(part)
        if factors is not None:
            found = self._quantizer.quantize_scaled(
                data, source.dtype, factors.data, *out, sums=sums
            )
            return found.count
        count = block = 0
        for _, values in self._chunks(part, data):
            blocks = values.size // BLOCK_SIZE
            packed = out[0][block * BLOCK_SIZE // 2 : (block + blocks) * BLOCK_SIZE // 2]
            count += self._quantize_rows(part, values, (packed, out[1][block:][:blocks]), sums)
            block += blocks
        return count

    def _quantize_transposed(
        self,
        part: Part,
        data: memoryview,
        out: tuple[memoryview, memoryview],
        sums: ErrorSums | None,
    ) -> int:
        """Quantize stored rows that are columns of the output, and put them into the whole."""
        rows, count = part.item.source.shape[0], 0
        for first, values in self._chunks(part, data):
            blocks = values.size // BLOCK_SIZE
            made = memoryview(bytearray(blocks * BLOCK_SIZE // 2)), memoryview(bytearray(blocks))
            count += self._quantize_rows(part, np.ascontiguousarray(values.T), made, sums)
            place_codes(made, out, rows, first)
        return count

    def _quantize_rows(
        self,
        part: Part,
        values: Array,
        out: tuple[memoryview, memoryview],
        sums: ErrorSums | None,
    ) -> int:
        source = part.item.source
        dtype = source.dtype if source.scale is None else "F32"
        some = ErrorSums() if sums is not None else None
        flat = values.reshape(-1).data.cast("B")
        found = self._quantizer.quantize(flat, dtype, *out, sums=some)
        if sums is not None and some is not None:
            sums.add(some)
        return found.count

    def widen(self, part: Part, data: memoryview, output: memoryview) -> int:
        """Make BF16 of scaled FP8, or transpose what is copied; return what BF16 cannot hold.

        Args:
            part: Of a matrix.
            data: Its bytes as stored.
            output: For the part; of a transposed one for the whole matrix.
        """
        source, count = part.item.source, 0
        factors = None if part.transposed or source.scale is None else self.factors(part)
        if factors is not None:
            return self._quantizer.widen_scaled(data, source.dtype, factors.data, output).count
        for first, values in self._chunks(part, data):
            if source.scale is not None:
                count += int((~has_bf16(values)).sum())
                values = to_bf16(values)  # noqa: PLW2901
            whole = np.frombuffer(output, values.dtype)
            if part.transposed:
                _place(values.T, whole.reshape(source.shape), first)
            else:
                begin = first * source.shape[1] - part.first_element
                whole[begin : begin + values.size] = values.reshape(-1)
        return count

    def decode(self, data: memoryview, scales: memoryview, output: memoryview) -> int:
        """Make BF16 of MXFP4; return how many of its values BF16 cannot hold."""
        return self._quantizer.dequantize(data, scales, output)

    def unfit(self, scales: memoryview, output: memoryview) -> int:
        """Return how many values of what was decoded BF16 cannot hold."""
        return self._quantizer.unfit(scales, output)

    def factors(self, part: Part) -> NDArray[np.float32] | None:
        """Return the factor of each block of a part of scaled FP8, which the kernels take.

        ``None`` if some block has several, and where a scale is zero: it needs a closer look.
        """
        source = part.item.source
        grid = self.scales_of(source).grid
        if not has_block_factors(source) or not grid.all():
            return None
        return block_factors(source, grid, part.first_block, part.num_elements // BLOCK_SIZE)

    def _chunks(self, part: Part, data: memoryview) -> Iterator[tuple[int, Array]]:
        """Yield a stored row's number and some rows from it on, dequantized or as integers."""
        source = part.item.source
        columns = stored_shape(source)[1]
        count, row = _chunk_rows(part.item), part.first_element // columns
        size = count * columns * DTYPE_BITS[source.dtype] // 8
        for begin in range(0, len(data), size):
            grid = None if source.scale is None else self.scales_of(source).grid
            yield row, stored_values(source, grid, row, data[begin : begin + size])
            row += count

    def scales_of(self, weight: TensorInfo) -> Scales:
        """Return the scales of an FP8 weight, kept for its next part."""
        with self._lock:
            scales = self._scales.get(weight.name)
        if scales is None:
            scales = load_scales(self._reader, weight)
            with self._lock:
                self._scales[weight.name] = scales
                kept = sum(some.grid.nbytes for some in self._scales.values())
                while kept > _SCALES_KEPT and len(self._scales) > 1:
                    kept -= self._scales.pop(next(iter(self._scales))).grid.nbytes
        return scales

    # ------------------------------------------------------------------------- diagnosis

    def nonfinite_error(self, item: Item) -> SourceError:
        """Scan a whole matrix and say what is wrong with it."""
        tensor = item.source
        columns = stored_shape(tensor)[1]
        grid = None if tensor.scale is None else read_scales(self._reader, tensor).grid
        count, first, row = 0, num_elements(tensor.shape), 0
        for data in tensor_pieces(self._reader, tensor, CHUNK_ELEMENTS):
            bad = np.flatnonzero(_is_bad(item, grid, row, data))
            if bad.size:
                count += bad.size
                first = min(first, int(output_elements(tensor, row * columns + bad).min()))
            row += len(data) * 8 // DTYPE_BITS[tensor.dtype] // columns
        return _nonfinite(tensor, count, first)


def _is_bad(item: Item, grid: Array | None, first_row: int, data: memoryview) -> Array:
    values = stored_values(item.source, grid, first_row, data)
    if grid is not None:
        return ~(has_bf16(values) if item.action is Action.DEQUANTIZE else np.isfinite(values))
    exponent = values.dtype.type(_EXPONENTS[item.source.dtype])
    bad: Array = (values & exponent) == exponent
    return bad


_EXPONENTS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}


def output_elements(tensor: TensorInfo, elements: Array) -> Array:
    """Return where in a tensor's output elements of its storage are."""
    if not tensor.transposed:
        return elements
    rows, columns = tensor.shape
    placed: Array = elements % rows * columns + elements // rows
    return placed


def chunk_bytes(item: Item) -> int:
    """Return the memory that converting an item takes beside its buffers."""
    source = item.source
    if source.dtype == CODES_DTYPE or (source.scale is None and not item.source.transposed):
        return 0
    elements = _chunk_rows(item) * stored_shape(source)[1]
    return elements * (_FLOAT_BYTES if source.scale else 2 * DTYPE_BITS[source.dtype] // 8)


def _chunk_rows(item: Item) -> int:
    """Return the stored rows that are converted at a time."""
    unit = BLOCK_SIZE if item.source.transposed and item.action is Action.QUANTIZE else 1
    return max(1, CHUNK_ELEMENTS // (stored_shape(item.source)[1] * unit)) * unit


def place_codes(
    made: tuple[memoryview, memoryview],
    whole: tuple[memoryview, memoryview],
    rows: int,
    first: int,
) -> None:
    """Put codes and scales of some columns of a matrix into the whole.

    Args:
        made: Codes ``[rows, columns / 2]`` and scales ``[rows, columns / 32]``.
        whole: Those of the matrix.
        rows: Of the matrix.
        first: The number of the first column.
    """
    for some, all_, per in zip(made, whole, (2, BLOCK_SIZE), strict=True):
        columns = np.frombuffer(some, np.uint8).reshape(rows, -1)
        _place(columns, np.frombuffer(all_, np.uint8).reshape(rows, -1), first // per)


def _place(columns: Array, whole: Array, first: int) -> None:
    whole[:, first : first + columns.shape[1]] = columns


def _nonfinite(tensor: TensorInfo, count: int, element: int) -> SourceError:
    row, column = divmod(element, tensor.shape[-1])
    keep = (
        f", or keep the tensor as it is with --exclude '{tensor.name.removesuffix('.weight')}'; "
        "either way start over with --overwrite"
    )
    return SourceError(
        f"{tensor.file}: tensor {tensor.name!r}: {count} of {num_elements(tensor.shape)} values "
        f"are NaN or infinite; the first is element {element} (row {row}, column {column}, "
        f"block {element // BLOCK_SIZE})",
        hint=f"mend the checkpoint{keep if tensor.scale is None else ' and its scales'}",
        code="non-finite",
    )
