"""GPUs beside the CPU's workers, played by threads that lag: order, overlap, limits, failures."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mxconvert import failpoints
from mxconvert.errors import MissingExtraError, SourceError
from mxconvert.events import Notice, ignore
from mxconvert.pipeline.devices import Devices
from mxconvert.pipeline.devices.launches import Kind, joined, plan_launches
from mxconvert.pipeline.devices.ring import ENTRIES
from mxconvert.pipeline.pieces import PIECE_SIZE, cut_file
from mxconvert.quantize import Quantizer, load_backend
from tests.convert_base import GATE, MIB, SOURCES, Run, changed
from tests.support import bf16_model
from tests.support.device import DeviceLostError, FakeDevice, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from mxconvert.events import Event
    from mxconvert.pipeline.devices.protocol import Device

SLOW = (0.004, 0.002, 0.003)


def devices_on(
    makers: Sequence[Callable[[], Device]],
    *,
    piece_size: int = PIECE_SIZE,
    helped: bool = False,
    required: bool = True,
    report: Callable[[Event], None] = ignore,
) -> Devices:
    """Return opened devices."""
    made = Devices(
        makers,
        Quantizer(load_backend("auto"), "mse"),
        piece_size,
        helped=helped,
        required=required,
        report=report,
    )
    made.start()
    return made


def devices_of(*fakes: FakeDevice, **options: Any) -> Devices:
    """Return opened fakes."""
    return devices_on([lambda fake=fake: fake for fake in fakes], **options)


class Notices:
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.found: list[Notice] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.found.append(event)

    @property
    def codes(self) -> list[str]:
        return [notice.code for notice in self.found]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, bytes]]:
    """A model of several files and many pieces, and what the CPU makes of it."""
    run = Run(bf16_model(layers=2, experts=4), tmp_path_factory.mktemp("small"))
    return run, run("cpu", 4096)


# ----------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("source", SOURCES)
def test_same_bytes_and_statistics_of_every_source(source: str, tmp_path: Path) -> None:
    """All layouts and dtypes, cut small and large, by a device alone."""
    run = Run(SOURCES[source](), tmp_path)
    expected = run("cpu", PIECE_SIZE)
    before = dict(run.results)
    for piece_size, jobs in ((8192, 3), (PIECE_SIZE, 1)):
        fake, notices = FakeDevice(), Notices()
        size = run.piece_size(piece_size)
        devices = devices_of(fake, piece_size=size, report=notices)
        made = run(f"gpu-{piece_size}", piece_size, jobs=jobs, held=MIB, devices=devices)
        assert made == expected
        assert notices.codes == []
        assert fake.closed
        for name, result in run.results.items():
            assert (result.outputs, result.sources) == (before[name].outputs, before[name].sources)
            close(result.statistics, before[name].statistics)


def close(found: Any, expected: Any) -> None:
    """Sums may differ in their last digits, as pieces are cut elsewhere; counts may not."""
    assert found._tensors.keys() == expected._tensors.keys()
    for name, sums in expected._tensors.items():
        mine = found._tensors[name]
        assert (mine.blocks, mine.flushed, mine.saturated, mine.exponents, mine.max_abs_err) == (
            sums.blocks, sums.flushed, sums.saturated, sums.exponents, sums.max_abs_err,
        )  # fmt: skip
        for figure in ("sum_x2", "sum_q2", "sum_err2"):
            np.testing.assert_allclose(getattr(mine, figure), getattr(sums, figure), rtol=1e-6)


def test_a_device_does_all_it_can(tmp_path: Path) -> None:
    """Of these sources no quantized weight is left to the host."""
    for source in ("fused, transposed, large", "FP8 by blocks", "plain"):
        if source not in SOURCES:
            continue
        run = Run(SOURCES[source](), tmp_path / source.replace(",", "").replace(" ", "-"))
        fake = FakeDevice()
        run("gpu", PIECE_SIZE, devices=devices_of(fake, piece_size=run.piece_size(PIECE_SIZE)))
        done = {part.item.source.name for launch in fake.launches for part in launch.parts}
        wanted = {
            item.source.name
            for file in run.plan.files
            for item in file.items
            if str(item.action) == "quantize"
        }
        assert wanted
        assert wanted <= done


@pytest.mark.parametrize("seed", range(4))
def test_lagging_streams_change_no_byte(small: tuple[Run, dict[str, bytes]], seed: int) -> None:
    """Buffers are used again only when the device is done with them, whatever is slowest."""
    run, expected = small
    delays = [(0.003, 0, 0), (0, 0.003, 0), (0, 0, 0.003), SLOW][seed]
    fakes = [FakeDevice(f"fake:{n}", delays=delays, seed=seed + n) for n in range(2)]
    devices = devices_of(*fakes, piece_size=4096, helped=bool(seed % 2))
    assert run(f"lag-{seed}", 4096, jobs=3, devices=devices) == expected
    assert all(fake.launches for fake in fakes), "work goes to both"


def test_small_tensors_share_launches(tmp_path: Path) -> None:
    """Experts of a few KiB: one launch and two copies back for many of them."""
    run = Run(bf16_model(layers=2, experts=16), tmp_path)
    fake = FakeDevice()
    run("gpu", PIECE_SIZE, devices=devices_of(fake))
    parts = sum(len(launch.parts) for launch in fake.launches)
    assert parts == 1 + 2 * 16 * 3
    assert len(fake.launches) <= 1 + len(run.plan.files)


# ----------------------------------------------------------------------- the ring


def test_copies_and_kernels_overlap(small: tuple[Run, dict[str, bytes]]) -> None:
    """While one piece is computed another is copied in and a third one out."""
    run, expected = small
    fake = FakeDevice(delays=(0.004, 0.008, 0.002))  # 2 copies in, a launch, 4 copies out
    assert run("overlap", 4096, jobs=4, devices=devices_of(fake, piece_size=4096)) == expected
    spans = {what: [s for s in fake.steps if s.what == what] for what in ("in", "launch", "out")}

    def beside(step: Step, what: str) -> bool:
        return any(s.begin < step.end and step.begin < s.end for s in spans[what])

    overlapping = [s for s in spans["launch"] if beside(s, "in") and beside(s, "out")]
    assert len(overlapping) > len(spans["launch"]) / 3, "streams that take turns would give none"


def test_no_more_pieces_than_the_ring_has(small: tuple[Run, dict[str, bytes]]) -> None:
    """A slow device holds the readers back; its memory is what was allocated at the start."""
    run, expected = small
    fake = FakeDevice(delays=(0, 0.01, 0))
    room = fake.room
    devices = devices_of(fake, piece_size=4096)
    ring = devices._rings[0]
    assert room - fake.room == ring.memory
    most, enqueue = 0, ring._enqueue

    def counting(*arguments: Any) -> Any:
        nonlocal most
        most = max(most, ring.load + 1)
        return enqueue(*arguments)

    ring._enqueue = counting  # type: ignore[method-assign]
    taken = fake.room
    assert run("ring", 4096, jobs=8, devices=devices) == expected
    assert most == ENTRIES
    assert fake.room == taken, "nothing is allocated later"


def test_the_host_helps_when_the_device_is_full(small: tuple[Run, dict[str, bytes]]) -> None:
    run, expected = small
    fake = FakeDevice(delays=(0.05, 0, 0))
    devices = devices_of(fake, piece_size=4096, helped=True)
    assert run("help", 4096, jobs=2, devices=devices) == expected
    (use,) = devices.uses()
    total = sum(item.source_size for file in run.plan.files for item in file.items)
    assert 0 < use.source_bytes < total / 2


def test_little_memory_makes_a_short_ring(small: tuple[Run, dict[str, bytes]]) -> None:
    """Two entries will do; fewer will not, and that is an error of the device."""
    run, expected = small
    probe = FakeDevice()
    before = probe.room
    devices = devices_of(probe, piece_size=4096)
    entry = (before - probe.room) // ENTRIES
    devices.close()
    fake = FakeDevice(room=2 * entry + entry // 2)
    devices = devices_of(fake, piece_size=4096)
    assert devices._rings[0].entries == 2
    assert run("short", 4096, jobs=3, devices=devices) == expected
    with pytest.raises(MissingExtraError, match=r"fake:0: out of memory"):
        devices_of(FakeDevice(room=entry + entry // 2), piece_size=4096)


# ------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("what", ["in", "launch", "out"])
@pytest.mark.parametrize("others", [0, 1])
def test_a_lost_device_costs_no_byte(
    small: tuple[Run, dict[str, bytes]], what: str, others: int
) -> None:
    """What it had goes to another one, or to the CPU; said once."""
    run, expected = small
    notices = Notices()
    bad = FakeDevice("fake:9", delays=SLOW)
    good = [FakeDevice(f"fake:{n}", delays=SLOW) for n in range(others)]
    devices = devices_of(bad, *good, piece_size=4096, report=notices)
    bad.lose_at = lambda kind, count: (
        DeviceLostError("unspecified launch failure") if kind == what and count > 9 else None
    )
    assert run(f"lost-{what}-{others}", 4096, jobs=4, devices=devices) == expected
    assert notices.codes == ["device-failed"]
    assert "fake:9: unspecified launch failure" in notices.found[0].message
    by_name = {use.name: use for use in devices.uses()}
    assert by_name["fake:9"].error == "unspecified launch failure"
    assert all(by_name[fake.name].error is None for fake in good)
    assert all(fake.launches for fake in good)


@pytest.mark.parametrize("point", ["device.enqueue", "device.done"])
def test_errors_at_any_moment(
    small: tuple[Run, dict[str, bytes]], point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While work is handed over, and while it is taken back."""
    run, expected = small
    notices = Notices()
    devices = devices_of(FakeDevice(), piece_size=4096, report=notices)
    monkeypatch.setattr(failpoints, "_points", failpoints._parse(f"{point}:5=eio"))
    monkeypatch.setattr(failpoints, "_hits", {})
    assert run(f"error-{point}", 4096, jobs=3, devices=devices) == expected
    assert notices.codes == ["device-failed"]


def test_a_device_that_dies_late_writes_nowhere(small: tuple[Run, dict[str, bytes]]) -> None:
    """Copies that are still under way when it is given up end in buffers nobody uses again."""
    run, expected = small
    fake = FakeDevice(delays=(0, 0, 0.02))
    devices = devices_of(fake, piece_size=4096)
    ring = devices._rings[0]
    calls = 0
    enqueue = ring._enqueue

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        event = enqueue(*arguments)
        if calls == 4:  # everything is enqueued and will happen, but the caller hears of an error
            raise DeviceLostError("an error of something earlier")
        return event

    ring._enqueue = failing  # type: ignore[method-assign]
    made = run("late", 4096, jobs=2, devices=devices)
    time.sleep(0.1)  # the late copies
    assert made == expected
    assert {path.name: path.read_bytes() for path in (run.folder / "late").iterdir()} == expected


def test_a_device_with_wrong_bytes_is_not_used(small: tuple[Run, dict[str, bytes]]) -> None:
    """Found before it gets any work; the other one does it."""
    run, expected = small
    notices = Notices()
    wrong, right = FakeDevice("fake:0", wrong=True), FakeDevice("fake:1")
    devices = devices_of(wrong, right, piece_size=4096, report=notices)
    assert run("wrong", 4096, jobs=2, devices=devices) == expected
    assert notices.codes == ["device-failed"]
    assert "gives 1 of" in notices.found[0].message
    assert len(wrong.launches) == 1
    with pytest.raises(MissingExtraError, match=r"gives 1 of .* otherwise than the CPU"):
        devices_of(FakeDevice(wrong=True), piece_size=4096)


def test_devices_that_cannot_be_opened(small: tuple[Run, dict[str, bytes]]) -> None:
    """Required: status 8 and why; found by `auto`: a warning, and the CPU does it."""
    run, expected = small
    broken = RuntimeError("CUDA driver version is insufficient")
    with pytest.raises(MissingExtraError, match="fake:0: CUDA driver version") as error:
        devices_of(FakeDevice(fail_open=broken))
    assert error.value.exit_status == 8
    notices = Notices()
    devices = devices_of(FakeDevice(fail_open=broken), helped=True, required=False, report=notices)
    assert run("unopened", 4096, jobs=2, devices=devices) == expected
    assert notices.codes == ["device-failed"]


def test_a_device_that_opens_late_joins_in(small: tuple[Run, dict[str, bytes]]) -> None:
    """Nothing waits for it where the CPU helps."""
    run, expected = small
    gate = threading.Event()

    class Late(FakeDevice):
        def open(self) -> str:
            gate.wait(20)
            return super().open()

    late = Late()
    devices = devices_of(late, piece_size=4096, helped=True, required=False)
    seen = 0

    def report(event: Event) -> None:
        nonlocal seen
        seen += 1
        if seen == 20:  # the CPU is at work
            gate.set()
            with devices._changed:
                while not devices._rings:
                    devices._changed.wait(5)

    assert run("late-open", 4096, jobs=1, devices=devices, report=report) == expected
    (use,) = devices.uses()
    assert use.source_bytes > 0


@pytest.mark.parametrize("at", [0, 20])
def test_nan_is_named_as_on_the_cpu(tmp_path: Path, at: int) -> None:
    """Tensor, count, first element: the same error, from a batch of several weights."""
    model = bf16_model(layers=1, experts=4)
    name = next(n for n in model.tensors if f"experts.2.{GATE}" in n)
    run = Run(changed(model, name, (1, at), float("nan")), tmp_path)
    with pytest.raises(SourceError) as expected:
        run("cpu", PIECE_SIZE)
    with pytest.raises(SourceError) as found:
        run("gpu", PIECE_SIZE, devices=devices_of(FakeDevice()))
    assert found.value.message == expected.value.message
    assert name in found.value.message


# --------------------------------------------------------------------------- planning


def test_launches_cover_each_part_once(tmp_path: Path) -> None:
    """Programs, factors and ranges of the launches of a piece do not overlap."""
    for name, make in SOURCES.items():
        run = Run(make(), tmp_path / "".join(c for c in name if c.isalnum()))
        for file in run.plan.files:
            for piece in cut_file(file, run.piece_size(65536)):
                launches = plan_launches(
                    piece, "mse", measure=True, blocks_each=4, has_factors=lambda _: True
                )
                parts = [part for launch in launches for part in launch.parts]
                assert len({id(part) for part in parts}) == len(parts)
                programs = [span for launch in launches for span in launch.programs(4)]
                ends = [0, *(end for _, _, end in programs)]
                assert [begin for _, begin, _ in programs] == ends[:-1]
                assert all(len(x.parts) == 1 for x in launches if x.kind is not Kind.QUANTIZE)


def test_joined_ranges() -> None:
    assert list(joined([(0, 4), (4, 8), (9, 9), (12, 16)])) == [(0, 8), (12, 16)]
    assert list(joined([(0, 4), (6, 8), (12, 16)], gap=2)) == [(0, 8), (12, 16)]
    assert list(joined([])) == []
