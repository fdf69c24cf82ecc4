"""Numbers and names for people, the same on a terminal and on a page."""

from __future__ import annotations

import math

_LARGEST_PLAIN = 1000
_UNITS = ((10**12, " T"), (10**9, " B"), (10**6, " M"), (10**3, " K"))


def printable(name: str) -> str:
    """Return a name with control, formatting and other unprintable characters escaped.

    Names come from files of any origin: they could move a terminal's cursor, or turn the
    direction of a page's text.
    """
    if name.isprintable():
        return name
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in name
    )


def ratio(value: float) -> str:
    """Return an error or a cosine with four significant decimals."""
    return "∞" if math.isinf(value) else "-" if math.isnan(value) else f"{value:.4f}"


def decibels(value: float) -> str:
    """Return a level in dB."""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.2f}"


def share(value: float) -> str:
    """Return a part of one as a percentage with at most three digits after the point."""
    if value == 0:
        return "0 %"
    percent = value * 100
    return f"{percent:.3f} %" if percent >= 0.001 else "< 0.001 %"  # noqa: PLR2004  (as shown)


def amount(number: int) -> str:
    """Return a count: exact when it is short, else like 2.78 T, 104.2 M, 1.50 K."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return str(number)


def magnitude(value: float) -> str:
    """Return an absolute error."""
    return f"{value:#.3g}" if value else "0"
