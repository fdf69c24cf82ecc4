"""`push hf://` and `pull hf://`: the real client library against a stand-in of the Hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.cli import fail_cleanly, run_cli, snapshot
from tests.support.hub import Hub

if TYPE_CHECKING:
    from tests.support.runs import Reference

pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub():
    with Hub() as server:
        server.add("org/model", {"README.md": b"nothing yet"})
        yield server


@pytest.fixture
def env(hub, tmp_path):
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": "hf_secretsecret",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "no_proxy": "127.0.0.1",
    }


def test_there_and_back_in_one_commit(hub, env, reference: Reference, tmp_path) -> None:
    """Every file arrives in one commit, and a second push makes none."""
    pushed = run_cli("push", reference.target, "hf://org/model", "--json", env=env).ok()
    assert len(hub.repositories["org/model"]) == 2
    assert "hf_secretsecret" not in pushed.stdout + pushed.stderr
    run_cli("push", reference.target, "hf://org/model", env=env).ok()
    assert len(hub.repositories["org/model"]) == 2
    run_cli("pull", "hf://org/model", tmp_path / "got", env=env).ok()
    assert snapshot(tmp_path / "got") == reference.files


def test_damage_is_found_before_the_commit(hub, env, reference: Reference, tmp_path) -> None:
    """The library reads the files itself, so they are compared with the manifest first."""
    import shutil

    copy = shutil.copytree(reference.target, tmp_path / "copy")
    path = copy / "config.json"
    path.write_bytes(path.read_bytes().replace(b'"', b"'", 1))
    fail_cleanly(run_cli("push", copy, "hf://org/model", env=env), 4, "config.json", "XXH3-128")
    assert len(hub.repositories["org/model"]) == 1


@pytest.mark.parametrize(
    "option", [("--tag", "v1"), ("--limit-rate", "1MB"), ("--part-size", "32MiB")]
)
def test_what_the_hub_does_itself_is_refused(hub, env, reference: Reference, option) -> None:
    """Tags are git's there, and rate and parts are the library's."""
    fail_cleanly(
        run_cli("push", reference.target, "hf://org/model", *option, env=env), 2, option[0]
    )
    assert len(hub.repositories["org/model"]) == 1
