"""Parts of an artifact in a folder: widened, resumed, damaged, tampered with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from mxconvert.manifest import MANIFEST_NAME, RECORD_NAME, encode_canonical
from tests.pull_base import INDEX, QUICK, contents, summary
from tests.rank_base import RankArtifact, assert_part, expert_of, make, pull, stored
from tests.support import bf16_model, fail_cleanly, run_cli, shell
from tests.support.faults import CutBody, Flip, access_denied
from tests.support.runs import arm

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.pull_base import Place

RANK = ("--experts", "1,2,5")


@pytest.fixture
def made(place: Place) -> RankArtifact:
    """Files of four experts each: a part of both is wanted."""
    model = bf16_model(layers=2, experts=8, hidden=64, inner=64)
    return make(place, model, "--experts-per-file", 4)


def the_whole(made: RankArtifact, target: Path) -> None:
    """A folder holds exactly the artifact."""
    expected = contents(made.folder)
    del expected[".mxconvert-report.jsonl.zst"]
    assert contents(target) == expected


def fetched_experts(place: Place) -> int:
    place.proxy.settle()
    return place.fetched("*experts*.safetensors")


# --------------------------------------------------------------------------- widening


def test_widened_without_fetching_again(place: Place, made: RankArtifact) -> None:
    """Of a second part only what is new comes from the store; then of the rest likewise."""
    pull(place, made, place.target, "--experts", "0-1").ok()
    assert_part(made, place.target, {0, 1})
    each = made.expert_bytes() // 8
    for options, experts, new in (
        (("--experts", "1-2"), {0, 1, 2}, 1),
        (("--rank", "0", "--world-size", "2"), {0, 1, 2, 3}, 1),
        (("--experts", "6"), {0, 1, 2, 3, 6}, 1),
    ):
        place.proxy.log.clear()
        result = pull(place, made, place.target, *options).ok()
        assert_part(made, place.target, experts)
        if experts != {0, 1, 2, 3}:  # a whole file: its chunks are larger than these experts
            assert fetched_experts(place) == new * each
            assert result.stderr.count("becomes experts") == 1
        assert len(list(place.target.glob("*.part-*"))) <= 2
    pull(place, made, place.target).ok()
    the_whole(made, place.target)


def test_the_same_part_again_is_complete(place: Place, made: RankArtifact) -> None:
    """And a narrower one too: it is there."""
    pull(place, made, place.target, *RANK).ok()
    before = contents(place.target)
    place.proxy.log.clear()
    for options in (RANK, ("--experts", "2")):
        found = summary(pull(place, made, place.target, *options, "--json"))
        assert found["was_complete"] is True
        assert found["selection"] == "experts 1-2,5 of 8"
    assert place.fetched("*.safetensors") == 0
    assert contents(place.target) == before


def test_a_part_of_a_whole_is_there(place: Place, made: RankArtifact) -> None:
    pull(place, made, place.target).ok()
    result = pull(place, made, place.target, *RANK).ok()
    assert "holds the whole artifact already" in result.stderr
    the_whole(made, place.target)


def test_overwrite_leaves_only_what_is_asked_for(place: Place, made: RankArtifact) -> None:
    pull(place, made, place.target, "--experts", "0-3").ok()
    pull(place, made, place.target, "--experts", "7", "--overwrite").ok()
    assert_part(made, place.target, {7})
    assert {expert_of(name) for name in stored(place.target)} == {None, 7}


def test_another_artifact_is_refused(place: Place, made: RankArtifact) -> None:
    """Parts of two artifacts are never mixed."""
    pull(place, made, place.target, *RANK).ok()
    other = make(place, bf16_model(layers=1, experts=8), prefix="models/other")
    result = pull(place, other, place.target, *RANK)
    fail_cleanly(result, 2, "is not empty", "--overwrite")
    assert_part(made, place.target, {1, 2, 5})


def test_sha256_does_not_claim_what_it_cannot(place: Place, made: RankArtifact) -> None:
    """Files of tensors have none; whole ones do."""
    result = pull(place, made, place.target, *RANK, "--sha256").ok()
    assert "--sha256 does not cover them" in result.stderr
    whole = pull(place, made, place.folder / "whole", "--experts", "0-3", "--sha256").ok()
    assert "does not cover" not in whole.stderr


# ----------------------------------------------------------------------------- slices


def test_slices_of_the_dense_files(place: Place) -> None:
    """Each node another share of the dense files; together all of them, once."""
    model = bf16_model(layers=2, experts=4, vocab=512)
    made = make(place, model, "--max-file-size", "100KiB")
    dense = {name for name in made.weights if "dense" in name}
    assert len(dense) > 2
    seen: list[str] = []
    for number in range(3):
        target = place.folder / f"slice-{number}"
        options = ("--experts", str(number), "--slice", f"{number}/3")
        pull(place, made, target, *options).ok()
        shell("verify", target).ok()
        seen += [path.name for path in target.glob("*dense*.safetensors")]
        assert {expert_of(name) for name in stored(target)} >= {number}
    assert sorted(seen) == sorted(dense)


# ------------------------------------------------------------------------------ kills

POINTS = (
    "pull.chunk-noted:1",
    "pull.tensor-written:1",
    "pull.tensor-written:9",
    "pull.before-sync:2",
    "pull.before-rename:3",
    "pull.renamed:2",
    "pull.before-index",
    "pull.before-record",
    "pull.before-manifest",
    "pull.before-cleanup",
)
BEYOND = {"pull.chunk-noted:1", "pull.tensor-written:9", "pull.before-rename:3"}
"""Not reached when so much is there already."""


@pytest.mark.parametrize("widened", [False, True])
def test_killed_and_finished(place: Place, made: RankArtifact, *, widened: bool) -> None:
    """By the same command; a folder without its manifest claims nothing meanwhile."""
    for point in POINTS:
        experts, target = {1, 2, 5}, place.folder / point
        if widened:
            pull(place, made, target, "--experts", "1,4").ok()
            experts |= {4}
        command = ("pull", made.url, target, *QUICK, "-j", "2", *RANK)
        killed = run_cli(*command, env=arm(f"{point}=kill"))
        if killed.status == 0 and widened and point in BEYOND:
            continue
        assert killed.status == -9, f"{point}: {killed.status}\n{killed.stderr}"
        if point != "pull.before-cleanup":
            assert not (target / MANIFEST_NAME).exists(), point
            assert shell("verify", target).status == 4, point
        shell(*command).ok()
        assert_part(made, target, experts)


def test_what_was_noted_is_not_fetched_again(place: Place, made: RankArtifact) -> None:
    command = ("pull", made.url, place.target, *QUICK, "-j", "1", *RANK)
    killed = run_cli(*command, env=arm("pull.tensor-written:13=kill"))
    assert killed.status == -9, killed.stderr
    found = summary(shell(*command, "--json"))
    each = made.expert_bytes() // 8
    assert found["resumed_bytes"] >= each / 2
    assert_part(made, place.target, {1, 2, 5})


def test_an_unfinished_part_goes_on_with_another(place: Place, made: RankArtifact) -> None:
    """The folder then holds both; an unfinished whole is not made a part of."""
    rule = place.proxy.add(access_denied(), "GetObject", key="*experts*")
    assert pull(place, made, place.target, "--experts", "0").status == 6
    place.proxy.remove(rule)
    pull(place, made, place.target, "--experts", "7").ok()
    assert_part(made, place.target, {0, 7})
    target = place.folder / "whole"
    rule = place.proxy.add(access_denied(), "GetObject", key="*experts*")
    assert pull(place, made, target).status == 6
    place.proxy.remove(rule)
    fail_cleanly(pull(place, made, target, *RANK), 2, "an unfinished pull of the whole artifact")
    pull(place, made, target).ok()
    the_whole(made, target)


# ----------------------------------------------------------------------------- faults


@pytest.mark.parametrize("fault", [Flip(5000), CutBody(3000)], ids=["flipped bit", "cut body"])
def test_bytes_that_arrive_wrong(place: Place, made: RankArtifact, fault: object) -> None:
    """Are fetched again: nothing but the tensor's own digest would notice."""
    rule = place.proxy.add(fault, "GetObject", key="*experts*.safetensors", times=1)
    pull(place, made, place.target, *RANK).ok()
    assert rule.fired
    assert_part(made, place.target, {1, 2, 5})


def test_a_tensor_that_is_damaged_at_the_store(place: Place, made: RankArtifact) -> None:
    """Status 6, key and tensor; nothing has a final name that holds it."""
    name = next(name for name in sorted(made.weights) if "experts-00004" in name)
    data = bytearray((made.folder / name).read_bytes())
    record = next(t for t in _records(made) if t.file == name and t.experts == (5, 5))
    data[record.begin] ^= 1
    place.s3.put(place.bucket, f"models/m/{made.id[:16]}/{name}", bytes(data))
    result = pull(place, made, place.target, *RANK)
    fail_cleanly(result, 6, name, record.name, "arrived wrong 4 times")
    assert not list(place.target.glob("*00004*.safetensors"))
    assert not (place.target / INDEX).exists()


def _records(made: RankArtifact):
    from tests.rank_base import list_of

    return list_of(made)


# ----------------------------------------------------------------------------- verify


def _flip_part(target: Path) -> str:
    path = next(target.glob("*.part-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path.name


def _drop_part(target: Path) -> str:
    path = next(target.glob("*.part-*.safetensors"))
    path.unlink()
    return path.name


def _change_index(target: Path) -> str:
    document = json.loads((target / INDEX).read_bytes())
    document["weight_map"].popitem()
    (target / INDEX).write_text(json.dumps(document))
    return INDEX


def _claim_more(target: Path) -> str:
    path = target / RECORD_NAME
    path.write_bytes(path.read_bytes().replace(b'"1-2,5"', b'"1-2,5-6"'))
    return RECORD_NAME


def _forge(target: Path) -> str:
    """Another tensor under a record that was made to fit."""
    from mxconvert.manifest import FileEntry
    from mxconvert.selection import encode_record, parse_record
    from tests.pull_base import entry

    path = next(target.glob("*.part-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    record = parse_record((target / RECORD_NAME).read_bytes(), "")
    forged: list[FileEntry] = []
    for old in record.derived:
        new = entry(path.name, bytes(data), record.chunk_size) if old.path == path.name else old
        forged.append(_like(new, old))
    from dataclasses import replace

    (target / RECORD_NAME).write_bytes(encode_record(replace(record, derived=tuple(forged))))
    return path.name


def _like(new, old):
    from dataclasses import replace

    return replace(new, role=old.role, experts=old.experts, layers=old.layers)


def _claim_a_crowd(target: Path) -> str:
    """Numbers that no memory holds."""
    document = json.loads((target / RECORD_NAME).read_bytes())
    document["selection"] |= {"experts": "0-900000000", "num_experts": 900_000_001}
    (target / RECORD_NAME).write_bytes(encode_canonical(document))
    return RECORD_NAME


def _extra(target: Path) -> str:
    (target / "model-more.safetensors").write_bytes(b"x")
    return "model-more.safetensors"


@pytest.mark.parametrize(
    "spoil", [_flip_part, _drop_part, _change_index, _claim_more, _claim_a_crowd, _forge, _extra]
)
def test_verify_finds_what_is_wrong(
    place: Place, made: RankArtifact, spoil: Callable[[Path], str]
) -> None:
    """Also if the record itself was made to fit: tensors are judged by the artifact's list."""
    pull(place, made, place.target, *RANK).ok()
    name = spoil(place.target)
    fail_cleanly(shell("verify", place.target), 4, name)


def test_a_part_is_not_pushed(place: Place, made: RankArtifact) -> None:
    """It is no artifact; the error says what it is."""
    pull(place, made, place.target, *RANK).ok()
    result = shell("push", place.target, place.url("models/again"), *QUICK)
    fail_cleanly(result, 2, "a part of an artifact")
