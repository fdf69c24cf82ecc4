"""A GPU made of threads: streams that lag, events between them, memory of its own.

What a stream is given it does later, on a thread of its own, after a delay; two streams are
ordered by events alone. Device memory is filled with what nobody writes, and host buffers are
read when the copy runs, not when it is asked for. So an event that is missing, a buffer that is
used again too early, or a byte that nobody copies shows as wrong bytes.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mxconvert.pipeline.devices.launches import FACTOR_BYTES, Kind
from mxconvert.quantize import SUMS, ErrorSums, Quantizer, load_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mxconvert.pipeline.devices.launches import Launch
    from mxconvert.pipeline.pieces import Part

POISON = 0xA5


class DeviceLostError(RuntimeError):
    """What the device raises once it is lost."""


@dataclass
class FakeEvent:
    """Set by the stream that recorded it."""

    device: FakeDevice
    happened: threading.Event = field(default_factory=threading.Event)

    def synchronize(self) -> None:
        while not self.happened.wait(0.01):
            self.device.check()
        self.device.check()


@dataclass
class Step:
    """What a stream did: which, what, when."""

    stream: int
    what: str
    begin: float
    end: float


class FakeDevice:
    """See the module.

    Args:
        name: Of the device.
        delays: Seconds that a copy in, a launch and a copy out take.
        seed: Of what varies the delays.
        room: Bytes of device memory.
        fail_open: Raised by `open`.
        wrong: Whether kernels give a wrong byte.
        blocks: For each program.
    """

    def __init__(
        self,
        name: str = "fake:0",
        *,
        delays: tuple[float, float, float] = (0.0, 0.0, 0.0),
        seed: int = 0,
        room: int = 1 << 40,
        fail_open: Exception | None = None,
        wrong: bool = False,
        blocks: int = 4,
    ) -> None:
        self.name = name
        self.programs_blocks = blocks
        self.delays = delays
        self.room = room
        self.fail_open = fail_open
        self.wrong = wrong
        self.lost: Exception | None = None
        self.lose_at: Callable[[str, int], Exception | None] = lambda what, count: None
        self.steps: list[Step] = []
        self.launches: list[Launch] = []
        self.pinned = 0
        self.closed = False
        self.streams: list[FakeStream] = []
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._counts = {"in": 0, "launch": 0, "out": 0}

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def open(self) -> str:
        if self.fail_open is not None:
            raise self.fail_open
        return "a fake"

    def allocate(self, size: int) -> bytearray:
        self.room -= size
        if self.room < 0:
            raise MemoryError("out of memory")
        return bytearray([POISON]) * size

    def stream(self) -> FakeStream:
        made = FakeStream(self, len(self.streams))
        self.streams.append(made)
        return made

    def pin(self, host: memoryview) -> None:
        self.pinned += host.nbytes

    def close(self) -> None:
        self.closed = True
        for stream in self.streams:
            stream.stop()

    def perform(self, stream: int, what: str, action: Callable[[], None]) -> None:
        """Do a step on a stream's thread, late."""
        if self.lost is not None:
            return
        begin = time.monotonic()
        delay = self.delays[stream % 3]
        if delay and what in self._counts:
            time.sleep(delay * self._random.uniform(0.5, 1.5))
        if what in self._counts:
            with self._lock:
                self._counts[what] += 1
                lost = self.lose_at(what, self._counts[what])
            if lost is not None:
                self.lost = lost
                return
        action()
        with self._lock:
            self.steps.append(Step(stream, what, begin, time.monotonic()))


class FakeStream:
    """A thread with a queue."""

    def __init__(self, device: FakeDevice, number: int) -> None:
        self._device, self._number = device, number
        self._queue: queue.SimpleQueue[tuple[str, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (step := self._queue.get()) is not None:
            what, action = step
            try:
                self._device.perform(self._number, what, action)
            except Exception as error:  # noqa: BLE001  (as a GPU reports what a kernel did: later)
                self._device.lost = self._device.lost or error

    def _put(self, what: str, action: Callable[[], None]) -> None:
        self._device.check()
        self._queue.put((what, action))

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join(5)

    def copy_in(self, host: memoryview, buffer: bytearray, at: int) -> None:
        def copy() -> None:
            buffer[at : at + host.nbytes] = host

        self._put("in", copy)

    def copy_out(self, buffer: bytearray, at: int, host: memoryview) -> None:
        def copy() -> None:
            host[:] = memoryview(buffer)[at : at + host.nbytes]

        self._put("out", copy)

    def launch(self, launch: Launch, buffers: Mapping[str, bytearray]) -> None:
        self._device.launches.append(launch)
        self._put("launch", lambda: run_launch(self._device, launch, buffers))

    def wait(self, event: FakeEvent) -> None:
        def wait() -> None:
            while not event.happened.wait(0.01):
                if self._device.lost is not None:
                    return

        self._put("wait", wait)

    def record(self) -> FakeEvent:
        event = FakeEvent(self._device)
        self._put("record", event.happened.set)
        return event


# ------------------------------------------------------------------------------- kernels


def run_launch(device: FakeDevice, launch: Launch, buffers: Mapping[str, bytearray]) -> None:
    """Do what a launch asks for with the CPU's kernels, on the device's own memory."""
    views = {name: memoryview(buffer) for name, buffer in buffers.items()}
    quantizer = Quantizer(load_backend("auto"), launch.rule)
    if launch.kind is Kind.DECODE:
        _decode(launch, views, quantizer)
    else:
        _compute(device, launch, views, quantizer)
    if device.wrong:
        views["output"][launch.output[0]] ^= 1


def _decode(launch: Launch, views: Mapping[str, memoryview], quantizer: Quantizer) -> None:
    part = launch.parts[0]
    quantizer.dequantize(
        views["source"][part.at : part.at + part.size],
        views["source"][part.scales_at : part.scales_at + part.stored_scales_size],
        views["output"][slice(*launch.output)],
    )


def _compute(
    device: FakeDevice, launch: Launch, views: Mapping[str, memoryview], quantizer: Quantizer
) -> None:
    at_factor, at_block = launch.factors[0], 0
    found = np.frombuffer(views["found"], np.int64).reshape(-1, 2)[launch.number]
    for part, begin, end in launch.programs(device.programs_blocks):
        size = part.scales_size * FACTOR_BYTES if launch.scaled else 0
        factors = views["factors"][at_factor : at_factor + size]
        at_factor += size
        sums = ErrorSums() if launch.measure else None
        bad = _part(launch, part, views, factors, quantizer, sums)
        if bad.count:
            found[1] = min(found[1], at_block * 32 + bad.first)
            found[0] += bad.count
        at_block += part.scales_size
        if sums is not None:
            programs = np.frombuffer(views["sums"], np.float64)
            programs[begin * SUMS : end * SUMS] = 0
            programs[begin * SUMS : (begin + 1) * SUMS] = _row(sums)


def _row(sums: ErrorSums) -> list[float]:
    below, _, above = sums.exponents
    return [
        sums.sum_x2, sums.sum_q2, sums.sum_err2, sums.max_abs_err,
        sums.flushed, sums.saturated, below, above, sums.blocks,
    ]  # fmt: skip


def _part(  # noqa: PLR0917
    launch: Launch,
    part: Part,
    views: Mapping[str, memoryview],
    factors: memoryview,
    quantizer: Quantizer,
    sums: ErrorSums | None,
) -> Any:
    source = views["source"][part.at : part.at + part.size]
    if launch.kind is Kind.WIDEN:
        return quantizer.widen_scaled(
            source, launch.dtype, factors, views["output"][slice(*launch.output)]
        )
    packed = views["output"][part.out_at : part.out_at + part.packed_size]
    scales = views["scales"][part.scales_out_at : part.scales_out_at + part.scales_size]
    if launch.scaled:
        return quantizer.quantize_scaled(source, launch.dtype, factors, packed, scales, sums=sums)
    if launch.transposed is not None:
        rows, columns = launch.transposed
        kind = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}[launch.dtype]
        stored = np.frombuffer(source, kind).reshape(columns, rows)
        source = memoryview(np.ascontiguousarray(stored.T)).cast("B")
    return quantizer.quantize(source, launch.dtype, packed, scales, sums=sums)
