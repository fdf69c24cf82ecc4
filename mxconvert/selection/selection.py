"""Which part of an artifact is wanted: experts, and perhaps a share of the dense files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.errors import UsageError
from mxconvert.placement import Experts, Placement, Ranks, format_experts, parse_experts

if TYPE_CHECKING:
    from mxconvert.manifest import Manifest

_SLICE = re.compile(r"(\d{1,6})/(\d{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A part of an artifact.

    Attributes:
        experts: The routed experts of every layer that are wanted, ascending.
        num_experts: Those that the model has.
        dense_slice: ``(i, n)``: of the files that hold no experts, in the order of their names,
            number i, i + n and so on; ``None``: all.
    """

    experts: Experts
    num_experts: int
    dense_slice: tuple[int, int] | None = None

    @property
    def is_everything(self) -> bool:
        """Whether it is the whole artifact."""
        return len(self.experts) == self.num_experts and self.dense_slice is None

    def __or__(self, other: Selection) -> Selection:
        """Return what holds both."""
        same = self.dense_slice == other.dense_slice
        return Selection(
            experts=tuple(sorted({*self.experts, *other.experts})),
            num_experts=self.num_experts,
            dense_slice=self.dense_slice if same else None,
        )

    def describe(self) -> str:
        """Return it in words."""
        words = f"experts {format_experts(self.experts) or 'none'} of {self.num_experts}"
        if self.dense_slice is not None:
            words += f", dense files {self.dense_slice[0]}/{self.dense_slice[1]}"
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a user asks for, before anything is known of the artifact.

    Attributes:
        rank: Of the expert-parallel group.
        world_size: Ranks of that group.
        placement: How experts are dealt out to them.
        experts: Numbers and ranges, ``0-15,40``.
        node: Of those that hold ``gpus_per_node`` ranks each.
        nodes: How many there are.
        gpus_per_node: Ranks of a node.
        dense_slice: ``I/N``.
    """

    rank: int | None = None
    world_size: int | None = None
    placement: Placement | None = None
    experts: str | None = None
    node: int | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    dense_slice: str | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, name) is not None for name in self.__slots__)

    def check(self) -> None:
        """Refuse what cannot be meant, whatever the artifact.

        Raises:
            UsageError: Options that miss or exclude one another, or a bad ``I/N``.
        """
        of_rank = (self.rank, self.world_size)
        of_node = (self.node, self.nodes, self.gpus_per_node)
        asked = {
            "--rank and --world-size": any(value is not None for value in of_rank),
            "--node, --nodes and --gpus-per-node": any(value is not None for value in of_node),
            "--experts": self.experts is not None,
        }
        chosen = [name for name, is_asked in asked.items() if is_asked]
        if len(chosen) > 1:
            raise UsageError(f"{' and '.join(chosen)} exclude one another", code="bad-rank")
        for names, values in (
            ("--rank and --world-size", of_rank),
            ("--node, --nodes and --gpus-per-node", of_node),
        ):
            if any(value is not None for value in values) and None in values:
                raise UsageError(f"{names} go together", code="bad-rank")
        if self.placement is not None and (not chosen or chosen == ["--experts"]):
            raise UsageError(
                "--placement deals experts out to ranks: give --rank and --world-size as well",
                code="bad-rank",
            )
        if self.nodes is not None and self.nodes < 1:
            raise UsageError(f"--nodes {self.nodes}: expected 1 or more", code="bad-rank")
        if self.gpus_per_node is not None and self.gpus_per_node < 1:
            raise UsageError(
                f"--gpus-per-node {self.gpus_per_node}: expected 1 or more", code="bad-rank"
            )
        if self.dense_slice is not None:
            _parse_slice(self.dense_slice)

    def resolve(self, manifest: Manifest) -> Selection:
        """Return what it means for an artifact.

        Raises:
            UsageError: A rank, node or expert that does not exist, or a dense model.
        """
        self.check()
        count = manifest.model.num_experts
        experts = tuple(range(count))
        if self.experts is not None:
            experts = parse_experts(self.experts, count)
        elif self.ranks_of(count) is not None:
            experts = self._of_ranks(count)
        part = None if self.dense_slice is None else _parse_slice(self.dense_slice)
        return Selection(experts=experts, num_experts=count, dense_slice=part)

    def ranks_of(self, num_experts: int) -> Ranks | None:
        """Return the ranks among which experts are dealt out, ``None`` without any."""
        world = self.world_size
        if self.nodes is not None and self.gpus_per_node is not None:
            world = self.nodes * self.gpus_per_node
        if world is None:
            return None
        return Ranks(num_experts, world, self.placement or Placement.LINEAR)

    def wanted_ranks(self, ranks: Ranks) -> tuple[int, ...]:
        """Return the ranks that are asked for.

        Raises:
            UsageError: There is no such rank or node.
        """
        if self.rank is not None:
            ranks.experts(self.rank)  # refuses what is out of range
            return (self.rank,)
        return tuple(ranks.of_node(self.node or 0, self.nodes or 1))

    def _of_ranks(self, count: int) -> Experts:
        ranks = self.ranks_of(count)
        if ranks is None:
            return ()
        wanted = self.wanted_ranks(ranks)
        return tuple(sorted(expert for rank in wanted for expert in ranks.experts(rank)))


def _parse_slice(text: str) -> tuple[int, int]:
    match = _SLICE.fullmatch(text)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not number < count:
        raise UsageError(
            f"--slice {text!r}: expected I/N with I from 0 to N - 1",
            hint="for example --slice 0/4 on the first of four nodes",
            code="bad-slice",
        )
    return number, count
