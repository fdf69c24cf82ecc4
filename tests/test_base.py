"""`quantize --base`: files of an earlier artifact whose source tensors have not changed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.support import (
    Model,
    Result,
    bf16_model,
    fail_cleanly,
    fp8_model,
    fused_model,
    run_cli,
    shell,
    snapshot,
)
from tests.support.contract import ROOMY
from tests.support.models import tensor
from tests.support.runs import arm, codes, events, made, partials

if TYPE_CHECKING:
    from pathlib import Path

CHANGED = (2, 5)


def tuned(model: Model) -> Model:
    """Return a fine-tune that changed one matrix of each of two experts."""
    names = [f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in CHANGED]
    return replace(
        model,
        shards={
            file: {
                name: tensor(name, stored.shape, seed=1) if name in names else stored
                for name, stored in shard.items()
            }
            for file, shard in model.shards.items()
        },
    )


def quantize(source: Path, target: Path, *options: object) -> Result:
    return shell("quantize", source, target, "--json", *ROOMY, *options).ok()


@pytest.fixture
def base(model: Model, tmp_path: Path) -> Path:
    quantize(model.write(tmp_path / "source"), tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def source(model: Model, tmp_path: Path) -> Path:
    return tuned(model).write(tmp_path / "tuned")


def assert_same(target: Path, source: Path, *options: object) -> None:
    """A folder is what a run without a base makes, and passes as such."""
    quantize(source, target.with_name("clean"), *options)
    assert snapshot(target) == snapshot(target.with_name("clean"))
    shell("verify", target, "--level", "numeric", "--source", source).ok()


def taken(result: Result) -> int:
    return int(events(result, "summary")[0]["files_taken"])


def test_a_fine_tune_makes_the_files_of_what_it_changed(
    base: Path, source: Path, tmp_path: Path
) -> None:
    """All others are the base's own files under a second name."""
    before = snapshot(base)
    result = quantize(source, tmp_path / "out", "--base", base)
    changed = {f"model-experts-{e:05d}-{e:05d}.safetensors" for e in CHANGED}
    assert taken(result) == 7
    assert events(result, "summary")[0]["files_made"] == 2
    same = {p.name for p in (tmp_path / "out").glob("*.safetensors") if p.stat().st_nlink == 2}
    assert {event["path"] for event in events(result, "file")} == same | changed
    assert not same & changed
    assert_same(tmp_path / "out", source)
    assert snapshot(base) == before
    text = shell("quantize", source, tmp_path / "again", *ROOMY, "--base", base).ok().stdout
    assert "7 files from the base" in text


def test_an_unchanged_source_makes_nothing(base: Path, tmp_path: Path) -> None:
    result = quantize(tmp_path / "source", tmp_path / "out", "--base", base)
    assert events(result, "summary")[0]["files_made"] == 0
    assert snapshot(tmp_path / "out") == snapshot(base)


def test_without_hard_links_files_are_copied(
    base: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "no")

    link = os.link
    monkeypatch.setattr(
        os, "link", lambda a, b, **k: refuse() if "safetensors" in str(b) else link(a, b, **k)
    )
    assert taken(quantize(source, tmp_path / "out", "--base", base)) == 7
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "out").glob("*.safetensors"))
    assert_same(tmp_path / "out", source)


@pytest.mark.parametrize("kind", ["fused", "fp8", "mxfp4"])
def test_other_sources(kind: str, tmp_path: Path) -> None:
    """Parts of fused tensors and MXFP4 are taken; not what shares FP8 scales in blocks."""
    models = {"fp8": fp8_model, "mxfp4": bf16_model, "fused": partial(fused_model, transposed=True)}
    folder = models[kind]().write(tmp_path / "source")
    if kind == "mxfp4":
        quantize(folder, tmp_path / "packed", "--force")
        folder = tmp_path / "packed"
    quantize(folder, tmp_path / "base", "--force")
    files = len(list((tmp_path / "base").glob("*.safetensors")))
    result = quantize(folder, tmp_path / "out", "--force", "--base", tmp_path / "base")
    assert taken(result) == (0 if kind == "fp8" else files)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "base")


# ------------------------------------------------------------------------------ unfit bases


def _no_manifest(base: Path) -> None:
    (base / "mxconvert.manifest.json").unlink()


def _damaged_manifest(base: Path) -> None:
    (base / "mxconvert.manifest.json").write_bytes(b"{}")


def _other_version(base: Path) -> None:
    path = base / "mxconvert.manifest.json"
    document = json.loads(path.read_bytes())
    document["generator"]["version"] = "0.0.1"
    path.write_text(json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n")


def _damaged_list(base: Path) -> None:
    path = base / "mxconvert.tensors.jsonl.zst"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")


@pytest.mark.parametrize("spoil", [_no_manifest, _damaged_manifest, _other_version, _damaged_list])
def test_an_unfit_base_is_named_and_left(
    spoil: object, base: Path, source: Path, tmp_path: Path
) -> None:
    """Everything is made, and the result is right."""
    spoil(base)  # type: ignore[operator]
    result = quantize(source, tmp_path / "out", "--base", base)
    assert taken(result) == 0
    assert "base-unfit" in codes(result)
    assert_same(tmp_path / "out", source)


def test_other_options_take_nothing(base: Path, source: Path, tmp_path: Path) -> None:
    """Another rule for scales is named; another layout has no files of the same names."""
    result = quantize(source, tmp_path / "out", "--base", base, "--scale-rule", "even")
    assert (taken(result), "base-unfit" in codes(result)) == (0, True)
    assert_same(tmp_path / "out", source, "--scale-rule", "even")
    result = quantize(source, tmp_path / "layers", "--base", base, "--layout", "layers")
    assert taken(result) == 0


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "link"])
def test_a_damaged_file_is_made(damage: str, base: Path, source: Path, tmp_path: Path) -> None:
    """Its own digest is compared, whatever the manifest says; the others are taken."""
    path = base / "model-experts-00000-00000.safetensors"
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "flip":
        data[-1] ^= 1
        path.write_bytes(data)
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    result = quantize(source, tmp_path / "out", "--base", base)
    assert taken(result) == 6
    assert "base-damaged" in codes(result)
    assert_same(tmp_path / "out", source)


@pytest.mark.parametrize("where", ["missing", "the output", "inside", "around"])
def test_a_base_that_cannot_be_meant_is_refused(where: str, base: Path, tmp_path: Path) -> None:
    place = {
        "missing": (tmp_path / "nowhere", tmp_path / "out"),
        "the output": (base, base),
        "inside": (base, base / "out"),
        "around": (base / "x", base),
    }
    folder, target = place[where]
    (base / "x").mkdir()
    before = snapshot(base)
    fail_cleanly(
        shell("quantize", tmp_path / "source", target, "--overwrite", "--base", folder), 2, "--base"
    )
    assert snapshot(base) == before


# ---------------------------------------------------------------------------------- the run


@pytest.mark.parametrize("point", ["base.before-take:3", "writer.before-rename:2"])
def test_a_killed_run_resumes(point: str, base: Path, source: Path, tmp_path: Path) -> None:
    """With or without the base: finished files stay, whichever way they came."""
    args = ("quantize", source, tmp_path / "out", "--json", "-j", "1")
    assert run_cli(*args, "--base", base, env=arm(f"{point}=kill")).status == -9
    shutil.copytree(tmp_path / "out", tmp_path / "other", copy_function=os.link)
    done = run_cli(*args, "--base", base).ok()
    assert len(made(done)) < 9
    other = ("quantize", source, tmp_path / "other", "--json")
    run_cli(*other).ok()
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "other")
    assert not partials(tmp_path / "out")
    assert_same(tmp_path / "out", source)


def test_only_some_files(base: Path, source: Path, tmp_path: Path) -> None:
    """--only holds for what is taken as for what is made."""
    result = quantize(source, tmp_path / "out", "--base", base, "--only", "*experts-0000[12]*")
    summary = events(result, "summary")[0]
    found = (summary["files_taken"], summary["files_made"], summary["files_left"])
    assert found == (1, 1, 7)
    assert summary["artifact"] is None
    quantize(source, tmp_path / "out", "--base", base)
    assert_same(tmp_path / "out", source)


def test_a_base_of_another_model_gives_nothing(base: Path, tmp_path: Path) -> None:
    """Same shapes, other values: every file is made."""
    other = bf16_model(seed=7).write(tmp_path / "other")
    assert taken(quantize(other, tmp_path / "out", "--base", base)) == 0
    assert_same(tmp_path / "out", other)
