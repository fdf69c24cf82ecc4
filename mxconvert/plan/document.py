"""The plan as one JSON document, for people's scripts."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mxconvert.model import OutputFile, Plan, Totals

SCHEMA_VERSION = 1


def plan_document(plan: Plan, notices: Iterable[tuple[str, str]] = ()) -> dict[str, Any]:
    """Return what ``plan --json`` prints; fields are described in ``docs/reference/cli.md``.

    ``notices`` are those of the source; the plan's own follow them.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "type": "plan",
        "recipe": plan.recipe,
        "options": asdict(plan.options),
        "num_experts": plan.num_experts,
        "totals": {
            "files": len(plan.files),
            "file_bytes": plan.file_bytes,
            "quantized": _totals(plan.quantized),
            "copied": _totals(plan.copied),
            "dequantized": _totals(plan.dequantized),
        },
        "ignore": list(plan.ignore),
        "files": [_file(file) for file in plan.files],
        "index": plan.index,
        "dropped": [asdict(entry) for entry in plan.dropped],
        "notices": [
            {"code": code, "message": message} for code, message in (*notices, *plan.notices)
        ],
    }


def _totals(totals: Totals) -> dict[str, int]:
    return asdict(totals)


def _file(file: OutputFile) -> dict[str, Any]:
    return {
        "name": file.name,
        "role": str(file.role),
        "size": file.size,
        "header_size": file.header_size,
        "tensors": file.num_tensors,
        "source_bytes": file.source_size,
        "experts": list(file.experts) if file.experts else None,
        "layers": list(file.layers) if file.layers else None,
    }
