"""The safetensors library opens our files and would have written the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors import TensorSpec, safe_open, serialize

from tests.support import Artifact, read_artifact, run_cli
from tests.support.artifact import read_tensors

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def artifact(shared_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    target = tmp_path_factory.mktemp("safetensors") / "out"
    run_cli("quantize", shared_source, target).ok()
    return read_artifact(target)


def test_every_file_opens_and_says_format_pt(artifact: Artifact) -> None:
    for path in artifact.root.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as opened:
            assert opened.metadata()["format"] == "pt"
            assert set(opened.keys()) == {
                name for name, stored in artifact.tensors.items() if stored.file == path.name
            }


def test_the_index_lists_exactly_what_is_stored(artifact: Artifact) -> None:
    assert artifact.index["weight_map"] == {n: t.file for n, t in artifact.tensors.items()}
    total = sum(len(stored.data) for stored in artifact.tensors.values())
    assert artifact.index["metadata"]["total_size"] == total


LIBRARY_DTYPE = {"BF16": "bfloat16", "U8": "uint8"}


def test_their_writer_makes_the_same_bytes(artifact: Artifact) -> None:
    """Same tensors, same metadata: equal files, header order and padding included."""
    for path in sorted(artifact.root.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as opened:
            metadata = opened.metadata()
        stored = read_tensors(path)
        alive = {name: np.frombuffer(tensor.data, np.uint8) for name, tensor in stored.items()}
        specs = {
            name: TensorSpec(
                dtype=LIBRARY_DTYPE[tensor.dtype],
                shape=list(tensor.shape),
                data_ptr=alive[name].ctypes.data,
                data_len=len(tensor.data),
            )
            for name, tensor in stored.items()
        }
        assert serialize(specs, metadata) == path.read_bytes(), path.name


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
def test_their_torch_writer_makes_the_same_bytes(artifact: Artifact, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    for path in sorted(artifact.root.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata()
        save_file(load_file(path), tmp_path / path.name, metadata=metadata)
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name
