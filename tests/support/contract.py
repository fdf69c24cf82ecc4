"""What every conversion must hold, whether it succeeds or is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support.artifact import Artifact, read_artifact
from tests.support.cli import Result, fail_cleanly, snapshot
from tests.support.container import Tensor, read_safetensors
from tests.support.fp8 import bf16_of, dequantized, is_scaled, scale_name
from tests.support.models import INDEX
from tests.support.shell import shell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

SOURCE_STATUS, USAGE_STATUS = 5, 2
MANIFEST = "mxconvert.manifest.json"
ROOMY = ("--max-memory", "8GiB")
"""The budget counts what is resident, and a test process has had other tests in it."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A conversion that succeeded and passed `converted`'s checks.

    ``notices`` are the messages of the events by their code; ``summary`` is the last event.
    """

    artifact: Artifact
    summary: dict[str, Any]
    notices: dict[str, list[str]]
    bytes: dict[str, str]

    @property
    def id(self) -> str:
        """The artifact's id."""
        return str(self.summary["artifact"])

    @property
    def weights(self) -> dict[str, str]:
        """SHA-256 of each weight file by name."""
        return {name: sha for name, sha in self.bytes.items() if name.endswith(".safetensors")}


def converted(source: Path, target: Path, *options: object) -> Conversion:
    """Quantize; assert that the artifact is whole and that nothing is lost; return it.

    ``verify`` recomputes it from the source; each source tensor is stored byte for byte,
    quantized or reported as dropped; every file opens with the plain library; the index
    lists exactly what is stored; the source is as it was.
    """
    before = snapshot(source)
    result = shell("quantize", source, target, "--json", *ROOMY, *options).ok()
    assert snapshot(source) == before
    events = [json.loads(line) for line in result.stdout.splitlines()]
    summary = events[-1]
    assert summary["type"] == "summary"
    shell("verify", target, "--level", "numeric", "--source", source).ok()
    artifact = read_artifact(target)
    check_accounting(source_tensors(source, summary), artifact, summary)
    check_index(artifact)
    notices: dict[str, list[str]] = {}
    for event in events:
        if event["type"] == "notice":
            notices.setdefault(event["code"], []).append(event["message"])
    return Conversion(artifact=artifact, summary=summary, notices=notices, bytes=snapshot(target))


def source_tensors(source: Path, summary: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """Return every copy of every tensor that is stored in files not reported as skipped."""
    skipped = {entry["name"] for entry in summary["skipped_files"]}
    index = source / INDEX
    mapped = json.loads(index.read_bytes())["weight_map"] if index.exists() else {}
    found: dict[str, list[Tensor]] = {}
    for path in sorted(source.rglob("*.safetensors")):
        file = path.relative_to(source).as_posix()
        if file in skipped:
            continue
        for name, tensor in read_safetensors(path).items():
            copies = found.setdefault(name, [])
            copies.insert(0 if mapped.get(name) == file else len(copies), tensor)
    return found


def check_accounting(
    source: Mapping[str, list[Tensor]], artifact: Artifact, summary: Mapping[str, Any]
) -> None:
    """Assert that each source tensor is written once, or reported with a reason."""
    dropped = {entry["name"]: entry["reason"] for entry in summary["dropped_tensors"]}
    assert all(dropped.values())
    quantized = set(artifact.quantized)
    tensors = {name: copies[0] for name, copies in source.items()}
    scaled = {name for name, tensor in tensors.items() if is_scaled(tensor)}
    scales = {scale_name(name, tensors) for name in scaled}
    ours = {f"{name}_scale" for name in quantized}
    assert not (scales - ours) & artifact.tensors.keys()
    for name, copies in source.items():
        if name in scales:
            continue
        if len(copies) > 1:
            assert name in dropped, name
        tensor = copies[0]
        if name in quantized:
            rows, columns = tensor.shape
            codes, exponents = artifact.packed(name)
            assert codes.shape == (rows, columns // 2), name
            assert exponents.shape == (rows, columns // 32), name
            assert name not in artifact.tensors
        elif name in scaled:
            expected = ("BF16", tensor.shape, bf16_of(dequantized(tensors, name)))
            assert artifact.tensors[name][1:] == expected, name
        elif name in artifact.tensors:
            assert artifact.tensors[name][1:] == tuple(tensor), name
        else:
            assert name in dropped, f"{name} is lost"
    assert quantized | set(artifact.kept) <= source.keys(), "tensors of no source"
    assert summary["quantized"]["tensors"] == len(quantized)
    assert summary["kept"]["tensors"] == len(artifact.kept)
    assert summary["dequantized"]["tensors"] == len(scaled - quantized)


def check_index(artifact: Artifact) -> None:
    """Assert that the index lists exactly the tensors stored, and their bytes."""
    stored = {name: entry.file for name, entry in artifact.tensors.items()}
    assert artifact.index["weight_map"] == stored
    total = sum(len(entry.data) for entry in artifact.tensors.values())
    assert artifact.index["metadata"]["total_size"] == total


def refused(
    source: Path, target: Path, *options: object, status: int = SOURCE_STATUS, says: tuple[str, ...]
) -> Result:
    """Quantize; assert that it is refused before anything is written; return the result.

    One message with ``says`` and a next step, no traceback, the source untouched, no
    output folder.
    """
    before = snapshot(source)
    result = shell("quantize", source, target, *options)
    fail_cleanly(result, status, "error: ", "hint: ", *says)
    assert not result.stdout
    assert not target.exists()
    assert snapshot(source) == before
    return result


def stopped(
    source: Path, target: Path, *options: object, status: int = SOURCE_STATUS, says: tuple[str, ...]
) -> Result:
    """Quantize; assert that it fails on the way; return the result.

    As `refused`, but finished files may be there: no partial file under any name, no
    manifest, and ``verify`` does not pass.
    """
    before = snapshot(source)
    result = shell("quantize", source, target, *ROOMY, *options)
    fail_cleanly(result, status, "error: ", "hint: ", *says)
    assert snapshot(source) == before
    left = snapshot(target)
    assert MANIFEST not in left
    assert not [name for name in left if name.endswith(".partial")]
    assert shell("verify", target).status != 0
    return result


def refused_until(
    mend: Callable[[], object],
    source: Path,
    target: Path,
    *options: object,
    says: tuple[str, ...],
    status: int = SOURCE_STATUS,
) -> Conversion:
    """`refused`; then, once ``mend`` removed the cause, the same command succeeds."""
    refused(source, target, *options, says=says, status=status)
    mend()
    return converted(source, target, *options)
