"""Cut an output file into pieces that one thread converts at a time.

A piece covers a few MiB of source: a run of rows of a large tensor, or many small
tensors together, so that neither memory nor per-call overhead depends on their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.model import BLOCK_SIZE, Action
from mxconvert.safetensors_format import DTYPE_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxconvert.model import Item, OutputFile

PIECE_SIZE = 4 * 1024 * 1024
"""Source bytes of a piece: small enough to stay in cache from read to write."""
MIN_PIECE_SIZE = 256 * 1024
PACKED_SHARE = 4  # a source of 16-bit elements is 4 times the size of its codes
SCALE_SHARE = 64  # and 64 times that of its scales
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Part:
    """A byte range of one source tensor within a piece.

    Attributes:
        item: What becomes of the tensor.
        begin: First byte, counted from the tensor's start.
        size: Bytes.
        at: Where they are read to in the piece's input buffer.
        out_at: Where their output goes in the piece's output buffer (quantized parts).
        last: Whether the tensor ends here.
        packed_size: Bytes of codes this part makes (quantized parts, as the next two).
        scales_size: Bytes of scales it makes, one for each block.
        first_block: Number of its first block within the tensor.
    """

    item: Item
    begin: int
    size: int
    at: int
    out_at: int
    last: bool
    packed_size: int = 0
    scales_size: int = 0
    first_block: int = 0

    @property
    def whole(self) -> bool:
        """Whether the part is the whole tensor."""
        return self.begin == 0 and self.last


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive parts of one output file; ``index`` counts from 0 within the file."""

    index: int
    parts: tuple[Part, ...]
    source_bytes: int


def output_capacity(piece_size: int) -> int:
    """Return the output bytes that a piece of ``piece_size`` source bytes can make."""
    return piece_size // PACKED_SHARE + piece_size // SCALE_SHARE


def cut_file(file: OutputFile, piece_size: int) -> Iterator[Piece]:
    """Yield the pieces of a file in the order of its bytes.

    Args:
        file: The planned file.
        piece_size: Source bytes a piece may have; a multiple of 4096, so that parts
            end between blocks.
    """
    index, parts, used, made = 0, list[Part](), 0, 0
    for item in file.items:
        begin = 0
        while True:
            room = piece_size - used
            left = item.source.size - begin
            # A tensor that fits into a piece is not cut; a larger one starts its own.
            if left > room and used:
                yield Piece(index, tuple(parts), sum(part.size for part in parts))
                index, parts, used, made = index + 1, [], 0, 0
                continue
            size = min(left, piece_size)
            part = _cut(item, begin, size, used, made)
            parts.append(part)
            used += -(-size // _ALIGNMENT) * _ALIGNMENT
            made += part.packed_size + part.scales_size
            begin += size
            if part.last:
                break
    if parts:
        yield Piece(index, tuple(parts), sum(part.size for part in parts))


def _cut(item: Item, begin: int, size: int, at: int, out_at: int) -> Part:
    last = begin + size == item.source.size
    if item.action is not Action.QUANTIZE:
        return Part(item, begin, size, at, out_at, last)
    bits = DTYPE_BITS[item.source.dtype]
    blocks, first_block = (8 * count // bits // BLOCK_SIZE for count in (size, begin))
    return Part(
        item, begin, size, at, out_at, last, blocks * (BLOCK_SIZE // 2), blocks, first_block
    )


def largest_scales(file: OutputFile, piece_size: int) -> int:
    """Return the bytes of scales kept until a cut tensor's codes are all written."""
    return max(
        (
            item.outputs[1].end - item.outputs[1].begin
            for item in file.items
            if item.action is Action.QUANTIZE and item.source.size > piece_size
        ),
        default=0,
    )
