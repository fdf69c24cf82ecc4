"""Convert a small model and compare the result with its matrices, element by element."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from tests.support.artifact import read_artifact
from tests.support.contract import ROOMY
from tests.support.numbers import E2M1, decode, e8m0
from tests.support.shell import shell

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.artifact import Artifact
    from tests.support.families.readings import Array, Stored
    from tests.support.models import Model


def reader(model: Model) -> Stored:
    """Return a function from a tensor's name to its values."""

    @cache
    def stored(name: str) -> Array:
        return decode(model.tensors[name].data, *model.tensors[name][:2])

    return stored


def quantized(model: Model, folder: Path, *options: object) -> Artifact:
    """Convert, whether or not an engine is known to take the result."""
    source = model.write(folder / "source")
    shell("quantize", source, folder / "out", *ROOMY, *options, "--force").ok()
    return read_artifact(folder / "out")


def check_values(artifact: Artifact, name: str, matrix: Array) -> None:
    """Assert that each element is the nearest that its block's scale allows, and the scale fits."""
    packed, scales = artifact.packed(name)
    assert packed.shape == (matrix.shape[0], matrix.shape[1] // 2), name
    steps = np.repeat(e8m0(scales), 32, axis=1)
    grid = np.concatenate([-E2M1[:0:-1], E2M1])
    nearest = np.abs(matrix[..., None] - grid * steps[..., None]).min(axis=-1)
    assert np.array_equal(np.abs(artifact.values(name) - matrix), nearest), name
    largest = np.abs(matrix).reshape(matrix.shape[0], -1, 32).max(axis=2) / e8m0(scales)
    assert (largest > 2).all(), name
    assert (largest < 12).all(), name
