"""Manifests, tampering and bit rot, where an artifact is pushed or pulled."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from mxconvert.manifest import MANIFEST_NAME
from tests.pull_base import PREFIX, QUICK, Place, command, contents
from tests.support import fail_cleanly, shell, snapshot
from tests.support.publish import publish, put_ref
from tests.verify_base import DENSE, EXPERT, INDEX, edit_tensors, flip, header_end, rebuild

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support import Result
    from tests.support.runs import Reference


@pytest.fixture
def base(place: Place, reference: Reference) -> str:
    """The artifact at the store; what its keys begin with."""
    return publish(place.s3, place.bucket, reference.target, PREFIX)


def not_pushed(place: Place, folder: Path, status: int, *mentions: str) -> Result:
    """Push; it fails and no version and no tag comes to be."""
    result = command("push", place, folder, place.url())
    fail_cleanly(result, status, *mentions)
    keys = place.s3.keys(place.bucket)
    assert not [key for key in keys if key.endswith(MANIFEST_NAME) or "/refs/" in key]
    return result


def not_pulled(place: Place, reference: Reference, *mentions: str) -> Result:
    """Pull; it fails, and what has its final name is right."""
    result = place.fails(6, *mentions)
    found = contents(place.target)
    assert MANIFEST_NAME not in found
    for path, sha256 in snapshot(place.target).items():
        if path in reference.files:
            assert sha256 == reference.files[path]
    return result


# ------------------------------------------------------------- MAN-01: one flipped bit

FLIPS: dict[str, tuple[str, Callable[[Path], int]]] = {
    "tensor data": (DENSE, lambda path: header_end(path) + 100),
    "padding of a header": (EXPERT, lambda path: header_end(path) - 1),
    "config": ("config.json", lambda _: 5),
    "last byte of a sidecar": ("tokenizer.json", lambda path: path.stat().st_size - 1),
}


@pytest.mark.parametrize("what", FLIPS)
def test_flipped_bit_is_not_pulled(
    place: Place, reference: Reference, artifact: Path, base: str, what: str
) -> None:
    """File, expected and found digest are named; the rest is kept for the next run."""
    name, where = FLIPS[what]
    flip(artifact / name, where(artifact / name))
    place.s3.put(place.bucket, base + name, (artifact / name).read_bytes())
    result = not_pulled(place, reference, base + name, "XXH3-128: expected ", "found ")
    assert not (place.target / name).exists()
    assert "push the artifact again" in result.stderr
    command("push", place, reference.target, place.url()).ok()
    place.pull().ok()
    assert snapshot(place.target) == reference.files


@pytest.mark.parametrize("what", FLIPS)
def test_flipped_bit_is_not_pushed(place: Place, artifact: Path, what: str) -> None:
    """A disk that rots: told before anybody can pull it."""
    name, where = FLIPS[what]
    flip(artifact / name, where(artifact / name))
    not_pushed(place, artifact, 4, name, "expected ", "found ")


# -------------------------------------------------------------- MAN-02: missing files


@pytest.mark.parametrize("name", [EXPERT, "tokenizer.json", INDEX])
@pytest.mark.parametrize("how", ["gone", "empty"])
def test_missing_file_is_not_pulled(
    place: Place, reference: Reference, base: str, name: str, how: str
) -> None:
    """Never two of three shards under a manifest."""
    if how == "gone":
        place.s3.delete(place.bucket, base + name)
    else:
        place.s3.put(place.bucket, base + name, b"")
    not_pulled(place, reference, base + name, "404" if how == "gone" else "0 bytes, expected ")
    assert not (place.target / name).exists()


def test_missing_manifest_is_no_version(place: Place, reference: Reference, base: str) -> None:
    place.s3.delete(place.bucket, base + MANIFEST_NAME)
    place.fails(6, "'latest' points at", reference.artifact, "not there")
    assert not place.target.exists()


@pytest.mark.parametrize("name", [EXPERT, "tokenizer.json", INDEX])
@pytest.mark.parametrize("how", ["gone", "empty"])
def test_missing_file_is_not_pushed(place: Place, artifact: Path, name: str, how: str) -> None:
    """Found before anything is sent; all of them are named."""
    (artifact / "config.json").unlink()
    if how == "gone":
        (artifact / name).unlink()
        words = f"{name} is missing"
    else:
        (artifact / name).write_bytes(b"")
        words = f"{name} has 0 bytes"
    not_pushed(place, artifact, 4, words, "config.json is missing", "nothing was sent")
    assert place.s3.keys(place.bucket) == []


def test_folder_without_a_manifest_is_not_pushed(place: Place, artifact: Path) -> None:
    (artifact / MANIFEST_NAME).unlink()
    not_pushed(place, artifact, 2, MANIFEST_NAME, "not an artifact")
    assert place.proxy.log == []


# --------------------------------------------------------------- MAN-03: extra files

EXTRAS = (".gitattributes", "model-00099.safetensors", "modeling_evil.py", ".DS_Store")


def test_extra_objects_are_not_pulled(place: Place, reference: Reference, base: str) -> None:
    """What the manifest does not list does not come, not even code."""
    for name in (*EXTRAS, "empty/", "sub/evil.py"):
        place.s3.put(place.bucket, base + name, b"")
    place.pull().ok()
    assert snapshot(place.target) == reference.files
    shell("verify", place.target, "--strict").ok()


def test_extra_files_are_not_pushed(place: Place, reference: Reference, artifact: Path) -> None:
    for name in EXTRAS:
        (artifact / name).write_bytes(b"x")
    (artifact / "empty").mkdir()
    command("push", place, artifact, place.url()).ok()
    base = f"{PREFIX}/{reference.artifact[:16]}/"
    found = {key.removeprefix(base) for key in place.s3.keys(place.bucket, base)}
    assert found == set(reference.files)


# ----------------------------------------------------------- MAN-04: hostile manifests

HOSTILE = (
    "../secret", "/etc/secret", "a/../../secret", "..\\\\secret", "C:/secret", "./README.md",
    "sub//secret", "tokenizer.JSON", ".mxconvert/lock", "mxconvert.manifest.json",
    "README.md/x/..", "nul\\u0000",
)  # fmt: skip


def test_hostile_manifests(place: Place, reference: Reference, artifact: Path) -> None:
    """No file is touched, none is asked for, and nothing is sent."""
    data = (artifact / MANIFEST_NAME).read_bytes()
    (place.folder / "secret").write_bytes(b"mine")
    for path in HOSTILE:
        hostile = data.replace(b'"README.md"', b'"' + path.encode() + b'"')
        assert hostile != data
        place.s3.put(place.bucket, f"flat/{MANIFEST_NAME}", hostile)
        (artifact / MANIFEST_NAME).write_bytes(hostile)
        before = snapshot(place.folder)
        fail_cleanly(place.pull(place.url("flat")), 4, MANIFEST_NAME)
        assert snapshot(place.folder) == before, path
        fail_cleanly(command("push", place, artifact, place.url("pushed")), 4, MANIFEST_NAME)
    assert place.fetched() == 0
    assert place.s3.keys(place.bucket) == [f"flat/{MANIFEST_NAME}"]


# ----------------------------------------------------------- MAN-05: the wrong version


@pytest.fixture
def other(shared_source: Path, tmp_path: Path) -> Path:
    """The same model with another scale rule."""
    shell("quantize", shared_source, tmp_path / "other", "--scale-rule", "floor").ok()
    return tmp_path / "other"


def test_wrong_manifest_in_a_version(
    place: Place, reference: Reference, other: Path, base: str
) -> None:
    """The folder's name says which it should be: both ids are told."""
    place.s3.put(place.bucket, base + MANIFEST_NAME, (other / MANIFEST_NAME).read_bytes())
    result = place.fails(4, base + MANIFEST_NAME, f"expected {reference.artifact}", "found ")
    assert "SHA-256 of the manifest" in result.stderr.splitlines()[0]
    assert not place.target.exists()


def test_wrong_files_in_a_version(
    place: Place, reference: Reference, other: Path, base: str
) -> None:
    """Under the right manifest: no file of the other build gets a name."""
    place.s3.put(place.bucket, base + EXPERT, (other / EXPERT).read_bytes())
    not_pulled(place, reference, base + EXPERT)


def test_tag_of_another_version(place: Place, reference: Reference, other: Path, base: str) -> None:
    """Moved meanwhile: --expect-id tells what the tag hides."""
    moved = publish(place.s3, place.bucket, other, PREFIX)
    assert moved != base
    place.fails(4, f"expected {reference.artifact}", options=("--expect-id", reference.artifact))
    put_ref(place.s3, place.bucket, PREFIX, "latest", reference.artifact)
    place.pull(None, "--expect-id", reference.artifact).ok()
    assert snapshot(place.target) == reference.files


# --------------------------------------- MAN-06: consistent hashes, inconsistent structure


def test_inconsistent_structure_survives_transport(place: Place, artifact: Path) -> None:
    """Push and pull answer for bytes; the structure is for verify, which still finds it."""
    edit_tensors(artifact / EXPERT, lambda tensors: tensors.pop(_scale(tensors)))
    rebuild(artifact)
    assert shell("verify", artifact).status == 4
    command("push", place, artifact, place.url()).ok()
    place.pull().ok()
    assert snapshot(place.target) == snapshot(artifact)
    fail_cleanly(shell("verify", place.target), 4)


def _scale(tensors: dict) -> str:
    return next(name for name in tensors if name.endswith("_scale"))


# ----------------------------------------------------- MAN-07: links and special files


@pytest.mark.parametrize("kind", ["same", "other", "itself", "FIFO"])
def test_links_are_not_pushed(place: Place, artifact: Path, kind: str) -> None:
    """Refused by name, whatever is behind; a FIFO is not waited for."""
    outside = place.folder / "outside.safetensors"
    shard = artifact / EXPERT
    outside.write_bytes(shard.read_bytes() if kind == "same" else b"other")
    shard.unlink()
    if kind == "FIFO":
        os.mkfifo(shard)
    else:
        shard.symlink_to(shard if kind == "itself" else outside)
    words = "is a FIFO" if kind == "FIFO" else "is a link"
    result = not_pushed(place, artifact, 4, f"{EXPERT} {words}")
    assert result.seconds < 10
    assert place.s3.keys(place.bucket) == []


@pytest.mark.parametrize("name", [MANIFEST_NAME, "config.json"])
def test_linked_documents_are_not_pushed(place: Place, artifact: Path, name: str) -> None:
    """Nor read: the manifest too has to be a file of the folder."""
    shutil.move(artifact / name, place.folder / "outside")
    (artifact / name).symlink_to(place.folder / "outside")
    result = shell("push", artifact, place.url(), *QUICK)
    assert result.status in (2, 4)
    fail_cleanly(result, result.status, name)
    assert place.s3.keys(place.bucket) == []
