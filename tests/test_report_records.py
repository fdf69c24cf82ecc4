"""Report records: what a run measures survives the way to disk and back, and damage is seen."""

from __future__ import annotations

import io
import json
import math
import time
from dataclasses import replace

import pytest
import zstandard

from mxconvert.errors import VerificationError
from mxconvert.statistics import (
    Header,
    Histograms,
    Sums,
    TensorStats,
    assemble,
    encode,
    encode_fragment,
    parse,
    parse_fragment,
    read_records,
)

HEADER = Header(tool="mxconvert 0.1.0", artifact="ab" * 32, scale_rule="mse", source="cd" * 32)
SUMS = Sums(
    elements=128,
    blocks=4,
    sum_x2=0.1,
    sum_q2=0.09,
    sum_err2=0.001,
    max_abs_err=1e-3,
    flushed=3,
    saturated=2,
    exponents=(1, 2, 1),
)
TENSOR = TensorStats(
    name='model.layers.3.mlp.experts.7.gate_proj."é\n.weight',
    file="model-experts-00007-00007.safetensors",
    layer=3,
    expert=7,
    projection="gate_proj",
    role="expert",
    shape=(2, 64),
    dtype="BF16",
    sums=SUMS,
)
COUNTS = Histograms(file=TENSOR.file, codes=tuple(range(16)), scales={254: 1, 3: 2}, sampled="1/2")


def report_bytes(*fragments: bytes) -> bytes:
    return b"".join(assemble(fragments, HEADER))


def read(data: bytes) -> list[object]:
    header, records = read_records(io.BytesIO(data))
    return [header, *records]


def compress(*lines: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(b"".join(lines))


def test_records_survive_the_way_to_disk_and_back() -> None:
    """Fragments are kept in a journal, joined and read: nothing changes, floats included."""
    dense = replace(TENSOR, name="a", layer=None, expert=None, projection=None)
    fragments = [encode_fragment([TENSOR, COUNTS]), b"", encode_fragment([dense])]
    assert parse_fragment(fragments[0], "f") == [TENSOR, COUNTS]
    assert read(report_bytes(*fragments)) == [HEADER, TENSOR, COUNTS, dense]


def test_a_line_is_plain_json_with_the_documented_members() -> None:
    """Other programs read the lines without us."""
    document = json.loads(encode(TENSOR))
    assert list(document) == [
        *("type", "name", "file", "layer", "expert", "projection", "role", "shape", "dtype"),
        *("elements", "blocks", "sum_x2", "sum_q2", "sum_err2", "max_abs_err"),
        *("flushed", "saturated", "exponents"),
    ]
    assert document["type"] == "tensor"
    assert document["shape"] == [2, 64]
    assert document["exponents"] == [1, 2, 1]
    assert json.loads(encode(COUNTS))["scales"] == {"3": 2, "254": 1}
    assert json.loads(encode(HEADER))["schema_version"] == 1


def test_the_same_records_make_the_same_bytes() -> None:
    fragment = encode_fragment([TENSOR, COUNTS])
    assert report_bytes(fragment) == report_bytes(fragment)


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("name", 1),
        ("layer", -1),
        ("layer", True),
        ("expert", 1.0),
        ("shape", [2]),
        ("shape", [2, "64"]),
        ("elements", 127),
        ("sum_x2", -1.0),
        ("sum_x2", "1"),
        ("sum_x2", None),
        ("flushed", 129),
        ("exponents", [4, 1, 0]),
        ("exponents", [1, 2]),
        ("type", "tensors"),
        ("type", None),
        ("extra", 1),
    ],
)
def test_a_wrong_member_is_refused_by_name(member: str, value: object) -> None:
    """The file may come from anywhere: what it says is checked once, here."""
    document = json.loads(encode(TENSOR)) | {member: value}
    with pytest.raises(VerificationError, match=member) as caught:
        parse(json.dumps(document).encode(), "line 2")
    assert "line 2" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("line", [b"", b"[]", b"{", b'{"type":"tensor"}', b"\xff", b'{"type":[]}'])
def test_what_is_no_record_is_refused(line: bytes) -> None:
    with pytest.raises(VerificationError):
        parse(line, "here")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(number: str) -> None:
    """A figure that is not a number would spread into every mean."""
    text = encode(TENSOR).replace(b'"sum_x2":0.1', f'"sum_x2":{number}'.encode())
    with pytest.raises(VerificationError):
        parse(text, "here")
    with pytest.raises(ValueError):
        encode(replace(TENSOR, sums=replace(SUMS, sum_x2=float(number))))


@pytest.mark.parametrize("scales", [{"256": 1}, {"01": 1}, {"x": 1}, {"3": -1}, []])
def test_histograms_of_impossible_scales_are_refused(scales: object) -> None:
    document = json.loads(encode(COUNTS)) | {"scales": scales}
    with pytest.raises(VerificationError, match="scales"):
        parse(json.dumps(document).encode(), "here")


def test_another_version_is_refused() -> None:
    text = encode(HEADER).replace(b'"schema_version":1', b'"schema_version":2')
    with pytest.raises(VerificationError, match="schema_version"):
        read(compress(text))


def test_a_damaged_file_is_refused() -> None:
    """Cut off at any place, a bit flipped, lines lost or added: never a shorter report."""
    fragment = encode_fragment([TENSOR, COUNTS])
    whole = report_bytes(fragment)
    for length in range(len(whole) - 4):  # the last 4 bytes are zstd's checksum
        with pytest.raises(VerificationError):
            read(whole[:length])
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    end = b'{"type":"end","tensors":1}\n'
    for data in (
        bytes(flipped),
        compress(encode(HEADER), fragment),
        compress(encode(HEADER), end),
        compress(encode(HEADER), fragment, end, encode(COUNTS)),
        compress(encode(HEADER), encode(HEADER), fragment, end),
        compress(fragment, end),
        compress(encode(HEADER), fragment, end[:-1]),
    ):
        with pytest.raises(VerificationError):
            read(data)
    with pytest.raises(ValueError):
        report_bytes(fragment[:-1])


def test_figures_follow_from_the_sums() -> None:
    assert SUMS.relative_rmse == pytest.approx(0.1)
    assert SUMS.sqnr_db == pytest.approx(20.0)
    assert SUMS.cosine == pytest.approx((0.1 + 0.09 - 0.001) / 2 / math.sqrt(0.009))
    assert SUMS.flushed_share == 3 / 128
    assert SUMS.saturated_share == 2 / 128


def test_zero_tensors_have_figures() -> None:
    """Freshly initialised or pruned experts are all zero; no division fails on them."""
    still = Sums(elements=32, blocks=1, exponents=(0, 1, 0))
    assert (still.relative_rmse, still.sqnr_db, still.cosine) == (0.0, math.inf, 1.0)
    woken = replace(still, sum_q2=1.0, sum_err2=1.0)
    assert (woken.relative_rmse, woken.sqnr_db, woken.cosine) == (math.inf, -math.inf, 0.0)
    lost = replace(still, sum_x2=1.0, sum_err2=1.0)
    assert (lost.relative_rmse, lost.sqnr_db, lost.cosine) == (1.0, 0.0, 0.0)
    exact = replace(still, sum_x2=1.0, sum_q2=1.0)
    assert (exact.relative_rmse, exact.sqnr_db, exact.cosine) == (0.0, math.inf, 1.0)
    nothing = Sums()
    assert (nothing.relative_rmse, nothing.flushed_share, nothing.saturated_share) == (0, 0, 0)


def test_sums_of_pieces_add_up() -> None:
    """A tensor goes through in pieces; the sums are those of the whole."""
    twice = SUMS + replace(SUMS, max_abs_err=0.5)
    assert twice == Sums(
        elements=256,
        blocks=8,
        sum_x2=0.2,
        sum_q2=0.18,
        sum_err2=0.002,
        max_abs_err=0.5,
        flushed=6,
        saturated=4,
        exponents=(2, 4, 2),
    )
    assert Sums() + SUMS == SUMS


def test_many_records_take_seconds() -> None:
    """A model of 250,000 weights must not take minutes: a tenth of it, with much to spare."""
    begin = time.monotonic()
    fragments = [
        encode_fragment(replace(TENSOR, expert=expert, layer=layer) for layer in range(25))
        for expert in range(1000)
    ]
    assert sum(1 for _ in read(report_bytes(*fragments))) == 25_001
    assert time.monotonic() - begin < 20
