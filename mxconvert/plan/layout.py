"""Which output tensors share a file.

``experts``: what every rank needs in ``model-dense-*``, and a contiguous range of
experts over all layers in each ``model-experts-*``, so that an expert-parallel rank
owns whole files. ``layers``: one file per layer. ``source``: the source's own files.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.errors import UsageError
from mxconvert.model import FileRole, Layout, Options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

DENSE_CAP = 5_000_000_000
"""Largest ``model-dense`` file by default: 5 GB, the hub's customary shard size."""
EXPERTS_CAP = 5 * 1024**3
"""Largest ``model-experts`` file by default: 5 GiB."""
HEADER_CAP = 8_000_000
"""Estimated header bytes beyond which a file is split, far below the readers' 100 MB."""
PARALLEL_DEGREES = 64
"""Every power-of-two expert-parallel degree up to this owns whole files."""

_ENTRY_OVERHEAD = 96  # JSON around a tensor's name: dtype, shape, offsets


@dataclass(frozen=True, slots=True)
class Piece:
    """One source tensor on its way into a file.

    Attributes:
        key: Its name.
        source_file: Where the source tensor is stored.
        layer: Layer number, or ``None``.
        expert: Routed expert number, or ``None``.
        size: Bytes of its output tensors.
        header: Estimated bytes of its header entries.
    """

    key: str
    source_file: str
    layer: int | None
    expert: int | None
    size: int
    header: int

    @property
    def order(self) -> tuple[int, str]:
        """Sort key within files that are filled one after the other: by layer, then name."""
        return (-1 if self.layer is None else self.layer, self.key)


@dataclass(frozen=True, slots=True)
class Group:
    """The pieces of one file, with the file's name and role."""

    name: str
    role: FileRole
    experts: tuple[int, int] | None
    pieces: tuple[Piece, ...]


def estimated_header(names: Iterable[str]) -> int:
    """Return an upper estimate of the header bytes of tensors with these names."""
    return sum(len(name.encode()) + _ENTRY_OVERHEAD for name in names)


def group_pieces(pieces: Sequence[Piece], options: Options) -> list[Group]:
    """Distribute pieces over files.

    Raises:
        UsageError: Options that contradict the layout, or are out of range.
    """
    if options.experts_per_file is not None and options.layout is not Layout.EXPERTS:
        raise UsageError(
            f"--experts-per-file needs --layout experts, not {options.layout}",
            hint="drop one of the two",
        )
    if options.max_file_size is not None and options.layout is Layout.SOURCE:
        raise UsageError(
            "--max-file-size: --layout source keeps the source's own files, whatever their size",
            hint="drop one of the two",
        )
    if options.layout is Layout.SOURCE:
        return _by_source(pieces)
    if options.layout is Layout.LAYERS:
        return _by_layer(pieces, options)
    dense = [piece for piece in pieces if piece.expert is None]
    routed = [piece for piece in pieces if piece.expert is not None]
    return [*_dense_files(dense, options), *_expert_files(routed, options)]


def experts_per_file(num_experts: int, largest: Callable[[int], int], cap: int) -> int:
    """Return how many experts share a file.

    The largest divisor of E / gcd(E, 64) whose files stay within ``cap``, at least 1:
    then every rank of a power-of-two degree up to 64 that divides E owns whole files.

    Args:
        num_experts: E, routed experts per layer.
        largest: Bytes of the largest file for a number of experts per file.
        cap: Bytes a file may have.
    """
    quotient = num_experts // math.gcd(num_experts, PARALLEL_DEGREES)
    divisors = [r for r in range(quotient, 0, -1) if quotient % r == 0]
    return next((r for r in divisors if largest(r) <= cap), 1)


# -------------------------------------------------------------------------- by experts


def _expert_files(pieces: list[Piece], options: Options) -> list[Group]:
    if not pieces:
        if options.experts_per_file is not None:
            raise UsageError(
                "--experts-per-file: the model has no routed experts", hint="drop the option"
            )
        return []
    by_expert: dict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_expert[piece.expert or 0].append(piece)
    count = max(by_expert) + 1
    sizes = [sum(p.size + p.header for p in by_expert[e]) for e in range(count)]
    cap = options.max_file_size or EXPERTS_CAP

    def largest(per_file: int) -> int:
        return max(sum(sizes[e : e + per_file]) for e in range(0, count, per_file))

    per_file = options.experts_per_file
    if per_file is None:
        per_file = experts_per_file(count, largest, cap)
    if not 1 <= per_file <= count:
        raise UsageError(
            f"--experts-per-file {per_file}: expected 1 to {count}",
            hint=f"the model has {count} experts per layer",
        )
    groups = []
    for first in range(0, count, per_file):
        last = min(first + per_file, count) - 1
        members = [p for e in range(first, last + 1) for p in by_expert[e]]
        if members:
            groups += _split_experts(members, (first, last), cap)
    return groups


def _split_experts(members: list[Piece], experts: tuple[int, int], cap: int) -> list[Group]:
    stem = f"model-experts-{experts[0]:05d}-{experts[1]:05d}"
    members = sorted(members, key=lambda p: p.order)
    parts = _fill(members, cap, boundary=lambda p: p.layer)
    if len(parts) == 1:
        return [Group(f"{stem}.safetensors", FileRole.EXPERTS, experts, tuple(parts[0]))]
    return [
        Group(
            f"{stem}-part-{number:05d}-of-{len(parts):05d}.safetensors",
            FileRole.EXPERTS,
            experts,
            tuple(part),
        )
        for number, part in enumerate(parts, 1)
    ]


# ------------------------------------------------------------------- dense, layers, source


def _dense_files(pieces: list[Piece], options: Options) -> list[Group]:
    if not pieces:
        return []
    cap = options.max_file_size or DENSE_CAP
    parts = _fill(sorted(pieces, key=lambda p: p.order), cap, boundary=lambda p: p.key)
    return [
        Group(
            f"model-dense-{number:05d}-of-{len(parts):05d}.safetensors",
            FileRole.DENSE,
            None,
            tuple(part),
        )
        for number, part in enumerate(parts, 1)
    ]


def _by_layer(pieces: Sequence[Piece], options: Options) -> list[Group]:
    layers: dict[int, list[Piece]] = defaultdict(list)
    rest = []
    for piece in pieces:
        if piece.layer is None:
            rest.append(piece)
        else:
            layers[piece.layer].append(piece)
    groups = _dense_files(rest, options)
    cap = options.max_file_size or None
    for layer, members in sorted(layers.items()):
        parts = _fill(sorted(members, key=lambda p: p.order), cap, boundary=lambda p: p.key)
        for number, part in enumerate(parts, 1):
            suffix = f"-part-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
            name = f"model-layer-{layer:05d}{suffix}.safetensors"
            groups.append(Group(name, FileRole.MIXED, None, tuple(part)))
    return groups


def _by_source(pieces: Sequence[Piece]) -> list[Group]:
    files: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        files[piece.source_file].append(piece)
    return [
        Group(name, FileRole.MIXED, None, tuple(members)) for name, members in sorted(files.items())
    ]


def _fill(
    pieces: Iterable[Piece], cap: int | None, boundary: Callable[[Piece], object]
) -> list[list[Piece]]:
    """Cut a sequence into files of at most ``cap`` bytes, at boundaries where possible.

    Pieces with equal ``boundary`` values stay together unless they alone exceed the cap.
    """
    runs: list[list[Piece]] = []
    for piece in pieces:
        if runs and boundary(runs[-1][-1]) == boundary(piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    files: list[list[Piece]] = []
    room = header_room = -1
    for run in runs:
        for part in [run] if _fits(run, cap) else [[piece] for piece in run]:
            size, header = sum(p.size + p.header for p in part), sum(p.header for p in part)
            if not files or size > room or header > header_room:
                files.append([])
                room, header_room = cap if cap is not None else 1 << 62, HEADER_CAP
            files[-1].extend(part)
            room, header_room = room - size, header_room - header
    return files


def _fits(run: list[Piece], cap: int | None) -> bool:
    if sum(p.header for p in run) > HEADER_CAP:
        return False
    return cap is None or sum(p.size + p.header for p in run) <= cap
