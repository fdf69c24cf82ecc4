"""A run that was cut off, at whatever moment, is finished by the same command, byte for byte."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import bf16_model, fail_cleanly, run_cli, shell, snapshot
from tests.support.runs import (
    MANIFEST,
    WORK_FOLDER,
    Reference,
    arm,
    codes,
    events,
    final_names,
    go_on,
    made,
    make_reference,
    partials,
    stopped,
)

if TYPE_CHECKING:
    from collections.abc import Callable

JOURNAL = f"{WORK_FOLDER}/journal.json"
KILLED = -9


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Tensors that are cut into pieces: 3 files of at least 5 pieces each."""
    model = bf16_model(experts=2, layers=1, hidden=1024, inner=768)
    return make_reference(model, tmp_path_factory.mktemp("pieces"), "--jobs", "1")


def _least_memory(source: Path, target: Path) -> str:
    """Return a --max-memory that leaves room for the smallest pieces only."""
    result = run_cli("quantize", source, target, "--max-memory", "1MiB")
    fail_cleanly(result, 2, "it needs at least")
    least = int(result.stderr.partition("pass --max-memory ")[2].partition("MiB")[0])
    return f"{least + 2}MiB"


def _cut_off(reference: Reference, target: Path, point: str, *options: str) -> set[str]:
    """Kill a run at a failpoint; return the weight files that are finished."""
    arguments = (reference.source, target, *reference.args, *options)
    killed = run_cli("quantize", *arguments, env=arm(f"{point}=kill"))
    assert killed.status == KILLED, f"{point} was not reached\n{killed.stderr}"
    reference.assert_nothing_unfinished(target)
    return final_names(target)


# In the order of a run. Small files are journal.json, a record for each weight file, then
# 4 sidecars, config, card, tensor list, index and manifest.
IN_WEIGHTS = (
    "writer.small-file:1",
    "writer.small-renamed:1",
    "writer.created:1",
    "writer.mid-append:1",
    "writer.append:4",
    "writer.mid-append:4",
    "writer.before-fsync:3",
    "engine.before-record:3",
    "writer.small-written:4",
    "writer.small-renamed:4",
    "writer.before-rename:3",
    "writer.after-rename:1",
    "writer.after-rename:3",
    "writer.after-rename:9",
)
IN_DOCUMENTS = (
    "finish.before-sidecars",
    "writer.small-written:12",
    "finish.before-documents",
    "writer.small-renamed:15",
    "writer.small-written:17",
    "finish.before-index",
    "writer.small-file:19",
    "writer.small-written:19",
)
AT_THE_END = ("writer.small-renamed:19", "finish.after-manifest", "journal.removing")


@pytest.mark.parametrize("point", [*IN_WEIGHTS, *IN_DOCUMENTS])
def test_killed_run_is_resumed(reference: Reference, tmp_path: Path, point: str) -> None:
    target = tmp_path / "target"
    finished = _cut_off(reference, target, point)
    assert (finished == reference.weights) == (point in {*IN_DOCUMENTS, "writer.after-rename:9"})
    reference.rerun(target)


@pytest.mark.parametrize("point", AT_THE_END)
def test_run_killed_after_its_manifest_is_complete(
    reference: Reference, tmp_path: Path, point: str
) -> None:
    target = tmp_path / "target"
    finished = _cut_off(reference, target, point)
    assert finished == reference.weights
    assert (target / MANIFEST).exists()
    result = reference.rerun(target)
    assert "complete" in codes(result)


@pytest.mark.parametrize(
    "point", ["writer.mid-append:2", "writer.append:3", "writer.mid-append:7", "writer.append:9"]
)
def test_run_killed_within_a_tensor_is_resumed(
    pieces: Reference, tmp_path: Path, point: str
) -> None:
    target = tmp_path / "target"
    memory = _least_memory(pieces.source, target)
    _cut_off(pieces, target, point, "--max-memory", memory)
    assert any(name.startswith("model-") for name in partials(target))
    pieces.rerun(target)


def test_killed_again_and_again(reference: Reference, tmp_path: Path) -> None:
    """Each attempt adds a file; the last one ends."""
    target = tmp_path / "target"
    for attempt in range(3):
        finished = _cut_off(reference, target, "writer.after-rename:1", "--jobs", "1")
        assert len(finished) == attempt + 1
    reference.rerun(target, "--jobs", "1")


def test_records_of_unfinished_files_do_not_count(reference: Reference, tmp_path: Path) -> None:
    """A record without its file, and a file without its record, are both made again."""
    target = tmp_path / "target"
    finished = sorted(_cut_off(reference, target, "writer.after-rename:4"))
    (target / finished[0]).unlink()
    (target / WORK_FOLDER / "files" / f"{finished[1]}.json").unlink()
    result = run_cli("quantize", reference.source, target, "--json").ok()
    assert set(finished[:2]) <= made(result)
    reference.assert_same(target, result)


def test_finished_file_of_another_size_is_made_again(reference: Reference, tmp_path: Path) -> None:
    target = tmp_path / "target"
    (name, *_) = sorted(_cut_off(reference, target, "writer.after-rename:4"))
    os.truncate(target / name, (target / name).stat().st_size - 1)
    result = run_cli("quantize", reference.source, target, "--json").ok()
    assert name in made(result)
    reference.assert_same(target, result)


def test_rerun_on_a_complete_artifact_says_so(reference: Reference) -> None:
    before = {path.name: path.stat() for path in reference.target.iterdir()}
    result = reference.rerun(reference.target)
    assert codes(result) == {"complete"}
    assert made(result) == set()
    after = {path.name: path.stat() for path in reference.target.iterdir()}
    assert {n: s.st_mtime_ns for n, s in before.items()} == {
        n: s.st_mtime_ns for n, s in after.items()
    }


def test_subset_now_and_the_rest_later(reference: Reference, tmp_path: Path) -> None:
    target = tmp_path / "target"
    first = run_cli(
        "quantize", reference.source, target, "--json", "--only", "model-experts-0000[0-2]-*"
    ).ok()
    assert made(first) == {f"model-experts-{n:05d}-{n:05d}.safetensors" for n in range(3)}
    (summary,) = events(first, "summary")
    assert (summary["artifact"], summary["files_made"], summary["files_left"]) == (None, 3, 6)
    reference.assert_nothing_unfinished(target)
    second = run_cli(
        "quantize", reference.source, target, "--json", "--only", "model-experts-*"
    ).ok()
    assert len(made(second)) == 5
    assert not (target / MANIFEST).exists()
    reference.rerun(target)


def test_subset_of_a_pattern_that_matches_nothing(reference: Reference, tmp_path: Path) -> None:
    """Refused before anything is touched, an older model in the folder included."""
    target = tmp_path / "target"
    shutil.copytree(reference.target, target)
    result = run_cli(
        "quantize", reference.source, target, "--overwrite", "--only", "model-experts-9*"
    )
    fail_cleanly(result, 2, "model-experts-9*", "9 output files")
    assert snapshot(target) == reference.files


# --------------------------------------------------------- something changed meanwhile


@pytest.fixture
def half_done(reference: Reference, tmp_path: Path) -> Path:
    """A source of its own, and beside it a target with 3 of 9 files finished."""
    source = tmp_path / "source"
    shutil.copytree(reference.source, source)
    arguments = ("quantize", source, tmp_path / "target", "--jobs", "1")
    assert run_cli(*arguments, env=arm("writer.after-rename:3=kill")).status == KILLED
    assert len(final_names(tmp_path / "target")) == 3
    return source


def _flip_a_byte(path: Path) -> None:
    """Change the last byte of a file, keeping size, inode and modification time."""
    info = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        (last,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def _contents(target: Path) -> dict[str, str]:
    """Everything in a target but the lock that the killed run left."""
    return {name: sha for name, sha in snapshot(target).items() if not name.endswith("/lock")}


def _shard(source: Path, number: int) -> Path:
    return source / f"model-{number:05d}-of-00002.safetensors"


def test_changed_source_shard_is_refused(half_done: Path, tmp_path: Path) -> None:
    shard, target = _shard(half_done, 2), tmp_path / "target"
    before = _contents(target)
    _flip_a_byte(shard)
    os.utime(shard)
    result = run_cli("quantize", half_done, target)
    fail_cleanly(result, 2, shard.name, "has changed", "--overwrite")
    assert _contents(target) == before


def test_content_that_changed_in_secret_is_found_by_recheck(
    half_done: Path, tmp_path: Path
) -> None:
    """The first shard, which finished files were made from, with its size and time kept."""
    shard, target = _shard(half_done, 1), tmp_path / "target"
    _flip_a_byte(shard)
    result = run_cli("quantize", half_done, target, "--recheck")
    fail_cleanly(result, 5, shard.name, "tensor '", "has changed", "--overwrite")
    assert not (target / MANIFEST).exists()
    over = run_cli("quantize", half_done, target, "--overwrite", "--json").ok()
    assert len(made(over)) == 9
    shell("verify", target, "--level", "numeric", "--source", half_done).ok()


def test_recheck_of_an_unchanged_source_resumes(
    reference: Reference, half_done: Path, tmp_path: Path
) -> None:
    reference.rerun(tmp_path / "target", "--recheck", source=half_done)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--exclude", "re:.*layers.1.*experts"), ("--exclude", "re:.*layers.1.*experts")),
        (("--scale-rule", "even"), ("--scale-rule", "mse", "even")),
        (("--layout", "layers"), ("--layout", "experts", "layers")),
        (("--base-model", "org/model"), ("--base-model", "org/model")),
    ],
)
def test_other_options_are_refused(
    half_done: Path, tmp_path: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """Two halves made by different rules are never glued together."""
    target = tmp_path / "target"
    before = _contents(target)
    result = run_cli("quantize", half_done, target, *options)
    fail_cleanly(result, 2, "started differently", *words)
    assert _contents(target) == before


def test_overwriting_starts_over_with_other_options(half_done: Path, tmp_path: Path) -> None:
    target, clean = tmp_path / "target", tmp_path / "clean"
    options = ("--layout", "layers", "--scale-rule", "even")
    over = run_cli("quantize", half_done, target, "--overwrite", "--json", *options).ok()
    assert events(over, "summary")[0]["files_kept"] == 0
    run_cli("quantize", half_done, clean, *options).ok()
    assert snapshot(clean) == snapshot(target)


def test_options_that_change_no_byte_may_change(
    reference: Reference, half_done: Path, tmp_path: Path
) -> None:
    options = ("--jobs", "3", "--backend", "numpy", "--max-memory", "300MiB")
    reference.rerun(tmp_path / "target", *options, source=half_done)


def test_another_version_is_refused(half_done: Path, tmp_path: Path) -> None:
    """Another version may make other bytes; it says so and starts over if told to."""
    journal = tmp_path / "target" / JOURNAL
    document = json.loads(journal.read_text())
    journal.write_text(json.dumps(document | {"version": "0.0.1"}))
    result = run_cli("quantize", half_done, tmp_path / "target")
    fail_cleanly(result, 2, "0.0.1", document["version"], "--overwrite")
    run_cli("quantize", half_done, tmp_path / "target", "--overwrite").ok()


def test_unreadable_journal_is_refused(half_done: Path, tmp_path: Path) -> None:
    journal = tmp_path / "target" / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-20])
    result = run_cli("quantize", half_done, tmp_path / "target")
    fail_cleanly(result, 7, "journal.json", "--overwrite")
    run_cli("quantize", half_done, tmp_path / "target", "--overwrite").ok()


def test_renamed_source_is_the_same_source(
    reference: Reference, half_done: Path, tmp_path: Path
) -> None:
    moved = half_done.rename(tmp_path / "elsewhere")
    reference.rerun(tmp_path / "target", source=moved)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "README.md"])
def test_changed_sidecar_is_refused(half_done: Path, tmp_path: Path, name: str) -> None:
    """Files beside the weights are inputs as well."""
    path = half_done / name
    path.write_bytes(path.read_bytes() + b"\n")
    result = run_cli("quantize", half_done, tmp_path / "target")
    fail_cleanly(result, 2, name)


def test_file_put_into_a_half_done_folder_is_not_shipped(
    reference: Reference, half_done: Path, tmp_path: Path
) -> None:
    """A loader would read it, so the run does not go on beside it."""
    target = tmp_path / "target"
    (target / "model-00099.safetensors").write_bytes(b"")
    (target / "notes.txt").write_text("mine")
    result = run_cli("quantize", half_done, target)
    fail_cleanly(result, 2, "model-00099.safetensors", "--overwrite")
    assert "notes.txt" not in result.stderr
    (target / "model-00099.safetensors").unlink()
    run_cli("quantize", half_done, target).ok()
    after = snapshot(target)
    assert after.pop("notes.txt")
    assert after == reference.files


def test_killed_overwriting_run_says_how_to_go_on(half_done: Path, tmp_path: Path) -> None:
    """--overwrite always starts over, so the way to resume is without it."""
    target = tmp_path / "target"
    arguments = ("quantize", half_done, target, "--scale-rule", "even", "--jobs", "1")
    point = arm("engine.convert:4=int")
    result = run_cli(*arguments, "--overwrite", env=point)
    fail_cleanly(result, 130, "without --overwrite")
    kept = final_names(target)
    again = run_cli(*arguments, "--json").ok()
    assert kept
    assert made(again).isdisjoint(kept)


# ------------------------------------------------- a source that changed after the end


def _finished(reference: Reference, tmp_path: Path) -> tuple[Path, Path]:
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(reference.source, source)
    shutil.copytree(reference.target, target)
    return source, target


def test_retrained_source_is_not_called_complete(reference: Reference, tmp_path: Path) -> None:
    """The next fine-tune has the same names, shapes and sizes, hence the same headers."""
    source, target = _finished(reference, tmp_path)
    retrained = bf16_model(seed=1).write(tmp_path / "retrained")
    for shard in (1, 2):
        shutil.copyfile(_shard(retrained, shard), _shard(source, shard))
    result = run_cli("quantize", source, target)
    fail_cleanly(result, 5, "tensor '", "has changed", "--overwrite")
    assert snapshot(target) == reference.files


def test_source_touched_after_the_end_is_compared(reference: Reference, tmp_path: Path) -> None:
    source, target = _finished(reference, tmp_path)
    os.utime(_shard(source, 2))
    result = reference.rerun(target, source=source)
    assert codes(result) == {"comparing", "complete"}


def test_secret_change_after_the_end_is_found_by_recheck(
    reference: Reference, tmp_path: Path
) -> None:
    source, target = _finished(reference, tmp_path)
    _flip_a_byte(_shard(source, 2))
    result = run_cli("quantize", source, target, "--recheck")
    fail_cleanly(result, 5, _shard(source, 2).name, "has changed")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("tokenizer.json", (), ("tokenizer.json has changed",)),
        ("config.json", (), ("config.json has changed",)),
        (None, ("--scale-rule", "rceil"), ("--scale-rule was mse, is rceil",)),
    ],
)
def test_artifact_of_other_inputs_is_not_called_complete(
    reference: Reference,
    tmp_path: Path,
    name: str | None,
    options: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    source, target = _finished(reference, tmp_path)
    if name:
        document = json.loads((source / name).read_text())
        (source / name).write_text(json.dumps(document | {"added": 1}))
    result = run_cli("quantize", source, target, *options)
    fail_cleanly(result, 2, "is not empty", *words, "--overwrite")
    assert snapshot(target) == reference.files


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [Path.unlink, _empty])
@pytest.mark.parametrize(
    "name",
    ["model-experts-00003-00003.safetensors", "tokenizer.json", "model.safetensors.index.json"],
)
def test_artifact_with_a_missing_file_is_not_called_complete(
    reference: Reference, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    """Neither by verify nor by a rerun, which offers to start over and then mends it."""
    target = tmp_path / "target"
    shutil.copytree(reference.target, target)
    damage(target / name)
    fail_cleanly(shell("verify", target), 4, name)
    refused = shell("quantize", reference.source, target)
    fail_cleanly(refused, 2, "is not empty", f"{name} is damaged", "--overwrite")
    mended = shell("quantize", reference.source, target, "--overwrite", "--json").ok()
    reference.assert_same(target, mended)


def test_artifact_without_its_manifest_is_none(reference: Reference, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(reference.target, target)
    (target / MANIFEST).unlink()
    fail_cleanly(shell("verify", target), 4, MANIFEST)
    fail_cleanly(shell("quantize", reference.source, target), 2, "is not empty", "--overwrite")


def test_source_that_changes_while_the_run_sleeps(half_done: Path, tmp_path: Path) -> None:
    """Nothing of the second half is mixed with the first."""
    target = tmp_path / "target"
    with stopped("quantize", half_done, target, "--jobs", "1", at="engine.convert:2") as run:
        os.utime(_shard(half_done, 2))
        result = go_on(run)
    fail_cleanly(result, 5, _shard(half_done, 2).name, "changed during the run")
    assert partials(target) == []
    assert not (target / MANIFEST).exists()


def test_what_a_killed_run_left_in_the_journal_goes(half_done: Path, tmp_path: Path) -> None:
    """Records and statistics are written like other files; a kill leaves partial ones."""
    target = tmp_path / "target"
    for folder in ("files", "statistics"):
        (target / WORK_FOLDER / folder).mkdir(exist_ok=True)
        (target / WORK_FOLDER / folder / "x.json.partial").write_bytes(b"{")
    point = arm("engine.convert=enospc")
    assert run_cli("quantize", half_done, target, "--jobs", "1", env=point).status != 0
    assert partials(target) == []


# --------------------------------------------------------------------------- failpoints


def test_every_failpoint_is_documented() -> None:
    root = Path(__file__).parents[1]
    code = "".join(path.read_text() for path in (root / "mxconvert").rglob("*.py"))
    places = set(re.findall(r'failpoints\.hit\(\s*"([^"]+)"', code))
    page = (root / "docs" / "reference" / "environment.md").read_text()
    documented = set(re.findall(r"^\| `([a-z]+\.[a-z-]+)`", page, re.MULTILINE))
    assert places == documented


@pytest.mark.parametrize(
    "text", ["engine.convert", "engine.convert=explode", "a:x=kill", "=kill=1"]
)
def test_failpoint_that_cannot_be_read_is_refused(
    reference: Reference, tmp_path: Path, text: str
) -> None:
    """A test that arms nothing would pass for the wrong reason."""
    result = run_cli("quantize", reference.source, tmp_path / "target", env=arm(text))
    fail_cleanly(result, 2, "MXCONVERT_FAILPOINTS", "NAME[:N]=ACTION")


def test_files_with_long_names_are_resumed(tmp_path: Path) -> None:
    """A name of 190 bytes takes three times as many where it is quoted."""
    model = bf16_model()
    names = {file: f"{'模' * 60}-{number}.safetensors" for number, file in enumerate(model.shards)}
    owner = {name: names[file] for file, shard in model.shards.items() for name in shard}
    reference = make_reference(model.reshard(owner.__getitem__), tmp_path, "--layout", "source")
    target = tmp_path / "again"
    finished = _cut_off(reference, target, "writer.after-rename:1", "--jobs", "1")
    assert len(finished) == 1
    reference.rerun(target)
