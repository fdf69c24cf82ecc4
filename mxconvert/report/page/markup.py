"""HTML by functions: text is escaped unless it is `Markup` already."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.report.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NO_END = frozenset({"input", "meta", "link", "br"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | Markup


def escape(text: Content) -> Markup:
    """Return text as HTML; `Markup` stays as it is."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(printable(text)))


def tag(name: str, /, *content: Content, **attributes: str | bool | None) -> Markup:
    """Return an element.

    Args:
        name: Its name.
        content: Escaped and joined.
        attributes: ``class_`` and ``for_`` lose the underscore, others become hyphens; True
            stands alone, False and None are left out.
    """
    pairs = "".join(map(_attribute, attributes.items()))
    if name in _NO_END:
        return Markup(f"<{name}{pairs}>")
    return Markup(f"<{name}{pairs}>{''.join(map(escape, content))}</{name}>")


def _attribute(item: tuple[str, str | bool | None]) -> str:
    key, value = item
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(value)}"'


def join(parts: Iterable[Content], between: str = "") -> Markup:
    """Return the parts, escaped, one after the other."""
    return Markup(between.join(map(escape, parts)))


@dataclass(frozen=True, slots=True)
class Cell:
    """A table's cell.

    Attributes:
        text: What it shows.
        value: The number to sort by; without it the text is.
    """

    text: Content
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column: its title, and whether it holds numbers."""

    title: str
    number: bool = True
    hint: str | None = None


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Iterable[Sequence[Cell]],
    *,
    name: str,
    filtered: str | None = None,
) -> Markup:
    """Return a table whose first column heads its rows; the script makes it sortable.

    Args:
        caption: What it shows, in a sentence.
        columns: From left to right.
        rows: A cell for each column.
        name: Its id.
        filtered: What a filter field, made by the script, is labelled.
    """
    head = join(
        tag("th", column.title, scope="col", class_="n" if column.number else None,
            title=column.hint)
        for column in columns
    )  # fmt: skip
    body = join((_row(columns, row) for row in rows), "\n")
    inner = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", head)),
        tag("tbody", body),
        id=name,
        class_="sortable",
        data_filter=filtered,
    )
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _row(columns: Sequence[Column], row: Sequence[Cell]) -> Markup:
    cells = [
        _cell(column, cell, head=place == 0)
        for place, (column, cell) in enumerate(zip(columns, row, strict=True))
    ]
    return tag("tr", join(cells))


def _cell(column: Column, cell: Cell, *, head: bool) -> Markup:
    value = None if cell.value is None else f"{cell.value:.10g}"
    return tag(
        "th" if head else "td",
        cell.text,
        scope="row" if head else None,
        class_="n" if column.number else None,
        data_v=value,
    )
