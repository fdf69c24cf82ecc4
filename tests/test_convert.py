"""Sources of every layout through the engine: the right bytes, however they are cut."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mxconvert.digest import xxh3_128_hex
from mxconvert.errors import SourceError
from mxconvert.events import Event, Notice, ignore
from mxconvert.model import Action, BlockScale, FileRole, Item, Options, OutputFile, TensorInfo
from mxconvert.pipeline.convert import Converter
from mxconvert.pipeline.engine import Engine
from mxconvert.pipeline.pieces import (
    MIN_PIECE_SIZE,
    PIECE_SIZE,
    cut_file,
    granule,
    held_size,
    kinds_of,
    largest_granule,
    largest_held,
    output_capacity,
    scales_capacity,
)
from mxconvert.pipeline.run import memory_needs
from mxconvert.pipeline.slots import Budget, plan_budget
from mxconvert.plan import build_plan
from mxconvert.quantize import Quantizer, load_backend
from mxconvert.source import SourceReader, open_checkpoint
from mxconvert.stop import StopToken
from mxconvert.views import swapped, view_of
from tests.support import Model, Tensor, bf16_model, decode, encode, fp8_model, fused_model
from tests.support.fp8 import bf16_of, dequantized
from tests.support.models import tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from mxconvert.model import Checkpoint, Plan
    from mxconvert.pipeline.job import FileResult

MIB = 1024 * 1024
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"

# ------------------------------------------------------------------------------- sources


def fused(kind: str, *, transposed: bool) -> Model:
    return fused_model(transposed=transposed).configured(model_type=kind)


def llama4() -> Model:
    """Transposed, gate before up, not alternating."""
    prefix = "language_model.model.layers.0.feed_forward.experts."
    model = fused_model(transposed=False)
    changed = {}
    for name, stored in model.tensors.items():
        values = decode(stored.data, stored.dtype, stored.shape).swapaxes(1, 2)
        last = name.rsplit(".", maxsplit=1)[-1]
        changed[prefix + last] = Tensor("BF16", values.shape, encode(values, "BF16"))
    config = dict(model.config)
    config["text_config"] = {**config, "model_type": "llama4_text"}
    return replace(
        model, config=config | {"model_type": "llama4"}, shards={"model.safetensors": changed}
    )


def wide(*, hidden: int = 256, inner: int = 2112, experts: int = 2) -> Model:
    """Transposed and alternating, of matrices that are cut."""
    prefix = "model.layers.0.mlp.experts."
    shapes = {
        "gate_up_proj": (experts, hidden, 2 * inner),
        "down_proj": (experts, inner, hidden),
        "gate_up_proj_bias": (experts, 2 * inner),
        "down_proj_bias": (experts, hidden),
    }
    tensors = {prefix + name: tensor(name, shape) for name, shape in shapes.items()}
    config = fused_model(transposed=True).config | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_local_experts": experts,
    }
    return Model(config=config, shards={"model.safetensors": tensors})


def other_scales(dtype: str, scale: Callable[[int, int], tuple[int, ...]]) -> Model:
    """F-FP8 with scales of another kind."""
    model = fp8_model()
    changed = {}
    for name, stored in model.tensors.items():
        if stored.dtype != "F8_E4M3":
            continue
        shape = scale(*stored.shape)
        exponents = -12 + np.arange(math.prod(shape)) % 5
        values = np.ldexp(1.0, exponents).reshape(shape)
        if dtype != "F8_E8M0":
            values *= 1.3125
        changed[f"{name}_scale_inv"] = Tensor(dtype, shape, encode(values, dtype))
    return model.adding(changed)


SOURCES: dict[str, Callable[[], Model]] = {
    "plain": lambda: bf16_model(layers=1, experts=2),
    "fused": lambda: fused("qwen3_5_moe_text", transposed=False),
    "fused, transposed": llama4,
    "fused, transposed, alternating": lambda: fused("gpt_oss", transposed=True),
    "fused, transposed, large": wide,
    "FP8 by blocks": fp8_model,
    "FP8 by rows": lambda: other_scales("F32", lambda rows, _: (rows, 1)),
    "FP8 by tensor": lambda: other_scales("BF16", lambda *_: ()),
    "FP8 by blocks, E8M0": lambda: other_scales(
        "F8_E8M0", lambda rows, columns: (-(-rows // 128), -(-columns // 128))
    ),
}


def matrices(model: Model, name: str) -> NDArray[np.float64] | None:
    """Return the values of a weight of the output, from its definition; ``None`` if not known."""
    stored = model.tensors
    if name in stored:
        if stored[name].dtype == "F8_E4M3":
            return dequantized(stored, name)
        return decode(stored[name].data, *stored[name][:2])
    prefix, _, rest = name.partition(".experts.")
    expert, projection, kind = rest.split(".")
    word = "down_proj" if projection == DOWN else "gate_up_proj"
    source = stored[f"{prefix}.experts.{word}" + ("_bias" if kind == "bias" else "")]
    values = decode(source.data, *source[:2])[int(expert)]
    if word == "down_proj":
        return values.T if model.config["model_type"] != "qwen3_5_moe_text" else values
    family = model.config["model_type"]
    if family == "gpt_oss":
        return values[..., 0::2].T if projection == GATE else values[..., 1::2].T
    if family == "llama4":
        values = values.T
    half = len(values) // 2
    return values[:half] if projection == GATE else values[half:]


# -------------------------------------------------------------------------------- engine


class Run:
    """One source, converted as often as wanted."""

    def __init__(self, model: Model, folder: Path, **options: Any) -> None:
        self.model = model
        self.checkpoint: Checkpoint = open_checkpoint(model.write(folder / "source"))
        self.plan: Plan = build_plan(self.checkpoint, Options(**options), force=True)
        self.folder = folder
        self.results: dict[str, FileResult] = {}

    def __call__(
        self,
        name: str,
        piece_size: int,
        *,
        jobs: int = 1,
        held: int = 0,
        report: Callable[[Event], None] = ignore,
        backend: str = "auto",
    ) -> dict[str, bytes]:
        """Return the files by name."""
        target = self.folder / name
        target.mkdir()
        least = largest_granule(kinds_of(self.plan.files))
        budget = Budget(jobs, 2 * jobs + 1, max(piece_size, -(-least // 4096) * 4096), 2, held)
        with SourceReader(self.checkpoint.root, self.checkpoint.files) as reader:
            engine = Engine(
                self.plan.files,
                target,
                budget=budget,
                reader=reader,
                quantizer=Quantizer(load_backend(backend), "mse"),
                record=lambda file, result: self.results.update({file.name: result}),
                report=report,
                measure=True,
            )
            failed = engine.run(StopToken())
        for _, error in failed:
            raise error
        return {path.name: path.read_bytes() for path in target.iterdir()}


def expected_tensors(run: Run) -> dict[str, bytes]:
    """Return every output tensor, made in one go from its definition."""
    quantizer = Quantizer(load_backend("numpy"), "mse")
    expected: dict[str, bytes] = {}
    for file in run.plan.files:
        for item in file.items:
            values = matrices(run.model, item.source.name)
            assert values is not None
            if item.action is Action.QUANTIZE:
                assert values.shape == item.source.shape
                raw = memoryview(bytearray(np.ascontiguousarray(values, "<f4").tobytes()))
                made = bytearray(values.size // 2), bytearray(values.size // 32)
                assert not quantizer.quantize(raw, "F32", *map(memoryview, made))
                pair = zip(item.outputs, made, strict=True)
                expected |= {output.name: bytes(data) for output, data in pair}
            elif item.action is Action.DEQUANTIZE:
                expected[item.source.name] = bf16_of(values)
            else:
                expected[item.source.name] = encode(values, item.source.dtype)
    return expected


def stored_tensors(run: Run, files: dict[str, bytes]) -> dict[str, bytes]:
    return {
        output.name: files[file.name][file.header_size :][output.begin : output.end]
        for file in run.plan.files
        for item in file.items
        for output in item.outputs
    }


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


def changed(model: Model, name: str, at: tuple[int, ...], value: float | bytes) -> Model:
    stored = model.tensors[name]
    index = int(np.ravel_multi_index(at, stored.shape))
    raw = value if isinstance(value, bytes) else encode([value], stored.dtype)
    data = stored.data[: index * len(raw)] + raw + stored.data[(index + 1) * len(raw) :]
    return model.adding({name: stored._replace(data=data)})


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
