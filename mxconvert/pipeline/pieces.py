"""Cut an output file into pieces that one thread converts at a time.

A piece covers a few MiB of source: a run of rows of a large tensor, or many small
tensors together, so that neither memory nor per-call overhead depends on their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.model import BLOCK_SIZE, CODES_DTYPE, Action
from mxconvert.safetensors_format import DTYPE_BITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mxconvert.model import Item, OutputFile

PIECE_SIZE = 4 * 1024 * 1024
"""Source bytes of a piece: small enough to stay in cache from read to write."""
MIN_PIECE_SIZE = 256 * 1024
PACKED_SHARE = 4  # a source of 16-bit elements is 4 times the size of its codes
SCALE_SHARE = 64  # and 64 times that of its scales
_ALIGNMENT = 64
_BLOCK_BYTES = BLOCK_SIZE // 2 + 1
_FINE = 32  # units after which the output of any dtype is whole bytes


@dataclass(frozen=True, slots=True)
class Part:
    """A byte range of one source tensor within a piece.

    Attributes:
        item: What becomes of the tensor.
        begin: First byte, counted from the tensor's start in the order of its storage.
        size: Bytes.
        at: Where they are read to in the piece's input buffer.
        out_at: Where their output goes in the piece's output buffer (unless copied).
        scales_out_at: Where the scales of a quantized part go in the piece's scales buffer.
        last: Whether the tensor ends here.
    """

    item: Item
    begin: int
    size: int
    at: int
    out_at: int
    scales_out_at: int
    last: bool

    @property
    def whole(self) -> bool:
        """Whether the part is the whole tensor."""
        return self.begin == 0 and self.last

    @property
    def transposed(self) -> bool:
        """Whether the output is the transpose of what is stored.

        Stored rows are then columns of the output: no row of it is complete before the whole
        tensor is read, so it is held in memory until then.
        """
        return self.item.source.transposed

    @property
    def held_size(self) -> int:
        """Bytes of output that wait for the rest of the tensor if this is its first part."""
        return 0 if self.whole else held_size(self.item)

    @property
    def output_size(self) -> int:
        """Bytes that the part makes, codes and scales together."""
        return _output_size(self.item, self.size)

    @property
    def scales_at(self) -> int:
        """Where its scales are read to in the piece's input buffer, if `stored_scales_size`."""
        return self.at + _aligned(self.size)

    @property
    def stored_scales_size(self) -> int:
        """Bytes of scales that MXFP4 is read with, 0 for all else."""
        return _stored_scales_size(self.item, self.size)

    @property
    def packed_size(self) -> int:
        """Bytes of codes this part makes."""
        return self.num_elements // 2

    @property
    def scales_size(self) -> int:
        """Bytes of scales this part makes."""
        return self.num_elements // BLOCK_SIZE

    @property
    def first_block(self) -> int:
        """Number of the part's first block within the tensor, in the order of its storage."""
        return self.first_element // BLOCK_SIZE

    @property
    def first_element(self) -> int:
        """Number of the part's first element, in the order of its storage."""
        return _elements(self.item, self.begin)

    @property
    def num_elements(self) -> int:
        """Elements of the part."""
        return _elements(self.item, self.size)


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive parts of one output file; ``index`` counts from 0 within the file."""

    index: int
    parts: tuple[Part, ...]
    source_bytes: int


def output_capacity(piece_size: int) -> int:
    """Return the output bytes that a piece of ``piece_size`` source bytes can make."""
    return piece_size // PACKED_SHARE + piece_size // SCALE_SHARE


def scales_capacity(piece_size: int) -> int:
    """Return the bytes of scales among them: a block has 16 bytes of codes and one scale."""
    return output_capacity(piece_size) // _BLOCK_BYTES


def cut_file(file: OutputFile, piece_size: int) -> Iterator[Piece]:
    """Yield the pieces of a file in the order of its bytes.

    Args:
        file: The planned file.
        piece_size: Source bytes a piece may have; a multiple of 4096, so that parts
            end between blocks.
    """
    capacity = output_capacity(piece_size)
    index, parts, used, made, scales = 0, list[Part](), 0, 0, 0
    for item in file.items:
        begin, most = 0, _largest_part(item, piece_size)
        while True:
            left = item.source.size - begin
            size = min(left, most)
            output = _output_size(item, size)
            # A tensor that fits into a piece is not cut; a larger one starts its own.
            fits = left <= most and used + _input_size(item, left) <= piece_size
            if used and not (fits and made + scales + output <= capacity):
                yield _piece(index, parts)
                index, parts, used, made, scales = index + 1, [], 0, 0, 0
                continue
            parts.append(Part(item, begin, size, used, made, scales, last=size == left))
            used += _aligned(_input_size(item, size))
            of_scales = output // _BLOCK_BYTES if item.action is Action.QUANTIZE else 0
            made, scales = made + output - of_scales, scales + of_scales
            begin += size
            if size == left:
                break
    if parts:
        yield _piece(index, parts)


def _piece(index: int, parts: list[Part]) -> Piece:
    return Piece(index, tuple(parts), sum(part.size + part.stored_scales_size for part in parts))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _elements(item: Item, size: int) -> int:
    return size * 8 // DTYPE_BITS[item.source.dtype]


def _stored_scales_size(item: Item, size: int) -> int:
    return _elements(item, size) // BLOCK_SIZE if item.source.dtype == CODES_DTYPE else 0


def _input_size(item: Item, size: int) -> int:
    """Return the bytes of the input buffer that ``size`` bytes of a source take."""
    scales = _stored_scales_size(item, size)
    return _aligned(size) + scales if scales else size


def _output_size(item: Item, size: int) -> int:
    """Return the bytes of the output buffer that ``size`` bytes of a source take."""
    if item.action is Action.COPY:
        return size if item.source.transposed else 0
    elements = _elements(item, size)
    if item.action is Action.DEQUANTIZE:
        return 2 * elements
    return elements // 2 + elements // BLOCK_SIZE


def granule(item: Item) -> int:
    """Return the bytes that a part of a source has to be a multiple of.

    Whole runs of a view, a block's 32 runs of a transposed one, whole rows where scales
    go by rows; a plain tensor may be cut between any two blocks.
    """
    source = item.source
    if source.view is not None:
        run = source.view.columns * DTYPE_BITS[source.stored.dtype] // 8
        unit = BLOCK_SIZE if item.source.transposed and item.action is Action.QUANTIZE else 1
        return max(1, run * unit)
    if source.scale is not None:
        return source.shape[-1] * DTYPE_BITS[source.dtype] // 8
    return 1


def _largest_part(item: Item, piece_size: int) -> int:
    """Return the most bytes of a source that one part may have."""
    if item.action is Action.COPY and item.source.view is None:
        return piece_size
    unit, most = granule(item), piece_size
    if per_many := _output_size(item, unit * _FINE):
        most = min(most, output_capacity(piece_size) * _FINE // per_many * unit)
    return max(unit, most // unit * unit)


def largest_granule(items: Iterable[Item]) -> int:
    """Return the source bytes that the pieces of items must at least have room for."""
    return max(map(_needed_room, items), default=0)


def _needed_room(item: Item) -> int:
    unit = min(granule(item), item.source.size)
    # The output buffer grows with the input buffer, and has to hold what a unit becomes.
    output = _output_size(item, unit)
    return max(unit, -(-output * SCALE_SHARE // (SCALE_SHARE // PACKED_SHARE + 1)))


def largest_held(items: Iterable[Item], piece_size: int) -> int:
    """Return the bytes of output kept until a cut tensor has been read to its end."""
    cut = (item for item in items if item.source.size > _largest_part(item, piece_size))
    return max(map(held_size, cut), default=0)


def kinds_of(files: Iterable[OutputFile]) -> list[Item]:
    """Return one item of each kind: those of a kind need the same memory."""
    kinds: dict[tuple[object, ...], Item] = {}
    for file in files:
        for item in file.items:
            source, view = item.source, item.source.view
            way = None if view is None else (view.columns, view.axes is None)
            kind = (item.action, source.dtype, source.shape, way, source.scale is None)
            kinds.setdefault(kind, item)
    return list(kinds.values())


def held_size(item: Item) -> int:
    """Return the bytes of output that wait for the whole tensor to be read, if it is cut.

    Scales, which follow all codes in the file; of a transposed tensor everything.
    """
    if item.source.transposed:
        return item.size
    if item.action is not Action.QUANTIZE:
        return 0
    scales = item.outputs[1]
    return scales.end - scales.begin
