"""diff: every kind of difference is found, none is invented, and nothing is read in vain."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mxconvert.diff import DiffOptions, Status, compare_folders
from mxconvert.diff.documents import json_changes
from mxconvert.diff.folder import pair_units
from mxconvert.errors import Interrupted, UsageError
from mxconvert.manifest import MANIFEST_NAME, TENSORS_NAME
from mxconvert.model import TensorInfo
from mxconvert.stop import StopToken
from tests.support import (
    Model,
    Tensor,
    bf16_model,
    decode,
    fail_cleanly,
    fp8_model,
    fused_model,
    read_artifact,
    shell,
    tensor,
)
from tests.verify_base import make_artifact

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from mxconvert.diff import Change, Comparison

READ = DiffOptions(jobs=2)


@pytest.fixture(scope="module")
def artifacts(shared_source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same source by two scale rules: read them, never change them."""
    folder = tmp_path_factory.mktemp("diff")
    return (
        make_artifact(shared_source, folder / "mse"),
        make_artifact(shared_source, folder / "even", scale_rule="even", layout="layers"),
    )


@pytest.fixture
def model() -> Model:
    return bf16_model()


def compare(a: Path, b: Path, **options: Any) -> Comparison:
    found = compare_folders(a, b, replace(READ, **options))
    assert sum(found.counts.values()) == len({*pair_names(a), *pair_names(b)}), (
        "each name has one status"
    )
    return found


def pair_names(folder: Path) -> Iterable[str]:
    from mxconvert.source import open_checkpoint

    return pair_units(open_checkpoint(folder).tensors)


def statuses(found: Comparison) -> dict[str, str]:
    return {entry.name: str(entry.status) for entry in found.tensors}


def paths(changes: Iterable[Change]) -> set[str]:
    return {change.path for change in changes}


# ---------------------------------------------------------------------------- tensors


def test_a_folder_equals_itself_however_it_is_cut(model: Model, tmp_path: Path) -> None:
    """Sharding moves tensors between files; it is stated, and no difference."""
    one, two = model.split(1).write(tmp_path / "a"), model.split(3).write(tmp_path / "b")
    found = compare(one, two)
    assert found.same
    assert found.counts == {Status.SAME: len(model.tensors)}
    assert found.moved > 0
    assert compare(one, one).moved == 0


def test_every_kind_of_difference_is_named(model: Model, tmp_path: Path) -> None:
    names = [name for name in model.tensors if name.endswith("q_proj.weight")]
    name, other = names[0], next(n for n in model.tensors if n.endswith("k_proj.weight"))
    changed = model.adding(
        {
            name: tensor(name, model.tensors[name].shape, seed=1),
            other: tensor(other, model.tensors[other].shape, "F32"),
            "extra.weight": tensor("extra.weight", (4, 32)),
        }
    ).without(lambda n: n == "lm_head.weight")
    found = compare(model.write(tmp_path / "a"), changed.write(tmp_path / "b"))
    assert statuses(found) == {
        name: "bytes differ",
        other: "dtype or shape differ",
        "extra.weight": "only in B",
        "lm_head.weight": "only in A",
    }
    assert not found.same
    entry = next(entry for entry in found.tensors if entry.name == other)
    assert entry.a is not None
    assert entry.b is not None
    assert (entry.a[:4], entry.b[:3]) == ("BF16", "F32")
    roles = {role.role: role for role in found.roles}
    assert roles["attention"].differing == 2
    assert roles["output head"].tensors_b == 0


def test_one_flipped_bit_is_found_in_the_last_byte(model: Model, tmp_path: Path) -> None:
    a, b = (model.write(tmp_path / name) for name in "ab")
    shard = max(b.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    found = compare(a, b)
    assert found.counts[Status.BYTES] == 1


def test_an_artifact_is_matched_with_its_source(
    shared_source: Path, artifacts: tuple[Path, Path]
) -> None:
    """A weight is itself, packed or not; what was copied is the same, by digest."""
    found = compare(shared_source, artifacts[0])
    packed = read_artifact(artifacts[0]).quantized
    assert {n for n, status in statuses(found).items() if status == "packed in one"} == set(packed)
    assert found.counts.keys() == {Status.FORM, Status.SAME}
    assert paths(found.quantization) == {"quantization_config"}
    assert found.manifest == ()
    assert found.b.packed == len(packed)
    assert found.a.artifact is None
    assert found.b.artifact is not None


def test_scales_that_do_not_fit_are_tensors_of_their_own() -> None:
    """Nothing is paired by name alone: another layout has the same endings."""
    codes = TensorInfo("x.weight_packed", "U8", (4, 32), "f", 0, 128)
    good = TensorInfo("x.weight_scale", "U8", (4, 2), "f", 128, 8)
    for scales in (replace(good, dtype="BF16"), replace(good, shape=(4, 1)), None):
        tensors = {t.name: t for t in (codes, scales) if t is not None}
        assert list(pair_units(tensors)) == list(tensors)
    units = pair_units({t.name: t for t in (codes, good)})
    assert list(units) == ["x.weight"]
    assert units["x.weight"].form == "MXFP4 [4, 64]"
    assert units["x.weight"].size == 136


# ---------------------------------------------------------------------------- digests


def unreadable(folder: Path, target: Path) -> Path:
    """Copy an artifact and destroy what its weights hold, but not their headers."""
    shutil.copytree(folder, target)
    for path in target.glob("*.safetensors"):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        path.write_bytes(data[:begin] + bytes(len(data) - begin))
    return target


def test_two_artifacts_are_compared_by_their_lists(
    artifacts: tuple[Path, Path], tmp_path: Path
) -> None:
    """Terabytes are not read when both sides say what they hold."""
    found = compare(artifacts[0], unreadable(artifacts[0], tmp_path / "zeros"))
    assert found.same
    changed = compare(*artifacts)
    assert changed.counts.keys() == {Status.BYTES, Status.SAME}
    assert statuses(changed) == dict.fromkeys(read_artifact(artifacts[0]).quantized, "bytes differ")


def test_no_read_leaves_open_what_it_cannot_know(
    shared_source: Path, artifacts: tuple[Path, Path]
) -> None:
    found = compare(shared_source, shared_source, read=False)
    assert found.same
    assert found.counts.keys() == {Status.UNREAD}
    assert not found.read
    text = shell("diff", shared_source, shared_source, "--no-read").ok().stdout
    assert "tensors were not compared" in text
    assert compare(*artifacts, read=False).counts == compare(*artifacts).counts


def test_without_a_list_bytes_are_read(artifacts: tuple[Path, Path], tmp_path: Path) -> None:
    """Another tool's folder has none, on either side or on both."""
    bare = tmp_path / "bare"
    shutil.copytree(artifacts[0], bare)
    for name in (MANIFEST_NAME, TENSORS_NAME):
        (bare / name).unlink()
    for a, b in ((bare, artifacts[0]), (artifacts[0], bare), (bare, bare)):
        assert compare(a, b).same
    assert compare(bare, artifacts[1]).counts == compare(*artifacts).counts


# ----------------------------------------------------------------------------- values


def test_values_are_the_distance_of_the_decoded_weights(
    shared_source: Path, artifacts: tuple[Path, Path], model: Model
) -> None:
    """Source first: the quantization error. Two artifacts: how far they are apart."""
    stored = [read_artifact(folder) for folder in artifacts]
    against_source = compare(shared_source, artifacts[0], values=True)
    between = compare(*artifacts, values=True)
    for name in stored[0].quantized[:4]:
        source = model.tensors[name]
        x = decode(source.data, source.dtype, source.shape)
        mse, even = (artifact.values(name) for artifact in stored)
        for found, one, other in ((against_source, x, mse), (between, mse, even)):
            entry = next(entry for entry in found.tensors if entry.name == name)
            assert entry.values is not None
            error = float(np.sqrt(np.square(other - one).sum() / np.square(one).sum()))
            assert entry.values.relative_rmse == pytest.approx(error)
    assert against_source.values is not None
    assert 0.1 < against_source.values.relative_rmse < 0.13
    assert against_source.not_measured == 0


def test_values_of_other_dtypes_are_left_open(model: Model, tmp_path: Path) -> None:
    """Of what cannot be decoded, no figure is invented."""
    name = "extra.weight"
    a = model.adding({name: tensor(name, (4, 32))}).write(tmp_path / "a")
    b = model.adding({name: tensor(name, (4, 32), "F8_E4M3")}).write(tmp_path / "b")
    c = model.adding({name: tensor(name, (4, 32), "F32")}).write(tmp_path / "c")
    found = compare(a, b, values=True)
    assert (found.not_measured, found.tensors[0].values) == (1, None)
    found = compare(a, c, values=True)
    assert found.not_measured == 0
    assert found.values is not None
    assert 0 < found.values.relative_rmse < 0.01


# -------------------------------------------------------------------------- documents


def test_config_and_files_are_compared(model: Model, tmp_path: Path) -> None:
    a = replace(model, sidecars={"tokenizer.json": b"{}", "LICENSE": b"x"}).write(tmp_path / "a")
    changed = model.configured(rope_theta=1, quantization_config={"bits": 4}, bos_token_id=True)
    b = replace(changed, sidecars={"tokenizer.json": b"[]", "new.txt": b""}).write(tmp_path / "b")
    found = compare(a, b)
    assert paths(found.quantization) == {"quantization_config"}
    assert paths(found.config) == {"rope_theta", "bos_token_id"}
    assert paths(found.files) == {"tokenizer.json", "LICENSE", "new.txt"}
    assert not found.same


def test_manifests_are_compared(artifacts: tuple[Path, Path]) -> None:
    found = compare(*artifacts)
    assert paths(found.manifest) == {
        "format.scale_rule", "options.layout", "options.scale_rule"
    }  # fmt: skip


def test_json_is_compared_member_by_member() -> None:
    a = {"x": {"y": 1, "z": [1, 2]}, "same": None, "t": 1}
    b = {"x": {"y": 2, "z": [2, 1]}, "same": None, "t": True}
    found = {change.path: (change.a, change.b) for change in json_changes(a, b)}
    assert found == {"x.y": (1, 2), "x.z": ([1, 2], [2, 1]), "t": (1, True)}


# ----------------------------------------------------------------------- command line


def test_the_exit_status_is_asked_for(shared_source: Path, artifacts: tuple[Path, Path]) -> None:
    """0 means that the comparison was made; scripts ask for 4 with --exit-code."""
    assert shell("diff", shared_source, artifacts[0], "-q").status == 0
    result = shell("diff", shared_source, artifacts[0], "-q", "--exit-code")
    assert (result.status, result.stdout) == (4, "")
    shell("diff", artifacts[0], artifacts[0], "--exit-code").ok()


def test_json_holds_every_difference(artifacts: tuple[Path, Path]) -> None:
    result = shell("diff", *artifacts, "--json", "--values", "--top", 1).ok()
    document = json.loads(result.stdout)
    assert (document["type"], document["schema_version"]) == ("diff", 1)
    assert document["same"] is False
    assert Counter(entry["status"] for entry in document["tensors"]) == {
        "bytes": document["counts"]["bytes"]
    }
    assert document["counts"].keys() == {
        "same", "bytes", "form", "shape", "only_a", "only_b", "unread"
    }  # fmt: skip
    assert 0 < document["values"]["relative_rmse"] < 0.2
    assert document == json.loads(
        shell("diff", *artifacts, "--json", "--values", "-j", 1).ok().stdout
    )


def test_the_terminal_says_the_main_things(
    shared_source: Path, artifacts: tuple[Path, Path]
) -> None:
    text = shell("diff", shared_source, artifacts[0], "--values", "--top", 2).ok().stdout
    for words in ("different", "packed in one", "relative RMSE 0.1", "more; all with --json",
                  "quantization_config", "expert", "MXFP4 ["):  # fmt: skip
        assert words in text
    text = shell("diff", *artifacts).ok().stdout
    assert "options.scale_rule" in text
    assert "no difference found" in shell("diff", artifacts[0], artifacts[0]).ok().stdout


def test_failures_say_what_to_do(shared_source: Path, tmp_path: Path) -> None:
    fail_cleanly(shell("diff", shared_source, tmp_path / "none"), 5)
    fail_cleanly(
        shell("diff", shared_source, shared_source, "--values", "--no-read"), 2, "--no-read"
    )
    with pytest.raises(UsageError):
        compare_folders(shared_source, shared_source, DiffOptions(read=False, values=True))


def test_a_stop_ends_the_comparison(shared_source: Path, tmp_path: Path) -> None:
    stop = StopToken()
    stop.set(15)
    with pytest.raises(Interrupted):
        compare_folders(shared_source, shared_source, READ, stop=stop)


# ----------------------------------------------------------- checkpoints of other layouts


@pytest.mark.parametrize("layout", ["fused", "transposed", "FP8"])
def test_a_source_of_another_layout_is_matched(layout: str, tmp_path: Path) -> None:
    """An artifact and its source, experts stored together or weights in FP8: weight by weight."""
    source = OTHERS[layout]().write(tmp_path / "source")
    target = tmp_path / "out"
    run = ("quantize", source, target, "--max-memory", "8GiB", "--force")
    shell(*run).ok()
    found = compare_folders(source, target, replace(READ, values=True))
    assert not found.counts[Status.ONLY_A]
    assert not found.counts[Status.ONLY_B]
    assert not found.counts[Status.BYTES]
    assert found.counts[Status.FORM] == 12
    assert found.counts[Status.SHAPE] == (14 if layout == "FP8" else 0)
    assert found.not_measured == 0
    assert found.values is not None
    report = shell("report", target, "--json").ok().json()["total"]
    weights = [entry for entry in found.tensors if entry.status is Status.FORM]
    error = sum(entry.values.sum_err2 for entry in weights if entry.values)
    total = sum(entry.values.sum_x2 for entry in weights if entry.values)
    assert (error / total) ** 0.5 == pytest.approx(report["relative_rmse"], rel=1e-5)
    again = compare_folders(target, target, replace(READ, values=True))
    assert not again.tensors


def llama4() -> Model:
    model = fused_model(transposed=True)
    stored = {
        name.replace(".mlp.", ".feed_forward."): value
        for name, value in model.tensors.items()
        if not name.endswith("bias")
    }
    config = model.config | {"model_type": "llama4"}
    config["text_config"] = model.config | {"model_type": "llama4_text"}
    return Model(config=config, shards={"model.safetensors": stored})


OTHERS: dict[str, Any] = {
    "fused": lambda: fused_model(transposed=False).configured(model_type="qwen3_5_moe_text"),
    "transposed": lambda: fused_model(transposed=True),
    "FP8": fp8_model,
}


def test_kept_weights_of_a_transposed_source_are_the_same(tmp_path: Path) -> None:
    """What is copied and transposed has the same values: no difference."""
    extra = {f"model.layers.1.self_attn.{p}_proj.weight": tensor(p, (64, 64)) for p in "qk"}
    source = llama4().adding(extra).write(tmp_path / "source")
    target = tmp_path / "out"
    exclude = ("--scope", "linear", "--exclude", "re:.*experts.*", "--max-memory", "8GiB")
    shell("quantize", source, target, *exclude, "--force").ok()
    found = compare_folders(source, target, READ)
    assert found.counts == {Status.SAME: 12, Status.FORM: 2}


def test_fp8_weights_of_other_scales_differ(tmp_path: Path) -> None:
    """Equal codes under other scales are other weights."""
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    model = fp8_model()
    stored = model.tensors[name + "_scale_inv"]
    other = model.adding({name + "_scale_inv": stored._replace(data=stored.data[::-1])})
    one, two = model.write(tmp_path / "one"), other.write(tmp_path / "two")
    [found] = compare_folders(one, two, replace(READ, values=True)).tensors
    assert (found.name, found.status) == (name, Status.BYTES)
    assert found.a == "F8_E4M3 [192, 256] x F32 [2, 2]"
    assert found.values is not None
    assert found.values.sum_err2 > 0


@pytest.mark.parametrize("shape", [(4, 2), (4, 1, 2), (8,)])
def test_half_bytes_are_compared(shape: tuple[int, ...], model: Model, tmp_path: Path) -> None:
    """Rows that do not end between bytes too."""
    size = int(np.prod(shape)) // 2
    folders = [
        model.adding({"x": Tensor("F4", shape, bytes(size - 1) + bytes([last]))}).write(
            tmp_path / str(last)
        )
        for last in (0, 1)
    ]
    assert [entry.name for entry in compare(*folders).tensors] == ["x"]
