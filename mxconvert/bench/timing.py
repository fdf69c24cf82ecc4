"""Rates that suit a shared machine: medians of rounds within a time budget."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LEAST_ROUNDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A rate.

    Attributes:
        group: ``memory``, ``kernel``, ``digest``, ``disk``, ``pipeline`` or ``whole``.
        name: What was done.
        threads: How many threads did it.
        bytes_per_second: The median over the rounds.
    """

    group: str
    name: str
    threads: int
    bytes_per_second: float


def median_rate(call: Callable[[], int], budget_s: float) -> float:
    """Call until the budget is used up, at least twice; return the median bytes per second.

    Args:
        call: Does the work once and returns how many bytes that was.
        budget_s: Seconds after which no further round begins.
    """
    rates: list[float] = []
    begin = time.perf_counter()
    while len(rates) < _LEAST_ROUNDS or time.perf_counter() - begin < budget_s:
        rates.append(rate(call))
    return statistics.median(rates)


def rate(call: Callable[[], int]) -> float:
    """Call once and return bytes per second."""
    begin = time.perf_counter()
    done = call()
    return done / max(time.perf_counter() - begin, 1e-9)


def run_on_threads(threads: int, work: Callable[[int], object], items: Sequence[int]) -> None:
    """Call ``work`` for each item; ``threads`` threads take every ``threads``-th one."""
    if threads == 1:
        for item in items:
            work(item)
        return

    def share(first: int) -> None:
        for item in items[first::threads]:
            work(item)

    with ThreadPoolExecutor(threads, "mxconvert-bench") as executor:
        for done in [executor.submit(share, first) for first in range(threads)]:
            done.result()


def thread_counts(most: int) -> tuple[int, ...]:
    """Return one, and all if there are more."""
    return (1,) if most == 1 else (1, most)
