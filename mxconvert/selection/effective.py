"""The artifact that a folder with a part of another one is: a manifest and a tensor list.

With these everything that reads artifacts takes the folder as one of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mxconvert.errors import VerificationError
from mxconvert.manifest import RECORD_NAME, encode_tensors, iter_tensors
from mxconvert.selection.plan import plan_selection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxconvert.manifest import Manifest, TensorRecord
    from mxconvert.selection.plan import SelectionPlan
    from mxconvert.selection.record import SelectionRecord


def effective(
    manifest: Manifest, record: SelectionRecord, tensors: bytes
) -> tuple[Manifest, bytes]:
    """Return manifest and tensor list of what a folder holds.

    Args:
        manifest: Of the whole artifact.
        record: What the folder holds of it.
        tensors: The artifact's tensor list.

    Raises:
        VerificationError: The tensor list is damaged, or the record names other derived files
            than its selection makes.
    """
    if record.selection.num_experts != manifest.model.num_experts:
        raise VerificationError(
            f"{RECORD_NAME}: num_experts: expected {manifest.model.num_experts}, found "
            f"{record.selection.num_experts}",
            code="bad-selection",
        )
    plan = plan_selection(manifest, record.selection, lambda: iter_tensors(tensors))
    expected = {part.path for part in plan.parts}
    found = {entry.path for entry in record.derived}
    indexes = {plan.index.path} if plan.index is not None else found - expected
    if found != expected | indexes or len(indexes) != 1:
        raise VerificationError(
            f"{RECORD_NAME}: derived files: expected {sorted(expected)} and an index, found "
            f"{sorted(found)}",
            hint="pull the same selection again with --overwrite",
            code="bad-selection",
        )
    files = sorted((*plan.files, *record.derived), key=lambda entry: entry.path)
    held = sorted(held_tensors(plan, tensors), key=lambda tensor: (tensor.file, tensor.begin))
    totals = replace(
        manifest.totals,
        tensors=len(held),
        files=len(files),
        file_bytes=sum(entry.size for entry in files),
    )
    return replace(manifest, files=tuple(files), totals=totals), encode_tensors(held)


def held_tensors(plan: SelectionPlan, tensors: bytes) -> Iterator[TensorRecord]:
    """Yield the tensors of a selection where they lie in its folder."""
    whole = {entry.path for entry in plan.files}
    for record in iter_tensors(tensors):
        if record.file in whole:
            yield record
    for part in plan.parts:
        yield from part.moved
