"""Odd Hugging Face folder layouts: missing, double, stray, linked and hostile files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import (
    Model,
    Tensor,
    bf16_model,
    converted,
    raw_safetensors,
    refused,
    refused_until,
    shell,
)
from tests.support.models import INDEX, json_bytes, tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
DOUBLE = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Weight files of a plain conversion of the fixture."""
    root = tmp_path_factory.mktemp("reference")
    return converted(bf16_model().write(root / "source"), root / "out").weights


def write_index(source: Path, weight_map: dict[str, Any], **keys: Any) -> None:
    (source / INDEX).write_bytes(json_bytes({"weight_map": weight_map, **keys}))


# ------------------------------------------------------------------------ missing files


def test_every_missing_shard_is_listed_with_its_tensors(model: Model, tmp_path: Path) -> None:
    """An incomplete download stops before any work, and says all that is needed."""
    wide = model.split(4)
    source = wide.write(tmp_path / "source")
    gone = ["model-00002-of-00004.safetensors", "model-00004-of-00004.safetensors"]
    counts = [f"{name} ({len(wide.shards[name])} tensors)" for name in gone]
    for name in gone:
        (source / name).unlink()
    refused_until(lambda: wide.write(source), source, tmp_path / "out", says=tuple(counts))


def test_a_missing_shard_is_noticed_without_an_index(model: Model, tmp_path: Path) -> None:
    """The numbers in the names tell that one is absent."""
    source = model.split(4).write(tmp_path / "source", index=False)
    (source / "model-00003-of-00004.safetensors").unlink()
    refused(source, tmp_path / "out", says=("1 of 4 shards are missing", "numbers 3"))


@pytest.mark.parametrize("found", [(), ("pytorch_model.bin",)])
def test_a_folder_without_safetensors_is_refused(found: tuple[str, ...], tmp_path: Path) -> None:
    """No weights, or weights in a format that is not read: said so, with the names."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    for name in found:
        (source / name).write_bytes(b"x")
    refused(source, tmp_path / "out", says=("no .safetensors files", *found))


def test_no_such_source(tmp_path: Path) -> None:
    """A path that is wrong, or is a file, is a bad source."""
    for path, says in ((tmp_path / "nowhere", "no such folder"), (Path(__file__), "is a file")):
        result = shell("quantize", path, tmp_path / "out")
        assert result.status == 5
        assert str(path) in result.stderr
        assert says in result.stderr


# --------------------------------------------------------------- index against shards


def test_an_index_that_disagrees_with_the_shards(model: Model, tmp_path: Path) -> None:
    """A tensor in another shard and a tensor in no shard are told apart."""
    moved = model.weight_map | {DOUBLE: FIRST}
    lost = model.weight_map | {"model.layers.9.nowhere.weight": FIRST}
    source = model.write(tmp_path / "source")

    write_index(source, moved)
    says = (DOUBLE, f"is stored in {SECOND}, the index says {FIRST}")
    refused(source, tmp_path / "out", says=says)

    write_index(source, lost)
    says = ("model.layers.9.nowhere.weight", f"is in no shard, the index says {FIRST}")
    refused_until(lambda: model.write(source), source, tmp_path / "out", says=says)


@pytest.mark.parametrize("seed", [0, 1], ids=["same bytes", "different bytes"])
def test_a_tensor_in_two_shards_follows_the_index(
    seed: int, model: Model, reference: dict[str, str], tmp_path: Path
) -> None:
    """The indexed copy is used, whatever the order; the other one is reported."""
    shards = {file: dict(shard) for file, shard in model.shards.items()}
    shards[FIRST] = {DOUBLE: tensor(DOUBLE, (64, 96), seed=seed)} | shards[FIRST]
    source = replace(model, shards=shards).write(tmp_path / "source")
    write_index(source, model.weight_map)
    done = converted(source, tmp_path / "out")
    assert done.weights == reference
    [entry] = done.summary["dropped_tensors"]
    assert entry["name"] == DOUBLE
    assert FIRST in entry["reason"]
    assert SECOND in entry["reason"]
    [notice] = done.notices["dropped-tensor"]
    assert DOUBLE in notice

    (source / INDEX).unlink()
    refused(source, tmp_path / "out2", says=(DOUBLE, FIRST, SECOND))


def test_a_name_twice_in_the_index_is_refused(model: Model, tmp_path: Path) -> None:
    """Not the last entry wins: the index contradicts itself."""
    source = model.write(tmp_path / "source")
    text = json.dumps({"weight_map": model.weight_map})
    doubled = text.replace('{"weight_map": {', f'{{"weight_map": {{"{DOUBLE}": "{FIRST}", ')
    (source / INDEX).write_text(doubled)
    refused(source, tmp_path / "out", says=(INDEX, DOUBLE, "twice"))


@pytest.mark.parametrize(
    ("metadata", "warned"),
    [
        ({}, False),
        ({"metadata": None}, False),
        ({"metadata": []}, False),
        ({"metadata": {}}, False),
        ({"metadata": {"total_size": 1}}, True),
        ({"metadata": {"total_size": "many"}}, True),
        ({"metadata": {"total_size": -3.5}}, True),
    ],
)
def test_wrong_index_metadata_is_replaced(
    metadata: dict[str, Any], *, warned: bool, tmp_path: Path
) -> None:
    """A wrong total gives a warning, an absent one nothing; our index is made anew."""
    model = bf16_model(layers=1, experts=2)
    source = model.write(tmp_path / "source", index=metadata | {"weight_map": model.weight_map})
    done = converted(source, tmp_path / "out")
    assert ("index-total-size" in done.notices) == warned
    assert done.artifact.index.keys() == {"metadata", "weight_map"}


@pytest.mark.parametrize(
    "document",
    [[], {}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}, None, "text"],
    ids=json.dumps,
)
def test_an_index_without_a_map_is_refused(document: Any, tmp_path: Path) -> None:
    """A broken index is not taken for no index."""
    source = bf16_model(layers=1, experts=2).write(tmp_path / "source")
    (source / INDEX).write_bytes(json_bytes(document))
    refused(source, tmp_path / "out", says=(INDEX, "weight_map"))


@pytest.mark.parametrize("file", [INDEX, "config.json"])
def test_a_byte_order_mark_is_shown(file: str, tmp_path: Path) -> None:
    """JSON that begins with a byte order mark is refused with the bytes found."""
    source = bf16_model(layers=1, experts=2).write(tmp_path / "source")
    (source / file).write_bytes(b"\xef\xbb\xbf" + (source / file).read_bytes())
    refused(source, tmp_path / "out", says=(file, "byte order mark", "ef bb bf"))


# ------------------------------------------------------------------------- extra files


def test_a_consolidated_copy_is_skipped(
    model: Model, reference: dict[str, str], tmp_path: Path
) -> None:
    """A second copy under other names is neither converted nor copied, and one line says so."""
    source = model.write(tmp_path / "source")
    renamed = {f"layers.{n}": t for n, t in enumerate(model.tensors.values())}
    path = raw_safetensors(source / "consolidated.safetensors", renamed)
    done = converted(source, tmp_path / "out")
    assert done.weights == reference
    [line] = done.notices["skipped-weights"]
    assert "consolidated.safetensors" in line
    assert str(path.stat().st_size) in line
    assert "consolidated.safetensors" not in done.bytes
    assert [e["name"] for e in done.summary["skipped_files"]] == ["consolidated.safetensors"]


def test_the_original_folder_is_skipped(
    model: Model, reference: dict[str, str], tmp_path: Path
) -> None:
    """Meta's `original/` beside the converted weights is a second copy too."""
    source = model.write(tmp_path / "source")
    (source / "original").mkdir()
    raw_safetensors(source / "original" / "model.safetensors", {"a": Tensor("U8", (1,), b"x")})
    (source / "original" / "params.json").write_text("{}")
    done = converted(source, tmp_path / "out")
    assert done.weights == reference
    assert not [name for name in done.bytes if name.startswith("original")]


def test_a_consolidated_file_alone_is_the_model(model: Model, tmp_path: Path) -> None:
    """Where there is nothing else, it is no second copy."""
    alone = model.reshard(lambda _: "consolidated.safetensors")
    source = alone.write(tmp_path / "source", index=False)
    assert len(converted(source, tmp_path / "out").artifact.quantized) == 48


def test_without_an_index_nothing_is_left_out_silently(model: Model, tmp_path: Path) -> None:
    """Weights in a folder of their own need a decision; a second copy gets its line."""
    source = model.write(tmp_path / "source", index=False)
    draft = {"mtp.layers.0.norm.weight": tensor("norm", (64,))}
    (source / "mtp").mkdir()
    raw_safetensors(source / "mtp" / "model.safetensors", draft)
    raw_safetensors(source / "consolidated.safetensors", {"x": tensor("x", (2, 2))})
    (source / "copy").mkdir()
    shutil.copy(source / FIRST, source / "copy" / FIRST)
    says = ("mtp/model.safetensors", "mtp.layers.0.norm.weight", "--unindexed include")
    refused(source, tmp_path / "out", says=says)
    taken = converted(source, tmp_path / "with", "--unindexed", "include")
    assert draft.keys() <= taken.artifact.tensors.keys()
    left = converted(source, tmp_path / "without", "--unindexed", "skip")
    lines = " ".join(left.notices["skipped-weights"])
    for name in ("mtp/model.safetensors", "consolidated.safetensors", f"copy/{FIRST}"):
        assert name in lines


def test_two_shard_sets_side_by_side(
    model: Model, reference: dict[str, str], tmp_path: Path
) -> None:
    """The index decides between two splits; without it nothing is mixed."""
    source = bf16_model(seed=1).split(4).write(tmp_path / "source")
    model.write(source)
    done = converted(source, tmp_path / "out")
    assert done.weights == reference
    skipped = [entry["name"] for entry in done.summary["skipped_files"]]
    assert skipped == [f"model-{n:05d}-of-00004.safetensors" for n in (1, 2, 3, 4)]

    (source / INDEX).unlink()
    says = (FIRST, "-of-00004.safetensors", "no index says which one counts")
    refused(source, tmp_path / "out2", says=says)


def test_weights_that_the_index_forgot_need_a_decision(model: Model, tmp_path: Path) -> None:
    """A draft layer in a file of its own is never lost, nor taken, without a word."""
    forgotten = {
        "mtp.layers.0.eh_proj.weight": tensor("eh", (64, 128)),
        "mtp.layers.0.mlp.experts.0.up_proj.weight": tensor("up", (96, 64)),
        "mtp.layers.0.norm.weight": tensor("norm", (64,)),
    }
    source = model.configured(num_nextn_predict_layers=1).write(tmp_path / "source")
    raw_safetensors(source / "model-mtp.safetensors", forgotten)
    says = ("model-mtp.safetensors", *forgotten, "--unindexed include", "--unindexed skip")
    refused(source, tmp_path / "out", says=says)

    taken = converted(source, tmp_path / "with", "--unindexed", "include")
    for name, expected in forgotten.items():
        assert taken.artifact.tensors[name][1:] == tuple(expected)
    left = converted(source, tmp_path / "without", "--unindexed", "skip")
    assert not forgotten.keys() & left.artifact.tensors.keys()
    assert "model-mtp.safetensors" in left.notices["skipped-weights"][0]


def test_stray_tensors_within_an_indexed_shard(model: Model, tmp_path: Path) -> None:
    """Padding in an indexed shard is reported as dropped, or kept on request."""
    source = model.write(tmp_path / "source")
    adding = model.adding({"stray": Tensor("U8", (4,), b"pads")})
    raw_safetensors(source / SECOND, adding.shards[SECOND])
    done = converted(source, tmp_path / "out")
    assert [entry["name"] for entry in done.summary["dropped_tensors"]] == ["stray"]
    assert "stray" in done.notices["dropped-tensor"][0]
    kept = converted(source, tmp_path / "kept", "--unindexed", "include")
    assert kept.artifact.tensors["stray"].data == b"pads"


# ------------------------------------------------------------------------------- links


def cache_snapshot(model: Model, cache: Path) -> Path:
    """Lay a model out as the hub's cache does: links with relative targets into blobs."""
    plain = model.write(cache.parent / "plain")
    snapshot = cache / "snapshots" / "0123abcd"
    for path in sorted(plain.rglob("*")):
        if path.is_dir():
            continue
        blob = cache / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        link = snapshot / path.relative_to(plain)
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def test_a_cache_snapshot_gives_regular_files(
    model: Model, reference: dict[str, str], tmp_path: Path
) -> None:
    """Links into the cache's blobs are followed; the artifact stands without the cache."""
    model.sidecars["additional_chat_templates/tool.jinja"] = b"{{ tools }}"
    source = cache_snapshot(model, tmp_path / "models--org--name")
    target = tmp_path / "out"
    done = converted(source, target)
    assert done.weights == reference
    assert not [path for path in target.rglob("*") if path.is_symlink()]
    plain = converted(tmp_path / "plain", tmp_path / "plain-out")
    assert plain.bytes == done.bytes
    shutil.rmtree(tmp_path / "models--org--name")
    shell("verify", target).ok()
    assert (target / "additional_chat_templates/tool.jinja").read_bytes() == b"{{ tools }}"


def test_links_elsewhere_in_the_cache_are_refused(model: Model, tmp_path: Path) -> None:
    """Only the snapshot's own blobs may be linked to, not another model's."""
    source = cache_snapshot(model, tmp_path / "models--org--name")
    other = tmp_path / "models--org--other" / "blobs" / "ffff"
    other.parent.mkdir(parents=True)
    other.write_bytes((source / FIRST).read_bytes())
    (source / FIRST).unlink()
    (source / FIRST).symlink_to(other)
    refused(source, tmp_path / "out", says=(FIRST, "leads outside", str(other)))


def test_a_dangling_link_is_refused(model: Model, tmp_path: Path) -> None:
    """An incomplete cache, where the blob is gone, names the link."""
    source = model.write(tmp_path / "source")
    (source / "vocab.json").symlink_to(source / "gone")
    refused(source, tmp_path / "out", says=("vocab.json", "dangling"))


# -------------------------------------------------------------------- names and places


@pytest.mark.parametrize("index", [True, False])
def test_shards_may_have_any_name(
    index: bool,
    model: Model,
    reference: dict[str, str],
    tmp_path: Path,
) -> None:
    """Splits by layer and expert range, with or without an index, give the same files."""

    def file_of(name: str) -> str:
        if ".experts." not in name:
            return "dense.safetensors"
        layer, expert = name.split(".")[2], int(name.split(".")[5])
        return f"layer-{layer}-experts-{expert // 4 * 4}-{expert // 4 * 4 + 3}.safetensors"

    source = model.reshard(file_of).write(tmp_path / "source", index=index)
    assert len(list(source.glob("*.safetensors"))) == 5
    assert converted(source, tmp_path / "out").weights == reference


def test_an_index_may_name_subfolders(
    model: Model, reference: dict[str, str], tmp_path: Path
) -> None:
    """Shards in folders are read, whatever the layout of the output."""
    (tmp_path / "source" / "weights" / "deep").mkdir(parents=True)
    nested = model.reshard(lambda name: f"weights/deep/{len(name) % 3}.safetensors")
    source = nested.write(tmp_path / "source")
    assert converted(source, tmp_path / "out").weights == reference
    same = converted(source, tmp_path / "same", "--layout", "source")
    assert sorted(same.weights) == [f"weights/deep/{n}.safetensors" for n in range(3)]


@contextlib.contextmanager
def watched_opens() -> Iterator[list[str]]:
    """Collect the paths that this process opens."""
    if not _HOOKED:
        sys.addaudithook(_hook)
        _HOOKED.append(True)
    opened: list[str] = []
    _OPENED.append(opened)
    try:
        yield opened
    finally:
        _OPENED.remove(opened)


_HOOKED: list[bool] = []
_OPENED: list[list[str]] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(args[0], str | os.PathLike):
        for opened in _OPENED:
            opened.append(os.path.realpath(args[0]))


@pytest.mark.parametrize(
    "value",
    [
        "../outside.safetensors",
        "{outside}",
        "a/../../outside.safetensors",
        "..\\outside.safetensors",
        "",
        ".",
        "./" + SECOND,
        "outside.safetensors\0",
        "C:outside.safetensors",
        7,
        None,
        ["../outside.safetensors"],
    ],
    ids=repr,
)
def test_an_index_cannot_lead_out_of_the_folder(value: Any, model: Model, tmp_path: Path) -> None:
    """Nothing outside the checkpoint is ever opened, let alone published."""
    source = model.write(tmp_path / "source")
    outside = raw_safetensors(tmp_path / "outside.safetensors", {DOUBLE: model.tensors[DOUBLE]})
    file = str(outside) if value == "{outside}" else value
    write_index(source, model.weight_map | {DOUBLE: file})
    with watched_opens() as opened:
        refused(source, tmp_path / "out", says=(INDEX, DOUBLE, "outside the folder"))
    assert str(source / INDEX) in opened
    assert str(outside) not in opened


def _link_file(source: Path, outside: Path) -> str:
    (source / "link.safetensors").symlink_to(outside)
    return "link.safetensors"


def _link_folder(source: Path, outside: Path) -> str:
    (source / "sub").symlink_to(outside.parent)
    return f"sub/{outside.name}"


def _link_sidecar(source: Path, outside: Path) -> str:
    (source / "tokenizer.model").symlink_to(outside)
    return SECOND


@pytest.mark.parametrize("link", [_link_file, _link_folder, _link_sidecar])
def test_a_link_cannot_lead_out_of_the_folder(link: Any, model: Model, tmp_path: Path) -> None:
    """Neither a linked shard, nor a linked folder, nor a linked tokenizer is followed."""
    source = model.write(tmp_path / "source")
    (tmp_path / "secret").mkdir()
    outside = raw_safetensors(
        tmp_path / "secret" / "outside.safetensors", {DOUBLE: model.tensors[DOUBLE]}
    )
    file = link(source, outside)
    write_index(source, model.weight_map | {DOUBLE: file})
    with watched_opens() as opened:
        result = shell("quantize", source, tmp_path / "out")
    assert result.status == 5, result
    assert "hint: " in result.stderr
    assert str(source / "config.json") in opened or "leads outside" in result.stderr
    assert str(outside) not in opened
    assert not (tmp_path / "out").exists()


def test_files_that_differ_in_case_only_are_refused(model: Model, tmp_path: Path) -> None:
    """A store or a disk that folds case would lose one of them."""
    model.sidecars.update({"LICENSE": b"one", "License": b"two"})
    source = model.write(tmp_path / "source")
    refused(source, tmp_path / "out", says=("'LICENSE'", "'License'"))


def test_special_files_are_not_read(model: Model, tmp_path: Path) -> None:
    """A pipe in the folder hangs nothing: refused as a shard, left out otherwise."""
    source = model.write(tmp_path / "source")
    os.mkfifo(source / "pipe")
    result = shell("quantize", source, tmp_path / "out", "--json").ok()
    summary = json.loads(result.stdout.splitlines()[-1])
    assert [entry["name"] for entry in summary["skipped_files"]] == ["pipe"]
    (source / SECOND).unlink()
    os.mkfifo(source / SECOND)
    result = shell("quantize", source, tmp_path / "out2")
    assert result.status == 5
    assert SECOND in result.stderr


def test_a_file_name_that_is_not_utf8_is_refused(model: Model, tmp_path: Path) -> None:
    """The manifest could not name it; it is shown instead of being half copied."""
    source = model.write(tmp_path / "source")
    (source / os.fsdecode(b"notes-\xff.txt")).write_bytes(b"x")
    refused(source, tmp_path / "out", says=(r"notes-\udcff.txt", "UTF-8"))


def test_several_indexes_need_a_choice(model: Model, tmp_path: Path) -> None:
    """The usual name wins; among other names none is guessed."""
    source = model.write(tmp_path / "source")
    index = (source / INDEX).read_bytes()
    (source / "model.fp32.safetensors.index.json").write_bytes(index)
    done = converted(source, tmp_path / "out")
    assert [name for name in done.bytes if name.endswith(".index.json")] == [INDEX]
    (source / INDEX).rename(source / "model.fp16.safetensors.index.json")
    says = ("model.fp16.safetensors.index.json", "model.fp32.safetensors.index.json")
    refused(source, tmp_path / "out2", says=says)


@pytest.mark.parametrize(
    "name",
    ["new\nline.txt", "back\\slash.txt", "c:drive.txt", "CONFIG.json/x.txt", "del\x7f", "a" * 250],
)
def test_a_file_name_that_no_manifest_can_hold_is_refused(
    name: str, model: Model, tmp_path: Path
) -> None:
    """Told before the work, not by `verify` after it."""
    model.sidecars[name] = b"x"
    source = model.write(tmp_path / "source")
    refused(source, tmp_path / "out", says=("rename or remove",))


def test_a_model_card_in_lower_case_is_the_card(model: Model, tmp_path: Path) -> None:
    """`readme.md` becomes part of our README.md and does not stand beside it."""
    model.sidecars["readme.md"] = model.sidecars.pop("README.md")
    source = model.write(tmp_path / "source")
    done = converted(source, tmp_path / "out")
    assert [name for name in done.bytes if name.lower() == "readme.md"] == ["README.md"]
    assert "license: apache-2.0" in (tmp_path / "out" / "README.md").read_text()
