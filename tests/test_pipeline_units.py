"""The parts of the pipeline by themselves: order, pieces, budget, and what a failure does."""

from __future__ import annotations

import itertools
import random
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mxconvert.errors import Interrupted, LocalError, MissingExtraError, SourceError, UsageError
from mxconvert.events import Advanced, Event, FileFinished, ignore
from mxconvert.model import Action, FileRole, Item, Options, OutputFile, TensorInfo
from mxconvert.pipeline.engine import MOST_CLOSING, Engine
from mxconvert.pipeline.job import FileJob, FileResult
from mxconvert.pipeline.lane import OrderedLane
from mxconvert.pipeline.pieces import (
    MIN_PIECE_SIZE,
    PIECE_SIZE,
    cut_file,
    largest_held,
    output_capacity,
    scales_capacity,
)
from mxconvert.pipeline.slots import Budget, Needs, plan_budget
from mxconvert.plan import build_plan
from mxconvert.quantize import Quantizer, compiling, load_backend
from mxconvert.source import SourceReader, open_checkpoint
from mxconvert.stop import StopToken
from tests.support.models import bf16_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mxconvert.model import Checkpoint, Plan

MIB = 1024 * 1024


# ---------------------------------------------------------------------------- lanes


@given(st.permutations(range(12)))
def test_lane_runs_tasks_in_order_whatever_the_order_of_arrival(order: list[int]) -> None:
    lane, ran, continued = OrderedLane(), list[int](), list[int]()

    def task(number: int) -> Callable[[], None]:
        ran.append(number)
        return lambda: continued.append(number)

    for number in order:
        lane.submit(number, lambda number=number: task(number))
    assert ran == list(range(12))
    assert continued == list(range(12))


def test_lane_does_not_run_ahead_of_a_gap() -> None:
    lane, ran = OrderedLane(), list[int]()
    for number in (1, 2, 4):
        lane.submit(number, lambda number=number: ran.append(number) or (lambda: None))
    assert ran == []
    lane.submit(0, lambda: ran.append(0) or (lambda: None))
    assert ran == [0, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_lane_under_many_threads(seed: int) -> None:
    """Tasks never overlap, none is lost, the order holds; two lanes in a row as in the engine."""
    count, threads = 400, 8
    first, second = OrderedLane(), OrderedLane()
    written, hashed, inside = list[int](), list[int](), threading.Lock()
    numbers = iter(range(count))
    taking = threading.Lock()

    def write(number: int) -> Callable[[], None]:
        assert inside.acquire(blocking=False), "two tasks of a lane at once"
        written.append(number)
        inside.release()
        return lambda: second.submit(number, lambda: hash_(number))

    def hash_(number: int) -> Callable[[], None]:
        hashed.append(number)
        return lambda: None

    def work(rng: random.Random) -> None:
        while True:
            with taking:
                batch = list(itertools.islice(numbers, rng.randint(1, 5)))
            if not batch:
                return
            rng.shuffle(batch)
            for number in batch:
                first.submit(number, lambda number=number: write(number))

    workers = [
        threading.Thread(target=work, args=(random.Random(100 * seed + n),)) for n in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert written == list(range(count))
    assert hashed == list(range(count))


# --------------------------------------------------------------------------- pieces


@st.composite
def _tensors(draw: st.DrawFn) -> tuple[Action, str, tuple[int, ...]]:
    if draw(st.booleans()):
        dtype = draw(st.sampled_from(["BF16", "F16", "F32"]))
        rows, blocks = draw(st.integers(1, 200)), draw(st.integers(1, 300))
        return Action.QUANTIZE, dtype, (rows, 32 * blocks)
    dtype = draw(st.sampled_from(["BF16", "F32", "F8_E4M3", "I64", "U8"]))
    shape = draw(st.lists(st.integers(0, 600), max_size=2))
    return Action.COPY, dtype, tuple(shape)


SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8, "U8": 1}


def _file(tensors: list[tuple[Action, str, tuple[int, ...]]]) -> OutputFile:
    items, begin = [], 0
    for number, (action, dtype, shape) in enumerate(tensors):
        size = SIZES[dtype]
        for dim in shape:
            size *= dim
        source = TensorInfo(f"t{number}", dtype, shape, "f", 0, size)
        item = Item(action, source, begin, None, None)
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


@settings(max_examples=60)
@given(
    st.lists(_tensors(), min_size=1, max_size=8),
    st.sampled_from([4096, 8192, MIN_PIECE_SIZE, PIECE_SIZE]),
)
def test_pieces_cover_every_byte_once_and_in_order(
    tensors: list[tuple[Action, str, tuple[int, ...]]], piece_size: int
) -> None:
    file = _file(tensors)
    pieces = list(cut_file(file, piece_size))
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    parts = [part for piece in pieces for part in piece.parts]
    grouped = {item: list(group) for item, group in itertools.groupby(parts, lambda p: p.item)}
    assert list(grouped) == list(file.items)
    for item, group in grouped.items():
        ends = list(itertools.accumulate(part.size for part in group))
        assert [part.begin for part in group] == [0, *ends[:-1]]
        assert ends[-1] == item.source.size
        assert [part.last for part in group] == [False] * (len(group) - 1) + [True]
        block = 32 * SIZES[item.source.dtype]
        if item.action is Action.QUANTIZE:
            assert all(part.size % block == 0 for part in group)
            packed, scales = item.outputs
            assert sum(part.packed_size for part in group) == packed.end - packed.begin
            assert sum(part.scales_size for part in group) == scales.end - scales.begin
            assert [part.first_block for part in group] == [p.begin // block for p in group]


@settings(max_examples=60)
@given(
    st.lists(_tensors(), min_size=1, max_size=8),
    st.sampled_from([4096, 8192, MIN_PIECE_SIZE, PIECE_SIZE]),
)
def test_pieces_fit_their_buffers(
    tensors: list[tuple[Action, str, tuple[int, ...]]], piece_size: int
) -> None:
    """Neither the input nor the output of two parts overlaps; a fitting tensor is not cut."""
    for piece in cut_file(_file(tensors), piece_size):
        at = out_at = scales_at = 0
        for part in piece.parts:
            assert part.at >= at
            assert part.at % 64 == 0
            at = part.at + part.size
            if part.item.action is Action.QUANTIZE:
                assert (part.out_at, part.scales_out_at) == (out_at, scales_at)
                out_at, scales_at = out_at + part.packed_size, scales_at + part.scales_size
            assert part.whole or part.item.source.size > piece_size
        assert at <= piece_size
        assert out_at + scales_at <= output_capacity(piece_size)
        assert scales_at <= scales_capacity(piece_size)
        assert piece.source_bytes == sum(part.size for part in piece.parts)


def test_scales_of_cut_tensors_are_counted() -> None:
    file = _file([(Action.QUANTIZE, "BF16", (64, 4096)), (Action.QUANTIZE, "BF16", (32, 1024))])
    assert largest_held(file.items, 4096) == 64 * 4096 // 32
    assert largest_held(file.items, PIECE_SIZE) == 0


# --------------------------------------------------------------------------- budget


def _waiting(scales: int) -> Needs:
    return Needs(held=lambda _: scales)


def _used(budget: Budget, scales: int) -> int:
    size = budget.piece_size
    per_slot = size + output_capacity(size) + scales_capacity(size)
    assert budget.held >= scales
    return budget.slots * per_slot + budget.held


def _assert_least(
    error: UsageError, jobs: int, max_memory: int, scales: int, resident: int
) -> None:
    """The budget that a refusal states is enough, and one byte less is not."""
    least = int(error.message.rpartition(" ")[2])
    assert least > max_memory
    assert f"pass --max-memory {-(-least // MIB)}MiB" in str(error.hint)
    smallest = plan_budget(jobs, least, resident, _waiting(scales))
    assert (smallest.jobs, smallest.piece_size) == (1, MIN_PIECE_SIZE)
    with pytest.raises(UsageError):
        plan_budget(jobs, least - 1, resident, _waiting(scales))


@given(
    jobs=st.integers(1, 256),
    room=st.integers(0, 4096),
    scales=st.integers(0, 64 * MIB),
    resident=st.integers(0, 512 * MIB),
)
def test_budget_is_never_exceeded(jobs: int, room: int, scales: int, resident: int) -> None:
    """What is planned fits; where nothing fits, the least that is stated does."""
    max_memory = resident + room * MIB
    try:
        budget = plan_budget(jobs, max_memory, resident, _waiting(scales))
    except UsageError as error:
        _assert_least(error, jobs, max_memory, scales, resident)
        return
    assert resident + _used(budget, scales) <= max_memory
    assert 1 <= budget.jobs <= jobs
    assert budget.slots >= 2
    assert 1 <= budget.active_files <= budget.jobs
    assert MIN_PIECE_SIZE <= budget.piece_size <= PIECE_SIZE


@given(
    jobs=st.integers(1, 64),
    memory=st.lists(st.integers(64, 4096), min_size=2, max_size=6, unique=True),
    scales=st.integers(0, 8 * MIB),
)
def test_more_memory_never_means_less_work(jobs: int, memory: list[int], scales: int) -> None:
    budgets = [plan_budget(jobs, m * MIB, 8 * MIB, _waiting(scales)) for m in sorted(memory)]
    for less, more in itertools.pairwise(budgets):
        assert less.piece_size <= more.piece_size
        assert less.jobs <= more.jobs
        assert less.slots * less.piece_size <= more.slots * more.piece_size


def test_ample_memory_gives_every_job_its_slots() -> None:
    assert plan_budget(4, 2048 * MIB, 64 * MIB, Needs()).jobs == 4


# --------------------------------------------------------------------------- engine


@dataclass
class Bench:
    """An engine on a real plan, with parts that can be sabotaged."""

    checkpoint: Checkpoint
    plan: Plan
    folder: Path
    jobs: int
    recorded: list[str] = field(default_factory=list)

    def run(
        self,
        *,
        stop: StopToken | None = None,
        quantizer: Any = None,
        read_into: Any = None,
        record: Any = None,
        report: Callable[[Event], None] = ignore,
    ) -> list[str]:
        """Make all files; return the names of those that failed."""
        with SourceReader(self.checkpoint.root, self.checkpoint.files) as reader:
            if read_into:
                reader.read_into = read_into  # type: ignore[method-assign]
            engine = Engine(
                self.plan.files,
                self.folder,
                budget=Budget(
                    self.jobs, 2 * self.jobs, MIN_PIECE_SIZE, max(1, self.jobs // 2), MIB
                ),
                reader=reader,
                quantizer=quantizer or Quantizer(load_backend("auto"), "mse"),
                record=record or (lambda file, result: self.recorded.append(file.name)),
                report=report,
            )
            return [file.name for file, _ in engine.run(stop or StopToken())]

    @property
    def left(self) -> set[str]:
        """Names of the files in the folder."""
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture(params=[1, 4])
def bench(shared_source: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Bench:
    checkpoint = open_checkpoint(shared_source)
    return Bench(checkpoint, build_plan(checkpoint, Options()), tmp_path, request.param)


class FailAt:
    """Raises at the n-th call, from any thread."""

    def __init__(self, number: int, error: BaseException, then: Callable[..., Any]) -> None:
        self._calls = itertools.count(1)
        self._number, self._error, self._then = number, error, then

    def __call__(self, *args: Any, **options: Any) -> Any:
        if next(self._calls) == self._number:
            raise self._error
        return self._then(*args, **options)


class BadQuantizer(Quantizer):
    """Fails at the n-th weight in a way that nobody expects."""

    def __init__(self, number: int, error: BaseException) -> None:
        super().__init__(load_backend("auto"), "mse")
        self.quantize = FailAt(number, error, super().quantize)  # type: ignore[method-assign]


def test_engine_makes_all_files(bench: Bench) -> None:
    assert bench.run() == []
    assert bench.left == {file.name for file in bench.plan.files} == set(bench.recorded)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("jobs", [1, 4])
def test_files_that_wait_for_a_slow_disk_are_few(jobs: int, tmp_path: Path) -> None:
    """Each of them has an open descriptor."""
    model = bf16_model(experts=64, layers=1, hidden=32, inner=32)
    checkpoint = open_checkpoint(model.write(tmp_path / "source"))
    folder = tmp_path / "out"
    folder.mkdir()
    plan = build_plan(checkpoint, Options(experts_per_file=1))
    waiting = []

    def record(_file: OutputFile, _result: FileResult) -> None:
        time.sleep(0.01)
        waiting.append(len(list(folder.glob("*.partial"))))

    bench = Bench(checkpoint, plan, folder, jobs)
    assert bench.run(record=record) == []
    assert bench.left == {file.name for file in plan.files}
    assert max(waiting) <= MOST_CLOSING + max(1, jobs // 2)


@pytest.mark.timeout(30)
def test_partial_file_that_cannot_be_removed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file counts as failed, and the others are made."""

    def discard(_job: FileJob) -> None:
        raise PermissionError

    monkeypatch.setattr(FileJob, "discard", discard)
    failed = bench.run(quantizer=BadQuantizer(1, SourceError("bad weight")))
    assert len(failed) == 1
    assert len(bench.recorded) == len(bench.plan.files) - 1


@pytest.mark.timeout(30)
@pytest.mark.parametrize("number", [1, 7, 48])
@pytest.mark.parametrize("error", [RuntimeError("bug"), MemoryError(), SystemError()], ids=repr)
def test_unexpected_error_in_a_kernel_ends_the_run(
    bench: Bench, number: int, error: BaseException
) -> None:
    """It is raised, nothing hangs, and finished files are all that is left."""
    with pytest.raises(type(error)):
        bench.run(quantizer=BadQuantizer(number, error))
    assert bench.left == set(bench.recorded)


@pytest.mark.timeout(30)
def test_unexpected_error_while_dispatching_ends_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = FailAt(5, MemoryError(), FileJob.next_piece)

    def next_piece(job: FileJob) -> object:
        return fail(job)

    monkeypatch.setattr(FileJob, "next_piece", next_piece)
    with pytest.raises(MemoryError):
        bench.run()
    assert bench.left == set(bench.recorded)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("error", [RuntimeError("bug"), LocalError("disk")], ids=repr)
def test_record_that_cannot_be_written_ends_the_run(bench: Bench, error: Exception) -> None:
    """A file without a record does not get its name."""
    recorded = []
    with pytest.raises(type(error)):
        bench.run(record=FailAt(3, error, lambda file, result: recorded.append(file.name)))
    assert bench.left == set(recorded)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", [Advanced, FileFinished])
def test_reporter_that_raises_ends_the_run(bench: Bench, kind: type[Event]) -> None:
    """Standard output may be a pipe whose reader has gone."""

    def report(event: Event) -> None:
        if isinstance(event, kind):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        bench.run(report=report)
    assert bench.left <= set(bench.recorded)


@pytest.mark.timeout(30)
def test_error_of_one_file_does_not_cost_the_others(bench: Bench) -> None:
    fail = SourceError("not finite", code="non-finite")
    failed = bench.run(quantizer=BadQuantizer(20, fail))
    assert len(failed) == 1
    assert bench.left == {file.name for file in bench.plan.files} - set(failed)


@pytest.mark.timeout(30)
def test_changed_source_ends_the_run(bench: Bench) -> None:
    fail = SourceError("changed", code="source-changed")
    with pytest.raises(SourceError, match="changed"):
        bench.run(quantizer=BadQuantizer(20, fail))
    assert bench.left == set(bench.recorded)


@pytest.mark.timeout(30)
def test_signal_before_the_first_file(bench: Bench) -> None:
    stop = StopToken()
    stop.set(15)
    with pytest.raises(Interrupted) as caught:
        bench.run(stop=stop)
    assert caught.value.exit_status == 143
    assert bench.left == set(bench.recorded)


@pytest.mark.timeout(30)
def test_signal_between_files(bench: Bench) -> None:
    """What is finished stays under its name, the rest leaves nothing."""
    stop = StopToken()

    def report(event: Event) -> None:
        if isinstance(event, FileFinished):
            stop.set(2)

    with pytest.raises(Interrupted) as caught:
        bench.run(stop=stop, report=report)
    assert caught.value.exit_status == 130
    assert bench.left == set(bench.recorded)
    assert bench.left


# --------------------------------------------------------------------------- the kernel, early


@pytest.mark.parametrize("sums", [False, True])
def test_the_kernel_is_compiled_meanwhile(sums, monkeypatch):
    """Once for the run, under the rule and the kind of kernel that it will use."""
    calls = []
    monkeypatch.setattr(
        Quantizer, "quantize", lambda self, *_, sums: calls.append((self._rule, sums is not None))
    )
    with compiling("numpy", "even", sums=sums):
        pass
    assert calls == [("even", sums)]


def test_a_backend_that_is_missing_is_left_to_the_run(monkeypatch):
    def refuse(name):
        raise MissingExtraError(f"backend {name}")

    monkeypatch.setattr("mxconvert.quantize.load_backend", refuse)
    with compiling("llvm", "mse", sums=True):
        pass
