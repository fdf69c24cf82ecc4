"""Malformed and odd safetensors files in a source: refused with a word, or read rightly."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support import (
    Model,
    Tensor,
    bf16_model,
    converted,
    encode,
    fail_cleanly,
    raw_safetensors,
    read_artifact,
    refused,
    refused_until,
    run_cli,
    shell,
    snapshot,
)
from tests.support.container import ABSENT, header_of, read_header
from tests.support.models import INDEX, json_bytes, tensor

if TYPE_CHECKING:
    from pathlib import Path

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"
MIB = 1 << 20


def small_model() -> Model:
    return bf16_model(layers=1, experts=2)


# ------------------------------------------------------------------------- truncation


def _middle_of_a_tensor(path: Path) -> int:
    header, base = read_header(path)
    begin, end = header["model.layers.1.mlp.experts.3.down_proj.weight"]["data_offsets"]
    return base + (begin + end) // 2


CUTS = {
    "one byte short": lambda path: path.stat().st_size - 1,
    "in a tensor": _middle_of_a_tensor,
    "in the header": lambda path: read_header(path)[1] // 2,
    "four bytes": lambda _: 4,
    "empty": lambda _: 0,
}


@pytest.mark.parametrize("where", CUTS)
def test_a_truncated_shard_is_refused_before_any_work(
    where: str, model: Model, tmp_path: Path
) -> None:
    """A download that was cut short is named at once, with found and needed sizes."""
    source = model.write(tmp_path / "source")
    size = (source / SECOND).stat().st_size
    cut = CUTS[where](source / SECOND)
    with (source / SECOND).open("r+b") as file:
        file.truncate(cut)
    needed = {"in the header": read_header(model.write(tmp_path / "whole") / SECOND)[1] - 8}
    found = cut - 8 if where == "in the header" else cut
    says = [SECOND, str(found)]
    if where not in ("four bytes", "empty"):
        says.append(str(needed.get(where, size)))

    def mend() -> None:
        model.write(source)

    done = refused_until(mend, source, tmp_path / "out", says=tuple(says))
    assert len(done.artifact.quantized) == 48


def test_bytes_after_the_last_tensor_are_refused(model: Model, tmp_path: Path) -> None:
    """A file that is longer than its header says is not read as if it were whole."""
    source = model.write(tmp_path / "source")
    with (source / FIRST).open("ab") as file:
        file.write(b"tail")
    size = (source / FIRST).stat().st_size
    refused(source, tmp_path / "out", says=(FIRST, str(size), str(size - 4)))


# ------------------------------------------------------------------------ LFS pointers

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 4976698672\n"
)


@pytest.mark.parametrize("file", [FIRST, "tokenizer.json", "config.json", INDEX, "README.md"])
def test_a_git_lfs_pointer_is_called_one(file: str, model: Model, tmp_path: Path) -> None:
    """A clone without LFS is recognised, whichever file is a stub, and none is copied."""
    source = model.write(tmp_path / "source")
    (source / file).write_bytes(POINTER)
    says = (file, "Git LFS pointer", "4976698672", "git lfs pull")
    refused(source, tmp_path / "out", says=says)


# ----------------------------------------------------------------------- header length


@pytest.mark.parametrize(
    ("length", "size", "says"),
    [
        (100_000_001, 100_000_100, ("100000001", "100000000")),
        (1 << 63, 100, (str(1 << 63), "100000000")),
        (2**64 - 1, 100, (str(2**64 - 1), "100000000")),
        (500, 100, ("500", "92")),
        (1, 100, ("1 bytes", "2")),
        (0, 100, ("0 bytes", "2")),
    ],
)
def test_an_absurd_header_length_allocates_nothing(
    length: int, size: int, says: tuple[str, ...], model: Model, tmp_path: Path
) -> None:
    """The claimed length and the limit are stated, and no buffer of that size is made."""
    source = model.write(tmp_path / "source")
    with (source / SECOND).open("wb") as file:
        file.write(struct.pack("<Q", length) + b"{")
        file.truncate(size)
    tracemalloc.start()
    try:
        result = shell("quantize", source, tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * MIB
    fail_cleanly(result, 5, "error: ", "hint: ", SECOND, *says)
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------- headers


def rewrite_header(path: Path, change: Any) -> None:
    """Write a shard again with a changed header document (or other raw header bytes)."""
    header, base = read_header(path)
    data = path.read_bytes()[base:]
    changed = change(header)
    raw_safetensors(path, {"all": Tensor("U8", (len(data),), data)}, header=changed)


def _entry(name: str, **fields: Any) -> Any:
    def change(header: dict[str, Any]) -> dict[str, Any]:
        return header | {name: header[name] | fields}

    return change


def _alias(shift: int) -> Any:
    def change(header: dict[str, Any]) -> dict[str, Any]:
        begin, end = header[EXPERT.format(0, "up")]["data_offsets"]
        return _entry(EXPERT.format(1, "up"), data_offsets=[begin + shift, end + shift])(header)

    return change


@pytest.mark.parametrize("overlap", [None, 64], ids=["same range", "by 64 bytes"])
def test_two_tensors_over_the_same_bytes_are_refused(
    overlap: int | None, model: Model, tmp_path: Path
) -> None:
    """No weight is ever an alias of another one's bytes."""
    source = model.write(tmp_path / "source")
    size = 96 * 64 * 2
    rewrite_header(source / SECOND, _alias(0 if overlap is None else size - overlap))
    says = [SECOND, EXPERT.format(1, "up"), "overlap"]
    if overlap is None:
        says.append(EXPERT.format(0, "up"))
    refused(source, tmp_path / "out", says=tuple(says))


VICTIM = EXPERT.format(2, "gate")
CONTRADICTIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "shape of a larger range": (_entry(VICTIM, shape=[1000, 1000]), (VICTIM, "2000000")),
    "begin after end": (_entry(VICTIM, data_offsets=[64, 60]), (VICTIM, "64", "60")),
    "end past the file": (
        lambda h: h | {"tail": {"dtype": "U8", "shape": [9], "data_offsets": _after(h, 9)}},
        ("truncated", "tail"),
    ),
    "offsets are floats": (_entry(VICTIM, data_offsets=[0.0, 12288.0]), (VICTIM, "offsets")),
    "offsets are strings": (_entry(VICTIM, data_offsets=["0", "12288"]), (VICTIM, "offsets")),
    "offsets are negative": (_entry(VICTIM, data_offsets=[-12288, 0]), (VICTIM, "offsets")),
    "three offsets": (_entry(VICTIM, data_offsets=[0, 1, 2]), (VICTIM, "offsets")),
    "offsets are booleans": (_entry(VICTIM, data_offsets=[False, True]), (VICTIM, "offsets")),
    "shape of 2^64 elements": (_entry(VICTIM, shape=[2**32, 2**32]), (VICTIM,)),
    "shape of 4000 digits": (_entry(VICTIM, shape=[10**4000, 10**4000]), (VICTIM,)),
    "shape of a million dimensions": (_entry(VICTIM, shape=[7] * 1_000_000), (VICTIM,)),
    "shape is a number": (_entry(VICTIM, shape=6144), (VICTIM, "shape")),
    "shape is negative": (_entry(VICTIM, shape=[-96, -64]), (VICTIM, "shape")),
    "shape has a fraction": (_entry(VICTIM, shape=[96.0, 64]), (VICTIM, "shape")),
    "dtype is a number": (_entry(VICTIM, dtype=16), (VICTIM, "dtype")),
    "dtype is absent": (
        lambda h: h | {VICTIM: {"shape": [0], "data_offsets": [0, 0]}},
        (VICTIM, "dtype"),
    ),
    "an unknown field": (_entry(VICTIM, stride=[1]), (VICTIM,)),
    "an entry is a list": (lambda h: h | {VICTIM: []}, (VICTIM,)),
    "a hole": (lambda h: {k: v for k, v in h.items() if k != VICTIM}, ("belong to no tensor",)),
    "a list": (list, ("list",)),
    "not UTF-8": (lambda h: b'{"\xff\xfe": 1}', ("UTF-8",)),
    "not JSON": (lambda h: b"{'a': 1}", ("JSON",)),
    "deeply nested": (lambda h: b"[" * 200_000 + b"]" * 200_000, ("JSON",)),
    "a key twice": (lambda h: b'{"a": {}, "a": {}}', ("'a'", "twice")),
}


def _after(header: dict[str, Any], count: int) -> list[int]:
    end = max(e["data_offsets"][1] for k, e in header.items() if k != "__metadata__")
    return [end, end + count]


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_header_that_contradicts_itself_is_refused(
    what: str, model: Model, tmp_path: Path
) -> None:
    """Shapes, dtypes, ranges and the file's size must agree; the tensor is named, shortly."""
    source = model.write(tmp_path / "source")
    change, says = CONTRADICTIONS[what]
    rewrite_header(source / SECOND, change)
    result = refused(source, tmp_path / "out", says=(SECOND, *says))
    assert len(result.stderr) < 2000


# ---------------------------------------------------------------------------- metadata


@pytest.fixture(scope="module")
def plain_weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("plain")
    source = small_model().write(root / "source")
    return converted(source, root / "out").weights


@pytest.mark.parametrize(
    "metadata",
    [ABSENT, {}, None, {"note": "x" * MIB}, {"format": "mlx"}],
    ids=["absent", "empty", "null", "1 MiB", "another format"],
)
def test_header_metadata_changes_no_weight(
    metadata: object, plain_weights: dict[str, str], tmp_path: Path
) -> None:
    """Odd `__metadata__` is tolerated, is no tensor, and our files say format pt."""
    source = small_model().write(tmp_path / "source", metadata=metadata)
    done = converted(source, tmp_path / "out")
    assert done.weights == plain_weights
    for name in done.weights:
        header, _ = read_header(tmp_path / "out" / name)
        assert header["__metadata__"] == {"format": "pt"}


@pytest.mark.parametrize("metadata", [{"k": 0}, {"k": {"a": []}}, [], "text"])
def test_header_metadata_of_a_wrong_type_is_refused(metadata: object, tmp_path: Path) -> None:
    """The format allows strings only; the offending key is named."""
    source = small_model().write(tmp_path / "source", metadata=metadata)
    key = ("'k'",) if isinstance(metadata, dict) else ()
    refused(source, tmp_path / "out", says=("__metadata__", FIRST, *key))


# --------------------------------------------------------------------------- alignment


def _with_bytes_in_front(pad: int, folder: Path) -> Path:
    """Write a model whose BF16 weights start at an odd byte if ``pad`` is 1."""
    model = small_model()
    expert = "model.layers.0.mlp.experts.0.gate_proj.weight"
    front = {"odd": Tensor("U8", (3,), b"abc"), expert: model.tensors[expert]}
    back = {"last": tensor("last", (5,), "F32")}
    shards = {f: {k: v for k, v in s.items() if k != expert} for f, s in model.shards.items()}
    shards[SECOND] = front | shards[SECOND] | back
    source = Model(config=model.config, shards=shards, sidecars=model.sidecars).write(folder)
    if pad == 1:  # an 8k+3 header: as long as needed with trailing spaces
        raw = json.dumps(header_of(shards[SECOND])).encode()
        raw += b" " * ((3 - len(raw)) % 8)
        raw_safetensors(source / SECOND, shards[SECOND], header=raw, pad=1)
        assert read_header(source / SECOND)[1] % 8 == 3
    return source


def test_unaligned_tensors_are_read_rightly(tmp_path: Path) -> None:
    """Neither an unpadded header nor an odd-sized tensor in front shifts a value."""
    odd = converted(_with_bytes_in_front(1, tmp_path / "odd"), tmp_path / "odd-out")
    even = converted(_with_bytes_in_front(8, tmp_path / "even"), tmp_path / "even-out")
    assert odd.weights == even.weights
    for name in odd.weights:
        assert read_header(tmp_path / "odd-out" / name)[1] % 8 == 0


# ------------------------------------------------------------------------------ dtypes


def test_dtypes_that_are_only_copied_keep_their_bytes(tmp_path: Path) -> None:
    """Every dtype of the format passes through with dtype and shape, NumPy or not."""
    extra = {
        "extra.e8m0": Tensor("F8_E8M0", (4,), b"\x00\x7f\x80\xff"),
        "extra.e5m2": Tensor("F8_E5M2", (4,), b"\x3c\x7c\x7d\x00"),
        "extra.f4": Tensor("F4", (2, 8), bytes(range(8))),
        "extra.count": Tensor("I64", (2,), struct.pack("<2q", -1, 1 << 40)),
        "extra.flag": Tensor("BOOL", (3,), b"\x01\x00\x01"),
        "extra.c64": Tensor("C64", (1,), struct.pack("<2f", 1.5, -2.5)),
        "extra.u16": Tensor("U16", (3,), b"abcdef"),
        "extra.f64": Tensor("F64", (1,), struct.pack("<d", 0.1)),
    }
    source = small_model().adding(extra).write(tmp_path / "source")
    done = converted(source, tmp_path / "out")
    for name, expected in extra.items():
        assert done.artifact.tensors[name][1:] == tuple(expected)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Tensor("Q99", (4,), b"abcd"), "Q99"),
        (Tensor("F4", (1, 3), b"ab"), "F4"),
        (Tensor("F6_E2M3", (3,), b"abc"), "F6_E2M3"),
        (Tensor("bf16", (2,), b"abcd"), "bf16"),
    ],
)
def test_a_dtype_nobody_knows_is_refused(wrong: Tensor, says: str, tmp_path: Path) -> None:
    """Unknown dtypes, and bits that fill no whole bytes, are named with their tensor."""
    source = small_model().adding({"extra.wrong": wrong}).write(tmp_path / "source")
    refused(source, tmp_path / "out", says=("extra.wrong", says, SECOND))


# --------------------------------------------------------------------- more than 4 GiB


def test_a_tensor_beyond_4_gib_is_found_where_it_is(tmp_path: Path) -> None:
    """Offsets of more than 32 bits are exact; memory does not grow with the file."""
    far = "model.layers.0.mlp.experts.0.gate_proj.weight"
    model = small_model()
    source = model.write(tmp_path / "source")
    plain = converted(source, tmp_path / "plain-out")
    hole = 4_400_000_000
    data = model.tensors[far].data
    header = {
        "__metadata__": {"format": "pt"},
        "pad": {"dtype": "U8", "shape": [hole], "data_offsets": [0, hole]},
        far: {"dtype": "BF16", "shape": [96, 64], "data_offsets": [hole, hole + len(data)]},
    }
    path = raw_safetensors(source / "far.safetensors", {}, header=header)
    with path.open("r+b") as file:
        file.seek(hole + path.stat().st_size)
        file.write(data)
    index = model.index()
    index["weight_map"][far] = "far.safetensors"
    (source / INDEX).write_bytes(json_bytes(index))

    result = run_cli("quantize", source, tmp_path / "out", "--json").ok()
    assert result.max_rss < 500 * MIB
    assert read_artifact(tmp_path / "out").tensors == plain.artifact.tensors
    summary = json.loads(result.stdout.splitlines()[-1])
    assert [(e["name"], e["size"]) for e in summary["dropped_tensors"] if e["name"] == "pad"] == [
        ("pad", hole)
    ]
    assert "far.safetensors" in result.stdout
    run_cli("verify", tmp_path / "out", "--level", "numeric", "--source", source).ok()


# -------------------------------------------------------------------------- byte order


def test_golden_bytes_of_one_block(tmp_path: Path) -> None:
    """Little-endian, low nibble first, bias 127: written by hand, independent of the host."""
    values = bytes.fromhex(
        "0000 003f 803f c03f 0040 4040 8040 c040"  # 0 .5 1 1.5 2 3 4 6
        "0080 00bf 80bf c0bf 00c0 40c0 80c0 c0c0"  # and their negatives
    )
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    header = (
        b'{"model.layers.0.mlp.experts.0.gate_proj.weight":'
        b'{"dtype":"BF16","shape":[1,32],"data_offsets":[0,64]}}'
    )
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").write_bytes(
        bytes([len(header), 0, 0, 0, 0, 0, 0, 0]) + header + values + values
    )
    (source / "config.json").write_bytes(json_bytes({"model_type": "qwen3_moe", "num_experts": 1}))
    done = converted(source, tmp_path / "out")
    packed, scales = done.artifact.packed(name)

    codes = bytes.fromhex("10325476 90badcfe 10325476 90badcfe")
    assert packed.tobytes() == codes
    assert scales.tobytes() == b"\x7f"
    file = (tmp_path / "out" / done.artifact.tensors[name + "_packed"].file).read_bytes()
    made = (
        b'{"__metadata__":{"format":"pt"},'
        b'"model.layers.0.mlp.experts.0.gate_proj.weight_packed":'
        b'{"dtype":"U8","shape":[1,16],"data_offsets":[0,16]},'
        b'"model.layers.0.mlp.experts.0.gate_proj.weight_scale":'
        b'{"dtype":"U8","shape":[1,1],"data_offsets":[16,17]}}'
    )
    made += b" " * (-len(made) % 8)
    assert file == bytes([len(made), 0, 0, 0, 0, 0, 0, 0]) + made + codes + b"\x7f"


# ----------------------------------------------------------------------- odd but right


def test_tensor_names_may_be_any_text(tmp_path: Path) -> None:
    """Quotes, control characters and other scripts survive in names, headers and index."""
    names = ['a "quoted" name', "tab\there", "слой.вес", "重み", "emoji 🙂", "back\\slash", "nul\0"]
    extra = {name: Tensor("U8", (1,), bytes([n])) for n, name in enumerate(names)}
    source = small_model().adding(extra).write(tmp_path / "source")
    done = converted(source, tmp_path / "out")
    assert all(done.artifact.tensors[name].data == extra[name].data for name in names)


def test_two_spellings_of_one_name_are_shown(tmp_path: Path) -> None:
    """Names that differ only in Unicode form are told apart before anything is lost."""
    extra = {"caf\u00e9": Tensor("U8", (1,), b"1"), "cafe\u0301": Tensor("U8", (1,), b"2")}
    source = small_model().adding(extra).write(tmp_path / "source")
    refused(source, tmp_path / "out", says=(r"caf\xe9", r"cafe\u0301"))


def test_a_lone_surrogate_in_a_name_is_refused(tmp_path: Path) -> None:
    """What UTF-8 cannot write cannot be stored."""
    source = small_model().write(tmp_path / "source")
    header = {"x\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}
    raw_safetensors(source / "model.safetensors", {}, header=json.dumps(header).encode())
    refused(source, tmp_path / "out", says=(r"x\ud800", "Unicode"))


def test_values_survive_every_float_dtype(tmp_path: Path) -> None:
    """F32 and F16 weights give the codes of their own values, not of rounded ones."""
    values = np.zeros((2, 64))
    values[:, ::2] = 6.0
    values[0, 1] = 0.25 + 2**-11  # rounds up; as BF16 it is the tie and rounds to 0
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    for dtype, code in (("F32", 1), ("F16", 1), ("BF16", 0)):
        weight = Tensor(dtype, (2, 64), encode(values, dtype))
        source = small_model().adding({name: weight}).write(tmp_path / dtype)
        done = converted(source, tmp_path / f"{dtype}-out", "--scale-rule", "floor")
        packed, _ = done.artifact.packed(name)
        assert packed[0, 0] >> 4 == code


def test_the_source_is_never_written(model: Model, tmp_path: Path) -> None:
    """A read-only source is enough, and a conversion leaves it byte for byte."""
    source = model.write(tmp_path / "source")
    for path in [*source.iterdir(), source]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = snapshot(source)
    converted(source, tmp_path / "out")
    assert snapshot(source) == before
    source.chmod(0o755)
