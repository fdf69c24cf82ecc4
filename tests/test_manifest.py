"""The manifest: canonical bytes, strict reading, stable ids."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxconvert.digest import ChunkHasher, digest_bytes
from mxconvert.errors import VerificationError
from mxconvert.manifest import (
    TENSORS_NAME,
    FileEntry,
    Generator,
    Manifest,
    artifact_id,
    build_manifest,
    encode_manifest,
    parse_manifest,
    source_identity,
    tensor_records,
)
from mxconvert.model import (
    Action,
    FileRole,
    Item,
    Options,
    OutputFile,
    Plan,
    Scope,
    SourceFile,
    TensorInfo,
    Totals,
)

GOLDEN = Path(__file__).parent / "data" / "manifest-v1.golden.json"
GOLDEN_ID = "666d45bc1e865aaa8bd0eb72e79868c36a19b27b715f1ed0477098add729fcc4"
EXPERTS = "model-experts-00000-00001.safetensors"


def make_plan() -> Plan:
    source = TensorInfo("l.0.experts.0.up.weight", "BF16", (2, 64), "model.safetensors", 100, 256)
    file = OutputFile(
        name=EXPERTS,
        role=FileRole.EXPERTS,
        experts=(0, 1),
        layers=(0, 0),
        items=(Item(Action.QUANTIZE, source, 0, 0, 0),),
        header_size=200,
        header_sha256="0" * 64,
        size=268,
    )
    return Plan(
        options=Options(scope=Scope.LINEAR, include=("a*", "b"), experts_per_file=2),
        recipe="qwen_moe",
        num_experts=8,
        files=(file,),
        ignore=(),
        quantized=Totals(tensors=1, source_bytes=256, output_bytes=68),
        copied=Totals(),
    )


def make_manifest(*extra: FileEntry) -> Manifest:
    sources = [
        SourceFile(path=name, size=size, header_sha256=digit * 64, mtime_ns=1, inode=2)
        for name, size, digit in (("b.safetensors", 20, "b"), ("a.safetensors", 10, "a"))
    ]
    return build_manifest(
        plan=make_plan(),
        source=source_identity(sources, 7),
        files=[
            FileEntry.from_digest(TENSORS_NAME, FileRole.TENSORS, digest_bytes(b"tensors")),
            FileEntry.from_digest(
                EXPERTS, FileRole.EXPERTS, digest_bytes(b"x" * 268), experts=(0, 1), layers=(0, 0)
            ),
            FileEntry.from_digest("é/empty.txt", FileRole.SIDECAR, digest_bytes(b"")),
            *extra,
        ],
        config={"architectures": ["A", 1], "model_type": "qwen3_moe"},
        generator=Generator(name="mxconvert", version="0.1.0"),
    )


DATA = encode_manifest(make_manifest())


def edited(change) -> bytes:
    document = json.loads(DATA)
    change(document)
    return (
        json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        + b"\n"
    )


def refused(data: bytes) -> str:
    with pytest.raises(VerificationError) as caught:
        parse_manifest(data, "M")
    assert caught.value.message.startswith("M")
    return caught.value.message


def test_round_trip() -> None:
    manifest = parse_manifest(DATA, "M")
    assert manifest == make_manifest()
    assert encode_manifest(manifest) == DATA
    assert edited(lambda document: None) == DATA


def test_contents() -> None:
    document = json.loads(DATA)
    assert document["schema_version"] == 1
    assert document["chunk_size"] == 16 * 1024 * 1024
    assert document["options"] == {
        "activations": "none",
        "base_model": None,
        "exclude": [],
        "expert_weights": [],
        "from_int4": False,
        "experts_per_file": 2,
        "include": ["a*", "b"],
        "layout": "experts",
        "max_file_size": None,
        "recipe": None,
        "scale_rule": "mse",
        "scope": "linear",
        "unindexed": None,
    }
    assert document["model"]["architectures"] == ["A"]
    assert [entry["path"] for entry in document["files"]] == [EXPERTS, TENSORS_NAME, "é/empty.txt"]
    rows = [["a.safetensors", 10, "a" * 64], ["b.safetensors", 20, "b" * 64]]
    text = json.dumps(rows, separators=(",", ":")) + "\n"
    assert document["source"] == {
        "digest": hashlib.sha256(text.encode()).hexdigest(),
        "files": 2,
        "size_bytes": 30,
        "tensors": 7,
    }
    assert document["files"][2]["chunks"] == {"crc64nvme": [], "xxh3_128": []}


def test_nothing_that_varies_between_runs_is_in_it() -> None:
    assert encode_manifest(make_manifest()) == DATA
    for word in (b"/home", b"/tmp", b"host", b"time", b"jobs"):
        assert word not in DATA


def test_the_committed_manifest_parses_forever() -> None:
    data = GOLDEN.read_bytes()
    manifest = parse_manifest(data, GOLDEN.name)
    assert artifact_id(data) == GOLDEN_ID
    assert encode_manifest(manifest) == data
    assert manifest.files[0].experts == (0, 1)


def test_json_schema_accepts_what_is_written() -> None:
    schema = json.loads(files("mxconvert.schemas").joinpath("manifest-v1.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(json.loads(DATA))
    for path in ("../x", "/x", "a//b", "a/", "a\\b", "C:x", "a/./b", ".", "a\x00"):
        document = json.loads(DATA)
        document["files"][0]["path"] = path
        assert not validator.is_valid(document), path


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("../x", "'..'"),
        ("a/../../x", "'..'"),
        ("a/..", "'..'"),
        ("/etc/passwd", "absolute"),
        ("//x", "absolute"),
        ("a\\b", "backslash"),
        ("..\\x", "backslash"),
        ("C:/x", "drive"),
        ("c:x", "drive"),
        ("a/./b", "'.'"),
        ("./a", "'.'"),
        ("a//b", "empty"),
        ("a/", "empty"),
        ("", "empty"),
        ("a\x00b", "control"),
        ("a\nb", "control"),
        ("mxconvert.manifest.json", "itself"),
        (".mxconvert/journal", "never part"),
    ],
)
def test_unsafe_paths_are_refused(path: str, fault: str) -> None:
    def change(document: dict) -> None:
        document["files"][2]["path"] = path

    message = refused(edited(change))
    assert fault in message
    assert ascii(path) in message


@pytest.mark.parametrize(
    "other",
    [EXPERTS, EXPERTS.upper(), "e\u0301/empty.txt", "É/EMPTY.TXT", EXPERTS + "/part", "é"],
)
def test_two_entries_for_one_file_are_refused(other: str) -> None:
    def change(document: dict) -> None:
        entry = copy.deepcopy(document["files"][2])
        document["files"] = sorted(
            [*document["files"], entry | {"path": other}], key=lambda e: e["path"]
        )
        document["totals"]["files"] += 1

    assert ascii(other) in refused(edited(change))


def set_in(*path, value):
    def change(document: dict) -> None:
        target = document
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_in("schema_version", value=2), "schema_version 2, expected 1"),
        (set_in("schema_version", value=True), "schema_version"),
        (set_in("surprise", value=1), "unknown keys ['surprise']"),
        (set_in("files", 0, "surprise", value=1), EXPERTS),
        (set_in("files", 0, "size", value=-1), EXPERTS),
        (set_in("files", 0, "size", value="268"), EXPERTS),
        (set_in("files", 0, "size", value=2**53), EXPERTS),
        (set_in("files", 0, "size", value=16 * 2**20 + 1), "the size needs 2"),
        (set_in("files", 0, "size", value=269), "totals.file_bytes"),
        (set_in("files", 0, "role", value="other"), "unknown role 'other'"),
        (set_in("files", 0, "sha256", value="0" * 63), "64 lowercase"),
        (set_in("files", 0, "sha256", value="A" * 64), "64 lowercase"),
        (set_in("files", 0, "crc64nvme", value=None), "16 lowercase"),
        (set_in("files", 0, "chunks", "xxh3_128", value=[]), "the size needs 1"),
        (set_in("files", 0, "experts", value=[1, 0]), "pair"),
        (set_in("files", 0, "experts", value=[0, 8]), "the model has 8"),
        (set_in("files", 0, "experts", value=None), "role experts"),
        (set_in("files", 1, "role", value="sidecar"), TENSORS_NAME),
        (set_in("files", value={}), "not a list"),
        (set_in("files", 0, value=[]), "expected an object"),
        (set_in("options", "scope", value={}), "scope"),
        (set_in("model", "architectures", value=[1]), "architectures"),
        (set_in("totals", "files", value=4), "totals.files"),
        (set_in("totals", "tensor_bytes", value=4), "totals.tensor_bytes"),
        (set_in("chunk_size", value=0), "chunk_size"),
        (lambda document: document.pop("source"), "source"),
        (lambda document: document["files"].reverse(), "sorted"),
    ],
)
def test_malformed_manifests_are_refused(change, words: str) -> None:
    assert words in refused(edited(change))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]\n",
        b"{}\n",
        b"\xff",
        b"{" * 100_000,
        b"[" * 100_000,
        b"1" * 10_000,
        DATA[:-1],
        DATA + b"\n",
        DATA.replace(b":", b": ", 1),
        DATA.replace(b'"schema_version":1', b'"schema_version":1.0'),
        DATA.replace(b'"schema_version":1', b'"schema_version":NaN'),
        DATA.replace(b'{"chunk_size"', b'{"chunk_size":1,"chunk_size"'),
        DATA.replace("é".encode(), b"\\u00e9"),
        b"\xef\xbb\xbf" + DATA,
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    refused(data)


def test_unknown_options_and_extensions_are_kept() -> None:
    def change(document: dict) -> None:
        document["options"]["later"] = ["x"]
        document["extensions"] = {"signature": {"deep": [1]}}

    data = edited(change)
    manifest = parse_manifest(data, "M")
    assert manifest.options["later"] == ["x"]
    assert encode_manifest(manifest) == data


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.data())
def test_any_change_of_a_value_is_read_or_refused(data) -> None:
    document = json.loads(DATA)
    target = document
    while True:
        keys = sorted(target) if isinstance(target, dict) else list(range(len(target)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if not isinstance(target[key], (dict, list)) or data.draw(st.booleans()):
            target[key] = data.draw(JSON_VALUES)
            break
        target = target[key]
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    raw = text.encode(errors="surrogatepass") + b"\n"
    try:
        manifest = parse_manifest(raw, "M")
    except VerificationError:
        return
    assert encode_manifest(manifest) == raw


@given(st.binary(max_size=200), st.integers(0, len(DATA)), st.integers(0, 40))
def test_any_damage_is_refused(patch: bytes, at: int, cut: int) -> None:
    damaged = DATA[:at] + patch + DATA[at + cut :]
    try:
        manifest = parse_manifest(damaged, "M")
    except VerificationError:
        return
    assert encode_manifest(manifest) == damaged


def test_chunks_of_a_large_file_are_parallel_lists() -> None:
    hasher = ChunkHasher(chunk_size=4)
    hasher.update(b"0123456789")
    digest = hasher.finish(hashlib.sha256(b"0123456789").hexdigest())
    entry = FileEntry.from_digest("z", FileRole.SIDECAR, digest)
    other = replace(make_manifest(), chunk_size=4, files=())
    tensors = hasher.__class__(4)
    tensors.update(b"t")
    listed = FileEntry.from_digest(TENSORS_NAME, FileRole.TENSORS, tensors.finish("0" * 64))
    totals = replace(other.totals, files=2, file_bytes=11)
    manifest = replace(other, files=(listed, entry), totals=totals)
    parsed = parse_manifest(encode_manifest(manifest), "M")
    assert len(parsed.files[1].chunks) == 3
    assert parsed == manifest


def test_tensor_records_follow_the_plan() -> None:
    plan = make_plan()
    names = [o.name for o in plan.files[0].items[0].outputs]
    records = list(
        tensor_records(
            plan.files[0],
            {name: str(i) * 32 for i, name in enumerate(names)},
            {"l.0.experts.0.up.weight": "f" * 32},
        )
    )
    assert [(r.name, r.begin, r.end) for r in records] == [
        (names[0], 200, 264),
        (names[1], 264, 268),
    ]
    assert records[0].experts == (0, 0)
    assert records[0].sources[0].name == "l.0.experts.0.up.weight"
    assert records[1].xxh3_128 == "1" * 32


DOCUMENT = Path(__file__).parents[1] / "docs" / "reference" / "manifest.md"


def test_the_documented_snippet_checks_an_artifact(tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    contents = {TENSORS_NAME: b"tensors", EXPERTS: b"x" * 268, "é/empty.txt": b""}
    (tmp_path / "é").mkdir()
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "mxconvert.manifest.json").write_bytes(DATA)

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", snippet, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run().returncode == 0
    assert run().stdout == f"id {artifact_id(DATA)}\n"
    (tmp_path / EXPERTS).write_bytes(b"x" * 267 + b"y")
    assert run().returncode == 1
    assert f"differs: {EXPERTS}" in run().stdout


def test_every_member_is_documented() -> None:
    text = DOCUMENT.read_text()
    schemas = [
        json.loads(files("mxconvert.schemas").joinpath(name).read_text())
        for name in ("manifest-v1.schema.json", "tensors-v1.schema.json")
    ]

    def members(schema: object) -> set[str]:
        if isinstance(schema, list):
            return set().union(*map(members, schema))
        if not isinstance(schema, dict):
            return set()
        own = schema.get("properties")
        found = set(own) if isinstance(own, dict) else set()
        return found.union(*(members(value) for value in schema.values()))

    missing = {
        name for name in members(schemas) if f"`{name}`" not in text and f'"{name}"' not in text
    }
    assert not missing
