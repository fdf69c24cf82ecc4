"""Make artifacts, change them, and write a manifest over the change."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mxconvert import safetensors_format as st
from mxconvert.digest import digest_bytes, xxh3_128_hex
from mxconvert.events import ignore
from mxconvert.manifest import (
    MANIFEST_NAME,
    TENSORS_NAME,
    FileEntry,
    TensorRecord,
    encode_manifest,
    encode_tensors,
    iter_tensors,
    parse_manifest,
)
from mxconvert.model import FileRole, Options
from mxconvert.pipeline import RunOptions, quantize_checkpoint
from mxconvert.plan import build_plan
from mxconvert.source import open_checkpoint, read_header
from mxconvert.verify import Finding, Level, VerifyOptions, VerifyReport, verify_artifact
from tests.support import raw_safetensors, read_safetensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

INDEX = "model.safetensors.index.json"
DENSE = "model-dense-00001-of-00001.safetensors"
EXPERT = "model-experts-00003-00003.safetensors"


def make_artifact(source: Path, target: Path, **options: Any) -> Path:
    checkpoint = open_checkpoint(source)
    plan = build_plan(checkpoint, Options(**options))
    run = RunOptions(jobs=1, backend="numpy")
    quantize_checkpoint(checkpoint, plan, target, run, report=ignore)
    return target


def verify(root: Path, level: str = "structure", **options: Any) -> VerifyReport:
    report = verify_artifact(root, VerifyOptions(level=Level(level), jobs=2, **options))
    assert report.ok == (not report.findings)
    json.dumps(report.to_json())
    return report


def codes(report: VerifyReport) -> Counter[str]:
    return Counter(finding.code for finding in report.findings)


def one(report: VerifyReport, code: str) -> Finding:
    found = [finding for finding in report.findings if finding.code == code]
    assert found, report.findings
    return found[0]


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document, indent=2) + "\n")


def edit_tensors(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a weight file's tensors; the order they stand in is kept."""
    tensors = read_safetensors(path)
    change(tensors)
    raw_safetensors(path, tensors)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def rebuild(root: Path, *, tensor_list: bool = True) -> None:
    """Write tensor list and manifest again, so that every digest agrees."""
    manifest = parse_manifest((root / MANIFEST_NAME).read_bytes(), "M")
    totals = manifest.totals
    if tensor_list:
        records = _records(root, manifest.files)
        (root / TENSORS_NAME).write_bytes(encode_tensors(records))
        totals = replace(totals, tensors=len(records))
    files = []
    for entry in manifest.files:
        path = root / entry.path
        if path.exists():
            digest = digest_bytes(path.read_bytes())
            files.append(
                FileEntry.from_digest(
                    entry.path, entry.role, digest, experts=entry.experts, layers=entry.layers
                )
            )
    totals = replace(totals, files=len(files), file_bytes=sum(entry.size for entry in files))
    new = replace(manifest, files=tuple(files), totals=totals)
    (root / MANIFEST_NAME).write_bytes(encode_manifest(new))


def _records(root: Path, files: tuple[FileEntry, ...]) -> list[TensorRecord]:
    """Describe what is stored; layer, experts and sources as they were listed."""
    known = {r.name: r for r in iter_tensors((root / TENSORS_NAME).read_bytes())}
    template = next(iter(known.values()))
    records = []
    for entry in files:
        if entry.role not in (FileRole.DENSE, FileRole.EXPERTS, FileRole.MIXED):
            continue
        data = (root / entry.path).read_bytes()
        for tensor in read_header(root, entry.path)[1]:
            old = known.get(tensor.name, replace(template, experts=entry.experts))
            end = tensor.offset + tensor.size
            records.append(
                replace(
                    old,
                    name=tensor.name,
                    file=entry.path,
                    dtype=tensor.dtype,
                    shape=tensor.shape,
                    begin=tensor.offset,
                    end=end,
                    xxh3_128=xxh3_128_hex(data[tensor.offset : end]),
                )
            )
    return sorted(records, key=lambda r: (r.file, r.begin))


def header_end(path: Path) -> int:
    with path.open("rb") as file:
        prefix = file.read(st.PREFIX_SIZE)
    return st.PREFIX_SIZE + int.from_bytes(prefix, "little")
