"""Levels structure and digest: what is wrong is found, named and counted."""

from __future__ import annotations

import json
import os
import shutil
from importlib.resources import files
from typing import TYPE_CHECKING

import jsonschema
import pytest
import zstandard

from mxconvert.errors import Interrupted, LocalError, UsageError, VerificationError
from mxconvert.events import Advanced, FileFinished, Started
from mxconvert.manifest import MANIFEST_NAME, TENSORS_NAME, artifact_id
from mxconvert.statistics import REPORT_NAME
from mxconvert.stop import StopToken
from mxconvert.verify import Level, VerifyOptions, verify_artifact
from tests.support import Tensor, bf16_model, raw_safetensors, read_safetensors
from tests.verify_base import (
    DENSE,
    EXPERT,
    INDEX,
    codes,
    edit_json,
    edit_tensors,
    flip,
    header_end,
    make_artifact,
    one,
    rebuild,
    verify,
)

if TYPE_CHECKING:
    from pathlib import Path

PACKED = "model.layers.1.mlp.experts.3.up_proj.weight_packed"
SCALE = "model.layers.1.mlp.experts.3.up_proj.weight_scale"


# ------------------------------------------------------------------------- what is fine


@pytest.mark.parametrize("level", ["structure", "digest"])
def test_an_untouched_artifact_passes(made: Path, level: str) -> None:
    report = verify(made, level, strict=True)
    assert report.ok
    assert report.notes == ()
    assert report.artifact_id == artifact_id((made / MANIFEST_NAME).read_bytes())
    not_listed = {MANIFEST_NAME, REPORT_NAME}
    present = {path.name for path in made.iterdir()}
    assert report.counts["files_listed"] == len(present - not_listed)
    assert report.counts["tensors"] == 17 + 2 * 48
    if level == "digest":
        assert report.counts["files_read"] == report.counts["files_listed"]
        assert report.counts["tensors_hashed"] == report.counts["tensors"]
        read = sum(p.stat().st_size for p in made.iterdir() if p.name not in not_listed)
        assert report.counts["bytes_read"] == read


@pytest.mark.parametrize("layout", ["layers", "source"])
def test_other_layouts_pass(shared_source: Path, tmp_path: Path, layout: str) -> None:
    assert verify(make_artifact(shared_source, tmp_path / "A", layout=layout), "digest").ok


def test_real_outputs_fit_the_json_schemas(made: Path) -> None:
    def validator(name: str) -> jsonschema.Draft202012Validator:
        return jsonschema.Draft202012Validator(
            json.loads(files("mxconvert.schemas").joinpath(name).read_text())
        )

    validator("manifest-v1.schema.json").validate(json.loads((made / MANIFEST_NAME).read_bytes()))
    lines = zstandard.ZstdDecompressor().decompress((made / TENSORS_NAME).read_bytes())
    line_validator = validator("tensors-v1.schema.json")
    for line in lines.splitlines():
        line_validator.validate(json.loads(line))


def test_what_was_not_checked_is_said(made: Path) -> None:
    assert any("no digest" in text for text in verify(made).not_checked)
    assert any("source" in text for text in verify(made, "digest").not_checked)


def test_progress_adds_up(made: Path) -> None:
    events = []
    verify_artifact(made, VerifyOptions(), events.append)
    (started,) = [event for event in events if isinstance(event, Started)]
    finished = [event for event in events if isinstance(event, FileFinished)]
    advanced = sum(event.num_bytes for event in events if isinstance(event, Advanced))
    assert advanced == started.total_bytes == sum(event.size_bytes for event in finished)
    assert started.total_files == len(finished)
    assert all(event.ok for event in finished)


def test_a_signal_ends_it(made: Path) -> None:
    stop = StopToken()

    def report(event: object) -> None:
        if isinstance(event, FileFinished):
            stop.set(15)

    with pytest.raises(Interrupted) as caught:
        verify_artifact(made, VerifyOptions(jobs=1), report, stop=stop)
    assert caught.value.exit_status == 143
    assert not stop.armed


# ------------------------------------------------------- MAN-01: one flipped bit


def test_flipped_bit_in_tensor_data(artifact: Path) -> None:
    flip(artifact / EXPERT, header_end(artifact / EXPERT) + 5)
    assert verify(artifact).ok  # headers cannot show it
    report = verify(artifact, "digest")
    finding = one(report, "digest")
    assert finding.path == EXPERT
    assert finding.expected in finding.message
    assert finding.found in finding.message
    assert "1 of 1 chunks differ, the first is chunk 0 (bytes 0 to" in finding.message
    tensor = one(report, "tensor-digest")
    assert tensor.tensor == "model.layers.0.mlp.experts.3.down_proj.weight_packed"
    assert codes(report).total() == 2
    assert report.counts["files_read"] == report.counts["files_listed"]
    assert report.counts["files_failed"] == 1


def test_flipped_bit_in_header_padding(artifact: Path) -> None:
    path = artifact / EXPERT
    raw_safetensors(path, read_safetensors(path), pad=4096)
    rebuild(artifact)
    assert verify(artifact, "digest").ok
    assert path.read_bytes()[header_end(path) - 1 :][:1] == b" "
    flip(path, header_end(path) - 1, bit=0)
    report = verify(artifact, "digest")
    assert one(report, "digest").path == EXPERT
    assert report.counts["files_failed"] == 1


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", INDEX])
def test_flipped_bit_in_a_small_file(artifact: Path, name: str) -> None:
    flip(artifact / name, (artifact / name).stat().st_size - 1, bit=1)
    report = verify(artifact, "digest")
    assert one(report, "digest").path == name
    assert report.counts["files_read"] == report.counts["files_listed"]


def test_flipped_bit_in_the_tensor_list(artifact: Path) -> None:
    flip(artifact / TENSORS_NAME, 500)
    assert one(verify(artifact), "bad-tensor-list").path == TENSORS_NAME
    assert one(verify(artifact, "digest"), "digest").path == TENSORS_NAME


def test_flipped_bit_in_the_manifest(artifact: Path) -> None:
    data = (artifact / MANIFEST_NAME).read_bytes()
    flip(artifact / MANIFEST_NAME, data.index(b'"sha256":"') + 12, bit=0)
    assert not verify(artifact, "digest").ok


# ---------------------------------------------------------- MAN-02: missing files


@pytest.mark.parametrize("name", [EXPERT, "tokenizer.json", INDEX, "config.json", TENSORS_NAME])
def test_missing_file(artifact: Path, name: str) -> None:
    (artifact / name).unlink()
    report = verify(artifact, "digest")
    finding = one(report, "missing-file")
    assert finding.path == name
    assert name in finding.message
    assert report.counts["files_read"] == report.counts["files_listed"] - 1
    assert "not-stored" not in codes(report)


def test_every_missing_file_is_listed(artifact: Path) -> None:
    (artifact / EXPERT).unlink()
    (artifact / DENSE).unlink()
    found = [f.path for f in verify(artifact).findings if f.code == "missing-file"]
    assert found == [DENSE, EXPERT]


def test_no_manifest_is_not_a_pass(artifact: Path) -> None:
    (artifact / MANIFEST_NAME).unlink()
    report = verify(artifact)
    assert codes(report) == {"no-manifest": 1}
    assert "this is not a finished artifact" in report.findings[0].message
    assert report.artifact_id is None


@pytest.mark.parametrize("name", [EXPERT, "config.json", INDEX, TENSORS_NAME])
def test_emptied_file(artifact: Path, name: str) -> None:
    size = (artifact / name).stat().st_size
    (artifact / name).write_bytes(b"")
    finding = one(verify(artifact, "digest"), "size")
    assert (finding.path, finding.expected, finding.found) == (name, str(size), "0")


def test_unfinished_run(artifact: Path) -> None:
    (artifact / ".mxconvert").mkdir()
    (artifact / (EXPERT + ".partial")).write_bytes(b"x")
    assert codes(verify(artifact)) == {"unfinished": 2}
    (artifact / MANIFEST_NAME).unlink()
    report = verify(artifact)
    assert codes(report) == {"unfinished": 1, "no-manifest": 1}
    assert "did not finish" in one(report, "unfinished").message


# ------------------------------------------------------------ MAN-03: extra files


def add_extras(root: Path) -> None:
    (root / "empty").mkdir()
    (root / ".git").mkdir()
    (root / ".git" / "x.py").write_text("")
    (root / "sub").mkdir()
    for name in (".gitattributes", ".DS_Store", "notes.txt", "config.json~", "sub/a.swp"):
        (root / name).write_text("x")


def test_harmless_extras_are_reported(artifact: Path) -> None:
    add_extras(artifact)
    report = verify(artifact)
    assert report.ok
    assert [note.path for note in report.notes] == [
        ".DS_Store",
        ".git",
        ".gitattributes",
        "config.json~",
        "empty",
        "notes.txt",
        "sub/a.swp",
    ]
    assert all(note.path in note.message for note in report.notes)


def test_strict_refuses_every_extra(artifact: Path) -> None:
    add_extras(artifact)
    report = verify(artifact, strict=True)
    assert codes(report) == {"extra-file": 7}
    assert report.to_json()["strict"] is True


@pytest.mark.parametrize(
    "name",
    [
        "model-00099.safetensors",
        "modeling_evil.py",
        "pytorch_model.bin",
        "x.gguf",
        "sub/x.pt",
        "hf_quant_config.json",
        "quantize_config.json",
        "added_tokens.json",
        "tokenizer.model",
        "merges.txt",
        "vocab.txt",
        "additional_chat_templates/a.jinja",
        "evil.so",
    ],
)
def test_extras_that_a_loader_reads_fail(artifact: Path, name: str) -> None:
    (artifact / name).parent.mkdir(exist_ok=True)
    (artifact / name).write_bytes(b"x")
    report = verify(artifact)
    assert codes(report) == {"extra-file": 1}
    assert name in report.findings[0].message


def test_ignored_extras_are_recorded(artifact: Path) -> None:
    (artifact / "modeling_evil.py").write_text("")
    (artifact / "sub").mkdir()
    (artifact / "sub" / "x.bin").write_text("")
    report = verify(artifact, strict=True, ignore=("*.py", "sub/"))
    assert report.ok
    assert [note.code for note in report.notes] == ["ignored", "ignored"]
    assert report.to_json()["ignored"] == ["*.py", "sub/"]


def test_ignore_cannot_hide_a_listed_file(artifact: Path) -> None:
    flip(artifact / EXPERT, 5000)
    assert not verify(artifact, "digest", ignore=("*",)).ok


def test_a_signature_beside_the_manifest_is_no_offence(artifact: Path) -> None:
    (artifact / "mxconvert.manifest.sigstore.json").write_text("{}")
    assert verify(artifact).ok


# ------------------------------------------------- MAN-04: hostile manifests


def test_hostile_manifest_touches_nothing(artifact: Path) -> None:
    secret = artifact.parent / "secret"
    secret.write_text("x")
    data = (artifact / MANIFEST_NAME).read_bytes()
    (artifact / MANIFEST_NAME).write_bytes(data.replace(b'"README.md"', b'"../secret"'))
    report = verify(artifact, "digest")
    assert codes(report) == {"unsafe-path": 1}
    assert "'../secret'" in report.findings[0].message
    assert report.counts.get("files_listed") is None


# ------------------------------------------------- MAN-05: the wrong version


def test_expected_id(made: Path) -> None:
    found = artifact_id((made / MANIFEST_NAME).read_bytes())
    assert verify(made, expect_id=found).ok
    assert verify(made, expect_id=found[:16]).ok
    report = verify(made, expect_id="0" * 64)
    assert codes(report) == {"other-artifact": 1}
    assert report.findings[0].message == (
        f"the artifact ids differ: expected {'0' * 64}, found {found}"
    )


def test_manifest_of_another_artifact(made: Path, shared_source: Path, tmp_path: Path) -> None:
    other = make_artifact(shared_source, tmp_path / "B", scale_rule="floor")
    report = verify(other, "digest", manifest=made / MANIFEST_NAME)
    assert report.findings[0].code == "other-artifact"
    # eight expert files, the card and the tensor list differ
    assert "; 10 of 17 files differ: expected" in report.findings[0].message
    differing = {f.path for f in report.findings if f.code in ("digest", "size")}
    assert len(differing) == 10
    assert report.artifact_id == artifact_id((made / MANIFEST_NAME).read_bytes())


def test_given_manifest_and_id_must_agree(made: Path) -> None:
    report = verify(made, manifest=made / MANIFEST_NAME, expect_id="0" * 16)
    assert codes(report) == {"other-artifact": 1}


def test_given_manifest_that_cannot_be_used(made: Path, tmp_path: Path) -> None:
    with pytest.raises(LocalError):
        verify(made, manifest=tmp_path / "none")
    (tmp_path / "bad").write_text("{}")
    with pytest.raises(VerificationError):
        verify(made, manifest=tmp_path / "bad")


# --------------------------------- MAN-06: consistent hashes, wrong structure


def test_index_names_another_shard(artifact: Path) -> None:
    edit_json(artifact / INDEX, lambda d: d["weight_map"].update({PACKED: DENSE}))
    rebuild(artifact)
    finding = one(verify(artifact), "index-file")
    assert (finding.tensor, finding.expected, finding.found) == (PACKED, EXPERT, DENSE)


@pytest.mark.parametrize("tensor_list", [True, False])
def test_missing_scale(artifact: Path, tensor_list: bool) -> None:
    edit_tensors(artifact / EXPERT, lambda tensors: tensors.pop(SCALE))
    rebuild(artifact, tensor_list=tensor_list)
    report = verify(artifact)
    assert one(report, "missing-scale").tensor == PACKED
    assert one(report, "not-stored").tensor == SCALE
    assert one(report, "total-size")
    assert ("not-in-file" in codes(report)) != tensor_list


def test_missing_codes(artifact: Path) -> None:
    edit_tensors(artifact / EXPERT, lambda tensors: tensors.pop(PACKED))
    rebuild(artifact)
    assert one(verify(artifact), "missing-codes").tensor == SCALE


def test_scale_of_another_shape(artifact: Path) -> None:
    def cut(tensors: dict) -> None:
        dtype, (rows, columns), data = tensors[SCALE]
        tensors[SCALE] = Tensor(dtype, (rows, columns - 1), data[: rows * (columns - 1)])

    edit_tensors(artifact / EXPERT, cut)
    rebuild(artifact)
    assert one(verify(artifact), "scale-shape").tensor == SCALE


def test_nan_scale(artifact: Path) -> None:
    def spoil(tensors: dict) -> None:
        dtype, shape, data = tensors[SCALE]
        tensors[SCALE] = Tensor(dtype, shape, data[:7] + b"\xff" + data[8:])

    edit_tensors(artifact / EXPERT, spoil)
    rebuild(artifact)
    report = verify(artifact, "digest")
    assert codes(report) == {"nan-scale": 1}
    assert report.findings[0].tensor == SCALE
    assert "scale 7 is 255" in report.findings[0].message
    assert report.findings[0].check == "structure"


def test_tensor_in_two_shards(artifact: Path) -> None:
    name = "model.norm.weight"
    edit_tensors(artifact / EXPERT, lambda t: t.update({name: Tensor("BF16", (2,), b"abcd")}))
    rebuild(artifact)
    report = verify(artifact)
    assert one(report, "duplicate-tensor").tensor == name
    assert DENSE in one(report, "duplicate-tensor").message


def test_config_ignores_what_is_packed(artifact: Path) -> None:
    entry = "re:.*experts.3.up_proj$"
    edit_json(artifact / "config.json", lambda d: d["quantization_config"]["ignore"].append(entry))
    rebuild(artifact)
    report = verify(artifact)
    assert codes(report) == {"packed-but-ignored": 2}
    assert report.findings[1].tensor == PACKED


def test_config_forgets_what_is_not_packed(artifact: Path) -> None:
    def forget(config: dict) -> None:
        ignore = config["quantization_config"]["ignore"]
        ignore.remove(next(entry for entry in ignore if "gate" in entry))

    edit_json(artifact / "config.json", forget)
    rebuild(artifact)
    report = verify(artifact)
    assert codes(report) == {"not-declared": 2}
    assert report.findings[0].tensor == "model.layers.0.mlp.gate.weight"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda d: d["quantization_config"]["ignore"].append("model.gone"), "stale-ignore"),
        (lambda d: d["quantization_config"].update(format="pack-quantized"), "quantization-config"),
        (
            lambda d: d["quantization_config"]["config_groups"]["group_0"]["weights"].update(
                group_size=16
            ),
            "quantization-config",
        ),
        (
            lambda d: d["quantization_config"]["config_groups"]["group_0"].update(
                input_activations={"num_bits": 8}
            ),
            "quantization-config",
        ),
        (
            lambda d: d["quantization_config"]["config_groups"]["group_0"].update(targets=["X"]),
            "packed-but-no-target",
        ),
        (lambda d: d["quantization_config"].pop("config_groups"), "bad-quantization-config"),
        (
            lambda d: d["quantization_config"].update(ignore=["re:("]),
            "bad-quantization-config",
        ),
        (lambda d: d.pop("quantization_config"), "no-quantization-config"),
        (
            lambda d: d.update(text_config={"quantization_config": {}}),
            "stale-quantization-config",
        ),
        (lambda d: d.update(compression_config={}), "stale-quantization-config"),
        (lambda d: d.update(dtype=None), "config-dtype"),
        (lambda d: d.update(text_config={"torch_dtype": "uint8"}), "config-dtype"),
    ],
)
def test_wrong_config(artifact: Path, change, code: str) -> None:
    edit_json(artifact / "config.json", change)
    rebuild(artifact)
    report = verify(artifact)
    assert set(codes(report)) == {code}
    assert "config.json" in report.findings[0].message or code == "packed-but-no-target"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda d: d["metadata"].update(total_size=1), "total-size"),
        (lambda d: d.update(metadata=None), "total-size"),
        (lambda d: d["weight_map"].pop(PACKED), "not-in-index"),
        (lambda d: d["weight_map"].update(ghost=EXPERT), "not-stored"),
        (lambda d: d.update(weight_map=[]), "bad-index"),
    ],
)
def test_wrong_index(artifact: Path, change, code: str) -> None:
    edit_json(artifact / INDEX, change)
    rebuild(artifact)
    assert set(codes(verify(artifact))) == {code}


@pytest.mark.parametrize("text", ["[]", "{", "\xff", '{"a":1,"a":2}'])
def test_documents_that_are_no_json_objects(artifact: Path, text: str) -> None:
    (artifact / "config.json").write_bytes(text.encode("latin-1"))
    (artifact / INDEX).write_bytes(text.encode("latin-1"))
    rebuild(artifact)
    assert codes(verify(artifact)) == {"bad-json": 2}


def test_format_pt_is_required(artifact: Path) -> None:
    path = artifact / EXPERT
    raw_safetensors(path, read_safetensors(path), metadata={"format": "mlx"})
    rebuild(artifact)
    finding = one(verify(artifact), "format-pt")
    assert (finding.path, finding.found) == (EXPERT, "'mlx'")


def test_malformed_header(artifact: Path) -> None:
    data = bytearray((artifact / EXPERT).read_bytes())
    data[10] = 0
    (artifact / EXPERT).write_bytes(data)
    report = verify(artifact)
    assert [finding.path for finding in report.findings] == [EXPERT]


def test_foreign_expert_in_an_expert_file(artifact: Path) -> None:
    other = artifact / "model-experts-00004-00004.safetensors"
    moved = {}
    edit_tensors(artifact / EXPERT, lambda t: moved.update({n: t.pop(n) for n in (PACKED, SCALE)}))
    edit_tensors(other, lambda t: t.update(moved))
    edit_json(
        artifact / INDEX,
        lambda d: d["weight_map"].update(dict.fromkeys((PACKED, SCALE), other.name)),
    )
    rebuild(artifact)
    report = verify(artifact)
    assert codes(report) == {"role": 2}
    assert report.findings[0].path == other.name


def test_pair_in_two_files(artifact: Path) -> None:
    other = artifact / "model-experts-00004-00004.safetensors"
    moved = {}
    edit_tensors(artifact / EXPERT, lambda t: moved.update({SCALE: t.pop(SCALE)}))
    edit_tensors(other, lambda t: t.update(moved))
    rebuild(artifact)
    assert one(verify(artifact), "split-pair").tensor == SCALE


# ------------------------------------------------------ MAN-07: links, special files


def test_links_and_special_files_are_refused(artifact: Path, tmp_path: Path) -> None:
    same = tmp_path / "same"
    shutil.copy(artifact / EXPERT, same)
    (tmp_path / "different").write_bytes(b"x")
    for target in (same, tmp_path / "different", artifact / EXPERT, tmp_path / "dangling"):
        (artifact / EXPERT).unlink()
        (artifact / EXPERT).symlink_to(target)
        report = verify(artifact, "digest")
        finding = one(report, "special-file")
        assert finding.path == EXPERT
        assert "a link" in finding.message
        assert report.counts["files_read"] == report.counts["files_listed"] - 1


@pytest.mark.parametrize("name", [EXPERT, "config.json", MANIFEST_NAME])
def test_a_fifo_never_hangs(artifact: Path, name: str) -> None:
    (artifact / name).unlink()
    os.mkfifo(artifact / name)
    finding = one(verify(artifact, "digest"), "special-file")
    assert finding.path == name
    assert "a FIFO" in finding.message


def test_extra_links_and_fifos_are_refused(artifact: Path) -> None:
    os.mkfifo(artifact / "pipe")
    (artifact / "link").symlink_to("/etc/passwd")
    (artifact / "folder").symlink_to("/etc")
    assert codes(verify(artifact)) == {"special-file": 3}


def test_a_folder_in_a_files_place(artifact: Path) -> None:
    (artifact / EXPERT).unlink()
    (artifact / EXPERT).mkdir()
    assert one(verify(artifact), "missing-file").path == EXPERT


# ------------------------------------------------------------------------- and more


def test_names_cannot_reach_the_terminal_raw(artifact: Path) -> None:
    (artifact / "evil\x1b[31m.py").write_text("")
    (artifact / os.fsdecode(b"evil\xff.py")).write_text("")
    report = verify(artifact)
    assert codes(report) == {"extra-file": 2}
    for finding in report.findings:
        assert finding.message.isprintable()
        finding.message.encode()


def test_tied_head_may_be_ignored(tmp_path: Path) -> None:
    model = bf16_model(layers=1).without(lambda name: name.startswith("lm_head"))
    source = model.configured(tie_word_embeddings=True).write(tmp_path / "S")
    assert verify(make_artifact(source, tmp_path / "A"), "digest").ok


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        verify(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError):
        verify(tmp_path / "file")
    assert codes(verify(tmp_path)) == {"no-manifest": 1}


@pytest.mark.parametrize(
    "options",
    [
        {"sample": "0/3"},
        {"sample": "4/3"},
        {"sample": "1"},
        {"expect_id": "xyz"},
        {"expect_id": "0" * 65},
        {"jobs": 0},
        {"max_error": 0.0},
        {"level": Level.NUMERIC},
        {"foreign": True, "expect_id": "0" * 64},
    ],
)
def test_bad_options(tmp_path: Path, options: dict) -> None:
    with pytest.raises(UsageError):
        verify_artifact(tmp_path, VerifyOptions(**options))
