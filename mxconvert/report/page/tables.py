"""The page's tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mxconvert.report.page.markup import Cell, Column, Markup, table, tag
from mxconvert.report.text import amount, decibels, magnitude, ratio, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mxconvert.report.summary import Group, Outlier, Summary
    from mxconvert.statistics import Sums, TensorStats

_SHOWN = 200
"""Rows of a large model's table of weights, at least."""

_RMSE_HINT = "sqrt(sum of squared errors / sum of squared weights)"
_FIGURES = (
    Column("relative RMSE", hint=_RMSE_HINT),
    Column("SQNR, dB", hint="signal to quantization noise ratio"),
    Column("cosine", hint="between the weights and their stored values"),
    Column("largest error", hint="largest absolute difference of one element"),
    Column("to zero", hint="elements that are not zero and became zero"),
    Column("saturated", hint="elements beyond 6 times their scale"),
)


def figure_cells(sums: Sums) -> list[Cell]:
    """Return the cells below the columns of `_FIGURES`."""
    error = sums.relative_rmse
    return [
        Cell(ratio(error), _sortable(error)),
        Cell(decibels(sums.sqnr_db), _sortable(sums.sqnr_db)),
        Cell(f"{sums.cosine:.5f}", sums.cosine),
        Cell(magnitude(sums.max_abs_err), sums.max_abs_err),
        Cell(share(sums.flushed_share), sums.flushed_share),
        Cell(share(sums.saturated_share), sums.saturated_share),
    ]


def _sortable(value: float) -> float:
    """Return a number in place of an infinite one."""
    return value if math.isfinite(value) else math.copysign(1e300, value)


def group_table(caption: str, title: str, groups: Sequence[Group], *, name: str) -> Markup:
    """Return the figures of layers, projections or roles."""
    columns = (Column(title, number=title == "layer"), Column("weights"), Column("elements"))
    rows = (
        [
            Cell(group.name, int(group.name) if title == "layer" else None),
            Cell(str(group.tensors), group.tensors),
            Cell(amount(group.sums.elements), group.sums.elements),
            *figure_cells(group.sums),
        ]
        for group in groups
    )
    return table(caption, (*columns, *_FIGURES), rows, name=name)


def shown_weights(summary: Summary, top: int) -> Sequence[TensorStats]:
    """Return the weights that the page lists."""
    return summary.worst if summary.complete else summary.worst[: max(top, _SHOWN)]


def weight_table(summary: Summary, top: int) -> Markup:
    """Return the weights of the largest error, or all of a small model."""
    shown = shown_weights(summary, top)
    columns = (
        Column("weight", number=False),
        Column("role", number=False),
        Column("layer"),
        Column("expert"),
        Column("shape", number=False),
        *_FIGURES,
    )
    rows = (
        [
            Cell(stats.name),
            Cell(stats.role),
            _optional(stats.layer),
            _optional(stats.expert),
            Cell("x".join(map(str, stats.shape))),
            *figure_cells(stats.sums),
        ]
        for stats in shown
    )
    what = (
        f"All {len(shown)} quantized weights, worst first"
        if summary.complete
        else f"The {len(shown)} of {summary.total.tensors} weights with the largest error"
    )
    return table(what, columns, rows, name="weights", filtered="Filter by name")


def _optional(number: int | None) -> Cell:
    return Cell("-", -1) if number is None else Cell(str(number), number)


def outlier_table(summary: Summary, top: int) -> Markup:
    """Return the experts that stand out in their layers."""
    shown = summary.outliers[: max(top, _SHOWN)]
    if not shown:
        return tag("p", "No expert has a much larger error than the others of its layer.")
    columns = (
        Column("layer"),
        Column("expert"),
        Column("relative RMSE", hint=_RMSE_HINT),
        Column("median of its layer"),
        Column("score", hint="modified z-score, above 3.5 to be listed"),
    )
    of = "" if len(shown) == summary.outlier_count else f" of {summary.outlier_count}"
    return table(
        f"{len(shown)}{of} experts with a larger error than their layer's others",
        columns,
        map(_outlier_row, shown),
        name="outliers",
    )


def _outlier_row(outlier: Outlier) -> list[Cell]:
    return [
        Cell(str(outlier.layer), outlier.layer),
        Cell(str(outlier.expert), outlier.expert),
        Cell(ratio(outlier.relative_rmse), outlier.relative_rmse),
        Cell(ratio(outlier.median), outlier.median),
        Cell(f"{outlier.score:.1f}", outlier.score),
    ]
