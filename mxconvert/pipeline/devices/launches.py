"""Which launches make the output of a piece. Pure: no device, no I/O.

Neighbouring parts that are made alike go into one launch, so that many small experts cost
no more than a large one. What a device does not do (copies, weights whose blocks of 32 have
several scales) is left to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from mxconvert.model import BLOCK_SIZE, CODES_DTYPE, Action

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mxconvert.pipeline.pieces import Part, Piece

MOST_LAUNCHES = 256
"""Of a piece; one that needs more stays on the host."""

FACTOR_BYTES = 4
_WHOLE = frozenset(("BF16", "F16", "F32"))
_GAP = 64 * 1024  # bytes that are copied along rather than begin another copy


class Kind(StrEnum):
    """What a launch does."""

    QUANTIZE = "quantize"
    DECODE = "decode"
    WIDEN = "widen"


@dataclass(frozen=True, slots=True)
class Launch:
    """Parts that one launch makes; their bytes follow each other.

    Attributes:
        kind: What is done.
        parts: To what.
        rule: The scale rule.
        number: Which of the piece's launches it is.
        first_program: The number of its first program among those of the piece.
        first_factor: The number of its first factor among those of the piece.
        measure: Whether the error is summed up.
    """

    kind: Kind
    parts: tuple[Part, ...]
    rule: str
    number: int
    first_program: int
    first_factor: int
    measure: bool

    @property
    def dtype(self) -> str:
        """The safetensors dtype of the source."""
        return self.parts[0].item.source.dtype

    @property
    def blocks(self) -> int:
        """Blocks of 32 elements."""
        return sum(part.scales_size for part in self.parts)

    @property
    def scaled(self) -> bool:
        """Whether it needs a factor for each block."""
        return self.kind is not Kind.DECODE and self.parts[0].item.source.scale is not None

    @property
    def transposed(self) -> tuple[int, int] | None:
        """Rows and columns of the output, if the source is stored column by column."""
        part = self.parts[0]
        if not part.transposed:
            return None
        rows = part.item.source.shape[0]
        return rows, part.num_elements // rows

    @property
    def source(self) -> tuple[int, int]:
        """Begin and end in the piece's input; for MXFP4 with the scales."""
        last = self.parts[-1]
        end = last.at + last.size
        if last.stored_scales_size:
            end = last.scales_at + last.stored_scales_size
        return self.parts[0].at, end

    @property
    def output(self) -> tuple[int, int]:
        """Begin and end in the piece's output."""
        begin, size = self.parts[0].out_at, self.parts[0].output_size
        if self.kind is Kind.QUANTIZE:
            size = sum(part.packed_size for part in self.parts)
        return begin, begin + size

    @property
    def scales(self) -> tuple[int, int]:
        """Begin and end in the piece's scales; empty unless it makes some."""
        begin = self.parts[0].scales_out_at
        return begin, begin + (self.blocks if self.kind is Kind.QUANTIZE else 0)

    @property
    def factors(self) -> tuple[int, int]:
        """Begin and end of its factors, in bytes."""
        begin = self.first_factor * FACTOR_BYTES
        return begin, begin + (self.blocks * FACTOR_BYTES if self.scaled else 0)

    def programs(self, blocks_each: int) -> Iterator[tuple[Part, int, int]]:
        """Yield each part with the numbers of its first program and of the one behind its last."""
        first = self.first_program
        for part in self.parts:
            end = first + -(-part.scales_size // blocks_each)
            yield part, first, end
            first = end


def plan_launches(
    piece: Piece,
    rule: str,
    *,
    measure: bool,
    blocks_each: int,
    has_factors: Callable[[Part], bool],
) -> tuple[Launch, ...]:
    """Return the launches of a piece, in the order of its bytes; none if a device cannot help.

    Args:
        piece: The piece.
        rule: The scale rule.
        measure: Whether to sum up errors; then a program serves one part only.
        blocks_each: Blocks for each program.
        has_factors: Whether each block of a part of scaled FP8 has one factor.
    """
    launches: list[Launch] = []
    program = factor = 0
    for kind, parts in _groups(piece, measure, blocks_each, has_factors):
        made = Launch(kind, parts, rule, len(launches), program, factor, measure)
        launches.append(made)
        program = max(end for _, _, end in made.programs(blocks_each))
        factor += made.blocks if made.scaled else 0
    return tuple(launches) if len(launches) <= MOST_LAUNCHES else ()


def _groups(
    piece: Piece, measure: bool, blocks_each: int, has_factors: Callable[[Part], bool]
) -> Iterator[tuple[Kind, tuple[Part, ...]]]:
    group: list[Part] = []
    kind_of_group: Kind | None = None
    for part in piece.parts:
        kind = _kind(part, has_factors)
        whole_programs = not measure or sum(p.scales_size for p in group) % blocks_each == 0
        if group and not (kind is kind_of_group and whole_programs and _joins(group[-1], part)):
            yield kind_of_group or Kind.QUANTIZE, tuple(group)
            group = []
        if kind is not None:
            group.append(part)
            kind_of_group = kind
    if group:
        yield kind_of_group or Kind.QUANTIZE, tuple(group)


def _kind(part: Part, has_factors: Callable[[Part], bool]) -> Kind | None:
    """Return what a device does with a part, ``None`` for nothing."""
    source, action = part.item.source, part.item.action
    if action is Action.COPY or not part.size:
        return None
    if action is Action.DEQUANTIZE:
        if source.dtype == CODES_DTYPE:
            return Kind.DECODE if part.stored_scales_size and not part.transposed else None
        return Kind.WIDEN if not part.transposed and has_factors(part) else None
    if source.scale is None:
        return Kind.QUANTIZE if source.dtype in _WHOLE else None
    return Kind.QUANTIZE if not part.transposed and has_factors(part) else None


def _joins(one: Part, other: Part) -> bool:
    """Whether two parts are made alike and follow each other everywhere."""
    mine, its = one.item.source, other.item.source
    return (
        one.item.action is Action.QUANTIZE
        and mine.dtype == its.dtype
        and (mine.scale is None) == (its.scale is None)
        and not (one.transposed or other.transposed)
        and other.at == one.at + one.size
        and other.out_at == one.out_at + one.packed_size
        and other.scales_out_at == one.scales_out_at + one.scales_size
        and one.num_elements % BLOCK_SIZE == 0
    )


def joined(ranges: Iterable[tuple[int, int]], gap: int = 0) -> Iterator[tuple[int, int]]:
    """Yield ascending ranges, those joined between which at most ``gap`` bytes lie."""
    current: tuple[int, int] | None = None
    for begin, end in ranges:
        if begin == end:
            continue
        if current is not None and begin - current[1] <= gap:
            current = current[0], end
            continue
        if current is not None:
            yield current
        current = begin, end
    if current is not None:
        yield current


def copies_in(launches: tuple[Launch, ...]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a piece's input that its launches read."""
    return joined((launch.source for launch in launches), _GAP)
