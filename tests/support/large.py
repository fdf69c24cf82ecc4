"""Artifacts whose files have many chunks and are sent in parts, and commands at a store.

`chunked` cuts an artifact's digests anew, so that files of a few MiB behave as those of many
GiB do. `at_store` gives the options that keep a failing command short.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.support.cli import snapshot
from tests.support.models import Model, bf16_model
from tests.support.shell import shell

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.support.cli import Result

MANIFEST = "mxconvert.manifest.json"
INDEX = "model.safetensors.index.json"
MIB = 2**20
CHUNK = MIB
PART = 5 * MIB
"""The smallest part that S3 takes, and what files with small chunks are cut into."""

QUICK = ("--store-option", "read_timeout=2", "--store-option", "connect_timeout=2")
"""For requests that are never answered; a loaded machine may need longer for others."""


@dataclass(frozen=True)
class LargeArtifact:
    """A finished artifact whose largest file goes in several parts; never change it.

    Attributes:
        folder: Where it lies.
        id: SHA-256 of its manifest.
        files: Bytes by path, without the manifest.
        digests: SHA-256 by path, with the manifest.
    """

    folder: Path
    id: str
    files: dict[str, int]
    digests: dict[str, str]

    @property
    def version(self) -> str:
        """The name of its folder at a store."""
        return self.id[:16]

    @property
    def largest(self) -> str:
        """The path of its largest file."""
        return max(self.files, key=lambda path: self.files[path])

    @property
    def payload(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(self.files.values())

    @cached_property
    def parts(self) -> int:
        """How many parts all files that are cut have together."""
        return sum(-(-size // PART) for size in self.files.values() if size > PART)


def chunked(folder: Path, chunk_size: int = CHUNK) -> LargeArtifact:
    """Write an artifact's manifest anew, for what its files hold now, with smaller chunks."""
    import xxhash
    from awscrt.checksums import crc64nvme

    path = folder / MANIFEST
    document = json.loads(path.read_text())
    document["chunk_size"] = chunk_size
    for entry in document["files"]:
        data = memoryview((folder / entry["path"]).read_bytes())
        pieces = [data[at : at + chunk_size] for at in range(0, len(data), chunk_size)]
        entry |= {
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "crc64nvme": f"{crc64nvme(data):016x}",
        }
        entry["chunks"] = {
            "crc64nvme": [f"{crc64nvme(piece):016x}" for piece in pieces],
            "xxh3_128": [xxhash.xxh3_128_hexdigest(piece) for piece in pieces],
        }
    document["totals"]["file_bytes"] = sum(entry["size"] for entry in document["files"])
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return describe(folder)


def describe(folder: Path) -> LargeArtifact:
    """Return what an artifact's folder holds, by its manifest."""
    data = (folder / MANIFEST).read_bytes()
    files = {entry["path"]: entry["size"] for entry in json.loads(data)["files"]}
    return LargeArtifact(folder, hashlib.sha256(data).hexdigest(), files, snapshot(folder))


def large_model(mib: int = 11, *, seed: int = 0) -> Model:
    """Return a model whose kept tensors have about so many MiB, in one file."""
    vocab = mib * MIB // (2 * 2 * 256)
    return bf16_model(vocab=vocab, hidden=256, inner=64, experts=2, layers=1, seed=seed)


def make_large(folder: Path, model: Model | None = None, chunk_size: int = CHUNK) -> LargeArtifact:
    """Quantize a model and cut its digests into small chunks."""
    source = (model or large_model()).write(folder / "source")
    shell("quantize", source, folder / "artifact").ok()
    return chunked(folder / "artifact", chunk_size)


def at_store(command: str, *args: object, env: Mapping[str, str], retry: str = "20s") -> Result:
    """Run a command in this process that talks to a store.

    Args:
        command: Its name.
        args: Its arguments.
        env: What leads it to the store.
        retry: After how long without progress it gives up.
    """
    with mock.patch.dict(os.environ, env):
        return shell(command, *args, "--retry-for", retry)


def json_lines(result: Result, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind of a ``--json`` run; each line has to be JSON."""
    found = [json.loads(line) for line in result.stdout.splitlines()]
    return [event for event in found if event["type"] == kind]


def summary(result: Result) -> dict[str, Any]:
    """Return the last line of a ``--json`` run that succeeded."""
    [found] = json_lines(result.ok(), "summary")
    return found


def notices(result: Result) -> dict[str, str]:
    """Return the messages of a ``--json`` run's notices by code."""
    return {event["code"]: event["message"] for event in json_lines(result, "notice")}


SAMPLE = re.compile(r'([a-z_:][a-z0-9_:]*)(?:\{[a-z_]+="[^"\\]*"\})? ([0-9.eE+-]+)')


def metrics(text: str) -> dict[str, float]:
    """Read Prometheus' text format: each sample has HELP and TYPE before it, and its own type."""
    assert text.endswith("\n")
    helped: set[str] = set()
    typed: dict[str, str] = {}
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped.add(line.split(" ", 3)[2])
        elif line.startswith("# TYPE "):
            name, kind = line.split(" ")[2:]
            assert kind in {"counter", "gauge"}
            typed[name] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            name = match[1]
            assert name in helped
            assert name.endswith("_total") == (typed[name] == "counter"), name
            assert name not in found
            found[name] = float(match[2])
    return found
