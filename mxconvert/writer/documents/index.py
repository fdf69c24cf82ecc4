"""``model.safetensors.index.json``: which file holds which tensor, for loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxconvert.writer.documents.jsontext import encode_json

if TYPE_CHECKING:
    from mxconvert.model import Plan

INDEX_NAME = "model.safetensors.index.json"


def index_json(plan: Plan) -> bytes:
    """Return the index: exactly the tensors stored, and the sum of their bytes.

    ``metadata.total_size`` counts tensor bytes, not headers, as loaders expect.
    """
    return encode_json(plan.index)
