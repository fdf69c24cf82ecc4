"""A report as one JSON document."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxconvert.report.summary import Group, Summary
    from mxconvert.statistics import Sums, TensorStats

SCHEMA_VERSION = 1


def report_document(summary: Summary, top: int) -> dict[str, Any]:
    """Return the document; figures that are not finite are null.

    Args:
        summary: What to show.
        top: Worst weights and outliers to list.
    """
    return {
        "type": "report",
        "schema_version": SCHEMA_VERSION,
        **asdict(summary.header),
        "files": summary.files,
        "total": _group(summary.total),
        "relative_rmse": {k: finite(v) for k, v in asdict(summary.spread).items()},
        "roles": [{"role": group.name, **_group(group)} for group in summary.roles],
        "layers": [{"layer": int(group.name), **_group(group)} for group in summary.layers],
        "projections": [
            {"projection": group.name, **_group(group)} for group in summary.projections
        ],
        "worst": [_tensor(stats) for stats in summary.worst[:top]],
        "outlier_experts": {
            "count": summary.outlier_count,
            "worst": [asdict(outlier) for outlier in summary.outliers[:top]],
        },
        "histograms": {
            "codes": list(summary.codes),
            "scales": {str(byte): count for byte, count in summary.scales.items()},
            "sampled": list(summary.sampled),
        },
    }


def finite(value: float) -> float | None:
    """Return a number that JSON can hold, ``None`` for one that it cannot."""
    return value if math.isfinite(value) else None


def _group(group: Group) -> dict[str, Any]:
    return {"tensors": group.tensors, **figures(group.sums)}


def _tensor(stats: TensorStats) -> dict[str, Any]:
    members = ("name", "file", "layer", "expert", "projection", "role", "dtype")
    return {
        **{name: getattr(stats, name) for name in members},
        "shape": list(stats.shape),
        **figures(stats.sums),
    }


def figures(sums: Sums) -> dict[str, Any]:
    """Return the sums and what follows from them."""
    return {
        "relative_rmse": finite(sums.relative_rmse),
        "sqnr_db": finite(sums.sqnr_db),
        "cosine": sums.cosine,
        **asdict(sums),
    }
