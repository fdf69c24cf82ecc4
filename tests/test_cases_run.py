"""Disks that fill up, folders that cannot be written, signals, sources that change."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import (
    Running,
    bf16_model,
    fail_cleanly,
    run_cli,
    shell,
    snapshot,
    start_cli,
)
from tests.support.runs import (
    MANIFEST,
    NO_OVERRIDE,
    WORK_FOLDER,
    Reference,
    arm,
    codes,
    events,
    final_names,
    go_on,
    mounted,
    partials,
    stopped,
)

if TYPE_CHECKING:
    from collections.abc import Callable

KIB = 1024
LIMITED = shutil.which(NO_OVERRIDE[0]) is not None or os.geteuid() != 0


@pytest.fixture
def prefix() -> tuple[str, ...]:
    """What makes file modes count for the user of the tests."""
    if os.geteuid() != 0:
        return ()
    if not LIMITED:
        pytest.skip("root ignores file modes, and setpriv is not here")
    return NO_OVERRIDE


# ----------------------------------------------------------------------- full disks


def test_too_small_disk_is_seen_before_anything_is_written(
    reference: Reference, tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=128k", "none") as disk:
        target = disk / "target"
        result = run_cli("quantize", reference.source, target)
        needed = sum((reference.target / name).stat().st_size for name in reference.weights)
        fail_cleanly(result, 7, str(target), f"{needed} bytes", "are free")
        assert final_names(target) == set()
        assert partials(target) == []


def _fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4 * KIB))
        except OSError:
            return filler


@pytest.mark.parametrize(
    "at", ["engine.convert:3", "finish.before-sidecars", "finish.before-index"]
)
def test_disk_fills_up_during_the_run(reference: Reference, tmp_path: Path, at: str) -> None:
    """Somebody else fills the disk; what is finished stays, and a rerun goes on."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=2m", "none") as disk:
        target = disk / "target"
        with stopped("quantize", reference.source, target, "--jobs", "1", at=at) as run:
            filler = _fill(disk)
            result = go_on(run)
        fail_cleanly(result, 7, str(target), "No space left on device", "free space")
        assert partials(target) == []
        reference.assert_nothing_unfinished(target)
        filler.unlink()
        reference.rerun(target)


@pytest.mark.parametrize(
    "point",
    [
        "writer.created:3",
        "writer.mid-append:1",
        "writer.before-fsync:3",
        "writer.small-file:4",  # a record
        "writer.small-written:4",
        "writer.before-rename:4",
        "writer.small-file:12",  # a sidecar
        "writer.small-file:19",  # the manifest
        "writer.small-written:19",
    ],
)
def test_no_space_at_every_write(reference: Reference, tmp_path: Path, point: str) -> None:
    target = tmp_path / "target"
    result = shell_with(point, "enospc", reference, target)
    fail_cleanly(result, 7, str(target), "No space left on device", "free space")
    assert partials(target) == []
    reference.assert_nothing_unfinished(target)
    reference.rerun(target)


def shell_with(point: str, action: str, reference: Reference, target: Path):
    """Run quantize with one armed failpoint, in a process of its own."""
    return run_cli("quantize", reference.source, target, env=arm(f"{point}={action}"))


# ------------------------------------------------------------- folders not writable


def test_parent_folder_is_missing(reference: Reference, tmp_path: Path) -> None:
    target = tmp_path / "no" / "target"
    result = shell("quantize", reference.source, target)
    fail_cleanly(result, 7, str(target.parent), "does not exist", "mkdir -p")
    assert not target.parent.exists()


def test_output_is_a_file(reference: Reference, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    fail_cleanly(shell("quantize", reference.source, target), 2, str(target), "is a file")
    assert target.read_text() == "mine"


@pytest.mark.parametrize("exists", [True, False])
def test_output_folder_is_not_writable(
    reference: Reference, tmp_path: Path, prefix: tuple[str, ...], *, exists: bool
) -> None:
    """Found out at once, not after hours of reading."""
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o555)
    target = folder if exists else folder / "target"
    result = run_cli("quantize", reference.source, target, prefix=prefix)
    fail_cleanly(result, 7, str(target), "Permission denied", "permissions")
    assert list(folder.iterdir()) == []
    folder.chmod(0o755)
    reference.rerun(target)


def test_output_on_a_read_only_mount(reference: Reference, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    with mounted(tmp_path / "mount", "--bind", str(inside)) as folder:
        os.system(f"mount -o remount,bind,ro {folder}")  # noqa: S605
        result = run_cli("quantize", reference.source, folder / "target")
        fail_cleanly(result, 7, str(folder / "target"), "Read-only file system")
    assert list(inside.iterdir()) == []


def test_temporary_folder_is_not_needed(
    reference: Reference, tmp_path: Path, prefix: tuple[str, ...]
) -> None:
    """Unfinished files lie beside the output, nowhere else."""
    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir(mode=0o555)
    environment = {"TMPDIR": str(elsewhere), "HOME": str(elsewhere)}
    target = tmp_path / "target"
    arguments = ("quantize", reference.source, target, "--json")
    reference.assert_same(target, run_cli(*arguments, prefix=prefix, env=environment).ok())


# ---------------------------------------------------------------- read-only sources


def _stats(folder: Path) -> dict[str, tuple[int, ...]]:
    """What would show that something was created, touched or changed below a folder."""
    return {
        str(path): (
            info.st_mode,
            info.st_ino,
            info.st_nlink,
            info.st_size,
            info.st_mtime_ns,
            info.st_ctime_ns,
        )
        for path in (folder, *folder.rglob("*"))
        for info in (path.stat(),)
    }


def test_read_only_source_is_left_as_it_is(
    reference: Reference, tmp_path: Path, prefix: tuple[str, ...]
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(reference.source, source)
    for path in source.rglob("*"):
        path.chmod(0o444)
    source.chmod(0o555)
    before = _stats(source)
    result = run_cli("quantize", source, target, "--json", prefix=prefix).ok()
    run_cli("verify", target, "--level", "numeric", "--source", source, prefix=prefix).ok()
    assert _stats(source) == before
    reference.assert_same(target, result)


# ----------------------------------------------------------- what lies in the output


@pytest.fixture
def occupied(tmp_path: Path) -> Path:
    """An older, larger artifact with the user's notes, and what loaders would prefer."""
    older = bf16_model(experts=16, seed=7).write(tmp_path / "older")
    target = tmp_path / "target"
    run_cli("quantize", older, target).ok()
    (target / "mxconvert.manifest.json.sig").write_text("of the older artifact")
    (target / ".mxconvert-report.jsonl.zst").write_bytes(b"of the older artifact")
    (target / "model-00001-of-00005.safetensors").write_bytes(b"older still")
    (target / "pytorch_model.bin").write_bytes(b"another format")
    (target / "special_tokens_map.json").write_text("{}")
    (target / "modeling_old.py").write_text("raise SystemExit")
    (target / "model-dense-00001-of-00001.safetensors.partial").write_bytes(b"killed")
    (target / "notes.txt").write_text("mine")
    (target / ".git").mkdir()
    (target / ".git" / "config.json").write_text("mine too")
    return target


def test_occupied_output_is_refused(reference: Reference, occupied: Path) -> None:
    before = snapshot(occupied)
    result = run_cli("quantize", reference.source, occupied)
    fail_cleanly(result, 2, "is not empty", "README.md", "--overwrite", "another source")
    assert snapshot(occupied) == before


def test_overwriting_leaves_nothing_of_the_older_model(
    reference: Reference, occupied: Path
) -> None:
    """What a loader would read is replaced or removed; the user's own files stay, and are named."""
    result = run_cli("quantize", reference.source, occupied, "--overwrite", "--json").ok()
    after = snapshot(occupied)
    assert after.pop("notes.txt")
    assert after.pop(".git/config.json")
    assert after == reference.files
    (kept,) = [e for e in events(result, "notice") if e["code"] == "kept-files"]
    assert "notes.txt" in kept["message"]
    assert "removed" in codes(result)
    shell("verify", occupied).ok()


def test_overwriting_run_that_is_killed_leaves_no_older_artifact(
    reference: Reference, occupied: Path
) -> None:
    """The older manifest goes first: old and new files are never one artifact."""
    result = shell_overwrite(reference, occupied, "engine.convert:1")
    assert result.status == -9
    assert not (occupied / MANIFEST).exists()
    assert final_names(occupied) == set()
    assert shell("verify", occupied).status != 0
    (occupied / "notes.txt").unlink()
    shutil.rmtree(occupied / ".git")
    reference.rerun(occupied)


def shell_overwrite(reference: Reference, target: Path, point: str):
    """Run quantize --overwrite, killed at a failpoint."""
    arguments = ("quantize", reference.source, target, "--overwrite")
    return run_cli(*arguments, env=arm(f"{point}=kill"))


# -------------------------------------------------------------------------- signals


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    "at", ["engine.convert:3", "engine.before-record:4", "finish.before-documents"]
)
def test_signal_ends_the_run_and_a_rerun_resumes(
    reference: Reference, tmp_path: Path, at: str, signum: signal.Signals, status: int
) -> None:
    target = tmp_path / "target"
    with stopped("quantize", reference.source, target, at=at) as run:
        run.process.send_signal(signum)
        begin = time.monotonic()
        result = go_on(run)
    assert time.monotonic() - begin < 10
    fail_cleanly(result, status, "interrupted", "run the same command again")
    assert partials(target) == []
    assert not (target / WORK_FOLDER / "lock").exists()
    reference.assert_nothing_unfinished(target)
    reference.rerun(target)


def test_signal_at_the_very_start(reference: Reference, tmp_path: Path) -> None:
    """Before any work, while headers are read: nothing is left at all."""
    target = tmp_path / "target"
    arguments = ("quantize", reference.source, target)
    with start_cli(*arguments, env=arm("writer.small-file:1=int")) as run:
        fail_cleanly(run.wait(), 130, "interrupted")
    assert partials(target) == []
    reference.rerun(target)


def _hang(target: Path, source: Path) -> Running:
    """Start a run one of whose threads is stuck, as on a dead network file system."""
    run = start_cli("quantize", source, target, "--jobs", "2", env=arm("engine.convert:4=hang"))
    end = time.monotonic() + 60
    while len(final_names(target)) < 8:  # all the others are made
        assert run.process.poll() is None, run.stderr_so_far()
        assert time.monotonic() < end
        time.sleep(0.01)
    return run


def test_signal_ends_a_run_that_hangs(reference: Reference, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with _hang(target, reference.source) as run:
        begin = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        result = run.wait()
    assert time.monotonic() - begin < 10
    fail_cleanly(result, 143, "interrupted")
    reference.rerun(target)


def test_second_signal_ends_the_run_at_once(reference: Reference, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with _hang(target, reference.source) as run:
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert run.process.poll() is None
        begin = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        result = run.wait()
    assert time.monotonic() - begin < 1
    assert result.status == 130
    assert not _processes_of(target), "a worker outlived the run"
    reference.rerun(target)


def _processes_of(target: Path) -> list[int]:
    """Return the processes that have a path in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(target).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


# --------------------------------------------------------------- output is the input


def _inside(source: Path, tmp_path: Path) -> Path:
    return source / "out"


def _link_inside(source: Path, tmp_path: Path) -> Path:
    (tmp_path / "link").symlink_to(source, target_is_directory=True)
    return tmp_path / "link" / "out"


def _link(source: Path, tmp_path: Path) -> Path:
    (tmp_path / "link").symlink_to(source, target_is_directory=True)
    return tmp_path / "link"


@pytest.mark.parametrize(
    "place",
    [
        lambda source, tmp_path: source,
        lambda source, tmp_path: f"{source}/.",
        lambda source, tmp_path: f"{source}/",
        lambda source, tmp_path: f"{source}/../source",
        lambda source, tmp_path: f"file://{source}",
        _link,
        _inside,
        _link_inside,
        lambda source, tmp_path: source.parent,
    ],
    ids=["same", "dot", "slash", "dotdot", "url", "link", "inside", "link-inside", "around"],
)
@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_output_that_is_the_input_is_refused(
    reference: Reference,
    tmp_path: Path,
    place: Callable[[Path, Path], Path | str],
    options: tuple[str, ...],
) -> None:
    source = tmp_path / "models" / "source"
    shutil.copytree(reference.source, source)
    target = place(source, tmp_path)
    before = snapshot(tmp_path), _stats(source)
    result = shell("quantize", source, target, *options)
    fail_cleanly(result, 2, "source", "hint: choose")
    assert (snapshot(tmp_path), _stats(source)) == before


def test_output_that_is_a_mount_of_the_input_is_refused(
    reference: Reference, tmp_path: Path
) -> None:
    """Paths differ, the folder is the same; --overwrite would remove the source."""
    source = tmp_path / "source"
    shutil.copytree(reference.source, source)
    before = snapshot(source)
    with mounted(tmp_path / "mount", "--bind", str(source)) as target:
        for place in (target, target / "out"):
            fail_cleanly(shell("quantize", source, place, "--overwrite"), 2, "source")
    assert snapshot(source) == before


# ------------------------------------------------------------- sources that give way


@pytest.fixture
def source(reference: Reference, tmp_path: Path) -> Path:
    """A copy of the source, to be changed."""
    shutil.copytree(reference.source, tmp_path / "source")
    return tmp_path / "source"


def _touch(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


def _replace(path: Path) -> None:
    """As a download does: another file takes the name, with the same time."""
    info = path.stat()
    shutil.copyfile(path, path.with_suffix(".new"))
    os.utime(path.with_suffix(".new"), ns=(info.st_atime_ns, info.st_mtime_ns))
    path.with_suffix(".new").replace(path)


def _shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("change", [_touch, _replace, _shrink, Path.unlink])
@pytest.mark.parametrize("at", ["engine.convert:1", "engine.convert:4", "writer.before-fsync:9"])
def test_source_that_changes_during_the_run(
    source: Path, tmp_path: Path, change: Callable[[Path], None], at: str
) -> None:
    """Bytes of two versions are never in one artifact; no SIGBUS when a file shrinks."""
    target = tmp_path / "target"
    shard = source / "model-00002-of-00002.safetensors"
    with stopped("quantize", source, target, "--jobs", "1", at=at) as run:
        change(shard)
        result = go_on(run)
    fail_cleanly(result, 5, shard.name, "changed during the run", "let nothing write")
    assert partials(target) == []
    assert not (target / MANIFEST).exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "README.md"])
def test_sidecar_that_changes_during_the_run(source: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    with stopped("quantize", source, target, at="engine.convert:4") as run:
        (source / name).unlink()
        result = go_on(run)
    fail_cleanly(result, 5, name, "changed during the run")
    assert not (target / MANIFEST).exists()


@pytest.mark.parametrize("content", [b'{"another": "tokenizer"}', b""])
def test_sidecar_that_is_rewritten_during_the_run(
    source: Path, tmp_path: Path, content: bytes
) -> None:
    target = tmp_path / "target"
    with stopped("quantize", source, target, at="engine.convert:4") as run:
        (source / "tokenizer.json").write_bytes(content)
        result = go_on(run)
    fail_cleanly(result, 5, "tokenizer.json", "changed during the run")
    assert not (target / "tokenizer.json").exists()
    assert not (target / MANIFEST).exists()


def test_read_error_costs_one_file(reference: Reference, tmp_path: Path) -> None:
    """The others are made and kept; a rerun makes that one."""
    target = tmp_path / "target"
    # The dense file comes first and has 17 tensors, then 6 tensors for each expert.
    environment = arm("reader.read:20=eio")
    result = run_cli("quantize", reference.source, target, "--jobs", "1", env=environment)
    fail_cleanly(result, 3, "Input/output error", "reading at byte", "run the same command again")
    assert len(final_names(target)) == 8
    assert partials(target) == []
    reference.assert_nothing_unfinished(target)
    reference.rerun(target)


def test_unexpected_error_leaves_no_partial_file(reference: Reference, tmp_path: Path) -> None:
    """A bug ends the run with one line and what is finished stays."""
    for point in ("engine.convert:5", "writer.append:4", "engine.before-record:3"):
        target = tmp_path / point
        result = shell_with(point, "bug", reference, target)
        fail_cleanly(result, 1, "unexpected RuntimeError", "--debug")
        assert partials(target) == []
        reference.assert_nothing_unfinished(target)
        reference.rerun(target)


def test_reader_of_the_events_goes_away(reference: Reference, tmp_path: Path) -> None:
    """As with ``--json | head -1``: the run ends, nothing unfinished is left."""
    import subprocess
    import sys

    from tests.support.cli import environment

    target = tmp_path / "target"
    command = [sys.executable, "-m", "mxconvert", "quantize", reference.source, target, "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout
        process.stdout.close()
        assert process.wait(60) != 0
    assert partials(target) == []
    reference.assert_nothing_unfinished(target)
    reference.rerun(target)


def test_what_can_be_refused_is_refused_before_anything_is_removed(tmp_path: Path) -> None:
    """--overwrite with a budget that is too small keeps the artifact that is there."""
    source, target = bf16_model().write(tmp_path / "source"), tmp_path / "target"
    assert run_cli("quantize", source, target).status == 0
    before = snapshot(target)
    result = run_cli("quantize", source, target, "--overwrite", "--max-memory", "1MiB")
    fail_cleanly(result, 2, "it needs at least")
    assert snapshot(target) == before
    assert run_cli("verify", target).status == 0
