"""Reading the JSON documents of an artifact: config.json and the index."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from mxconvert.verify.report import Check, Collector

if TYPE_CHECKING:
    from mxconvert.verify.place import Place

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"


def read_object(place: Place, path: str, collector: Collector) -> dict[str, Any] | None:
    """Return a JSON object, ``None`` after a finding."""
    collector.look(path, Check.STRUCTURE)
    try:
        value = json.loads(place.read(path).decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        message = f"{path}: not a JSON document: {error}"
    except OSError as error:
        message = f"{path}: cannot be read: {error.strerror}"
    else:
        if isinstance(value, dict):
            return value
        message = f"{path}: a JSON {type(value).__name__}, expected an object"
    collector.fail(Check.STRUCTURE, "bad-json", message, path=path)
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        double = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {double!r} stands there twice")
    return result


def read_weight_map(
    place: Place, path: str, collector: Collector
) -> tuple[dict[str, str], object] | None:
    """Return the index's weight_map and its total_size, ``None`` after a finding."""
    document = read_object(place, path, collector)
    if document is None:
        return None
    weight_map, metadata = document.get("weight_map"), document.get("metadata")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        message = f"{path}: weight_map is not an object of file names"
        collector.fail(Check.STRUCTURE, "bad-index", message, path=path)
        return None
    return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None
