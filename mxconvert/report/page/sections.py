"""The page's parts, from the overview to what is embedded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from mxconvert.report.page.charts import Bar, Line, bars, lines
from mxconvert.report.page.markup import Markup, join, tag
from mxconvert.report.text import amount, decibels, magnitude, printable, ratio, share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxconvert.report.grid import Grid
    from mxconvert.report.summary import Summary

_CODE_ORDER = (*range(15, 7, -1), *range(8))
_CODE_VALUES = ("0", "0.5", "1", "1.5", "2", "3", "4", "6")
_BIAS = 127
_BINS = 40
_FEW_SCALES = 1e-5
_LABELS = 8
_STEPS = ("one below", "floor", "one above")


def facts(summary: Summary) -> Markup:
    """Return what was measured, as a list of terms."""
    header = summary.header
    pairs = (
        ("artifact", header.artifact or "no manifest"),
        ("scale rule", header.scale_rule or "unknown"),
        ("source", header.source or "unknown"),
        ("measured by", header.tool),
        ("measured", f"part {header.sample} of the weights" if header.sample else "every weight"),
    )
    return tag(
        "dl",
        join(tag("div", tag("dt", term), tag("dd", text)) for term, text in pairs),
        class_="facts",
    )


def cards(summary: Summary) -> Markup:
    """Return the overview."""
    sums, spread = summary.total.sums, summary.spread
    entries = (
        (
            "relative RMSE",
            ratio(sums.relative_rmse),
            f"of weights: {ratio(spread.minimum)} to {ratio(spread.maximum)}",
        ),
        ("SQNR", f"{decibels(sums.sqnr_db)} dB", "signal to quantization noise"),
        ("cosine", f"{sums.cosine:.5f}", "between weights and stored values"),
        (
            "weights",
            f"{summary.total.tensors:,}",
            f"{amount(sums.elements)} elements in {summary.files} files",
        ),
        ("to zero", share(sums.flushed_share), f"{amount(sums.flushed)} elements became zero"),
        (
            "saturated",
            share(sums.saturated_share),
            f"{amount(sums.saturated)} elements beyond the largest value",
        ),
        ("largest error", magnitude(sums.max_abs_err), "of one element, absolute"),
    )
    return tag("div", *(_card(*entry) for entry in entries), class_="cards")


def _card(title: str, value: str, note: str) -> Markup:
    return tag(
        "div",
        tag("h3", title),
        tag("p", value, class_="value"),
        tag("p", note, class_="note"),
        class_="card",
    )


def exponents(summary: Summary) -> Markup:
    """Return how often a scale was moved from the floor rule's."""
    sums = summary.total.sums
    parts = [count / max(sums.blocks, 1) for count in sums.exponents]
    words = ", ".join(f"{step} {share(part)}" for step, part in zip(_STEPS, parts, strict=True))
    strip = join(
        tag("span", class_=f"k{place}", style=f"width:{100 * part:.3f}%")
        for place, part in enumerate(parts)
    )
    items = join(
        tag("li", tag("span", class_=f"key k{place}", aria_hidden="true"), f"{step} {share(part)}")
        for place, (step, part) in enumerate(zip(_STEPS, parts, strict=True))
    )
    return tag(
        "figure",
        tag("figcaption", f"Scales against the floor rule, {amount(sums.blocks)} blocks"),
        tag("div", strip, class_="strip", role="img", aria_label=words),
        tag("ul", items, class_="legend"),
        class_="wide",
    )


def spread_chart(summary: Summary) -> Markup:
    """Return the distribution of the weights' relative RMSE."""
    errors = summary.errors[np.isfinite(summary.errors)]
    if not errors.size:
        return Markup("")
    low, high = np.quantile(errors, [0.005, 0.995]).tolist()
    margin = (high - low) * 0.2 or max(high, 1e-6) * 0.05
    low, high = max(low - margin, 0.0), high + margin
    counts, edges = np.histogram(np.clip(errors, low, high), bins=_BINS, range=(low, high))
    entries = [
        Bar(
            count / errors.size,
            f"{_edge(place, edges[place], edges[place + 1])}: {count} weights",
            ratio(edges[place]) if place % (_BINS // 4) == _BINS // 8 else "",
        )
        for place, count in enumerate(counts.tolist())
    ]
    text = (
        f"{errors.size} weights from {ratio(errors[0])} to {ratio(errors[-1])}. The first and "
        "the last column also hold what lies beyond them."
    )
    return bars("Weights by relative RMSE", text, entries, "relative RMSE")


def _edge(place: int, low: float, high: float) -> str:
    if place == 0:
        return f"below {ratio(high)}"
    return f"from {ratio(low)}" if place == _BINS - 1 else f"{ratio(low)} to {ratio(high)}"


def layer_chart(summary: Summary) -> Markup:
    """Return the relative RMSE by layer, with a line for each projection of the experts."""
    series = list(_lines(summary.grid)) if summary.grid is not None else [_one_line(summary)]
    return lines(
        "Relative RMSE by layer",
        "One line for each projection of the routed experts."
        if summary.grid is not None
        else "All quantized weights of a layer together.",
        [line for line in series if line.points],
        "layer",
    )


def _lines(grid: Grid) -> Iterator[Line]:
    for place, word in enumerate(grid.projections):
        name = word or "weight"
        sum_x2, sum_err2 = (
            cells[:, :, place].sum(axis=1) for cells in (grid.sum_x2, grid.sum_err2)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.sqrt(sum_err2 / sum_x2).tolist()
        yield Line(
            name,
            tuple(
                (layer, error, f"layer {layer}, {printable(name)}: {ratio(error)}")
                for layer, error in zip(grid.layers, errors, strict=True)
                if math.isfinite(error)
            ),
        )


def _one_line(summary: Summary) -> Line:
    points = (
        (int(group.name), group.sums.relative_rmse, f"layer {group.name}")
        for group in summary.layers
    )
    return Line("all", tuple(point for point in points if math.isfinite(point[1])))


def code_chart(summary: Summary) -> Markup:
    """Return how often each code occurs."""
    total = sum(summary.codes)
    if not total:
        return Markup("")
    entries = []
    for code in _CODE_ORDER:
        value = ("-" if code >= len(_CODE_VALUES) else "") + _CODE_VALUES[code % len(_CODE_VALUES)]
        part = summary.codes[code] / total
        entries.append(Bar(part, f"{value}: {share(part)}", value))
    what = f"{amount(total)} codes counted{_sampled(summary)}."
    return bars("Codes", what, entries, "value before scaling")


def scale_chart(summary: Summary) -> Markup:
    """Return how often each scale occurs, without a few far away."""
    total = sum(summary.scales.values())
    common = [byte for byte, n in summary.scales.items() if n > total * _FEW_SCALES]
    if not common:
        return Markup("")
    first, last = common[0], common[-1]
    if summary.scales.get(0) and first == 0 and len(common) > 1:
        first = common[1]  # blocks of zeros stand far from all others
    every = -(-(last - first + 1) // _LABELS)
    entries = []
    for byte in range(first, last + 1):
        part = summary.scales.get(byte, 0) / total
        power = byte - _BIAS
        label = str(power) if (byte - first) % every == 0 else ""
        entries.append(Bar(part, f"2^{power}: {share(part)}", label))
    rest = total - sum(summary.scales.get(byte, 0) for byte in range(first, last + 1))
    beyond = f" {amount(rest)} blocks lie beyond, {amount(summary.scales.get(0, 0))} of them "
    beyond = f"{beyond}with scale 2^-127, as blocks of zeros have." if rest else ""
    what = f"{amount(total)} blocks counted{_sampled(summary)}.{beyond}"
    return bars("Scales", what, entries, "power of two")


def _sampled(summary: Summary) -> str:
    return f" ({', '.join(map(printable, summary.sampled))})" if summary.sampled else ""


def heat_map(summary: Summary) -> Markup:
    """Return the place where the script draws layer x expert, and what stands there without."""
    if summary.grid is None:
        return Markup("")
    grid = summary.grid
    note = tag(
        "noscript",
        tag("p", "The heat map and the experts of a layer need JavaScript; the tables do not."),
    )
    controls = tag(
        "div",
        _select("Figure", "metric"),
        _select("Projection", "plane"),
        class_="controls",
    )
    canvas = tag("canvas", id="heat", role="img", aria_label="Layers by experts, coloured by error")
    drill = tag("div", _select("Layer", "layer"), class_="controls")
    return join(
        [
            tag("h2", "Layers and experts", id="experts"),
            tag(
                "p",
                f"{len(grid.layers)} layers from top to bottom, {len(grid.experts)} experts from "
                "left to right.",
            ),
            note,
            tag(
                "div",
                controls,
                tag("div", canvas, class_="scroll heat", tabindex="0", role="region",
                    aria_label="Heat map"),
                tag("div", tag("span", id="low"), tag("span", id="ramp"), tag("span", id="high"),
                    class_="ramp"),
                tag("p", id="under", class_="note"),
                tag("h3", "Experts of a layer"),
                drill,
                tag("div", id="drill", class_="scroll tall", tabindex="0", role="region",
                    aria_label="Experts of a layer"),
                class_="script",
                hidden=True,
            ),
        ]
    )  # fmt: skip


def _select(label: str, name: str) -> Markup:
    return tag("label", f"{label} ", tag("select", id=name))


def about(summary: Summary, shown: int, num_bytes: int) -> Markup:
    """Say what the page holds and what it leaves out."""
    grid = summary.grid
    cells = 0 if grid is None else int(np.count_nonzero(grid.elements[:, :, :-1]))
    rows = "every quantized weight" if summary.complete else f"the {shown} worst weights"
    experts = (
        f"{num_bytes:,} bytes of embedded numbers hold relative RMSE (32-bit floats) and the parts "
        f"that became zero or saturated (16-bit steps) of {cells:,} weights of routed experts, by "
        "layer, expert and projection. "
        if cells
        else ""
    )
    text = (
        f"{experts}The table of weights lists {rows}; ",
        tag("code", "mxconvert report --jsonl"),
        " writes every weight. This page loads nothing from anywhere.",
    )
    return join([tag("h2", "What is in this page", id="about"), tag("p", *text)])
