"""Differences of what is not a tensor: configs, manifests, other files."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mxconvert.diff.records import Change
from mxconvert.manifest import MANIFEST_NAME, TENSORS_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mxconvert.manifest import Manifest
    from mxconvert.model import Checkpoint

_QUANTIZATION = "quantization_config"
_COVERED = frozenset({"config.json", MANIFEST_NAME, TENSORS_NAME})
_INDEX_END = ".safetensors.index.json"


def json_changes(a: Any, b: Any, path: str = "") -> Iterator[Change]:
    """Yield the members that differ, each by its path; lists are compared as a whole."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            inner = f"{path}.{key}" if path else key
            yield from json_changes(a.get(key), b.get(key), inner)
    elif a != b or isinstance(a, bool) != isinstance(b, bool):
        yield Change(path, a, b)


def config_changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[Change], list[Change]]:
    """Return the members of two configs that differ: those about quantization, and others."""
    quantization: list[Change] = []
    others: list[Change] = []
    for change in json_changes(dict(a), dict(b)):
        about = _QUANTIZATION in change.path.split(".")
        (quantization if about else others).append(change)
    return quantization, others


def file_changes(a: Checkpoint, b: Checkpoint) -> list[Change]:
    """Return the files besides weights, index, config and manifest that differ, by SHA-256."""
    ours, theirs = ({f.path: f.sha256 for f in side.sidecars} for side in (a, b))
    return [
        Change(path, ours.get(path), theirs.get(path))
        for path in sorted(ours.keys() | theirs.keys())
        if ours.get(path) != theirs.get(path)
        and path not in _COVERED
        and not path.endswith(_INDEX_END)
    ]


def manifest_changes(a: Manifest | None, b: Manifest | None) -> list[Change]:
    """Return how two artifacts say they were made differently."""
    if a is None or b is None:
        return []
    return list(json_changes(_made_by(a), _made_by(b)))


def _made_by(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": dataclasses.asdict(manifest.format),
        "generator": dataclasses.asdict(manifest.generator),
        "model": dataclasses.asdict(manifest.model),
        "options": dict(manifest.options),
        "source": dataclasses.asdict(manifest.source),
    }
