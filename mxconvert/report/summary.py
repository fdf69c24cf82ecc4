"""From a stream of records to the figures that people look at; one pass, bounded memory."""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mxconvert.report.grid import Grid, GridBuilder
from mxconvert.statistics import Header, Histograms, Record, Sums, TensorStats

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

DEFAULT_TOP = 20
ALL_TENSORS = 1000
"""Models of so many weights are kept whole; of larger ones the worst are."""

_CODES = 16
_MODIFIED_Z = 0.6745  # the MAD of a normal distribution
_OUTLIER_SCORE = 3.5  # Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993
_FEWEST_EXPERTS = 8


class Tally:
    """Sums of a group of weights, growing."""

    __slots__ = ("_counts", "_exponents", "_max", "_sums", "tensors")

    def __init__(self) -> None:
        self.tensors = 0
        self._counts = [0, 0, 0, 0]
        self._exponents = [0, 0, 0]
        self._sums = [0.0, 0.0, 0.0]
        self._max = 0.0

    def add(self, sums: Sums) -> None:
        """Take one weight."""
        self.tensors += 1
        counts, exponents, totals = self._counts, self._exponents, self._sums
        counts[0] += sums.elements
        counts[1] += sums.blocks
        counts[2] += sums.flushed
        counts[3] += sums.saturated
        totals[0] += sums.sum_x2
        totals[1] += sums.sum_q2
        totals[2] += sums.sum_err2
        for step, blocks in enumerate(sums.exponents):
            exponents[step] += blocks
        self._max = max(self._max, sums.max_abs_err)

    @property
    def sums(self) -> Sums:
        """The sums so far."""
        below, floor, above = self._exponents
        return Sums(
            elements=self._counts[0],
            blocks=self._counts[1],
            flushed=self._counts[2],
            saturated=self._counts[3],
            sum_x2=self._sums[0],
            sum_q2=self._sums[1],
            sum_err2=self._sums[2],
            max_abs_err=self._max,
            exponents=(below, floor, above),
        )


@dataclass(frozen=True, slots=True)
class Group:
    """A layer, a projection or a role: how many weights, and their sums."""

    name: str
    tensors: int
    sums: Sums


@dataclass(frozen=True, slots=True)
class Outlier:
    """An expert whose error stands out among the experts of its layer.

    ``score`` is the modified z-score: 0.6745 times the distance from the layer's median, in
    units of the median absolute deviation.
    """

    layer: int
    expert: int
    relative_rmse: float
    median: float
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Relative RMSE over all weights: least, quantiles, largest."""

    minimum: float = 0.0
    p05: float = 0.0
    median: float = 0.0
    p95: float = 0.0
    maximum: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Everything that a report shows.

    Attributes:
        header: Of the records.
        total: All weights.
        roles: By role, sorted by name.
        layers: By layer, in order; weights without a layer are in none.
        projections: By the name's word for the matrix, sorted.
        spread: Of the weights' relative RMSE.
        errors: The relative RMSE of every weight, float64, sorted.
        worst: The weights of the largest error, worst first; all of a small model.
        complete: Whether ``worst`` holds every weight.
        outliers: Worst first; ``outlier_count`` counts them all.
        grid: Routed experts by layer, expert and projection.
        codes: Elements per code.
        scales: Blocks per scale byte.
        sampled: What the histograms counted, in words; empty if everything.
        files: Output files that hold weights.
    """

    header: Header
    total: Group
    roles: tuple[Group, ...]
    layers: tuple[Group, ...]
    projections: tuple[Group, ...]
    spread: Spread
    errors: NDArray[np.float64]
    worst: tuple[TensorStats, ...]
    complete: bool
    outliers: tuple[Outlier, ...]
    outlier_count: int
    grid: Grid | None
    codes: tuple[int, ...]
    scales: dict[int, int]
    sampled: tuple[str, ...]
    files: int


def summarize(header: Header, records: Iterable[Record], top: int = DEFAULT_TOP) -> Summary:
    """Draw all records and return what they amount to.

    Args:
        header: The report's.
        records: In file order; ties are broken by it.
        top: Worst weights and outliers to keep at least.
    """
    builder = _Builder(max(top, ALL_TENSORS))
    for record in records:
        if isinstance(record, TensorStats):
            builder.add(record)
        else:
            builder.count(record)
    return builder.finish(header, top)


@dataclass(slots=True)
class _Builder:
    """What one pass collects."""

    keep: int
    total: Tally = field(default_factory=Tally)
    roles: dict[str, Tally] = field(default_factory=dict)
    layers: dict[int, Tally] = field(default_factory=dict)
    projections: dict[str, Tally] = field(default_factory=dict)
    errors: array[float] = field(default_factory=lambda: array("d"))
    worst: list[tuple[float, int, TensorStats]] = field(default_factory=list)
    grid: GridBuilder = field(default_factory=GridBuilder)
    codes: list[int] = field(default_factory=lambda: [0] * _CODES)
    scales: dict[int, int] = field(default_factory=dict)
    sampled: dict[str, None] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)

    def add(self, stats: TensorStats) -> None:
        """Take a weight."""
        sums = stats.sums
        self.total.add(sums)
        self.roles.setdefault(stats.role, Tally()).add(sums)
        if stats.layer is not None:
            self.layers.setdefault(stats.layer, Tally()).add(sums)
        self.projections.setdefault(word_of(stats), Tally()).add(sums)
        self.files.add(stats.file)
        self.grid.add(stats)
        error = sums.relative_rmse
        self.errors.append(error)
        entry = (error, -len(self.errors), stats)  # of equal ones the first is the worst
        if len(self.worst) < self.keep:
            heapq.heappush(self.worst, entry)
        elif entry[:2] > self.worst[0][:2]:
            heapq.heapreplace(self.worst, entry)

    def count(self, counts: Histograms) -> None:
        """Take a file's histograms."""
        for code, number in enumerate(counts.codes):
            self.codes[code] += number
        for byte, number in counts.scales.items():
            self.scales[byte] = self.scales.get(byte, 0) + number
        if counts.sampled is not None:
            self.sampled[counts.sampled] = None

    def finish(self, header: Header, top: int) -> Summary:
        """Return the summary."""
        grid = self.grid.build()
        errors = np.sort(np.array(self.errors))
        complete = len(errors) <= ALL_TENSORS
        ordered = sorted(self.worst, key=lambda entry: entry[:2], reverse=True)
        outliers = find_outliers(grid) if grid is not None else []
        return Summary(
            header=header,
            total=Group("all", self.total.tensors, self.total.sums),
            roles=_groups({name: self.roles[name] for name in sorted(self.roles)}),
            layers=_groups({str(n): self.layers[n] for n in sorted(self.layers)}),
            projections=_groups(
                {name: self.projections[name] for name in sorted(self.projections)}
            ),
            spread=_spread(errors),
            errors=errors,
            worst=tuple(entry[2] for entry in ordered),
            complete=complete,
            outliers=tuple(outliers[: max(top, ALL_TENSORS)]),
            outlier_count=len(outliers),
            grid=grid,
            codes=tuple(self.codes),
            scales=dict(sorted(self.scales.items())),
            sampled=tuple(self.sampled),
            files=len(self.files),
        )


def word_of(stats: TensorStats) -> str:
    """Return the name's word for the matrix, also for weights that are no routed expert's."""
    if stats.projection is not None:
        return stats.projection
    return stats.name.removesuffix(".weight").rpartition(".")[2]


def _groups(tallies: dict[str, Tally]) -> tuple[Group, ...]:
    return tuple(Group(name, tally.tensors, tally.sums) for name, tally in tallies.items())


def _spread(errors: NDArray[np.float64]) -> Spread:
    if not errors.size:
        return Spread()
    at = [round(part * (errors.size - 1)) for part in (0, 0.05, 0.5, 0.95, 1)]
    minimum, p05, median, p95, maximum = errors[at].tolist()
    return Spread(minimum=minimum, p05=p05, median=median, p95=p95, maximum=maximum)


def find_outliers(grid: Grid) -> list[Outlier]:
    """Return experts of unusually large error within their layer, most unusual first."""
    found = []
    errors = grid.relative_rmse[:, :, -1]
    for layer, row in zip(grid.layers, errors, strict=True):
        present = np.flatnonzero(np.isfinite(row))
        if present.size < _FEWEST_EXPERTS:
            continue
        median = float(np.median(row[present]))
        deviation = float(np.median(np.abs(row[present] - median)))
        if deviation == 0:
            continue
        scores = _MODIFIED_Z * (row[present] - median) / deviation
        for place in np.flatnonzero(scores > _OUTLIER_SCORE):
            at = int(present[place])
            found.append(
                Outlier(layer, grid.experts[at], float(row[at]), median, float(scores[place]))
            )
    return sorted(found, key=lambda entry: (-entry.score, entry.layer, entry.expert))
