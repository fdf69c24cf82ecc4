"""Charts as inline SVG, coloured by the page's style so that they follow its theme.

Coordinates are those of a narrow drawing that stays readable on a phone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.report.page.markup import Markup, join, tag

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH, _HEIGHT = 440, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 12, 40
_TICKS = 6
_COLOURS = 8
_MANY_LABELS = 10
_DECIMALS = 8
_SHOWN_POINTS = 400
_MANY_POINTS = 40


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: how high it is, and what it stands for in words."""

    value: float
    words: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A named series of (x, y, words)."""

    name: str
    points: tuple[tuple[float, float, str], ...]


def figure(title: str, description: str, drawing: Markup, *notes: Markup) -> Markup:
    """Return a chart with its title above and notes below."""
    svg = tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        drawing,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=f"{title}. {description}",
    )
    return tag("figure", tag("figcaption", title), svg, *notes)


def bars(title: str, description: str, entries: Sequence[Bar], x_title: str) -> Markup:
    """Return a column chart of parts of a whole."""
    top = max((bar.value for bar in entries), default=0) or 1.0
    dense = "dense" if sum(bool(bar.label) for bar in entries) > _MANY_LABELS else None
    room = (_WIDTH - _LEFT - _RIGHT) / max(len(entries), 1)
    gap = min(2.0, room / 5)
    drawn = []
    for place, bar in enumerate(entries):
        height = (_HEIGHT - _TOP - _BOTTOM) * bar.value / top
        x = _LEFT + place * room
        shape = tag(
            "rect",
            tag("title", bar.words),
            x=_number(x + gap / 2),
            y=_number(_HEIGHT - _BOTTOM - height),
            width=_number(room - gap),
            height=_number(height),
            class_="s0",
        )
        drawn.append(shape)
        if bar.label:
            drawn.append(_text(bar.label, x + room / 2, _HEIGHT - _BOTTOM + 14, "middle", dense))
    ticks = _ticks(0, 100 * top)
    axis = _y_axis(ticks, 0, 100 * top, [f"{label} %" for label in _labels(ticks)])
    return figure(title, description, join([axis, *drawn, _x_title(x_title)]))


def lines(title: str, description: str, series: Sequence[Line], x_title: str) -> Markup:
    """Return a line chart with a dot for each point, and a legend."""
    points = [point for line in series for point in line.points]
    if not points:
        return Markup("")
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low, high = _padded(min(ys), max(ys))
    left, right = min(xs), max(*xs, min(xs) + 1)

    def place(x: float, y: float) -> tuple[str, str]:
        along = (x - left) / (right - left)
        up = (y - low) / (high - low)
        return (
            _number(_LEFT + 4 + along * (_WIDTH - _LEFT - _RIGHT - 8)),
            _number(_HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)),
        )

    drawn = [_y_axis(ticks := _ticks(low, high), low, high, _labels(ticks))]
    for label in sorted({left, (left + right) // 2, right}):
        x, _ = place(label, low)
        drawn.append(_text(f"{label:.0f}", float(x), _HEIGHT - _BOTTOM + 14, "middle"))
    for number, line in enumerate(series):
        drawn.append(_line(line, number, [place(x, y) for x, y, _ in line.points]))
    return figure(title, description, join([*drawn, _x_title(x_title)]), _legend(series))


def _line(line: Line, number: int, places: list[tuple[str, str]]) -> Markup:
    path = tag(
        "polyline", points=" ".join(f"{x},{y}" for x, y in places), class_=f"l{number % _COLOURS}"
    )
    if len(places) > _SHOWN_POINTS:
        return path
    dots = [
        tag(
            "circle",
            tag("title", words),
            cx=x,
            cy=y,
            r="2.4" if len(places) < _MANY_POINTS else "1.6",
            class_=f"s{number % _COLOURS}",
        )
        for (x, y), (_, _, words) in zip(places, line.points, strict=True)
    ]
    return join([path, *dots])


def _legend(series: Sequence[Line]) -> Markup:
    if len(series) < 2:  # noqa: PLR2004  (one line needs no key)
        return Markup("")
    items = [
        tag("li", tag("span", class_=f"key k{number % _COLOURS}", aria_hidden="true"), line.name)
        for number, line in enumerate(series)
    ]
    return tag("ul", *items, class_="legend")


def _y_axis(ticks: Sequence[float], low: float, high: float, labels: Sequence[str]) -> Markup:
    parts = []
    for tick, label in zip(ticks, labels, strict=True):
        y = _HEIGHT - _BOTTOM - (tick - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        x1, x2, at = _number(_LEFT), _number(_WIDTH - _RIGHT), _number(y)
        parts.append(tag("line", x1=x1, x2=x2, y1=at, y2=at, class_="rule"))
        parts.append(_text(label, _LEFT - 6, y + 4, "end"))
    return join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers from low to high."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _labels(ticks: Sequence[float]) -> list[str]:
    """Return the ticks with as many decimals as keep them apart, and no more."""
    for decimals in range(_DECIMALS):
        labels = [f"{tick:.{decimals}f}" for tick in ticks]
        exact = all(
            math.isclose(float(label), tick, rel_tol=1e-9, abs_tol=1e-12)
            for label, tick in zip(labels, ticks, strict=True)
        )
        if exact:
            return labels
    return [f"{tick:.3g}" for tick in ticks]


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = (high - low) * 0.08 or max(abs(high), 1e-9) * 0.08
    return max(low - margin, 0.0), high + margin


def _x_title(text: str) -> Markup:
    return _text(text, (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, "middle")


def _text(text: str, x: float, y: float, anchor: str, class_: str | None = None) -> Markup:
    return tag("text", text, x=_number(x), y=_number(y), text_anchor=anchor, class_=class_)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
