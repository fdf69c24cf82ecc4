"""The routed experts of a model as a grid: layer x expert x projection."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mxconvert.statistics import TensorStats

    Doubles = NDArray[np.float64]

MOST_CELLS = 4_000_000
"""Beyond this a grid is not made: numbers that thin belong to no model."""
_SUMMED = ("elements", "sum_x2", "sum_err2", "flushed", "saturated")


@dataclass(frozen=True, slots=True)
class Grid:
    """Sums per cell, float64 ``[layers, experts, projections + 1]``; the last is all of them.

    A cell without elements is empty. Weights with the same coordinates are summed.
    """

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    projections: tuple[str, ...]
    elements: Doubles
    sum_x2: Doubles
    sum_err2: Doubles
    flushed: Doubles
    saturated: Doubles

    @property
    def relative_rmse(self) -> Doubles:
        """sqrt(sum_err2 / sum_x2): NaN in empty cells, infinite where only x is zero."""
        with np.errstate(divide="ignore", invalid="ignore"):
            error: Doubles = np.sqrt(self.sum_err2 / self.sum_x2)
        error = np.where((self.sum_err2 == 0) & (self.sum_x2 == 0), 0.0, error)
        return np.where(self.elements == 0, np.nan, error)

    def share(self, counts: Doubles) -> Doubles:
        """Counts as parts of the elements; 0 in empty cells."""
        return counts / np.maximum(self.elements, 1)


class GridBuilder:
    """Takes records one by one, in flat arrays: some 60 bytes each."""

    def __init__(self) -> None:
        self._places = tuple(array("q") for _ in range(3))
        self._values = {name: array("d") for name in _SUMMED}
        self._projections: dict[str, int] = {}

    def add(self, stats: TensorStats) -> bool:
        """Take a routed expert's weight; return whether it is one."""
        if stats.layer is None or stats.expert is None:
            return False
        word = stats.projection or ""
        number = self._projections.setdefault(word, len(self._projections))
        for places, value in zip(self._places, (stats.layer, stats.expert, number), strict=True):
            places.append(value)
        for name, values in self._values.items():
            values.append(getattr(stats.sums, name))
        return True

    def build(self) -> Grid | None:
        """Return the grid, ``None`` without experts or if it would be mostly empty."""
        axes = [np.unique(np.frombuffer(places, np.int64)) for places in self._places if places]
        if not axes or axes[0].size * axes[1].size * axes[2].size > MOST_CELLS:
            return None
        at = tuple(
            np.searchsorted(axis, np.frombuffer(places, np.int64))
            for axis, places in zip(axes, self._places, strict=True)
        )
        words = sorted(self._projections)
        rank = np.array([words.index(word) for word in self._projections])
        at = (at[0], at[1], rank[at[2]])
        shape = (axes[0].size, axes[1].size, len(words))
        sums = {
            name: _with_all(_spread(shape, at, values)) for name, values in self._values.items()
        }
        return Grid(
            layers=tuple(axes[0].tolist()),
            experts=tuple(axes[1].tolist()),
            projections=tuple(words),
            **sums,
        )


def _spread(
    shape: tuple[int, ...], at: tuple[NDArray[np.int64], ...], values: array[float]
) -> Doubles:
    cells = np.zeros(shape)
    np.add.at(cells, at, np.frombuffer(values))
    return cells


def _with_all(cells: Doubles) -> Doubles:
    return np.concatenate([cells, cells.sum(axis=2, keepdims=True)], axis=2)
