"""The folder that is pulled into: what is in the way, and links."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from mxconvert.manifest import MANIFEST_NAME
from tests.pull_base import (
    INDEX,
    SPAN,
    WEIGHTS,
    Place,
    Published,
    contents,
    small_files,
    summary,
)
from tests.support import fail_cleanly, shell, snapshot
from tests.support.faults import access_denied
from tests.support.runs import WORK_FOLDER, arm

if TYPE_CHECKING:
    from tests.support.runs import Reference

PARTIAL = WEIGHTS + ".partial"


@pytest.fixture
def made(place: Place) -> Published:
    return place.publish(small_files() | {"sub/dir/file.json": b"{}"})


# ------------------------------------------------------------------- what is in the way


def test_a_folder_with_files_is_refused(place: Place, made: Published) -> None:
    """With any file; nothing in it is touched."""
    place.target.mkdir()
    (place.target / "notes.txt").write_text("mine")
    place.fails(2, str(place.target), "is not empty: notes.txt", "--overwrite")
    assert contents(place.target) == {"notes.txt": b"mine"}
    assert [path.name for path in place.target.iterdir()] == ["notes.txt"]
    assert place.fetched() == 0


def test_another_finished_artifact_is_refused(place: Place, made: Published) -> None:
    place.pull().ok()
    other = place.publish(small_files(seed=5))
    place.fails(2, str(place.target), "is not empty", "--overwrite")
    made.assert_whole(place.target)
    place.pull(None, "--overwrite").ok()
    other.assert_whole(place.target)


def test_what_overwrite_removes(place: Place, made: Published) -> None:
    """What a loader would read; the rest stays, and both are named."""
    place.target.mkdir()
    for name in ("old.safetensors", "tokenizer.json", "sub/code.py", "x.bin.partial"):
        (place.target / name).parent.mkdir(exist_ok=True)
        (place.target / name).write_bytes(b"old")
    (place.target / "notes.txt").write_text("mine")
    (place.target / ".git").mkdir()
    (place.target / ".git/config.json").write_text("mine")
    result = place.pull(None, "--overwrite").ok()
    assert "removed: old.safetensors, sub/code.py, tokenizer.json, x.bin.partial" in result.stderr
    assert "left alone: .git/config.json, notes.txt" in result.stderr
    mine = {"notes.txt": b"mine", ".git/config.json": b"mine"}
    assert contents(place.target) == made.files | mine
    assert summary(place.pull(None, "--json"))["was_complete"]


def test_overwrite_mends_a_finished_artifact(place: Place, made: Published) -> None:
    """Only what is wrong is fetched: damaged files of the right size, missing ones."""
    place.pull().ok()
    (place.target / "config.json").write_bytes(b"x" * len(made.files["config.json"]))
    (place.target / INDEX).unlink()
    place.proxy.log.clear()
    place.pull(None, "--overwrite").ok()
    made.assert_whole(place.target)
    assert place.fetched() == len(made.files["config.json"]) + len(made.files[INDEX])


def test_overwrite_of_an_older_version_fetches_the_difference(place: Place) -> None:
    """Files that both versions have are read, not fetched."""
    place.publish(small_files())
    place.pull().ok()
    files = small_files() | {"config.json": b'{"architectures": ["U"]}', "new.json": b"{}"}
    other = place.publish(files)
    place.proxy.log.clear()
    place.pull(None, "--overwrite").ok()
    other.assert_whole(place.target)
    assert place.fetched() == len(files["config.json"]) + 2


def test_killed_overwrite_leaves_no_artifact(place: Place, made: Published) -> None:
    """The old manifest goes first: no moment at which it vouches for new files."""
    place.pull().ok()
    other = place.publish(small_files(seed=5))
    killed = place.run("--overwrite", env=arm("pull.chunk-written=kill"))
    assert killed.status == -9
    assert not (place.target / MANIFEST_NAME).exists()
    place.pull().ok()
    other.assert_whole(place.target)


def test_strangers_beside_an_unfinished_pull(place: Place, made: Published) -> None:
    """A loader would read them with the artifact: refused, and removed by --overwrite only."""
    place.leave_unfinished()
    (place.target / "model-00099.safetensors").write_bytes(b"stranger")
    (place.target / "notes.txt").write_text("mine")
    place.fails(2, "do not belong", "model-00099.safetensors", "--overwrite")
    found = summary(place.pull(None, "--overwrite", "--json"))
    assert contents(place.target) == made.files | {"notes.txt": b"mine"}
    assert found["resumed_bytes"] > SPAN


def test_unfinished_conversion_is_refused(place: Place, made: Published) -> None:
    """Hours of work are not thrown away, and with --overwrite none of it is left."""
    work = place.target / WORK_FOLDER
    (work / "files").mkdir(parents=True)
    (work / "journal.json").write_text("{}")
    (work / "files/a.json").write_text("{}")
    place.fails(2, "unfinished conversion", "--overwrite")
    assert (work / "journal.json").exists()
    rule = place.proxy.add(access_denied(), "GetObject", key=f"*/{WEIGHTS}")
    place.fails(6, WEIGHTS, options=("--overwrite",))
    place.proxy.remove(rule)
    place.pull().ok()
    made.assert_whole(place.target)


def test_a_conversion_over_an_unfinished_pull(
    place: Place, made: Published, reference: Reference
) -> None:
    """Refused, and with --overwrite nothing of the pull is left."""
    place.leave_unfinished()
    fail_cleanly(shell("quantize", reference.source, place.target), 2, "is not empty")
    shell("quantize", reference.source, place.target, "--overwrite").ok()
    assert snapshot(place.target) == reference.files
    assert not (place.target / WORK_FOLDER).exists()


def test_an_empty_folder_and_one_with_empty_folders(place: Place, made: Published) -> None:
    (place.target / "sub/empty").mkdir(parents=True)
    place.pull().ok()
    assert contents(place.target) == made.files


def test_unfinished_pull_is_no_artifact(place: Place, made: Published) -> None:
    """Neither verify nor push takes it for one."""
    place.leave_unfinished()
    assert shell("verify", place.target).status == 4
    result = shell("push", place.target, place.url("other"), "--retry-for", "2s")
    fail_cleanly(result, 2, "has not finished here")
    assert place.s3.keys(place.bucket, "models/other") == []


# -------------------------------------------------------------------------------- links


def test_links_where_folders_should_be(place: Place, made: Published) -> None:
    """Nothing is read or written behind a link, even if the right file lies there."""
    place.leave_unfinished()
    outside = place.folder / "outside"
    shutil.move(place.target / "sub", outside)
    (place.target / "sub").symlink_to(outside)
    before = snapshot(outside)
    place.fails(7, str(place.target / "sub"), "is a link", "remove it")
    assert snapshot(outside) == before
    assert not (place.target / MANIFEST_NAME).exists()
    (place.target / "sub").unlink()
    place.pull().ok()
    made.assert_whole(place.target)
    assert snapshot(outside) == before


def test_links_in_a_finished_folder(place: Place, made: Published) -> None:
    """It does not count as finished: what is behind a link may change any time."""
    place.pull().ok()
    outside = place.folder / "outside"
    shutil.move(place.target / "sub", outside)
    (place.target / "sub").symlink_to(outside)
    place.fails(2, "is not empty")
    before = snapshot(outside)
    place.fails(7, "is a link", options=("--overwrite",))
    assert snapshot(outside) == before


@pytest.mark.parametrize("target", ["same", "other", "nothing", "itself"])
@pytest.mark.parametrize("name", [WEIGHTS, "sub/dir/file.json"])
def test_links_where_files_should_be(place: Place, made: Published, target: str, name: str) -> None:
    """Replaced by the file, never followed."""
    place.leave_unfinished()
    outside = place.folder / "outside.bin"
    outside.write_bytes(made.files[name] if target == "same" else b"other")
    link = place.target / name
    link.unlink(missing_ok=True)
    to = {"nothing": place.folder / "nothing", "itself": link}.get(target, outside)
    link.symlink_to(to)
    before = outside.read_bytes()
    place.pull().ok()
    made.assert_whole(place.target)
    assert not link.is_symlink()
    assert outside.read_bytes() == before
    assert not (place.folder / "nothing").exists()


@pytest.mark.parametrize("exists", [True, False])
def test_links_where_partial_files_should_be(
    place: Place, made: Published, *, exists: bool
) -> None:
    """The most dangerous: a partial file is written in place."""
    place.leave_unfinished()
    outside = place.folder / "outside.bin"
    if exists:
        outside.write_bytes(bytes(len(made.files[WEIGHTS])))
    (place.target / PARTIAL).unlink()
    (place.target / PARTIAL).symlink_to(outside)
    place.fails(7, PARTIAL, "is a link", "remove it")
    assert outside.exists() == exists
    assert not exists or not any(outside.read_bytes())


@pytest.mark.parametrize("name", [WORK_FOLDER, f"{WORK_FOLDER}/chunks"])
def test_links_where_the_journal_should_be(place: Place, made: Published, name: str) -> None:
    """Nothing is written, nothing removed behind it."""
    place.leave_unfinished()
    outside = place.folder / "outside"
    shutil.move(place.target / name, outside)
    (place.target / name).symlink_to(outside)
    before = contents(outside)
    place.fails(7, name, "is a link")
    place.fails(7, name, "is a link", options=("--overwrite",))
    assert contents(outside) == before


def test_a_link_where_notes_of_chunks_should_be(place: Place, made: Published) -> None:
    place.leave_unfinished()
    outside = place.folder / "outside"
    outside.write_bytes(b"mine")
    notes = place.target / WORK_FOLDER / "chunks" / WEIGHTS
    notes.unlink()
    notes.symlink_to(outside)
    place.pull().ok()
    made.assert_whole(place.target)
    assert outside.read_bytes() == b"mine"


@pytest.mark.parametrize("name", [WEIGHTS, PARTIAL, "config.json"])
@pytest.mark.parametrize("kind", ["folder", "FIFO"])
def test_other_things_where_files_should_be(
    place: Place, made: Published, name: str, kind: str
) -> None:
    """Named, not waited for."""
    place.leave_unfinished()
    path = place.target / name
    path.unlink(missing_ok=True)
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    place.fails(7, str(path), f"is a {kind}", "remove it")
    path.rmdir() if kind == "folder" else path.unlink()
    place.pull().ok()
    made.assert_whole(place.target)


def test_a_manifest_that_is_a_fifo(place: Place, made: Published) -> None:
    """Is not waited for."""
    place.target.mkdir()
    os.mkfifo(place.target / MANIFEST_NAME)
    place.fails(2, "is not empty")


def test_a_target_that_is_a_link(place: Place, made: Published) -> None:
    """The user's own choice: followed."""
    (place.folder / "real").mkdir()
    place.target.symlink_to(place.folder / "real")
    place.pull().ok()
    made.assert_whole(place.folder / "real")
