"""What happens to the bytes of one part: copied, quantized or dequantized."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from mxconvert.errors import SourceError
from mxconvert.fp8 import dequantize_rows, stored_shape, to_bf16
from mxconvert.model import BLOCK_SIZE
from mxconvert.quantize import NonFinite
from mxconvert.safetensors_format import DTYPE_BITS, num_elements
from mxconvert.source.gather import read_tensor, tensor_pieces
from mxconvert.source.scales import load_scales

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mxconvert.model import TensorInfo
    from mxconvert.pipeline.pieces import Part
    from mxconvert.quantize import ErrorSums, Quantizer
    from mxconvert.source import SourceReader
    from mxconvert.source.scales import Scales

_UNSIGNED = {2: np.uint16, 4: np.uint32}
_SCALES_KEPT = 64


class Converter:
    """Reads and converts parts; one instance serves all threads."""

    def __init__(self, reader: SourceReader, quantizer: Quantizer) -> None:
        self._reader = reader
        self._quantizer = quantizer
        self._lock = threading.Lock()
        self._scales: dict[str, Scales] = {}

    def read(self, part: Part, data: memoryview) -> None:
        """Read a part's source bytes, in the order of their storage."""
        read_tensor(self._reader, part.item.source, part.begin, data)

    def scan(self, part: Part, data: memoryview) -> NonFinite:
        """Count what is not finite in a part that is copied."""
        return self._quantizer.scan(data, part.item.source.dtype)

    def quantize(
        self,
        part: Part,
        data: memoryview,
        packed: memoryview,
        scales: memoryview,
        sums: ErrorSums | None,
    ) -> NonFinite:
        """Quantize a part.

        Args:
            part: Of a matrix; of a transposed one, whole multiples of 32 stored rows.
            data: Its bytes as stored.
            packed: For the codes: those of each output row, one row after the other.
            scales: For the scales, likewise.
            sums: What quantization does to the values is added here.
        """
        source = part.item.source
        if source.scale is None and not part.held:
            return self._quantizer.quantize(data, source.dtype, packed, scales, sums=sums)
        values = self._values(part, data) if source.scale else self._bits(part, data)
        if part.held:
            values = np.ascontiguousarray(values.T)
        dtype = source.dtype if source.scale is None else "F32"
        flat = values.reshape(-1).data.cast("B")
        return self._quantizer.quantize(flat, dtype, packed, scales, sums=sums)

    def dequantize(self, part: Part, data: memoryview, output: memoryview) -> NonFinite:
        """Make BF16 of a part of scaled FP8, rows of the output being rows of the storage."""
        values = self._values(part, data)
        finite = np.isfinite(values)
        if not finite.all():
            return NonFinite(int((~finite).sum()), int(np.argmin(finite)))
        np.frombuffer(output, np.uint16)[:] = to_bf16(values).reshape(-1)
        return NonFinite(0, -1)

    def _values(self, part: Part, data: memoryview) -> NDArray[np.float32]:
        """Return the stored rows of a part of scaled FP8."""
        source = part.item.source
        first_row = part.first_element // stored_shape(source)[1]
        return dequantize_rows(source, self._scales_of(source).grid, first_row, data)

    @staticmethod
    def _bits(part: Part, data: memoryview) -> NDArray[Any]:
        """Return the stored rows of a part as unsigned integers of the elements' width."""
        source = part.item.source
        kind = _UNSIGNED[DTYPE_BITS[source.dtype] // 8]
        return np.frombuffer(data, kind).reshape(-1, stored_shape(source)[1])

    def scales_digest(self, weight: TensorInfo) -> str:
        """Return the XXH3-128 of the scales of an FP8 weight."""
        return self._scales_of(weight).digest

    def _scales_of(self, weight: TensorInfo) -> Scales:
        """Return the scales of an FP8 weight, kept for its next part."""
        with self._lock:
            scales = self._scales.get(weight.name)
        if scales is None:
            scales = load_scales(self._reader, weight)
            with self._lock:
                while len(self._scales) >= _SCALES_KEPT:
                    del self._scales[next(iter(self._scales))]
                self._scales[weight.name] = scales
        return scales

    # ------------------------------------------------------------------------- diagnosis

    def nonfinite_error(self, tensor: TensorInfo) -> SourceError:
        """Scan a whole matrix and say what is wrong with it."""
        columns = stored_shape(tensor)[1]
        count, row, first = 0, 0, -1
        for data in tensor_pieces(self._reader, tensor):
            found = self._scan_rows(tensor, row, data)
            if found and first < 0:
                first = row * columns + found.first
            count += found.count
            row += len(data) * 8 // DTYPE_BITS[tensor.dtype] // columns
        return _nonfinite(tensor, count, divmod(first, columns))

    def _scan_rows(self, tensor: TensorInfo, first_row: int, data: memoryview) -> NonFinite:
        if tensor.scale is None:
            return self._quantizer.scan(data, tensor.dtype)
        finite = np.isfinite(dequantize_rows(tensor, self._scales_of(tensor).grid, first_row, data))
        count = int((~finite).sum())
        return NonFinite(count, int(np.argmin(finite)) if count else -1)


def scatter(
    part: Part, packed: memoryview, scales: memoryview, held: tuple[memoryview, memoryview]
) -> None:
    """Put the blocks of a transposed matrix's part where they belong in its whole output.

    Args:
        part: Stored rows, which are columns of the output.
        packed: Codes of the part, output row by output row.
        scales: Scales of the part, likewise.
        held: Codes ``[N, K/2]`` and scales ``[N, K/32]`` of the whole matrix.
    """
    rows, columns = part.item.source.shape
    width = part.num_elements // rows
    first = part.first_element // rows
    for made, whole, per in ((packed, held[0], 2), (scales, held[1], BLOCK_SIZE)):
        target = np.frombuffer(whole, np.uint8).reshape(rows, columns // per)
        begin = first // per
        target[:, begin : begin + width // per] = np.frombuffer(made, np.uint8).reshape(rows, -1)


def _nonfinite(tensor: TensorInfo, count: int, place: tuple[int, int]) -> SourceError:
    swapped = tensor.view is not None and tensor.view.axes is not None
    row, column = reversed(place) if swapped else place
    columns, total = tensor.shape[-1], num_elements(tensor.shape)
    element = row * columns + column
    return SourceError(
        f"{tensor.file}: tensor {tensor.name!r}: {count} of {total} values are NaN or "
        f"infinite; the first is element {element} (row {row}, column {column}, "
        f"block {element // BLOCK_SIZE})",
        hint="mend the checkpoint, or keep the tensor as it is with --exclude "
        f"'{tensor.name.removesuffix('.weight')}'; either way start over with --overwrite",
        code="non-finite",
    )
