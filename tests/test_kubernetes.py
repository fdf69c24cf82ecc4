"""The manifests of the documentation: valid, and their commands do what they say."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from mxconvert.manifest import RECORD_NAME
from tests.pull_base import QUICK
from tests.rank_base import expert_of, make, stored
from tests.support import bf16_model, run_cli, shell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.pull_base import Place
    from tests.rank_base import RankArtifact

FOLDER = Path(__file__).parents[1] / "docs" / "how-to" / "kubernetes"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
SCHEMAS = "1.31"
_VARIABLE = re.compile(r"\$\((\w+)\)")


def documents(name: str) -> list[dict[str, Any]]:
    """Return the documents of a file."""
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def containers(name: str) -> Iterator[dict[str, Any]]:
    """Yield every container of a file, those that run first before the others."""
    for document in documents(name):
        spec = document["spec"].get("template", {}).get("spec", {})
        yield from (*spec.get("initContainers", ()), *spec.get("containers", ()))


def command(name: str, given: dict[str, str], volume: Path, url: str) -> list[str]:
    """Return the command of the container `pull`, as a kubelet would run it.

    Args:
        name: Of the file.
        given: Variables that Kubernetes sets.
        volume: Where its volume is mounted.
        url: What stands for the documented one.
    """
    (pull,) = (each for each in containers(name) if each["name"] == "pull")
    variables = dict(given)
    for entry in pull["env"]:
        if "value" in entry:
            variables[entry["name"]] = entry["value"]
        else:
            assert entry["name"] in given, "a field of the pod"
    variables["MODEL_URL"] = url
    (mount,) = pull["volumeMounts"]
    words = [_VARIABLE.sub(lambda match: variables[match[1]], word) for word in pull["command"]]
    assert words[:2] == ["mxconvert", "pull"]
    inside = mount["mountPath"] + "/"
    return [
        f"{volume}/{word.removeprefix(inside)}" if word.startswith(inside) else word
        for word in words[1:]
    ]


@pytest.fixture
def made(place: Place) -> RankArtifact:
    model = bf16_model(layers=1, experts=64, hidden=32, inner=32)
    return make(place, model, "--experts-per-file", 8)  # few objects: the server is slow at many


@pytest.mark.parametrize("name", FILES)
def test_the_schemas_accept_it(name: str) -> None:
    """Those that Kubernetes publishes, strictly: no field that does not exist."""
    validate = pytest.importorskip("kubernetes_validate")
    for document in documents(name):
        validate.validate(document, SCHEMAS, strict=True)


@pytest.mark.parametrize("name", FILES)
def test_volumes_limits_and_secrets(name: str) -> None:
    """What is mounted is declared, readers cannot write, no key stands in the file."""
    for document in documents(name):
        if document["kind"] == "Service":
            continue
        spec = document["spec"]["template"]["spec"]
        volumes = [volume["name"] for volume in spec.get("volumes", ())]
        volumes += [c["metadata"]["name"] for c in document["spec"].get("volumeClaimTemplates", ())]
        for container in containers(name):
            for mount in container["volumeMounts"]:
                assert mount["name"] in volumes
                assert mount.get("readOnly", False) == (container["name"] == "engine")
            assert container["resources"]["limits"]
    assert "AWS_SECRET" not in (FOLDER / name).read_text()


def test_whole_models(place: Place, made: RankArtifact) -> None:
    for name in ("init-container.yaml", "node-cache.yaml"):
        volume = place.folder / name
        volume.mkdir()
        shell(*command(name, {}, volume, made.url), *QUICK).ok()
        assert stored(volume / "demo") == made.tensors


def test_each_pod_gets_its_ranks(place: Place, made: RankArtifact) -> None:
    """The first, one and the last of eight pods: experts 8 i to 8 i + 7 of 64."""
    variables = {"indexed-job.yaml": "JOB_COMPLETION_INDEX", "statefulset.yaml": "POD_INDEX"}
    for name, index in itertools.product(variables, (0, 3, 7)):
        volume = place.folder / f"{name}-{index}"
        volume.mkdir()
        words = command(name, {variables[name]: str(index)}, volume, made.url)
        run_cli(*words, *QUICK, env=place.proxy.environment()).ok()
        held = {n for n in map(expert_of, stored(volume / "demo")) if n is not None}
        assert held == set(range(8 * index, 8 * index + 8))
        record = json.loads((volume / "demo" / RECORD_NAME).read_bytes())
        assert record["selection"]["experts"] == f"{8 * index}-{8 * index + 7}"


@pytest.mark.parametrize("name", ["indexed-job.yaml", "statefulset.yaml"])
def test_the_engine_counts_ranks_as_the_pull_does(name: str) -> None:
    """Same nodes, same GPUs for each, the first rank of node i is i times that."""
    by_name = {container["name"]: container for container in containers(name)}
    pull = dict(word[2:].split("=") for word in by_name["pull"]["command"] if "=" in word)
    (script,) = by_name["engine"]["args"]
    words = shlex.split(script)
    nodes, gpus = int(pull["nodes"]), int(pull["gpus-per-node"])
    assert words[words.index("--data-parallel-size") + 1] == str(nodes * gpus)
    assert words[words.index("--data-parallel-size-local") + 1] == str(gpus)
    index = pull["node"].removeprefix("$(").removesuffix(")")
    assert f"--data-parallel-start-rank $(({index} * {gpus}))" in script
    assert by_name["engine"]["resources"]["limits"]["nvidia.com/gpu"] == str(gpus)
    (document,) = (d for d in documents(name) if d["kind"] != "Service")
    spec = document["spec"]
    assert spec.get("completions", spec.get("replicas")) == nodes


def test_the_follower_keeps_current_whole(place: Place, made: RankArtifact) -> None:
    """Until it is told to end."""
    import signal
    import time

    from tests.support import start_cli

    words = command("follow.yaml", {}, place.folder, made.url)
    with start_cli(*words, *QUICK, env=place.proxy.environment()) as running:
        end = time.monotonic() + 20
        while not (place.folder / "demo" / "current").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait().status == 143
    assert stored(place.folder / "demo" / "current") == made.tensors
