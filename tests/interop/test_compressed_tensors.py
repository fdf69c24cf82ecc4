"""compressed-tensors, the format's own library, reads our files and config as we mean them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.interop.families import CONFIGS
from tests.support import run_cli
from tests.support.int4 import int4_model
from tests.support.matching import renamings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support import Artifact

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("default"),
]


def parsed_config(artifact: Artifact) -> Any:
    from compressed_tensors.quantization import QuantizationConfig

    return QuantizationConfig.model_validate(artifact.config["quantization_config"])


def scheme_of(artifact: Artifact) -> Any:
    (scheme,) = parsed_config(artifact).config_groups.values()
    return scheme


def source_tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


@pytest.mark.parametrize("family", CONFIGS)
def test_their_decompressor_sees_what_refdec_sees(
    family, family_artifacts: dict[str, Artifact]
) -> None:
    """Bit for bit, on every packed tensor, under the scheme of the config we wrote."""
    import torch
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor

    artifact = family_artifacts[family]
    scheme = scheme_of(artifact)
    for name in artifact.quantized:
        packed, scales = map(torch.tensor, artifact.packed(name))
        state = {"weight_packed": packed, "weight_scale": scales}
        theirs = MXFP4PackedCompressor.decompress(state, scheme)["weight"].to(torch.float32)
        ours = artifact.values(name).astype(np.float32)
        assert theirs.numpy().tobytes() == ours.tobytes(), name


@pytest.mark.parametrize("family", CONFIGS)
def test_their_compressor_writes_our_bytes_under_the_even_rule(
    family, family_artifacts: dict[str, Artifact], family_sources: dict[str, Path]
) -> None:
    """Their quantizer on the source weight gives our codes and scales."""
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    artifact = family_artifacts[family]
    scheme = scheme_of(artifact)
    weights = source_tensors(family_sources[family])
    for name in artifact.quantized:
        blocks = weights[name].unflatten(-1, (-1, 32))
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
        state = {"weight": weights[name], "weight_scale": scale}
        made = MXFP4PackedCompressor.compress(state, scheme)
        packed, scales = artifact.packed(name)
        assert made["weight_packed"].numpy().tobytes() == packed.tobytes(), name
        assert made["weight_scale"].numpy().tobytes() == scales.tobytes(), name


@pytest.mark.parametrize("family", CONFIGS)
def test_their_matching_agrees_with_what_is_stored(
    family, family_artifacts: dict[str, Artifact]
) -> None:
    """Each plain matrix is ignored, each packed weight is a target, no ignore entry is stale."""
    from compressed_tensors.utils.match import match_name

    artifact = family_artifacts[family]
    ignore = parsed_config(artifact).ignore
    assert scheme_of(artifact).targets == ["Linear"]

    def ignored(weight: str) -> bool:
        return any(match_name(weight.removesuffix(".weight"), entry) for entry in ignore)

    matrices = [n for n in artifact.kept if len(artifact.tensors[n].shape) == 2]
    assert [name for name in matrices if not ignored(name)] == []
    assert [name for name in artifact.quantized if ignored(name)] == []
    modules = [name.removesuffix(".weight") for name in artifact.kept]
    modules += [new for module in modules for new in renamings(module)]
    assert [e for e in ignore if not any(match_name(name, e) for name in modules)] == []


def test_the_config_says_weight_only_mxfp4(family_artifacts: dict[str, Artifact]) -> None:
    """Group size 32, E2M1 with U8 scales, no activation scheme that an engine could act on."""
    artifact = family_artifacts["qwen3_moe"]
    config, weights = parsed_config(artifact), scheme_of(artifact).weights
    assert config.format == "mxfp4-pack-quantized"
    assert str(config.quantization_status.value) == "compressed"
    assert (weights.num_bits, weights.type, weights.group_size) == (4, "float", 32)
    assert weights.symmetric
    assert not weights.dynamic
    assert scheme_of(artifact).input_activations is None
    assert scheme_of(artifact).output_activations is None


@pytest.mark.parametrize("group", [32, 16, None])
def test_int4_is_what_their_decompressor_sees(group: int | None, tmp_path: Path) -> None:
    """`dequantize` gives their bytes, and their compressor gives back the words we read."""
    import torch
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    source = int4_model(group=group).write(tmp_path / "source")
    run_cli("dequantize", source, tmp_path / "out").ok()
    ours = source_tensors(tmp_path / "out")
    declared = json.loads((source / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(declared).config_groups.values()
    stored = source_tensors(source)
    modules = [n.removesuffix(".weight_packed") for n in stored if n.endswith(".weight_packed")]
    assert len(modules) == 48
    for module in modules:
        names = ("weight_packed", "weight_scale", "weight_shape")
        state = {name: stored[f"{module}.{name}"] for name in names}
        theirs = PackedQuantizationCompressor.decompress(state, scheme)
        assert torch.equal(theirs["weight"], ours[f"{module}.weight"]), module
        again = PackedQuantizationCompressor.compress(
            {"weight": theirs["weight"], "weight_scale": state["weight_scale"]}, scheme
        )
        assert torch.equal(again["weight_packed"], state["weight_packed"]), module
