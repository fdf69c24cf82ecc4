"""Which routed experts a rank holds, as the engines that will load them decide it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

from mxconvert.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

Experts = tuple[int, ...]
"""Numbers of experts, ascending, each once."""

_NO_EXPERTS = "leave the option away: every rank needs all of a dense model"
_ITEM = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


class Placement(StrEnum):
    """How experts are dealt out to ranks.

    ``linear``: contiguous, and the first ranks hold one more where it does not come out even.
    vLLM 0.32 (``determine_expert_map``) does the same; SGLang 0.5 (``expert_location.py``)
    too, but wants a number of experts that its ranks divide.
    ``round-robin``: rank r holds r, r + world size, and so on, as vLLM's ``round_robin``.
    """

    LINEAR = "linear"
    ROUND_ROBIN = "round-robin"


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks among which the experts of a model are dealt out.

    Attributes:
        num_experts: Routed experts of a layer.
        world_size: Ranks of the expert-parallel group.
        placement: How they are dealt out.

    Raises:
        UsageError: The model has no experts, or there are more ranks than experts.
    """

    num_experts: int
    world_size: int
    placement: Placement = Placement.LINEAR

    def __post_init__(self) -> None:
        refuse_dense(self.num_experts, "--world-size")
        if not 1 <= self.world_size <= self.num_experts:
            raise UsageError(
                f"--world-size {self.world_size}: expected 1 to {self.num_experts}, "
                "the number of experts",
                code="bad-rank",
            )

    def experts(self, rank: int) -> Experts:
        """Return the experts of a rank.

        Raises:
            UsageError: ``rank`` is not in ``range(world_size)``.
        """
        self._check(rank)
        if self.placement is Placement.ROUND_ROBIN:
            return tuple(range(rank, self.num_experts, self.world_size))
        count, more = divmod(self.num_experts, self.world_size)
        begin = rank * count + min(rank, more)
        return tuple(range(begin, begin + count + (rank < more)))

    def of_node(self, node: int, nodes: int) -> range:
        """Return the ranks of a node when each of ``nodes`` holds as many, in order.

        Raises:
            UsageError: ``node`` is not in ``range(nodes)``, or the ranks do not divide evenly.
        """
        if nodes < 1 or self.world_size % nodes:
            raise UsageError(
                f"--nodes {nodes}: does not divide the {self.world_size} ranks", code="bad-rank"
            )
        if not 0 <= node < nodes:
            raise UsageError(f"--node {node}: expected 0 to {nodes - 1}", code="bad-rank")
        each = self.world_size // nodes
        return range(node * each, (node + 1) * each)

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise UsageError(f"--rank {rank}: expected 0 to {self.world_size - 1}", code="bad-rank")


def refuse_dense(num_experts: int, option: str) -> None:
    """Refuse to choose among the experts of a model that has none.

    Raises:
        UsageError: ``num_experts`` is 0.
    """
    if not num_experts:
        raise UsageError(
            f"{option}: the model has no routed experts to choose from",
            hint=_NO_EXPERTS,
            code="no-experts",
        )


def parse_experts(text: str, num_experts: int, option: str = "--experts") -> Experts:
    """Read numbers and inclusive ranges of experts, as in ``0-15,40``.

    Raises:
        UsageError: Not of that form, a range that runs backwards, a number that is not in
            ``range(num_experts)``, or a model without experts.
    """
    refuse_dense(num_experts, option)
    chosen: set[int] = set()
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < num_experts:
            raise UsageError(
                f"{option} {text!r}: {item.strip()!r}: expected a number or FIRST-LAST, "
                f"0 to {num_experts - 1}",
                hint=f"for example {option} 0-{min(1, num_experts - 1)}",
                code="bad-experts",
            )
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def format_experts(experts: Iterable[int]) -> str:
    """Write experts as `parse_experts` reads them, runs as ranges: ``0-15,40``."""
    numbers = sorted(set(experts))
    if not numbers:
        return ""
    breaks = [i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1]
    runs = [numbers[i:j] for i, j in pairwise([0, *breaks, len(numbers)])]
    return ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
