"""The report: figures from records, from an artifact and its source, on terminal and as JSON."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mxconvert.manifest import MANIFEST_NAME
from mxconvert.report import open_measuring, report_document, summarize
from mxconvert.report.grid import GridBuilder
from mxconvert.report.text import amount, decibels, printable, ratio, share
from mxconvert.sample import WHOLE_SOURCE_LIMIT, Sample
from mxconvert.statistics import (
    REPORT_NAME,
    Header,
    Histograms,
    Sums,
    TensorStats,
    assemble,
    encode_fragment,
    read_records,
)
from mxconvert.stop import StopToken
from tests.support import bf16_model, decode, fail_cleanly, shell
from tests.support.artifact import Stored, read_artifact
from tests.support.artifact import read_tensors as read_file
from tests.support.statistics import PROJECTIONS, model_records, weight
from tests.verify_base import make_artifact

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from mxconvert.statistics import Record

HEADER = Header(tool="mxconvert 0.1.0", scale_rule="mse")
LAYERS, EXPERTS = range(3, 9), 16


def small_records() -> list[Record]:
    return list(model_records(LAYERS, EXPERTS))


def write_report(folder: Path, records: Iterable[Record], header: Header = HEADER) -> Path:
    folder.mkdir(exist_ok=True)
    data = b"".join(assemble([encode_fragment(records)], header))
    (folder / REPORT_NAME).write_bytes(data)
    return folder


# ---------------------------------------------------------------------------- figures


def test_groups_add_up_to_the_whole() -> None:
    """Every weight is in the total, once in its layer, projection and role."""
    records = small_records()
    weights = [record for record in records if isinstance(record, TensorStats)]
    summary = summarize(HEADER, records)
    expected = sum((stats.sums for stats in weights), Sums())
    assert summary.total.tensors == len(weights) == len(LAYERS) * EXPERTS * len(PROJECTIONS)
    assert summary.total.sums == expected
    for groups in (summary.layers, summary.projections, summary.roles):
        added = sum((group.sums for group in groups), Sums())
        assert sum(group.tensors for group in groups) == len(weights)
        assert added.relative_rmse == pytest.approx(expected.relative_rmse)
        assert replace(added, sum_x2=0, sum_q2=0, sum_err2=0) == replace(
            expected, sum_x2=0, sum_q2=0, sum_err2=0
        )
    assert [group.name for group in summary.layers] == [str(layer) for layer in LAYERS]
    assert [group.name for group in summary.projections] == sorted(PROJECTIONS)
    assert summary.files == EXPERTS


def test_the_worst_come_first_and_ties_stay_in_file_order() -> None:
    records = [weight(f"w{place}", error) for place, error in enumerate([0.1, 0.3, 0.2, 0.3])]
    summary = summarize(HEADER, records)
    assert [stats.name for stats in summary.worst] == ["w1", "w3", "w2", "w0"]
    assert summary.spread.minimum == pytest.approx(0.1)
    assert summary.spread.maximum == pytest.approx(0.3)


def test_a_large_model_keeps_its_worst_weights_only() -> None:
    """Memory does not grow with a record for each of 250,000 weights."""
    records = [weight(f"w{place}", 0.1 + place / 1e5) for place in range(1500)]
    summary = summarize(HEADER, records, top=5)
    assert not summary.complete
    assert len(summary.worst) == 1000
    assert [stats.name for stats in summary.worst[:2]] == ["w1499", "w1498"]
    assert summary.total.tensors == len(summary.errors) == 1500


def test_experts_that_stand_out_in_their_layer_are_found() -> None:
    """A single odd expert vanishes in every mean; that is what the list is for."""
    records = small_records()
    found = {(entry.layer, entry.expert) for entry in summarize(HEADER, records).outliers}
    expected = {(layer, e) for layer in LAYERS for e in range(EXPERTS) if (layer * 16 + e) == 50}
    assert found == expected == {(3, 2)}


def test_no_expert_stands_out_among_few_or_equals() -> None:
    few = summarize(HEADER, model_records(LAYERS, 4))
    equal = summarize(
        HEADER,
        [weight(f"{e}", 0.3, layer=0, expert=e, projection="w1") for e in range(32)],
    )
    assert few.outliers == equal.outliers == ()


def test_the_grid_holds_each_expert_where_it_belongs() -> None:
    """Layers and experts may have gaps; what is missing is empty, not zero."""
    builder = GridBuilder()
    places = [(5, 2, "w2", 0.1), (5, 7, "w1", 0.2), (9, 2, "w1", 0.4), (9, 2, "w2", 0.3)]
    for layer, expert, projection, error in places:
        stats = weight("x", error, layer=layer, expert=expert, projection=projection)
        assert builder.add(stats)
    assert not builder.add(weight("y", 0.5, layer=5))
    grid = builder.build()
    assert grid is not None
    assert (grid.layers, grid.experts, grid.projections) == ((5, 9), (2, 7), ("w1", "w2"))
    errors = grid.relative_rmse
    for layer, expert, projection, error in places:
        at = (grid.layers.index(layer), grid.experts.index(expert))
        assert errors[(*at, grid.projections.index(projection))] == pytest.approx(error)
    assert math.isnan(errors[0, 0, 0])
    assert math.isnan(errors[1, 1, 2])
    assert errors[1, 0, 2] == pytest.approx(math.sqrt((0.16 + 0.09) / 2))


def test_absurd_coordinates_make_no_huge_grid() -> None:
    """Numbers come from a file: 10,000 layers of one expert each must not take gigabytes."""
    builder = GridBuilder()
    for number in range(10_000):
        builder.add(weight("x", 0.1, layer=number, expert=10**9 - number, projection="w"))
    assert builder.build() is None
    assert GridBuilder().build() is None


def test_zero_and_broken_weights_do_not_break_the_document() -> None:
    """All-zero experts exist; JSON has no infinity."""
    zero = weight("zero", 0.1)
    still = replace(zero, sums=replace(zero.sums, sum_x2=0.0, sum_q2=0.0, sum_err2=0.0))
    woken = replace(zero, sums=replace(zero.sums, sum_x2=0.0, sum_q2=1.0, sum_err2=1.0))
    for records in ([still], [woken], []):
        document = report_document(summarize(HEADER, records), 3)
        json.dumps(document, allow_nan=False)
    assert report_document(summarize(HEADER, [woken]), 3)["total"]["relative_rmse"] is None
    assert report_document(summarize(HEADER, [still]), 3)["total"]["relative_rmse"] == 0


def test_numbers_for_people() -> None:
    assert (ratio(0.11449), ratio(math.inf), ratio(math.nan)) == ("0.1145", "∞", "-")
    assert (decibels(18.526), decibels(math.inf), decibels(-math.inf)) == ("18.53", "∞", "-∞")
    assert (share(0), share(1e-9), share(0.0125)) == ("0 %", "< 0.001 %", "1.250 %")
    assert (amount(999), amount(1500), amount(2_780_000_000_000)) == ("999", "1.50 K", "2.78 T")
    assert printable("a\x1b[2J\u202eb\n é") == "a\\x1b[2J\\u202eb\\n é"


# -------------------------------------------------------------------------- measuring


@pytest.fixture(scope="module")
def folders(shared_source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An artifact and its source: read them, never change them."""
    target = tmp_path_factory.mktemp("report") / "a"
    return make_artifact(shared_source, target), shared_source


def read_tensors(folder: Path) -> dict[str, Stored]:
    paths = sorted(folder.glob("*.safetensors"))
    return {name: stored for path in paths for name, stored in read_file(path).items()}


def slow_error(target: Path, source: Path, name: str) -> float:
    """Return a weight's relative RMSE by other means than the code under test."""
    decoded, original = read_artifact(target).values(name), read_tensors(source)[name]
    wanted = decode(original.data, original.dtype, original.shape)
    return float(np.sqrt(np.square(decoded - wanted).sum() / np.square(wanted).sum()))


def measured(target: Path, source: Path, *args: object) -> list[Record]:
    result = shell("report", target, "--source", source, "--jsonl", "-q", *args).ok()
    data = b"".join(line.encode() for line in result.stdout.splitlines(keepends=True))
    import zstandard

    packed = zstandard.ZstdCompressor(write_checksum=True).compress(data)
    header, records = read_records(io.BytesIO(packed))
    assert header.source is not None
    return list(records)


def test_measuring_an_artifact_gives_its_error(folders: tuple[Path, Path]) -> None:
    """The figures are those of the decoded weights, for every quantized weight."""
    target, source = folders
    records = measured(target, source)
    weights = [record for record in records if isinstance(record, TensorStats)]
    packed = [name for name in read_tensors(target) if name.endswith(".weight_packed")]
    assert {stats.name for stats in weights} == {n.removesuffix("_packed") for n in packed}
    for stats in weights[:4]:
        assert stats.sums.relative_rmse == pytest.approx(slow_error(target, source, stats.name))
    assert all(stats.role == "expert" and stats.layer is not None for stats in weights)
    counts = [record for record in records if isinstance(record, Histograms)]
    assert [c.file for c in counts] == sorted({stats.file for stats in weights})
    assert sum(sum(c.codes) for c in counts) == sum(s.sums.elements for s in weights)
    assert sum(sum(c.scales.values()) for c in counts) == sum(s.sums.blocks for s in weights)


def test_what_a_run_records_is_what_measuring_finds(folders: tuple[Path, Path]) -> None:
    """Kernels sum while they quantize; decoding the result and comparing must agree."""
    target, source = folders
    with (target / REPORT_NAME).open("rb") as file:
        header, drawn = read_records(file)
        recorded = {r.name: r for r in drawn if isinstance(r, TensorStats)}
    again = {r.name: r for r in measured(target, source) if isinstance(r, TensorStats)}
    assert list(recorded) == list(again)
    for name, one in recorded.items():
        mine, other = one.sums, again[name].sums
        assert replace(one, sums=other) == again[name]
        for figure in ("sum_x2", "sum_q2", "sum_err2", "max_abs_err"):
            assert getattr(mine, figure) == pytest.approx(getattr(other, figure), rel=1e-5), figure
        for figure in ("elements", "blocks", "flushed", "saturated", "exponents"):
            assert getattr(mine, figure) == getattr(other, figure), figure
    document = shell("report", target, "--source", source, "--json").ok().json()
    for member in ("artifact", "source", "scale_rule", "tool"):
        assert getattr(header, member) == document[member]


def test_measuring_twice_gives_the_same_bytes(folders: tuple[Path, Path]) -> None:
    """Threads end in any order; the records do not."""
    one, two = (
        shell("report", folders[0], "--source", folders[1], "--jsonl", "-j", jobs).ok().stdout
        for jobs in (1, 4)
    )
    assert one == two


def test_another_tools_folder_is_measured(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """No manifest, one file for all: codes and scales are found by name."""
    target, source = folders
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for path in target.iterdir():
        if not path.name.startswith("mxconvert."):
            (foreign / path.name).write_bytes(path.read_bytes())
    document = shell("report", foreign, "--source", source, "--json").ok().json()
    own = shell("report", target, "--source", source, "--json").ok().json()
    assert document["artifact"] is document["scale_rule"] is None
    assert own["scale_rule"] == "mse"
    assert document["total"] == own["total"]


def test_samples_cover_everything_once(folders: tuple[Path, Path]) -> None:
    target, source = folders
    parts = [measured(target, source, "--sample", f"{n}/3") for n in (1, 2, 3)]
    names = [s.name for part in parts for s in part if isinstance(s, TensorStats)]
    whole = [s.name for s in measured(target, source) if isinstance(s, TensorStats)]
    assert sorted(names) == sorted(whole)
    document = shell("report", target, "--source", source, "--sample", "1/3", "--json").ok().json()
    assert document["sample"] == "1/3"


def test_a_huge_source_is_sampled() -> None:
    assert Sample.choose(None, WHOLE_SOURCE_LIMIT) == Sample(1, 1)
    assert Sample.choose(None, 10 * WHOLE_SOURCE_LIMIT + 1) == Sample(1, 11)
    assert Sample.choose("2/3", 10 * WHOLE_SOURCE_LIMIT) == Sample(2, 3)


def test_another_source_is_told(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Measured against the wrong checkpoint, figures mean nothing: say so."""
    model = bf16_model()
    gone = next(name for name in model.tensors if ".experts.3." in name)
    other = model.without(lambda name: name == gone).write(tmp_path / "other")
    result = shell("report", folders[0], "--source", other, "--json").ok()
    assert "not the checkpoint" in result.stderr
    assert "1 packed weights are not measured" in result.stderr


def test_a_stop_ends_measuring(folders: tuple[Path, Path]) -> None:
    from mxconvert.errors import Interrupted
    from mxconvert.events import ignore

    stop = StopToken()
    measuring = open_measuring(*folders, sample=None, jobs=1, reporter=ignore, stop=stop)
    stop.set(15)
    with pytest.raises(Interrupted):
        list(measuring.records())


# ----------------------------------------------------------------------- command line


def test_the_file_beside_an_artifact_is_read(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """`report TARGET` and `report FILE` need no source."""
    folder = write_report(tmp_path / "model", small_records())
    document = shell("report", folder, "--json", "--top", 3).ok().json()
    assert document["type"] == "report"
    assert document["schema_version"] == 1
    assert document["total"]["tensors"] == 288
    assert len(document["worst"]) == 3
    assert shell("report", folder / REPORT_NAME, "--json", "--top", 3).ok().json() == document


def test_the_terminal_says_the_main_things(tmp_path: Path) -> None:
    folder = write_report(tmp_path / "m", small_records())
    text = shell("report", folder, "--top", 2).ok().stdout
    for words in ("relative RMSE 0.11", "SQNR", "cosine", "to zero", "saturated", "gate_proj",
                  "experts.2.", "1 experts have a larger error"):  # fmt: skip
        assert words in text
    assert shell("report", folder, "-q").ok().stdout == ""


def test_names_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    folder = write_report(tmp_path / "m", [weight("a\x1b[2J\u202e", 0.2, role="\x07")])
    text = shell("report", folder).ok().stdout
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\u202e" not in text
    assert "a\\x1b[2J\\u202e" in text


def test_records_pass_through_to_json_lines(tmp_path: Path) -> None:
    folder = write_report(tmp_path / "m", small_records())
    lines = shell("report", folder, "--jsonl").ok().stdout.splitlines()
    kinds = [json.loads(line)["type"] for line in lines]
    assert kinds[0] == "header"
    assert kinds[-1] == "end"
    assert (kinds.count("tensor"), kinds.count("histograms")) == (288, 16)


def test_a_report_of_another_artifact_is_refused(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """A folder that was made anew must not show the figures of what was there before."""
    header = replace(HEADER, artifact="ab" * 32)
    folder = write_report(tmp_path / "m", small_records(), header)
    shell("report", folder).ok()
    (folder / MANIFEST_NAME).write_bytes((folders[0] / MANIFEST_NAME).read_bytes())
    fail_cleanly(shell("report", folder), 4, "abababababababab", "--source")


def test_failures_say_what_to_do(folders: tuple[Path, Path], tmp_path: Path) -> None:
    target, source = folders
    fail_cleanly(shell("report", tmp_path / "none"), 2, "no such folder")
    bare = tmp_path / "bare"
    bare.mkdir()
    fail_cleanly(shell("report", bare), 2, REPORT_NAME, "--source")
    fail_cleanly(shell("report", target, "--sample", "1/2"), 2, "--source")
    fail_cleanly(shell("report", target, "--source", source, "--sample", "3/2"), 2, "N/T")
    fail_cleanly(shell("report", target, "--json", "--jsonl"), 2, "--jsonl")
    fail_cleanly(shell("report", source, "--source", target), 2, "no packed weights")
    folder = write_report(tmp_path / "m", small_records())
    fail_cleanly(shell("report", folder, "--html", tmp_path / "no" / "x.html"), 7, "--html")
    (folder / REPORT_NAME).write_bytes((folder / REPORT_NAME).read_bytes()[:100])
    fail_cleanly(shell("report", folder), 4, REPORT_NAME, "measure again")


def test_weights_that_are_not_finite_are_refused(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """A NaN scale would make every mean NaN."""
    target, source = folders
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in target.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    name, stored = next((n, t) for n, t in read_tensors(target).items() if n.endswith("_scale"))
    path = next(p for p in sorted(broken.glob("*.safetensors")) if name.encode() in p.read_bytes())
    data = path.read_bytes()
    assert data.count(stored.data) == 1
    path.write_bytes(data.replace(stored.data, b"\xff" + stored.data[1:]))
    fail_cleanly(shell("report", broken, "--source", source), 4, "not finite", path.name)
