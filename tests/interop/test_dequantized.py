"""Other libraries read what dequantize writes: plain checkpoints with the packed values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.interop.families import CONFIGS
from tests.interop.test_compressed_tensors import scheme_of, source_tensors
from tests.interop.test_transformers import logits
from tests.support import run_cli

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support import Artifact

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("family", CONFIGS)
def test_plain_weights_are_those_of_the_packed_ones(
    family, family_artifacts: dict[str, Artifact], tmp_path: Path
) -> None:
    """As compressed-tensors decompresses them, bit for bit, and as transformers runs them."""
    import torch
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor

    artifact, folder = family_artifacts[family], tmp_path / "plain"
    run_cli("dequantize", artifact.root, folder).ok()
    plain = source_tensors(folder)
    for name in artifact.quantized:
        packed, scales = map(torch.tensor, artifact.packed(name))
        state = {"weight_packed": packed, "weight_scale": scales}
        theirs = MXFP4PackedCompressor.decompress(state, scheme_of(artifact))["weight"]
        assert plain[name].dtype == torch.bfloat16
        assert torch.equal(
            theirs.to(torch.bfloat16).view(torch.int16), plain[name].view(torch.int16)
        )
    assert torch.equal(logits(folder), logits(artifact.root))
