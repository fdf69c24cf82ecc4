"""transformers loads the artifact and computes what our decoded weights compute."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.interop.families import CONFIGS
from tests.support import Artifact, Tensor, encode, raw_safetensors
from tests.support.artifact import read_tensors

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("default"),
]


def logits(folder: Path) -> Any:
    """Load a folder on the CPU and return its logits for one fixed prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12)).logits


def write_decoded(source: Path, artifact: Artifact, folder: Path) -> Path:
    """Copy a source folder with each quantized weight replaced by its decoded BF16 values."""
    shutil.copytree(source, folder)
    for path in folder.glob("*.safetensors"):
        tensors = {n: Tensor(*stored[1:]) for n, stored in read_tensors(path).items()}
        for name in tensors.keys() & set(artifact.quantized):
            data = encode(artifact.values(name), "BF16")
            tensors[name] = tensors[name]._replace(data=data)
        raw_safetensors(path, tensors)
    return folder


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_equal_those_of_the_decoded_weights(
    family, family_artifacts: dict[str, Artifact], family_sources: dict[str, Path], tmp_path
) -> None:
    """Same logits bit for bit, and not those of the unquantized model (the check has teeth)."""
    import torch

    artifact, source = family_artifacts[family], family_sources[family]
    ours = logits(artifact.root)
    assert torch.equal(ours, logits(write_decoded(source, artifact, tmp_path / "decoded")))
    original = logits(source)
    assert not torch.equal(ours, original)
    assert torch.nn.functional.cosine_similarity(ours, original, dim=-1).min() > 0.9
