"""Plain tables and lists on stdout that survive a pipe."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_GAP = "  "


class Table:
    """Columns as wide as their content; ``right`` names the right-aligned ones."""

    def __init__(self, *titles: str, right: tuple[int, ...] = ()) -> None:
        self._rows = [titles]
        self._right = right

    def add(self, *cells: str) -> None:
        """Add a row."""
        self._rows.append(cells)

    def print(self) -> None:
        """Write the table to stdout."""
        widths = [max(len(row[i]) for row in self._rows) for i in range(len(self._rows[0]))]
        for row in self._rows:
            cells = [
                cell.rjust(width) if i in self._right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print(_GAP.join(cells).rstrip())


def print_pairs(*pairs: tuple[str, str]) -> None:
    """Write labels and texts, texts wrapped beside their labels on a terminal."""
    label_width = max(len(label) for label, _ in pairs)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10**6
    print()
    for label, text in pairs:
        lines = textwrap.wrap(
            text,
            max(width - label_width - len(_GAP), 20),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for number, line in enumerate(lines or [""]):
            print(f"{label if number == 0 else '':<{label_width}}{_GAP}{line}")


def print_notices(notices: Iterable[tuple[str, str]]) -> None:
    """Write warnings to stderr."""
    for _, message in notices:
        print(f"warning: {message}", file=sys.stderr)
