"""The numbers that the page's script draws from: typed columns in base64, not rows of a table.

``relative_rmse`` is float32; shares are 16-bit integers times a scale. All are little-endian,
``[layers, experts, planes]`` in row-major order, where the planes are the projections and, last,
all of them together. Empty cells have NaN as relative RMSE.
"""

from __future__ import annotations

import base64
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from mxconvert.report.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from mxconvert.report.grid import Grid
    from mxconvert.report.summary import Summary
    from mxconvert.statistics import TensorStats

_STEPS = 65535
_NUMBERS = re.compile(r"\d+")


def embedded_data(summary: Summary) -> dict[str, Any]:
    """Return what the page embeds; without routed experts it is almost empty."""
    grid = summary.grid
    if grid is None:
        return {"layers": [], "experts": [], "planes": [], "columns": []}
    return {
        "layers": list(grid.layers),
        "experts": list(grid.experts),
        "planes": [printable(word) or "weight" for word in grid.projections] + ["all"],
        "columns": [
            {"name": "relative_rmse", "type": "f4", "data": _base64(grid.relative_rmse, "<f4")},
            _shares("flushed", grid.share(grid.flushed)),
            _shares("saturated", grid.share(grid.saturated)),
        ],
        "names": name_patterns(grid, summary.worst),
    }


def _shares(name: str, values: NDArray[np.float64]) -> dict[str, Any]:
    scale = float(values.max(initial=0.0)) / _STEPS
    steps = np.rint(values / scale) if scale else values
    return {"name": name, "type": "u2", "scale": scale, "data": _base64(steps, "<u2")}


def _base64(values: NDArray[np.float64], dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode()


def name_patterns(grid: Grid, known: Iterable[TensorStats]) -> list[str]:
    """Return for each projection the tensor's name with {layer} and {expert}, or "".

    A pattern is given only if it makes the names of all known tensors of its projection.
    """
    patterns = dict.fromkeys(grid.projections, "")
    refuted = set()
    for stats in known:
        word = stats.projection or ""
        if stats.layer is None or stats.expert is None:
            continue
        patterns[word] = patterns[word] or _pattern(stats)
        if fill(patterns[word], stats.layer, stats.expert) != stats.name:
            refuted.add(word)
    return ["" if word in refuted else printable(pattern) for word, pattern in patterns.items()]


def _pattern(stats: TensorStats) -> str:
    name, expert = stats.name, f".experts.{stats.expert}."
    head, found, tail = name.partition(expert)
    layer = f".{stats.layer}."
    before, also, after = head.rpartition(layer)
    if not found or not also or "{" in name:
        return ""
    return f"{before}.{{layer}}.{after}.experts.{{expert}}.{tail}"


def fill(pattern: str, layer: int, expert: int) -> str:
    """Return the name that a pattern makes."""
    return pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def as_script(data: dict[str, Any]) -> str:
    """Return JSON that is safe inside a script element, whatever it holds."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
