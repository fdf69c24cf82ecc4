"""Artifacts of real models at the S3 server, and what a rank should get of them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mxconvert.manifest import MANIFEST_NAME, RECORD_NAME, TENSORS_NAME, iter_tensors
from mxconvert.safetensors_format import PREFIX_SIZE, parse_header
from tests.pull_base import INDEX, PREFIX, QUICK
from tests.support import Result, shell
from tests.support.publish import artifact_id, publish

if TYPE_CHECKING:
    from pathlib import Path

    from tests.pull_base import Place
    from tests.support import Model

EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class RankArtifact:
    """A model's artifact at the server.

    Attributes:
        folder: Where it was made.
        url: Where it lies.
        id: Its id.
    """

    folder: Path
    url: str
    id: str

    @property
    def tensors(self) -> dict[str, bytes]:
        """Bytes of every tensor."""
        return stored(self.folder)

    @property
    def weights(self) -> dict[str, int]:
        """Size of each weight file."""
        return {path.name: path.stat().st_size for path in self.folder.glob("*.safetensors")}

    def expert_bytes(self) -> int:
        """Bytes of tensors of routed experts."""
        return sum(len(data) for name, data in self.tensors.items() if EXPERT.search(name))


def make(place: Place, model: Model, *options: object, prefix: str = PREFIX) -> RankArtifact:
    """Convert a model and put it at the server."""
    place.made += 1
    source = model.write(place.folder / f"source-{place.made}")
    folder = place.folder / f"made-{place.made}"
    shell("quantize", source, folder, *options).ok()
    publish(place.s3, place.bucket, folder, prefix)
    return RankArtifact(folder, place.url(prefix), artifact_id(folder))


def pull(place: Place, made: RankArtifact, target: Path, *options: object) -> Result:
    """Pull in this process."""
    return shell("pull", made.url, target, *QUICK, *options)


def stored(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every tensor that a folder's index lists, by its own files."""
    weight_map = json.loads((folder / INDEX).read_bytes())["weight_map"]
    found: dict[str, bytes] = {}
    for file in sorted(set(weight_map.values())):
        raw = (folder / file).read_bytes()
        length = int.from_bytes(raw[:PREFIX_SIZE], "little")
        header = raw[PREFIX_SIZE : PREFIX_SIZE + length]
        for tensor in parse_header(header, file, len(raw)):
            if weight_map.get(tensor.name) == file:
                found[tensor.name] = raw[tensor.offset : tensor.offset + tensor.size]
    assert found.keys() == weight_map.keys()
    return found


def loaded(folder: Path) -> dict[str, Any]:
    """Return every tensor as the safetensors library reads it."""
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                try:
                    found[name] = np.asarray(file.get_tensor(name)).tobytes()
                except TypeError:  # BF16, which numpy lacks
                    found[name] = None
    return found


def expert_of(name: str) -> int | None:
    """Return the routed expert that a tensor is of."""
    match = EXPERT.search(name)
    return int(match[1]) if match else None


def assert_part(made: RankArtifact, target: Path, experts: set[int]) -> None:
    """A folder holds these experts and everything that is of none, right, and says so."""
    found, whole = stored(target), made.tensors
    wanted = {name for name in whole if expert_of(name) is None or expert_of(name) in experts}
    assert found == {name: whole[name] for name in wanted}
    assert (target / MANIFEST_NAME).read_bytes() == (made.folder / MANIFEST_NAME).read_bytes()
    assert loaded(target).keys() == wanted
    total = json.loads((target / INDEX).read_bytes())["metadata"]["total_size"]
    assert total == sum(map(len, found.values()))
    record = json.loads((target / RECORD_NAME).read_bytes())
    assert record["artifact"] == made.id
    assert not (target / ".mxconvert").exists()
    assert not list(target.glob("*.partial"))
    result = shell("verify", target, "--json").ok()
    report = json.loads(result.stdout)
    assert report["artifact_id"] == made.id
    sidecars = {p.name for p in made.folder.iterdir() if not p.name.endswith(".safetensors")}
    assert {p.name for p in target.iterdir() if not p.name.endswith(".safetensors")} == {
        *sidecars - {".mxconvert-report.jsonl.zst"}, RECORD_NAME,
    }  # fmt: skip


def list_of(made: RankArtifact) -> list[Any]:
    """Return the artifact's tensor records."""
    return list(iter_tensors((made.folder / TENSORS_NAME).read_bytes()))
