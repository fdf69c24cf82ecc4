"""Sources of every layout through the engine: the right bytes, however they are cut."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mxconvert.digest import xxh3_128_hex
from mxconvert.errors import SourceError
from mxconvert.events import Event, Notice
from mxconvert.model import Action, BlockScale, FileRole, Item, OutputFile, TensorInfo
from mxconvert.pipeline.convert import Converter
from mxconvert.pipeline.pieces import (
    MIN_PIECE_SIZE,
    PIECE_SIZE,
    cut_file,
    granule,
    held_size,
    largest_granule,
    largest_held,
    output_capacity,
    scales_capacity,
)
from mxconvert.pipeline.resources import memory_needs
from mxconvert.pipeline.slots import plan_budget
from mxconvert.views import swapped, view_of
from tests.convert_base import (
    MIB,
    SOURCES,
    Run,
    changed,
    expected_tensors,
    stored_tensors,
    wide,
)
from tests.support import Model, Tensor, bf16_model, decode, encode, fp8_model, fused_model
from tests.support.models import tensor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@pytest.mark.parametrize("source", SOURCES)
def test_same_bytes_however_a_source_is_cut(source: str, tmp_path: Path) -> None:
    """Pieces of any size, one job or many, held output scarce or not; and they are the right ones.

    Digests of outputs and sources agree as well.
    """
    run = Run(SOURCES[source](), tmp_path)
    first = run("whole", PIECE_SIZE)
    results = dict(run.results)
    assert stored_tensors(run, first) == expected_tensors(run)
    for piece_size, jobs, held in ((4096, 1, 0), (4096, 4, 0), (16384, 4, MIB), (65536, 3, 0)):
        name = f"{piece_size}-{jobs}-{held}"
        assert run(name, piece_size, jobs=jobs, held=held) == first, name
        for file, result in run.results.items():
            before = results[file]
            assert (result.digest, result.outputs) == (before.digest, before.outputs)
            assert result.sources == before.sources
    for output, digest in {k: v for r in results.values() for k, v in r.outputs.items()}.items():
        assert xxh3_128_hex(stored_tensors(run, first)[output]) == digest


@pytest.mark.parametrize("source", ["fused, transposed, large", "FP8 by blocks"])
def test_numpy_makes_the_same(source: str, tmp_path: Path) -> None:
    run = Run(SOURCES[source](), tmp_path)
    assert run("numpy", 16384, backend="numpy", jobs=2) == run("auto", PIECE_SIZE)


@pytest.mark.parametrize("source", SOURCES)
def test_statistics_do_not_depend_on_cuts_of_transposed_weights(
    source: str, tmp_path: Path
) -> None:
    """Sums differ in their last digits at most; the sample of codes is the same."""
    run = Run(SOURCES[source](), tmp_path)
    found = []
    for name, piece_size in (("whole", PIECE_SIZE), ("cut", 4096)):
        run(name, piece_size)
        found.append({file: run.results[file].statistics for file in run.results})
    for file in run.plan.files:
        whole, cut = (list(each[file.name].records(file, _classify)) for each in found)
        assert len(whole) == len(cut)
        for one, other in zip(whole, cut, strict=True):
            if hasattr(one, "codes"):
                assert (one.codes, one.scales) == (other.codes, other.scales)
            else:
                assert one.sums.elements == other.sums.elements
                assert one.sums.sum_err2 == pytest.approx(other.sums.sum_err2, rel=1e-6)
                assert one.sums.max_abs_err == other.sums.max_abs_err


def _classify(name: str) -> Any:
    from mxconvert.recipes.base import Role, Slot

    return Slot(Role.EXPERT, 0, 0, name.split(".")[-2])


@pytest.mark.parametrize("source", ["fused, transposed", "fused, transposed, large"])
def test_kept_transposed_weights_are_transposed_too(source: str, tmp_path: Path) -> None:
    """What is excluded has the shape that its header says, in the order that shape means."""
    model = SOURCES[source]()
    extra = {f"model.layers.1.self_attn.{p}_proj.weight": tensor(p, (64, 64)) for p in "qk"}
    run = Run(
        model.adding(extra),
        tmp_path,
        scope="linear",
        exclude=("re:.*experts.*",),
    )
    assert {item.action for file in run.plan.files for item in file.items} == {
        Action.QUANTIZE,
        Action.COPY,
    }
    whole = run("whole", PIECE_SIZE)
    assert stored_tensors(run, whole) == expected_tensors(run)
    assert run("cut", 4096, jobs=3) == whole


def test_ragged_transposed_weights_are_kept(tmp_path: Path) -> None:
    """K = 80 of down_proj: the layer keeps BF16, each matrix the right way round."""
    model = wide(hidden=64, inner=80)
    extra = {"model.layers.1.self_attn.q_proj.weight": tensor("q", (64, 64))}
    run = Run(model.adding(extra), tmp_path, scope="linear")
    whole = run("whole", PIECE_SIZE)
    assert stored_tensors(run, whole) == expected_tensors(run)
    assert run("cut", 4096) == whole


# ------------------------------------------------------------------------------- findings


@pytest.mark.parametrize("piece_size", [4096, PIECE_SIZE])
def test_nan_in_a_slice_is_named_as_in_the_output(piece_size: int, tmp_path: Path) -> None:
    """Of gpt-oss' gate_up: expert, projection, row and column are those of what is written."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    model = changed(wide(), name, (1, 70, 2 * 7 + 1), math.nan)
    model = changed(model, name, (1, 3, 2 * 2000 + 1), math.inf)
    run = Run(model, tmp_path)
    with pytest.raises(Exception, match=r"experts\.1\.up_proj\.weight") as error:
        run("out", piece_size)
    element = 7 * 256 + 70
    assert f"2 of {2112 * 256} values" in str(error.value)
    assert f"element {element} (row 7, column 70, block {element // 32})" in str(error.value)


@pytest.mark.parametrize("piece_size", [4096, PIECE_SIZE])
def test_nan_in_a_kept_slice_is_a_notice(piece_size: int, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    model = changed(wide(inner=1056), name, (0, 70, 9), math.nan)
    extra = {"model.layers.1.self_attn.q_proj.weight": tensor("q", (64, 64))}
    run = Run(model.adding(extra), tmp_path, scope="linear", exclude=("re:.*experts.*",))
    seen: list[Event] = []
    run("out", piece_size, report=seen.append)
    [notice] = [event for event in seen if isinstance(event, Notice)]
    assert notice.code == "non-finite-copied"
    assert "experts.0.down_proj.weight: 1 of" in notice.message
    assert f"element {9 * 1056 + 70};" in notice.message


@pytest.mark.parametrize("piece_size", [4096, PIECE_SIZE])
def test_fp8_nan_is_named(piece_size: int, tmp_path: Path) -> None:
    """In what is quantized and in what becomes BF16."""
    for number, name in enumerate(
        ("model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.1.self_attn.q_proj.weight")
    ):
        model = changed(fp8_model(), name, (130, 40), b"\xff")
        run = Run(changed(model, name, (190, 3), b"\x7f"), tmp_path / str(number))
        with pytest.raises(Exception, match=name) as error:
            run("out", piece_size)
        element = 130 * 256 + 40
        assert f"2 of {192 * 256 if number == 0 else 256 * 256} values" in str(error.value)
        assert f"element {element} (row 130, column 40, block {element // 32})" in str(error.value)


def test_a_product_that_is_no_bf16_is_an_error(tmp_path: Path) -> None:
    """Finite as float32, infinite once it is rounded: never stored as infinity."""
    name = "model.layers.1.self_attn.q_proj.weight"
    model = changed(fp8_model(), name, (0, 5), encode([1.0], "F8_E4M3"))
    model = changed(model, name + "_scale_inv", (0, 0), 3.4e38)
    stored = model.tensors[name]
    values = decode(stored.data, *stored[:2])
    values[:128, :128] = 0
    values[0, 5] = 1
    model = model.adding({name: stored._replace(data=encode(values, "F8_E4M3"))})
    with pytest.raises(Exception, match="row 0, column 5"):
        Run(model, tmp_path)("out", PIECE_SIZE)


def test_overflow_in_a_quantized_weight_is_an_error(tmp_path: Path) -> None:
    """448 times a scale beyond 2^119.19; 416 times it is finite."""
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    model = changed(fp8_model(), name + "_scale_inv", (1, 1), 2.0**119.25)
    model = changed(model, name, (150, 140), b"\x7e")
    with pytest.raises(Exception, match=name) as error:
        Run(model, tmp_path)("out", PIECE_SIZE)
    assert "row 150, column 140" in str(error.value)


@pytest.mark.parametrize("piece_size", [4096, PIECE_SIZE])
def test_a_zero_scale_over_zeros_is_a_notice(piece_size: int, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    model = changed(fp8_model(), name + "_scale_inv", (1, 0), 0.0)
    stored = model.tensors[name]
    values = decode(stored.data, *stored[:2])
    values[128:, :128] = 0
    model = model.adding({name: stored._replace(data=encode(values, "F8_E4M3"))})
    run = Run(model, tmp_path)
    seen: list[Event] = []
    files = run("out", piece_size, report=seen.append)
    [notice] = [event for event in seen if isinstance(event, Notice)]
    assert (notice.severity, notice.code) == ("warning", "zero-scale")
    assert f"{name}: 1 of 4 scales in {name}_scale_inv are 0" in notice.message
    assert stored_tensors(run, files) == expected_tensors(run)


@pytest.mark.parametrize("shard", ["weights", "scales"])
def test_a_source_that_changes_meanwhile_ends_the_run(
    shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that holds nothing but scales."""
    model = fp8_model().reshard(
        lambda name: f"{'scales' if name.endswith('_scale_inv') else 'weights'}.safetensors"
    )
    run = Run(model, tmp_path)
    path = tmp_path / "source" / f"{shard}.safetensors"
    calls = itertools.count()
    before = Converter.read

    def read(self: Converter, part: Any, data: memoryview) -> None:
        before(self, part, data)
        if next(calls) == 40:
            os.utime(path, ns=(1, 1))

    monkeypatch.setattr(Converter, "read", read)
    with pytest.raises(SourceError, match=f"{shard}.*changed during the run") as error:
        run("out", 16384)
    assert error.value.code == "source-changed"


# --------------------------------------------------------------------------------- pieces


def _source(
    draw: st.DrawFn, number: int, rows: int, columns: int
) -> tuple[TensorInfo, Sequence[Action]]:
    """Return a matrix, whole or a part, transposed or not, plain or scaled FP8."""
    way = draw(st.sampled_from(["whole", "rows", "transposed"]))
    dtype = draw(st.sampled_from(["BF16", "F32", "F8_E4M3"]))
    item = {"BF16": 2, "F32": 4, "F8_E4M3": 1}[dtype]
    shape = (2, columns, 2 * rows) if way == "transposed" else (2, 2 * rows, columns)
    stored = TensorInfo(f"s{number}", dtype, shape, "f", 0, 4 * rows * columns * item)
    name = f"t{number}"
    if way == "whole":
        source = TensorInfo(name, dtype, (rows, columns), "f", 0, rows * columns * item)
    else:
        part, inputs = draw(st.sampled_from([(0, rows, 1), (1, 2 * rows, 2)])), (0, columns, 1)
        selection = [(1, 2, 1), *((inputs, part) if way == "transposed" else (part, inputs))]
        axes = swapped(3) if way == "transposed" else None
        source = view_of(stored, name, selection, shape=(rows, columns), axes=axes)
    if dtype == "F8_E4M3":
        scale = TensorInfo(f"{name}_scale", "F32", (), "f", 0, 4)
        source = replace(source, scale=BlockScale(scale, 128, 128))
        return source, (Action.QUANTIZE, Action.DEQUANTIZE)
    return source, (Action.QUANTIZE, Action.COPY)


@st.composite
def files(draw: st.DrawFn) -> OutputFile:
    items, begin = [], 0
    for number in range(draw(st.integers(1, 6))):
        rows = draw(st.sampled_from([1, 3, 32, 100, 500]))
        source, actions = _source(draw, number, rows, 32 * draw(st.integers(1, 20)))
        item = Item(draw(st.sampled_from(actions)), source, begin, None, None)
        begin = item.outputs[-1].end
        items.append(item)
    return OutputFile(
        name="f",
        role=FileRole.MIXED,
        experts=None,
        layers=None,
        items=tuple(items),
        header_size=0,
        header_sha256="",
        size=begin,
    )


@settings(max_examples=200)
@given(files(), st.sampled_from([4096, 16384, MIN_PIECE_SIZE, PIECE_SIZE]))
def test_no_buffer_is_overrun(file: OutputFile, wanted: int) -> None:
    """Input and output of all parts of a piece lie apart and inside; granules stay whole."""
    piece_size = max(wanted, -(-largest_granule(file.items) // 4096) * 4096)
    done = dict.fromkeys((item.source.name for item in file.items), 0)
    for piece in cut_file(file, piece_size):
        at = out_at = scales_at = 0
        for part in piece.parts:
            assert part.at >= at
            assert (part.out_at, part.scales_out_at) == (out_at, scales_at)
            scales = part.scales_size if part.item.action is Action.QUANTIZE else 0
            at, scales_at = part.at + part.size, scales_at + scales
            out_at += part.output_size - scales
            name = part.item.source.name
            assert part.begin == done[name]
            assert part.begin % granule(part.item) == 0
            done[name] += part.size
            assert part.last == (done[name] == part.item.source.size)
            if not part.whole:
                assert part is piece.parts[0]
                assert part.held_size == held_size(part.item)
                assert part.held_size <= largest_held(file.items, piece_size)
        assert at <= piece_size
        assert out_at + scales_at <= output_capacity(piece_size)
        assert scales_at <= scales_capacity(piece_size)
    assert done == {item.source.name: item.source.size for item in file.items}


def test_a_granule_larger_than_the_default_piece(tmp_path: Path) -> None:
    """32 stored rows of 70,000 outputs: the pieces grow, and the budget says what that takes."""
    prefix = "model.layers.0.mlp.experts."
    rows = 70_016
    stored = Tensor("BF16", (1, 32, 2 * rows), bytes(2 * 32 * 2 * rows))
    down = tensor(prefix + "down_proj", (1, rows, 32))
    config = fused_model(transposed=True).config | {
        "hidden_size": 32, "intermediate_size": rows, "num_local_experts": 1,
    }  # fmt: skip
    shards = {"m.safetensors": {prefix + "gate_up_proj": stored, prefix + "down_proj": down}}
    run = Run(Model(config=config, shards=shards), tmp_path)
    needs = memory_needs(run.plan)
    assert needs.granule > PIECE_SIZE
    budget = plan_budget(4, 1024 * MIB, 64 * MIB, needs)
    assert budget.piece_size >= needs.granule
    files = run("out", budget.piece_size, jobs=2, held=budget.held)
    assert stored_tensors(run, files) == expected_tensors(run)


def test_what_is_held_is_counted(tmp_path: Path) -> None:
    """The budget of transposed weights holds their output, that of others their scales."""
    needs = memory_needs(Run(wide(), tmp_path / "t").plan)
    size = 256 * 2112
    assert needs.held(64 * 1024) == size // 2 + size // 32
    assert needs.held(PIECE_SIZE) == 0
    assert needs.chunk > 0
    assert needs.granule >= 32 * 2112 * 2
    plain = memory_needs(Run(bf16_model(layers=1, experts=1), tmp_path / "p").plan)
    assert (plain.held(4096), plain.chunk) == (64 * 96 // 32, 0)


def test_scarce_held_memory_is_never_exceeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many jobs: one tensor waits at a time if that is all there is room for."""
    from mxconvert.pipeline.job import FileJob

    run = Run(wide(experts=4), tmp_path)
    size = memory_needs(run.plan).held(64 * 1024)
    seen: list[int] = []
    before = FileJob.next_piece

    def next_piece(job: FileJob) -> Any:
        piece = before(job)
        seen.append(job.held)
        return piece

    monkeypatch.setattr(FileJob, "next_piece", next_piece)
    for held, most in ((0, 1), (2 * size, 2), (3 * size, 3)):
        seen.clear()
        run(f"held-{held}", 64 * 1024, jobs=6, held=held)
        assert max(seen) <= most * size
