"""Level numeric: every weight made again from the source, or measured against it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from mxconvert.errors import SourceError, UsageError
from mxconvert.manifest import (
    MANIFEST_NAME,
    TENSORS_NAME,
    encode_manifest,
    encode_tensors,
    iter_tensors,
    parse_manifest,
)
from mxconvert.verify import numeric
from tests.support import Tensor, bf16_model, fail_cleanly, fp8_model, read_safetensors, shell
from tests.verify_base import (
    DENSE,
    EXPERT,
    INDEX,
    codes,
    edit_tensors,
    make_artifact,
    one,
    rebuild,
    verify,
)

if TYPE_CHECKING:
    from pathlib import Path

WEIGHT = "model.layers.1.mlp.experts.3.up_proj.weight"
PACKED, SCALE = WEIGHT + "_packed", WEIGHT + "_scale"
NORM = "model.norm.weight"


def patch(tensors: dict, name: str, at: int, mask: int = 1) -> None:
    dtype, shape, data = tensors[name]
    changed = bytearray(data)
    changed[at] ^= mask
    tensors[name] = Tensor(dtype, shape, bytes(changed))


@pytest.mark.parametrize("rule", ["mse", "even", "floor", "rceil"])
def test_every_rule_is_made_again(shared_source: Path, tmp_path: Path, rule: str) -> None:
    artifact = make_artifact(shared_source, tmp_path / "A", scale_rule=rule)
    report = verify(artifact, "numeric", source=shared_source)
    assert report.ok
    assert report.not_checked == ()
    assert report.counts["tensors_recomputed"] == 48
    assert report.counts["tensors_compared"] == 17
    assert report.error is None


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_other_source_dtypes(tmp_path: Path, dtype: str) -> None:
    source = bf16_model(layers=1, experts=2, dtype=dtype).write(tmp_path / "S")
    artifact = make_artifact(source, tmp_path / "A")
    report = verify(artifact, "numeric", source=source)
    assert report.ok
    assert report.counts["tensors_recomputed"] == 6


def test_pieces_smaller_than_a_tensor(
    artifact: Path, shared_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numeric, "PIECE_ELEMENTS", 96)
    monkeypatch.setattr(numeric, "PIECE_BYTES", 100)
    assert verify(artifact, "numeric", source=shared_source).ok
    edit_tensors(artifact / EXPERT, lambda t: patch(t, PACKED, 20 * 16 + 3))
    edit_tensors(artifact / DENSE, lambda t: patch(t, NORM, 101))
    rebuild(artifact)
    report = verify(artifact, "numeric", source=shared_source)
    assert codes(report) == {"codes-differ": 1, "copy-differs": 1}
    columns = read_safetensors(artifact / EXPERT)[SCALE].shape[1]
    row, block = divmod(20, columns)
    assert f"row {row}, block {block}:" in one(report, "codes-differ").message
    assert "first at byte 101" in one(report, "copy-differs").message


def test_one_wrong_code(artifact: Path, shared_source: Path) -> None:
    edit_tensors(artifact / EXPERT, lambda t: patch(t, PACKED, 16 * 5, 0x10))
    rebuild(artifact)
    assert verify(artifact, "digest").ok
    report = verify(artifact, "numeric", source=shared_source)
    finding = one(report, "codes-differ")
    assert codes(report).total() == 1
    assert (finding.path, finding.tensor) == (EXPERT, PACKED)
    assert finding.expected != finding.found
    assert report.counts["tensors_recomputed"] == 48


def test_one_wrong_scale(artifact: Path, shared_source: Path) -> None:
    edit_tensors(artifact / EXPERT, lambda t: patch(t, SCALE, 0))
    rebuild(artifact)
    report = verify(artifact, "numeric", source=shared_source)
    assert "row 0, block 0" in one(report, "codes-differ").message


def test_wrong_source_digest_in_the_list(artifact: Path, shared_source: Path) -> None:
    records = list(iter_tensors((artifact / TENSORS_NAME).read_bytes()))
    wrong = replace(records[0].sources[0], xxh3_128="0" * 32)
    records[0] = replace(records[0], sources=(wrong,))
    (artifact / TENSORS_NAME).write_bytes(encode_tensors(records))
    rebuild(artifact)
    report = verify(artifact, "numeric", source=shared_source)
    assert codes(report) == {"source-tensor": 1}
    assert report.findings[0].expected == "0" * 32


def test_a_list_that_names_parts_which_do_not_fit(artifact: Path, shared_source: Path) -> None:
    """Parts of another size, scales of what has none: each is a finding, none a crash."""
    records = list(iter_tensors((artifact / TENSORS_NAME).read_bytes()))
    (whole,) = records[0].sources
    part = replace(whole, selection=((0, 1, 1),) * len(whole.shape))
    records[0] = replace(records[0], sources=(part,))
    rank = len(records[1].sources[0].shape)
    turned = replace(records[1].sources[0], axes=tuple(reversed(range(rank))))
    records[1] = replace(records[1], sources=(turned,))
    records[-1] = replace(records[-1], sources=records[-1].sources * 2)
    records[-2] = replace(records[-2], sources=records[-2].sources * 2)
    records[-4] = replace(records[-4], sources=records[-4].sources * 3)
    records[-6] = replace(records[-6], sources=())
    (artifact / TENSORS_NAME).write_bytes(encode_tensors(records))
    rebuild(artifact, tensor_list=False)
    report = verify(artifact, "numeric", source=shared_source)
    found = {f.tensor for f in report.findings if f.code == "source-tensor"}
    assert found == {records[place].name for place in (0, 1, -2, -4, -6)}
    assert report.counts["tensors_recomputed"] + report.counts["tensors_compared"] == 60


def test_another_revision_of_the_source(artifact: Path, tmp_path: Path) -> None:
    model = bf16_model()
    dtype, shape, data = model.tensors[WEIGHT]
    changed = model.adding({WEIGHT: Tensor(dtype, shape, bytes(2) + data[2:])})
    report = verify(artifact, "numeric", source=changed.write(tmp_path / "S"))
    assert codes(report)["source-tensor"] == 1
    assert one(report, "source-tensor").tensor == PACKED
    other = model.without(lambda name: name == NORM).adding(
        {"extra": Tensor("BF16", (2,), b"abcd")}
    )
    report = verify(artifact, "numeric", source=other.write(tmp_path / "T"))
    assert report.findings[0].code == "other-source"
    assert one(report, "no-source-tensor").tensor == NORM
    assert one(report, "lost-tensor").tensor == "extra"


def test_sources_of_another_shape(artifact: Path, tmp_path: Path) -> None:
    source = bf16_model(hidden=32).write(tmp_path / "S")
    report = verify(artifact, "numeric", source=source)
    assert report.findings[0].code == "other-source"
    assert codes(report)["source-tensor"] > 0


def test_damaged_source(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        verify(artifact, "numeric", source=tmp_path / "none")


def test_samples_cover_everything(artifact: Path, shared_source: Path) -> None:
    total = 0
    for part in (1, 2, 3):
        report = verify(artifact, "numeric", source=shared_source, sample=f"{part}/3")
        assert report.ok
        assert f"only part {part} of 3" in report.not_checked[0]
        total += report.counts["tensors_recomputed"] + report.counts["tensors_compared"]
    assert total == 65


def test_a_large_source_is_sampled(
    artifact: Path, shared_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mxconvert.sample.WHOLE_SOURCE_LIMIT", 100_000)
    report = verify(artifact, "numeric", source=shared_source)
    assert report.ok
    assert "only part 1 of 7" in report.not_checked[0]


def test_unknown_rule_is_measured(artifact: Path, shared_source: Path) -> None:
    manifest = parse_manifest((artifact / MANIFEST_NAME).read_bytes(), "M")
    later = replace(manifest, format=replace(manifest.format, scale_rule="later"))
    (artifact / MANIFEST_NAME).write_bytes(encode_manifest(later))
    report = verify(artifact, "numeric", source=shared_source)
    assert report.ok
    assert "scale rule later" in report.not_checked[0]
    assert report.error is not None
    assert report.error.tensors == 48
    assert 0.10 < report.error.mean <= report.error.maximum < 0.13
    assert report.to_json()["error"]["relative_rmse_mean"] == report.error.mean
    tight = verify(artifact, "numeric", source=shared_source, max_error=0.05)
    assert codes(tight) == {"error-too-large": 48}


def test_damaged_artifact_and_source_level_together(artifact: Path, shared_source: Path) -> None:
    (artifact / EXPERT).unlink()
    report = verify(artifact, "numeric", source=shared_source)
    assert one(report, "missing-file")
    assert report.counts["tensors_recomputed"] == 42
    (artifact / TENSORS_NAME).unlink()
    report = verify(artifact, "numeric", source=shared_source)
    assert any("list is missing" in text for text in report.not_checked)


# ------------------------------------------------------------------------- foreign


@pytest.fixture
def foreign(artifact: Path) -> Path:
    """The artifact as another tool would have left it."""
    for name in (MANIFEST_NAME, TENSORS_NAME):
        (artifact / name).unlink()
    return artifact


def test_foreign_folder_passes_and_is_measured(foreign: Path, shared_source: Path) -> None:
    report = verify(foreign, "digest", foreign=True)
    assert report.ok
    assert report.artifact_id is None
    assert "no byte was compared with a digest" in report.not_checked[0]
    report = verify(foreign, "numeric", foreign=True, source=shared_source)
    assert report.ok
    assert report.error is not None
    assert report.error.tensors == 48
    assert report.counts["tensors_compared"] == 17


def test_foreign_folder_with_wrong_codes(foreign: Path, shared_source: Path) -> None:
    def swap(tensors: dict) -> None:
        dtype, shape, data = tensors[PACKED]
        swapped = bytes((b >> 4) | (b & 15) << 4 for b in data)  # nibble order
        tensors[PACKED] = Tensor(dtype, shape, swapped)

    edit_tensors(foreign / EXPERT, swap)
    edit_tensors(foreign / DENSE, lambda t: patch(t, NORM, 1))
    report = verify(foreign, "numeric", foreign=True, source=shared_source)
    assert codes(report) == {"error-too-large": 1, "copy-differs": 1}
    assert report.error is not None
    assert report.error.worst_tensor == PACKED


def test_foreign_folder_with_nan_scales(foreign: Path, shared_source: Path) -> None:
    edit_tensors(
        foreign / EXPERT,
        lambda t: t.update({SCALE: t[SCALE]._replace(data=b"\xff" * len(t[SCALE].data))}),
    )
    report = verify(foreign, "numeric", foreign=True, source=shared_source)
    assert codes(report) == {"error-too-large": 1}


def test_foreign_structure(foreign: Path) -> None:
    (foreign / EXPERT).unlink()
    edit_tensors(foreign / DENSE, lambda t: t.pop(NORM))
    report = verify(foreign, foreign=True)
    assert codes(report) == {"missing-file": 1, "not-stored": 1}


def test_foreign_names_the_source_lacks_are_said(foreign: Path, tmp_path: Path) -> None:
    source = bf16_model().without(lambda name: ".experts." in name).write(tmp_path / "S")
    report = verify(foreign, "numeric", foreign=True, source=source)
    assert report.ok
    assert any("48 tensors were not compared" in text for text in report.not_checked)


def test_foreign_folder_without_index(foreign: Path) -> None:
    (foreign / INDEX).unlink()
    assert one(verify(foreign, foreign=True), "missing-file").path == "model.safetensors"


def test_a_bound_that_nothing_is_compared_with_is_refused(artifact: Path) -> None:
    """`--max-error` belongs to what level numeric measures."""
    fail_cleanly(shell("verify", artifact, "--max-error", "0.1"), 2, "--max-error")


def test_a_source_is_compared_with(artifact: Path, shared_source: Path) -> None:
    """Given without a level it means numeric; with a lower one it would have no effect."""
    given = ("--source", shared_source)
    report = shell("verify", artifact, *given, "--json").ok().json()
    assert report["level"] == "numeric"
    assert report["counts"]["tensors_recomputed"] == 48
    for level in ("structure", "digest"):
        fail_cleanly(shell("verify", artifact, "--level", level, *given), 2, level, "numeric")
    with pytest.raises(UsageError, match="compares with no source"):
        verify(artifact, "digest", source=shared_source)


def test_the_declaration_s_place_is_the_source_s(tmp_path: Path) -> None:
    """Whole digests do not tell that an engine would look elsewhere."""
    model = fp8_model()
    inner = {**model.config, "model_type": "deepseek_v3"}
    outer = {key: value for key, value in model.config.items() if key != "quantization_config"}
    nested = replace(model, config={**outer, "text_config": inner})
    source = nested.write(tmp_path / "S")
    artifact = make_artifact(source, tmp_path / "A")
    assert verify(artifact, "numeric", source=source).ok
    path = artifact / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = config["text_config"].pop("quantization_config")
    path.write_text(json.dumps(config))
    rebuild(artifact)
    assert verify(artifact, "digest").ok
    finding = one(verify(artifact, "numeric", source=source), "quantization-config")
    assert (finding.expected, finding.found) == ("in text_config", "at the top level")
