"""docs/how-to/ci.md: its files parse, and the commands in them do what the page says.

They run in a shell with a ``mxconvert`` of this checkout and a ``pip`` that installs nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import bf16_model
from tests.support.cli import ROOT
from tests.support.publish import publish
from tests.support.shell import shell

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.seaweed import S3Server

yaml = pytest.importorskip("yaml")

PAGE = (ROOT / "docs" / "how-to" / "ci.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MANIFEST = "mxconvert.manifest.json"


def block(language: str, mark: str = "") -> str:
    """Return the page's only block of a language that holds ``mark``."""
    (found,) = (text for kind, text in BLOCK.findall(PAGE) if kind == language and mark in text)
    return str(found)


def github() -> dict[str, Any]:
    return yaml.safe_load(block("yaml", ".github/workflows"))["jobs"]["verify"]


def gitlab() -> dict[str, Any]:
    return yaml.safe_load(block("yaml", ".gitlab-ci.yml"))["verify"]


SCRIPTS = {
    "github": "\n".join(step["run"] for step in github()["steps"] if "run" in step),
    "gitlab": "\n".join(gitlab()["script"]),
    "shell": block("bash"),
}


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """A sound artifact with its source beside it, named as in the Makefile."""
    source = bf16_model().write(tmp_path / "My-MoE")
    shell("quantize", source, tmp_path / "My-MoE-MXFP4").ok()
    return tmp_path / "My-MoE-MXFP4"


def damage(artifact: Path) -> None:
    """Change the last byte of a weight file."""
    path = max(artifact.glob("model-experts-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def run(command: list[str], artifact: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in the artifact's parent with the page's variables set."""
    tools = artifact.parent / "tools"
    tools.mkdir(exist_ok=True)
    scripts = {
        "mxconvert": f'exec {sys.executable} -m mxconvert "$@"',
        "python": 'case "$*" in "-m pip install mxconvert") ;; *) exit 99 ;; esac',
    }
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    digest = hashlib.sha256((artifact / MANIFEST).read_bytes()).hexdigest()
    env = dict(os.environ) | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "ARTIFACT": str(artifact),
        "ARTIFACT_ID": digest[:16],
    }
    return subprocess.run(
        command, cwd=artifact.parent, env=env, capture_output=True, text=True, check=False
    )


def run_script(name: str, artifact: Path) -> subprocess.CompletedProcess[str]:
    """Run a script as its CI system does: it stops at the first command that fails."""
    options = "-c" if name == "shell" else "-ec"
    return run(["bash", options, SCRIPTS[name]], artifact)


def failures(report: Path) -> int:
    return len(ET.parse(report).getroot().findall(".//failure"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_sound_artifact_passes(name: str, artifact: Path) -> None:
    done = run_script(name, artifact)
    assert done.returncode == 0, done.stderr
    if name != "shell":
        assert failures(artifact.parent / "verify.xml") == 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_damaged_artifact_ends_with_4_and_a_report(name: str, artifact: Path) -> None:
    damage(artifact)
    done = run_script(name, artifact)
    assert done.returncode == 4, done.stderr
    if name == "shell":
        assert done.stdout.splitlines()[-1] == "damaged: not deployed"
    else:
        assert failures(artifact.parent / "verify.xml") > 0


def test_the_script_tells_a_missing_disk_from_damage(artifact: Path) -> None:
    """The page promises 2 for a folder that is not there."""
    text = SCRIPTS["shell"].replace("$ARTIFACT", "$ARTIFACT/none")
    done = run(["bash", "-c", text], artifact)
    assert done.returncode == 2
    assert "could not be checked: status 2" in done.stdout


def nightly() -> dict[str, Any]:
    return yaml.safe_load(block("yaml", "nightly:"))["nightly"]


def test_the_nightly_job_reads_a_part_at_the_store(
    artifact: Path, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(s3, bucket, artifact, "My-MoE", tag="production")
    for name, value in s3.environment(URL=f"s3://{bucket}/My-MoE@production").items():
        monkeypatch.setenv(name, value)
    assert nightly()["env"]["URL"].endswith("/My-MoE@production")
    (script,) = [step["run"] for step in nightly()["steps"] if "run" in step]
    done = run(["bash", "-ec", script], artifact)
    assert done.returncode == 0, done.stderr
    assert re.search(r"only part \d+ of 30 of the chunks", done.stdout)
    assert failures(artifact.parent / nightly()["steps"][-1]["with"]["path"]) == 0
    monkeypatch.setenv("URL", f"s3://{bucket}/My-MoE@gone")
    assert run(["bash", "-ec", script], artifact).returncode == 6


def test_the_report_is_kept_where_the_commands_write_it() -> None:
    """A pipeline that uploads another name shows nothing, and nobody notices."""
    upload = next(step for step in github()["steps"] if "upload-artifact" in step.get("uses", ""))
    assert upload["if"] == "always()"
    assert gitlab()["artifacts"]["when"] == "always"
    for name in (upload["with"]["path"], gitlab()["artifacts"]["reports"]["junit"]):
        assert f"--junit {name}" in SCRIPTS["github"]
        assert f"--junit {name}" in SCRIPTS["gitlab"]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_makefile_converts_verifies_and_does_neither_twice(artifact: Path) -> None:
    folder = artifact.parent
    (folder / "Makefile").write_text(block("make"))
    os.utime(folder / "My-MoE" / "config.json", (0, 0))
    first = run(["make", "verify"], artifact)
    assert first.returncode == 0, first.stderr
    assert "mxconvert quantize" not in first.stdout, "the artifact was there"
    assert failures(folder / "verify.xml") == 0
    assert "mxconvert" not in run(["make", "verify"], artifact).stdout
    numbers = run(["make", "numbers"], artifact)
    assert numbers.returncode == 0, numbers.stderr
    assert "tensors recomputed" in numbers.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_makefile_leaves_no_stamp_on_a_damaged_artifact(artifact: Path) -> None:
    (artifact.parent / "Makefile").write_text(block("make"))
    os.utime(artifact.parent / "My-MoE" / "config.json", (0, 0))
    damage(artifact)
    assert run(["make", "verify"], artifact).returncode != 0
    assert not (artifact.parent / "verify.stamp").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_makefile_makes_what_is_not_there(artifact: Path) -> None:
    (artifact.parent / "Makefile").write_text(block("make"))
    other = artifact.parent / "Other-MXFP4"
    done = run(["make", "verify", f"ARTIFACT={other}"], artifact)
    assert done.returncode == 0, done.stderr
    assert (other / MANIFEST).read_bytes() == (artifact / MANIFEST).read_bytes()
