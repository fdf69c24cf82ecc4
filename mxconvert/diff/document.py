"""A comparison as one JSON document."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mxconvert.diff.records import Status

if TYPE_CHECKING:
    from mxconvert.diff.records import Comparison, Difference
    from mxconvert.statistics import Sums

SCHEMA_VERSION = 1


def diff_document(comparison: Comparison) -> dict[str, Any]:
    """Return the document; figures that are not finite are null."""
    return {
        "type": "diff",
        "schema_version": SCHEMA_VERSION,
        "same": comparison.same,
        "a": asdict(comparison.a),
        "b": asdict(comparison.b),
        "counts": {_key(status): comparison.counts.get(status, 0) for status in Status},
        "moved": comparison.moved,
        "roles": [asdict(role) for role in comparison.roles],
        "quantization": [asdict(change) for change in comparison.quantization],
        "config": [asdict(change) for change in comparison.config],
        "files": [asdict(change) for change in comparison.files],
        "manifest": [asdict(change) for change in comparison.manifest],
        "values": _values(comparison.values),
        "not_measured": comparison.not_measured,
        "read": comparison.read,
        "tensors": [_tensor(entry) for entry in comparison.tensors],
    }


def _key(status: Status) -> str:
    return status.name.lower()


def _tensor(entry: Difference) -> dict[str, Any]:
    return {
        "name": entry.name,
        "status": _key(entry.status),
        "a": entry.a,
        "b": entry.b,
        "values": _values(entry.values),
    }


def _values(sums: Sums | None) -> dict[str, Any] | None:
    if sums is None:
        return None
    figures = {
        "relative_rmse": sums.relative_rmse,
        "sqnr_db": sums.sqnr_db,
        "cosine": sums.cosine,
        "max_abs_err": sums.max_abs_err,
    }
    return {
        "elements": sums.elements,
        **{name: value if math.isfinite(value) else None for name, value in figures.items()},
    }
