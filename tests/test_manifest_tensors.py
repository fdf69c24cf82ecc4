"""The tensor list: canonical lines in one zstd frame."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files

import jsonschema
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from mxconvert.errors import VerificationError
from mxconvert.manifest import SourceRecord, TensorRecord, encode_tensors, iter_tensors

WHOLE = SourceRecord("l.0.w", "BF16", (4, 64), "a" * 32)
PART = SourceRecord(
    'fused "é"', "BF16", (8, 64, 4), "b" * 32, ((1, 2, 1), (0, 64, 1), (0, 4, 2)), (0, 2, 1)
)
FIRST = TensorRecord(
    "l.0.w_packed", "a.safetensors", "U8", (4, 32), 96, 224, "c" * 32, 0, (3, 3), (WHOLE,)
)
RECORDS = [
    FIRST,
    replace(FIRST, name="l.0.w_scale", shape=(4, 2), begin=224, end=232, sources=(WHOLE, PART)),
    replace(FIRST, name="scalar", file="b", shape=(), layer=None, experts=None, sources=()),
]
DATA = encode_tensors(RECORDS)


def plain(data: bytes = DATA) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def listed(*lines: str | bytes, count: int | None = None) -> bytes:
    count = len(lines) if count is None else count
    header = json.dumps(
        {"count": count, "schema_version": 1, "type": "mxconvert-tensors"}, separators=(",", ":")
    )
    body = b"".join(
        (line if isinstance(line, bytes) else line.encode()) + b"\n" for line in (header, *lines)
    )
    return zstandard.ZstdCompressor().compress(body)


def refused(data: bytes) -> str:
    with pytest.raises(VerificationError) as caught:
        list(iter_tensors(data, "T"))
    return caught.value.message


def test_round_trip() -> None:
    assert list(iter_tensors(DATA)) == RECORDS
    assert encode_tensors(iter(RECORDS), count=3) == DATA


def test_lines_are_canonical_json_after_a_header() -> None:
    lines = plain().decode().splitlines()
    assert json.loads(lines[0]) == {"count": 3, "schema_version": 1, "type": "mxconvert-tensors"}
    for line in lines:
        same = json.dumps(
            json.loads(line), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
        assert same == line
    assert json.loads(lines[1])["range"] == [96, 224]
    assert json.loads(lines[2])["sources"][1]["selection"] == [[1, 2, 1], [0, 64, 1], [0, 4, 2]]


def test_json_schema_accepts_each_line() -> None:
    schema = json.loads(files("mxconvert.schemas").joinpath("tensors-v1.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for line in plain().splitlines():
        validator.validate(json.loads(line))
    assert not validator.is_valid(json.loads(plain().splitlines()[1]) | {"more": 1})


def test_one_frame_with_checksum_and_content_size() -> None:
    parameters = zstandard.get_frame_parameters(DATA)
    assert parameters.has_checksum
    assert parameters.content_size == len(plain())
    assert parameters.dict_id == 0


def test_many_records_stream() -> None:
    records = [
        replace(FIRST, name=f"t{i}", begin=i * 8, end=i * 8 + 8, xxh3_128=f"{i:032x}")
        for i in range(5000)
    ]
    data = encode_tensors(records)
    assert zstandard.get_frame_parameters(data).content_size == len(plain(data))
    assert list(iter_tensors(data)) == records


def test_no_records() -> None:
    assert list(iter_tensors(encode_tensors([]))) == []


def test_writer_refuses_disorder_and_a_wrong_count() -> None:
    with pytest.raises(ValueError, match="comes after"):
        encode_tensors(RECORDS[::-1])
    with pytest.raises(ValueError, match="announced"):
        encode_tensors(RECORDS, count=2)


LINE = plain().decode().splitlines()[1]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "null",
        "[]",
        "{}",
        LINE.replace('"U8"', "8"),
        LINE.replace('"U8"', '"U\\u0038"'),
        LINE.replace("[4,32]", "[4,-32]"),
        LINE.replace("[4,32]", "[4,32.0]"),
        LINE.replace("[4,32]", "[4,true]"),
        LINE.replace("[4,32]", '"4,32"'),
        LINE.replace("[96,224]", "[224,96]"),
        LINE.replace("[96,224]", "[96]"),
        LINE.replace("[96,224]", f"[96,{2**53}]"),
        LINE.replace("[3,3]", "[3,2]"),
        LINE.replace("[3,3]", "[-1,3]"),
        LINE.replace("[3,3]", "[3]"),
        LINE.replace("[3,3]", "3"),
        LINE.replace('"layer":0', '"layer":-1'),
        LINE.replace('"layer":0', '"layer":"0"'),
        LINE.replace("c" * 32, "c" * 31),
        LINE.replace("c" * 32, "C" * 32),
        LINE.replace('"dtype"', '"dtypo"', 1),
        LINE.replace('{"dtype"', '{"dtype":"U8","dtype"', 1),
        LINE.replace(":", ": ", 1),
        LINE[:-1],
        LINE[:-1] + ',"zzz":1}',
    ],
)
def test_malformed_lines_are_refused(line: str) -> None:
    assert line != LINE
    assert "line 2" in refused(listed(line))


def test_bad_selection_and_axes_are_refused() -> None:
    line = plain().decode().splitlines()[2].replace("[224,232]", "[96,104]")
    assert len(list(iter_tensors(listed(line)))) == 1
    for old, new in (
        ("[0,4,2]", "[0,5,2]"),
        ("[0,4,2]", "[0,4,0]"),
        ("[0,4,2]", "[0,4]"),
        ("[0,2,1]", "[0,2,2]"),
    ):
        assert "out of range" in refused(listed(line.replace(old, new)))


def test_disorder_overlap_and_wrong_counts_are_refused() -> None:
    lines = plain().decode().splitlines()[1:]
    assert "3 tensors, its first line says 2" in refused(listed(*lines, count=2))
    assert "out of order" in refused(listed(lines[1], lines[0]))
    assert "overlaps" in refused(listed(lines[0], lines[1].replace("[224,232]", "[220,232]")))


def test_damage_is_refused() -> None:
    assert "decompressed" in refused(b"not zstd")
    refused(b"")
    refused(DATA[:-8])
    flipped = bytearray(DATA)
    flipped[len(DATA) // 2] ^= 1
    refused(bytes(flipped))
    refused(zstandard.ZstdCompressor().compress(plain()[:-1]))


def test_another_version_is_refused() -> None:
    body = plain().replace(b'"schema_version":1', b'"schema_version":2')
    assert "version 2" in refused(zstandard.ZstdCompressor().compress(body))


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_any_flipped_byte_is_refused_or_changes_nothing(at: int, mask: int) -> None:
    damaged = bytearray(DATA)
    damaged[at] ^= mask
    try:
        records = list(iter_tensors(bytes(damaged)))
    except VerificationError:
        return
    assert records == RECORDS


@given(st.text(), st.text())
def test_any_name_survives(name: str, file: str) -> None:
    record = replace(FIRST, name=name, file=file)
    try:
        data = encode_tensors([record])
    except UnicodeEncodeError:
        return
    assert list(iter_tensors(data)) == [record]
