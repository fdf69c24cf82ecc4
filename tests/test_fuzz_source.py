"""Whatever lies in a source folder: an `MxConvertError` or a checkpoint, within bounded memory."""

from __future__ import annotations

import json
import struct
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mxconvert import safetensors_format
from mxconvert.errors import MxConvertError
from mxconvert.inspect import inspect_checkpoint
from mxconvert.model import Options
from mxconvert.plan import build_plan
from mxconvert.safetensors_format import parse_header
from mxconvert.source import open_checkpoint
from tests.support import bf16_model, raw_safetensors
from tests.support.container import Tensor, header_of
from tests.support.models import INDEX, json_bytes

MIB = 1 << 20
MESSAGE_LIMIT = 6000
FAST = settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow])

# ----------------------------------------------------------------------------- material

TEXT = st.text(max_size=8) | st.sampled_from(
    ["", "dtype", "shape", "data_offsets", "__metadata__", "\ud800", "\0", "é", "BF16", "F4", "U8"]
)
NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from(
    [0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**4000, 1e308]
)  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*safetensors_format.DTYPE_BITS, "Q9", ""]) | ANYTHING,
        "shape": st.lists(st.integers(0, 8), max_size=4) | st.lists(NUMBERS, max_size=3) | ANYTHING,
        "data_offsets": st.lists(st.integers(0, 64), min_size=2, max_size=2) | ANYTHING,
        "extra": ANYTHING,
    },
)
HEADER = st.dictionaries(TEXT, ENTRY | ANYTHING, max_size=4) | ANYTHING

GOOD = header_of(
    {
        "a.weight": Tensor("BF16", (2, 3), bytes(12)),
        "b": Tensor("U8", (5,), bytes(5)),
        "c.empty": Tensor("F32", (0, 4), b""),
        "d": Tensor("I64", (), bytes(8)),
    }
)
GOOD_BYTES = json.dumps(GOOD).encode()
GOOD_SIZE = 25


def check_error(error: MxConvertError, statuses: tuple[int, ...] = (5,)) -> None:
    """A refusal has the right status, a next step and few words."""
    assert error.exit_status in statuses
    assert error.hint
    assert len(error.message) < MESSAGE_LIMIT


def parse(raw: bytes, data_size: int = GOOD_SIZE) -> bool:
    """Parse a header; return whether it was taken, let nothing but our errors pass."""
    try:
        tensors = parse_header(raw, "x.safetensors", 8 + len(raw) + data_size)
    except MxConvertError as error:
        check_error(error)
        return False
    # What is taken tiles the data exactly: no byte twice, none left over.
    end = 8 + len(raw)
    for tensor in tensors:
        assert tensor.offset == end or tensor.size == 0
        end += tensor.size
    assert end == 8 + len(raw) + data_size
    return True


# ------------------------------------------------------------------------------ headers


@FAST
@given(raw=st.binary(max_size=200))
@example(raw=b"")
@example(raw=b"\xff\xfe")
@example(raw=b"{}")
def test_random_bytes_are_no_header(raw: bytes) -> None:
    """Noise is refused in words."""
    assert not parse(raw)


@FAST
@given(document=HEADER, data_size=st.integers(0, 64))
@example(document={"a": {"dtype": "U8", "shape": [10**4000], "data_offsets": [0, 1]}}, data_size=1)
@example(
    document={"a": {"dtype": "U8", "shape": [2**62] * 64, "data_offsets": [0, 1]}}, data_size=1
)
@example(document={"a": {"dtype": "U8", "shape": [0] * 65, "data_offsets": [0, 0]}}, data_size=0)
@example(document={"\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, data_size=0)
@example(document={"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, data_size=1)
@example(document={"__metadata__": {"a": float("nan")}}, data_size=0)
def test_json_of_wrong_types_is_no_header(document: Any, data_size: int) -> None:
    """Any JSON document in the header's place."""
    parse(json.dumps(document).encode(), data_size)


@FAST
@given(
    path=st.sampled_from(
        [
            (),
            *((n,) for n in GOOD),
            *((n, f) for n in GOOD for f in ("dtype", "shape", "data_offsets")),
        ]
    ),
    value=ANYTHING,
)
def test_a_good_header_with_one_wrong_value(path: tuple[str, ...], value: Any) -> None:
    """Each field in turn replaced by anything."""
    document = json.loads(GOOD_BYTES)
    if not path:
        parse(json.dumps(value).encode())
        return
    place = document
    for key in path[:-1]:
        place = place[key]
        if not isinstance(place, dict):
            return
    place[path[-1]] = value
    parse(json.dumps(document).encode())


@settings(FAST, max_examples=500)
@given(
    cuts=st.lists(
        st.tuples(st.integers(0, len(GOOD_BYTES)), st.integers(0, 4), st.binary(max_size=4)),
        min_size=1,
        max_size=3,
    )
)
def test_a_good_header_with_wrong_bytes(cuts: list[tuple[int, int, bytes]]) -> None:
    """Bytes removed, replaced and inserted anywhere."""
    raw = GOOD_BYTES
    for at, length, new in cuts:
        raw = raw[:at] + new + raw[at + length :]
    parse(raw)


def test_the_good_header_is_good() -> None:
    """The material of these tests does parse, so that they start from something."""
    assert parse(GOOD_BYTES)


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 500_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"a": [' + b"[" * 900 + b"]" * 900 + b"]}",
        b'{"__metadata__": {"a": ' + b"[" * 400 + b"]" * 400 + b"}}",
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": {"dtype": "U8", "shape": [' + b"1," * 400_000 + b'1], "data_offsets": [0, 25]}}',
        b'{"' + b"n" * 1_000_000 + b'": 1}',
        b'{"a": "' + b"v" * 1_000_000 + b'"}',
        b'{"a": 1, "a": 2}',
        b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [25], "data_offsets": [0, 25]}}',
        b"{" + b",".join(b'"%d":{}' % n for n in range(50_000)) + b"}",
    ],
    ids=lambda raw: repr(raw[:24]),
)
def test_large_and_deep_headers_are_refused_in_few_words(raw: bytes) -> None:
    """Depth, digits, rank and length: refused with a short message and little memory."""
    tracemalloc.start()
    try:
        assert not parse(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * MIB + 40 * len(raw)


@FAST
@given(prefix=st.binary(max_size=12), rest=st.binary(max_size=40))
@example(prefix=struct.pack("<Q", 2**64 - 1), rest=b"")
@example(prefix=struct.pack("<Q", 100_000_000), rest=b"{}")
def test_any_first_bytes(prefix: bytes, rest: bytes) -> None:
    """The length in front is checked against limit and file before anything is allocated."""
    size = len(prefix + rest)
    try:
        length = safetensors_format.header_length(prefix[:8], "x", size)
    except MxConvertError:
        return
    assert 2 <= length <= size - 8


# -------------------------------------------------------------------- folders and configs


def look(root: Path) -> None:
    """Open, inspect and plan a folder; let nothing but our errors pass."""
    try:
        checkpoint = open_checkpoint(root)
        inspect_checkpoint(checkpoint, Options())
        build_plan(checkpoint, Options())
    except MxConvertError as error:
        check_error(error, (2, 5))


MODEL = bf16_model(layers=1, experts=1)
SHARD = next(iter(MODEL.shards))
CONFIG_KEYS = [
    "model_type", "architectures", "num_experts", "num_local_experts", "n_routed_experts",
    "num_experts_per_tok", "num_hidden_layers", "tie_word_embeddings", "text_config", "dtype",
    "torch_dtype", "quantization_config", "compression_config", "transformers_version",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder() -> Any:
    with tempfile.TemporaryDirectory() as name:
        yield MODEL.write(Path(name) / "source")


@FAST
@given(config=st.dictionaries(st.sampled_from(CONFIG_KEYS), ANYTHING, max_size=5) | ANYTHING)
@example(config={"model_type": ["qwen3_moe"], "num_experts": 1})
@example(config={"text_config": {"model_type": {"a": 1}}})
@example(config={"model_type": "qwen3_moe", "num_experts": 10**4000})
@example(config={"model_type": "qwen3_moe", "num_experts": 2**62})
@example(config={"model_type": "qwen3_moe", "num_hidden_layers": True})
@example(config={"quantization_config": {"quant_method": {"a": []}, "bits": [1]}})
def test_any_config(folder: Path, config: Any) -> None:
    """A config of odd types and sizes neither crashes nor hangs."""
    (folder / INDEX).write_bytes(json_bytes(MODEL.index()))
    (folder / "config.json").write_text(json.dumps(config))
    look(folder)


@FAST
@given(config=st.dictionaries(st.sampled_from(CONFIG_KEYS), ANYTHING, max_size=3))
@example(config={"num_experts_per_tok": 2**62, "num_experts": 0})
@example(config={"num_hidden_layers": None})
def test_a_good_config_with_wrong_values(folder: Path, config: dict[str, Any]) -> None:
    """The fixture's config with some keys replaced by anything."""
    (folder / INDEX).write_bytes(json_bytes(MODEL.index()))
    (folder / "config.json").write_text(json.dumps(MODEL.config | config))
    look(folder)


@FAST
@given(
    index=st.fixed_dictionaries(
        {},
        optional={
            "metadata": ANYTHING | st.fixed_dictionaries({"total_size": ANYTHING}),
            "weight_map": st.dictionaries(
                st.sampled_from(list(MODEL.tensors)) | TEXT,
                st.sampled_from([*MODEL.shards, "../x", "", "a/b", "config.json"]) | ANYTHING,
                max_size=4,
            )
            | ANYTHING,
        },
    )
    | ANYTHING
)
@example(index={"weight_map": {"\ud800": "\ud800"}})
@example(index={"weight_map": {"a" * 8000: "b" * 8000}})
@example(index={"weight_map": {"a": "b\n.safetensors"}, "metadata": {"total_size": 10**4000}})
def test_any_index(folder: Path, index: Any) -> None:
    """An index of odd types, names and places."""
    (folder / "config.json").write_bytes(json_bytes(MODEL.config))
    (folder / INDEX).write_text(json.dumps(index))
    look(folder)


@FAST
@given(raw=st.binary(max_size=64), file=st.sampled_from([INDEX, "config.json", SHARD]))
def test_any_bytes_in_a_file_s_place(folder: Path, raw: bytes, file: str) -> None:
    """Noise instead of index, config or shard."""
    (folder / "config.json").write_bytes(json_bytes(MODEL.config))
    (folder / INDEX).write_bytes(json_bytes(MODEL.index()))
    good = (folder / file).read_bytes()
    (folder / file).write_bytes(raw)
    try:
        look(folder)
    finally:
        (folder / file).write_bytes(good)


@settings(FAST, max_examples=120)
@given(
    names=st.lists(
        st.lists(
            st.sampled_from(
                ["model", "layers", "0", "1", "99999999999999999999", "mlp", "experts", "weight",
                 "gate_proj", "up_proj", "down_proj", "bias", "", "weight_packed", "lm_head"]
            ),
            min_size=1,
            max_size=9,
        ).map(".".join),
        min_size=1,
        max_size=6,
        unique=True,
    ),
    shape=st.sampled_from([(), (32,), (2, 32), (2, 31), (0, 32), (1, 2, 32)]),
)  # fmt: skip
@example(names=["model.layers.0.mlp.experts.99999999.gate_proj.weight"], shape=(2, 32))
@example(names=["model.layers.0.mlp.experts.9999999999999.gate_proj.weight"], shape=(2, 32))
def test_any_tensor_names(folder: Path, names: list[str], shape: tuple[int, ...]) -> None:
    """Names that almost mean something, and numbers that no model has."""
    root = folder.parent / "named"
    root.mkdir(exist_ok=True)
    size = 2
    for dim in shape:
        size *= dim
    tensors = {name: Tensor("BF16", shape, bytes(size)) for name in names}
    raw_safetensors(root / "model.safetensors", tensors)
    (root / "config.json").write_bytes(json_bytes(MODEL.config))
    look(root)
