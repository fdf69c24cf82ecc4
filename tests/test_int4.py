"""INT4 of compressed-tensors as a source: only where it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mxconvert.fp8 import int_pairs
from tests.support import Model, Tensor, fail_cleanly, read_artifact, refused, shell
from tests.support.families.check import check_values
from tests.support.int4 import declared, int4_model, matrix_of
from tests.support.matching import check_declared

if TYPE_CHECKING:
    from pathlib import Path

FROM = "--from-int4"
MODULE = "model.layers.1.mlp.experts.2.down_proj"


def modules(model: Model) -> list[str]:
    end = ".weight_packed"
    return [name.removesuffix(end) for name in model.tensors if name.endswith(end)]


def with_tensor(model: Model, name: str, tensor: Tensor) -> Model:
    return model.without(lambda other: other == name).adding({name: tensor})


def test_all_bytes_of_two_integers() -> None:
    """The low nibble comes first, and 8 is nought."""
    pairs = int_pairs()
    for byte in range(256):
        assert pairs[byte].tolist() == [(byte & 15) - 8, (byte >> 4) - 8]


def test_refused_unless_asked_for(tmp_path: Path) -> None:
    """It is rounded twice, which nobody should get unawares."""
    source = int4_model().write(tmp_path / "source")
    says = ("pack-quantized", "weight_packed", "I32", FROM)
    refused(source, tmp_path / "out", says=says)


@pytest.mark.parametrize(
    ("group", "dtype"),
    [(32, "BF16"), (32, "F16"), (32, "F32"), (16, "BF16"), (8, "BF16"), (None, "BF16")],
    ids=["32", "f16", "f32", "16", "8", "channels"],
)
@pytest.mark.parametrize("backend", ["llvm", "numpy"])
def test_values_of_every_expert(
    group: int | None, dtype: str, backend: str, tmp_path: Path
) -> None:
    """Straight from the product in float32 into the rule, whatever shares a scale."""
    model = int4_model(group=group, dtype=dtype)
    source = model.write(tmp_path / "source")
    shell("quantize", source, tmp_path / "out", FROM, "--backend", backend).ok()
    artifact = read_artifact(tmp_path / "out")
    assert set(artifact.quantized) == {f"{module}.weight" for module in modules(model)}
    for module in modules(model):
        check_values(artifact, f"{module}.weight", matrix_of(model, module))
    others = {n for n in model.tensors if n.rpartition(".")[0] not in modules(model)}
    assert set(artifact.kept) == others
    check_declared(artifact)
    verified = shell("verify", tmp_path / "out", "--source", source, "--json").ok()
    assert verified.json()["findings"] == []


def test_the_manifest_says_so(tmp_path: Path) -> None:
    source = int4_model().write(tmp_path / "source")
    result = shell("quantize", source, tmp_path / "out", FROM, "--json").ok()
    text = (tmp_path / "out" / "mxconvert.manifest.json").read_text()
    assert '"from_int4":true' in text.replace(" ", "")
    assert '"shape of an INT4 weight"' in result.stdout


def test_dequantize_gives_the_library_s_values(tmp_path: Path) -> None:
    """To BF16, rounded once: nothing is lost that it had not lost before."""
    model = int4_model()
    source = model.write(tmp_path / "source")
    shell("dequantize", source, tmp_path / "out").ok()
    artifact = read_artifact(tmp_path / "out")
    for module in modules(model):
        exact = matrix_of(model, module).astype(np.float32)
        bits = exact.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        assert artifact.tensors[f"{module}.weight"][3] == rounded.astype("<u2").tobytes()
    shell("verify", tmp_path / "out", "--source", source).ok()


def test_shards_and_threads_change_nothing(tmp_path: Path) -> None:
    """Scales in another shard than the words, one job instead of two."""
    one, two = int4_model().write(tmp_path / "one"), tmp_path / "two"
    int4_model().reshard(
        lambda name: f"model-0000{1 + name.endswith('_scale')}-of-00002.safetensors"
    ).write(two)
    shell("quantize", one, tmp_path / "A", FROM).ok()
    shell("quantize", two, tmp_path / "B", FROM, "--jobs", "1").ok()
    files = [path for path in (tmp_path / "A").iterdir() if path.suffix == ".safetensors"]
    assert files
    for path in files:
        assert path.read_bytes() == (tmp_path / "B" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"num_bits": 8}, "8"),
        ({"type": "float"}, "float"),
        ({"symmetric": False}, "False"),
        ({"actorder": "group"}, "group"),
    ],
)
def test_other_schemes_are_named(weights: dict[str, Any], says: str, tmp_path: Path) -> None:
    model = int4_model().configured(quantization_config=declared(**weights))
    source = model.write(tmp_path / "source")
    refused(source, tmp_path / "out", FROM, says=(says, "symmetric INT4"))


@pytest.mark.parametrize(
    ("suffix", "says"),
    [("weight_zero_point", "asymmetric"), ("weight_g_idx", "act-order")],
)
def test_more_than_scales(suffix: str, says: str, tmp_path: Path) -> None:
    """Zero points and reordered columns would change the values."""
    extra = Tensor("I32", (8, 1), bytes(32))
    source = int4_model().adding({f"{MODULE}.{suffix}": extra}).write(tmp_path / "source")
    refused(source, tmp_path / "out", FROM, says=(says, MODULE))


def test_a_missing_scale(tmp_path: Path) -> None:
    source = int4_model().without(lambda n: n == f"{MODULE}.weight_scale").write(tmp_path / "s")
    refused(source, tmp_path / "out", FROM, says=(f"{MODULE}.weight_scale", "no scale"))


@pytest.mark.parametrize("shape", [(64, 2), (63, 3), (64,)])
def test_scales_of_another_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Down is [64, 96]: groups that are no whole number of columns, rows that are missing."""
    size = 2 * int(np.prod(shape))
    wrong = Tensor("BF16", shape, bytes(size))
    if shape == (64, 2):
        wrong = Tensor("BF16", (64, 5), bytes(640))
    source = with_tensor(int4_model(), f"{MODULE}.weight_scale", wrong).write(tmp_path / "source")
    refused(source, tmp_path / "out", FROM, says=(f"{MODULE}.weight_packed", "[N, groups]"))


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"group_size": 64}, "3 scales for a row of 96; config.json declares one for each 64"),
        ({"strategy": "channel", "group_size": None}, "declares one for each row"),
        ({"strategy": "tensor", "group_size": None}, "strategy 'tensor'"),
        ({"strategy": "group", "group_size": None}, "group_size None"),
    ],
)
def test_scales_that_are_not_as_declared(
    weights: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Their number alone does not tell how a row is shared out: the last group may be ragged."""
    model = int4_model().configured(quantization_config=declared(**weights))
    refused(model.write(tmp_path / "source"), tmp_path / "out", FROM, says=(says,))


def test_a_ragged_last_group_is_not_taken_for_two_halves(tmp_path: Path) -> None:
    """96 columns in groups of 64 have two scales, as they would in groups of 48."""
    model = int4_model(group=64, ragged=True)
    result = shell("dequantize", model.write(tmp_path / "source"), tmp_path / "out")
    fail_cleanly(result, 5, "2 scales for a row of 96", "each 64")


@pytest.mark.parametrize("size", [32, -1])
def test_no_strategy_is_what_the_size_says(size: int, tmp_path: Path) -> None:
    """As compressed-tensors infers it; -1 is a channel."""
    model = int4_model(group=None if size == -1 else size)
    stated = declared(group_size=size, strategy=None)
    source = model.configured(quantization_config=stated).write(tmp_path / "source")
    shell("quantize", source, tmp_path / "out", FROM).ok()


def test_rows_with_padding_are_refused(tmp_path: Path) -> None:
    """The words hold 96 columns, the checkpoint says 90: six would be padding."""
    stated = Tensor("I64", (2,), np.array([64, 90], "<i8").tobytes())
    model = with_tensor(int4_model(), f"{MODULE}.weight_shape", stated)
    source = model.write(tmp_path / "source")
    result = shell("quantize", source, tmp_path / "out", FROM)
    fail_cleanly(result, 5, "[64, 90]", "[64, 96]", f"{MODULE}.weight_shape")


def test_a_scale_that_is_not_finite(tmp_path: Path) -> None:
    scale = int4_model().tensors[f"{MODULE}.weight_scale"]
    data = b"\x80\x7f" + scale.data[2:]
    model = with_tensor(int4_model(), f"{MODULE}.weight_scale", scale._replace(data=data))
    source = model.write(tmp_path / "source")
    result = shell("quantize", source, tmp_path / "out", FROM)
    fail_cleanly(result, 5, f"{MODULE}.weight_scale", "NaN, infinite or negative")


def test_the_option_without_such_a_source(tmp_path: Path, shared_source: Path) -> None:
    result = shell("quantize", shared_source, tmp_path / "out", FROM)
    fail_cleanly(result, 2, "--from-int4: no tensor of the source is INT4")


def test_report_and_diff_read_it(tmp_path: Path) -> None:
    source = int4_model().write(tmp_path / "source")
    shell("quantize", source, tmp_path / "out", FROM, "--no-statistics").ok()
    later = shell("report", tmp_path / "out", "--source", source, "--json").ok().json()
    shell("quantize", source, tmp_path / "again", FROM).ok()
    collected = shell("report", tmp_path / "again", "--json").ok().json()
    for figures in (later, collected):
        assert figures["total"]["tensors"] == 48
        assert 0.02 < figures["total"]["relative_rmse"] < 0.2
    assert later["total"].pop("exponents") == collected["total"].pop("exponents")
    assert later["total"] == pytest.approx(collected["total"])
    assert "48" in shell("diff", tmp_path / "out", tmp_path / "again").ok().stdout
