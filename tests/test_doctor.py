"""doctor: it reads machines rightly, keeps secrets, and its status tells what is unfit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from mxconvert.doctor import environment, machine, software
from mxconvert.doctor.folder import examine, file_system, in_memory
from tests.support.cli import ROOT, fail_cleanly, run_cli
from tests.support.runs import NO_OVERRIDE
from tests.support.shell import shell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Place = Callable[[Mapping[str, str]], Path]

MIB = 1 << 20


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Write files below a folder that stands for /proc or /sys."""

    def write(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / "fake" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "fake"

    return write


# ----------------------------------------------------------------------- control groups


def test_the_tightest_limit_on_the_way_up_counts(place: Place) -> None:
    """A pod's limit may stand above the container's own group."""
    root = place(
        {
            "self/cgroup": "0::/pod/box\n",
            "fs/cgroup/cpu.max": "max 100000\n",
            "fs/cgroup/pod/cpu.max": "150000 100000\n",
            "fs/cgroup/pod/memory.max": f"{512 * MIB}\n",
            "fs/cgroup/pod/box/cpu.max": "400000 100000\n",
            "fs/cgroup/pod/box/memory.max": "max\n",
        }
    )
    assert machine.limits(root, root) == machine.Limits(processors=1.5, memory=512 * MIB)


def test_a_container_sees_its_own_group_as_the_root(place: Place) -> None:
    """There /proc names a path of the host that does not exist inside."""
    root = place({"self/cgroup": "0::/host/path\n", "fs/cgroup/memory.max": "1048576\n"})
    assert machine.limits(root, root) == machine.Limits(processors=None, memory=MIB)


def test_control_groups_of_version_1_are_read_too(place: Place) -> None:
    root = place(
        {
            "self/cgroup": "5:cpu,cpuacct:/box\n4:memory:/box\n3:pids:/box\n",
            "fs/cgroup/cpu/box/cpu.cfs_quota_us": "50000\n",
            "fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            "fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "fs/cgroup/memory/box/memory.limit_in_bytes": f"{MIB}\n",
            "fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        }
    )
    assert machine.limits(root, root) == machine.Limits(processors=0.5, memory=MIB)
    assert machine.processors(root, root) == 0.5


def test_no_control_group_is_no_limit(place: Place) -> None:
    root = place({"unrelated": ""})
    assert machine.limits(root, root) == machine.Limits(processors=None, memory=None)


# -------------------------------------------------------------------- processors and GPUs


@pytest.mark.parametrize(
    ("text", "model", "features"),
    [
        (
            "model name\t: AMD EPYC\nflags\t\t: fpu avx2 sha_ni sse\n",
            "AMD EPYC",
            ("avx2", "sha_ni"),
        ),
        ("Features\t: fp asimd sve sha2\nCPU part\t: 0xd4f\n", "", ("asimd", "sve", "sha2")),
    ],
)
def test_processors_of_both_kinds_are_named(
    place: Place, text: str, model: str, features: tuple[str, ...]
) -> None:
    root = place({"cpuinfo": text})
    assert machine.cpu_features(root) == features
    assert machine.cpu_model(root)
    assert model in machine.cpu_model(root)


def test_gpus_are_found_without_a_vendors_tool(place: Place) -> None:
    device = "bus/pci/devices/0000:01:00.0"
    other = "bus/pci/devices/0000:02:00.0"
    network = "bus/pci/devices/0000:03:00.0"
    root = place(
        {
            "driver/nvidia/version": "NVRM version: NVIDIA UNIX Kernel Module  570.10.01  Tue\n",
            "driver/nvidia/gpus/0000:01:00.0/information": "Model: \t NVIDIA H200\nIRQ: 1\n",
            f"{device}/vendor": "0x10de\n",
            f"{device}/class": "0x030200\n",
            f"{device}/device": "0x2335\n",
            f"{other}/vendor": "0x1002\n",
            f"{other}/class": "0x120000\n",
            f"{other}/device": "0x74a1\n",
            f"{network}/vendor": "0x10de\n",
            f"{network}/class": "0x020000\n",
        }
    )
    assert machine.gpus(root, root) == ("NVIDIA H200 at 0000:01:00.0", "AMD 0x74a1 at 0000:02:00.0")
    assert machine.gpu_driver(root, root) == "nvidia 570.10.01"


def test_a_gpu_in_a_container_without_its_bus_is_still_named(place: Place) -> None:
    root = place({"driver/nvidia/gpus/0000:01:00.0/information": "Model: NVIDIA H200\n"})
    assert machine.gpus(root, root) == ("NVIDIA H200 at 0000:01:00.0",)


# ------------------------------------------------------------------------------- folders


def mounts(folder: Path) -> str:
    """Return a mount table in which ``folder`` holds one mount with a blank, one on top."""
    name = str(folder).replace(" ", "\\040")
    return (
        "1 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda rw\n"
        f"2 1 0:2 / {name} rw - xfs /dev/sdb rw\n"
        f"3 2 0:3 / {name} ro,nosuid - tmpfs tmpfs rw\n"
    )


def test_the_mount_that_is_on_top_counts(tmp_path: Path, place: Place) -> None:
    folder = tmp_path / "a disk"
    (folder / "sub").mkdir(parents=True)
    proc = place({"self/mountinfo": mounts(folder)})
    assert file_system(folder / "sub", proc) == "tmpfs"
    assert in_memory(folder, proc)
    assert examine(folder, proc).read_only
    assert file_system(tmp_path, proc) == "ext4"
    assert not examine(tmp_path, proc).read_only


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    report = examine(tmp_path)
    assert (report.writable, report.obstacle, report.fsync) == (True, None, True)
    assert report.hard_links is True
    assert report.free > 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_hard_links_is_said_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems over a network have none; the folder can be used all the same."""

    def refuse(*_args: object) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr("os.link", refuse)
    report = examine(tmp_path)
    assert (report.writable, report.hard_links) == (True, False)


def test_a_folder_that_cannot_be_written_ends_with_7_after_the_report(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    result = run_cli("doctor", tmp_path, prefix=NO_OVERRIDE)
    tmp_path.chmod(0o755)
    fail_cleanly(result, 7, f"{tmp_path}: cannot be written: Permission denied", "hint: ")
    assert "writable     no: Permission denied" in result.stdout


def test_a_missing_folder_ends_with_7_too(tmp_path: Path) -> None:
    result = shell("doctor", tmp_path / "none", "--json")
    assert result.status == 7
    assert result.json()["folder"]["writable"] is False


# ------------------------------------------------------------------------------ backends


def without_llvmlite(folder: Path) -> dict[str, str]:
    """Return an environment in which llvmlite cannot be imported."""
    (folder / "llvmlite").mkdir()
    (folder / "llvmlite" / "__init__.py").write_text("raise ImportError('not for this CPU')\n")
    return {"PYTHONPATH": f"{folder}:{ROOT}:{ROOT / 'kernels'}"}


def test_a_backend_that_cannot_be_used_ends_with_8_after_the_report(tmp_path: Path) -> None:
    result = run_cli("doctor", "--backend", "llvm", env=without_llvmlite(tmp_path))
    fail_cleanly(result, 8, "backend llvm", "not for this CPU", "hint: ")
    assert "llvmlite cannot be imported (not for this CPU)" in result.stdout


def test_auto_is_content_with_what_there_is_and_says_why(tmp_path: Path) -> None:
    result = run_cli("doctor", env=without_llvmlite(tmp_path)).ok()
    assert "kernels  numpy: llvmlite cannot be imported (not for this CPU)" in result.stdout


def test_an_unknown_backend_is_a_mistake_in_the_command() -> None:
    fail_cleanly(shell("doctor", "--backend", "cuda"), 2, "--backend")


# ------------------------------------------------------------------------ what is shown


def test_doctor_prints_what_a_report_needs(tmp_path: Path) -> None:
    found = shell("doctor", tmp_path, "--json").ok().json()
    assert (found["type"], found["schema_version"]) == ("diagnosis", 1)
    wanted = {"mxconvert", "python", "llvmlite", "numpy", "xxhash", "zstandard", "awscrt", "kernel"}
    assert wanted <= {name for name, version in found["versions"].items() if version}
    assert found["machine"]["usable_cores"] >= 1
    assert found["machine"]["memory"]["total"] > 0
    assert found["backend"]["usable"] is True
    assert found["folder"]["fsync"] is True
    text = shell("doctor", tmp_path).ok().stdout
    titles = [line for line in text.splitlines() if not line.startswith(" ")]
    assert titles == ["versions", "machine", "backend", "extras", "folder", "environment"]
    assert found["versions"]["numpy"] in text


def test_no_secret_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is made to be pasted into public reports."""
    secrets = {
        "AWS_SECRET_ACCESS_KEY": "s3cr3t-one",
        "AWS_SESSION_TOKEN": "s3cr3t-two",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "/s3cr3t-three",
        "HF_TOKEN": "s3cr3t-four",
        "HTTPS_PROXY": "http://user:s3cr3t-five@proxy",
        "MXCONVERT_API_TOKEN": "s3cr3t-six",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MXCONVERT_NO_PROGRESS", "yes")
    for options in ((), ("--json",)):
        text = shell("doctor", *options).ok().stdout
        assert "s3cr3t" not in text
        for name in secrets:
            assert name in text
        assert "'yes'" in text


def test_a_set_variable_is_told_from_an_unset_one() -> None:
    shown = environment.variables({"HF_TOKEN": "x", "MXCONVERT_NO_PROGRESS": "1"})
    assert shown["HF_TOKEN"] == "set"  # noqa: S105
    assert shown["AWS_PROFILE"] == "unset"
    assert shown["MXCONVERT_NO_PROGRESS"] == "'1'"


def test_every_variable_that_the_code_reads_is_shown() -> None:
    """A new variable must be added to `mxconvert.doctor.environment.OURS`."""
    read = {
        name
        for folder in ("mxconvert", "kernels/mxconvert_kernels")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"""["'](MXCONVERT_[A-Z_]+[A-Z])["']""", path.read_text())
    }
    assert read == set(environment.OURS)


# ------------------------------------------------------------------------------ software


def test_extras_say_what_is_missing_and_how_to_get_it() -> None:
    found = software.parse_extras(
        [
            "numpy>=1.26",
            'pytest>=8; extra == "dev"',
            "no-such-package[fast]>=1 ; extra == 'gpu'",
            "mxconvert[gpu] ; extra == 'all'",
        ]
    )
    assert [(extra.name, extra.missing) for extra in found] == [
        ("all", ()),
        ("dev", ()),
        ("gpu", ("no-such-package",)),
    ]
    assert found[2].command == "pip install 'mxconvert[gpu]'"


def test_nothing_heavy_is_imported_to_find_out_what_is_installed(tmp_path: Path) -> None:
    """Importing torch takes seconds and may fail; its version stands in its metadata."""
    for name in ("torch", "triton"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
        info = tmp_path / f"{name}-9.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    path = f"{tmp_path}:{ROOT}:{ROOT / 'kernels'}"
    found = run_cli("doctor", "--json", env={"PYTHONPATH": path}).ok().json()
    assert found["versions"]["torch"] == found["versions"]["triton"] == "9.9"
