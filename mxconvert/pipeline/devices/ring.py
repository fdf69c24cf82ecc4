"""One GPU at work: a ring of buffers, a stream each for copies in, kernels and copies out.

Whoever has read a piece enqueues its copies and launches, if an entry of the ring is free;
one thread waits for the entries in their order and hands the pieces back. Nothing waits for
a device but that thread, so while one piece is copied in, another is computed and a third
copied out.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mxconvert import failpoints
from mxconvert.model import BLOCK_SIZE
from mxconvert.pipeline.devices.launches import FACTOR_BYTES, MOST_LAUNCHES, copies_in, joined
from mxconvert.pipeline.pieces import output_capacity, scales_capacity
from mxconvert.pipeline.slots import SLOTS_PER_DEVICE
from mxconvert.quantize import NO_PLACE, SUMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from mxconvert.pipeline.devices.launches import Launch
    from mxconvert.pipeline.devices.protocol import Device, Event, Stream
    from mxconvert.pipeline.slots import Slot

ENTRIES = SLOTS_PER_DEVICE
"""Pieces that a device has at once: one in each stream, and one that waits."""

_FEWEST = 2
_STREAMS = 3
_FOUND_BYTES = 16
_SUMS_BYTES = 8 * SUMS


@dataclass(frozen=True, slots=True)
class Work:
    """A piece that was read, for a device.

    Attributes:
        slot: Holds what was read, and receives what is made.
        launches: What is to be done.
        factors: Float32, those of all launches.
        num_bytes: Source bytes.
        back: Called, from any thread, with what came of it.
    """

    slot: Slot
    launches: tuple[Launch, ...]
    factors: NDArray[np.float32]
    num_bytes: int
    back: Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a device made of a piece.

    Attributes:
        device: Its name.
        error: Why it failed; then the slot must not be used again, since copies into it may
            still be under way.
        found: Int64 ``[launches, 2]``: how many elements are not finite, and the first of them.
        sums: Float64 ``[programs, SUMS]``.
        blocks_each: Blocks for each program.
    """

    device: str
    error: Exception | None = None
    found: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    sums: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, SUMS)))
    blocks_each: int = 1


def sizes(piece_size: int, blocks_each: int) -> dict[str, int]:
    """Return the bytes of each buffer of an entry."""
    blocks = piece_size // BLOCK_SIZE
    return {
        "source": piece_size,
        "output": output_capacity(piece_size),
        "scales": scales_capacity(piece_size),
        "factors": blocks * FACTOR_BYTES,
        "found": MOST_LAUNCHES * _FOUND_BYTES,
        "sums": (blocks // blocks_each + MOST_LAUNCHES) * _SUMS_BYTES,
    }


class _Entry:
    """The buffers of one piece, on the device and (small ones) on the host."""

    def __init__(self, device: Device, piece_size: int) -> None:
        wanted = sizes(piece_size, device.programs_blocks)
        self.buffers: dict[str, Any] = {
            name: device.allocate(size) for name, size in wanted.items()
        }
        self.host = {
            name: memoryview(mmap.mmap(-1, wanted[name])) for name in ("factors", "found", "sums")
        }
        for view in self.host.values():
            device.pin(view)

    def outcome(self, device: Device, work: Work) -> Outcome:
        """Copy the small results out of the entry."""
        launches = len(work.launches)
        found = np.frombuffer(self.host["found"], np.int64)[: 2 * launches].reshape(-1, 2).copy()
        sums = np.frombuffer(self.host["sums"], np.float64)[: num_programs(device, work) * SUMS]
        return Outcome(
            device=device.name,
            found=found,
            sums=sums.reshape(-1, SUMS).copy(),
            blocks_each=device.programs_blocks,
        )


def num_programs(device: Device, work: Work) -> int:
    """Return how many programs store sums; none do unless errors are measured."""
    measured = (launch for launch in work.launches if launch.measure)
    each = device.programs_blocks
    return max((end for launch in measured for _, _, end in launch.programs(each)), default=0)


class Ring:
    """A device and what it has to do.

    Args:
        device: The device.
        piece_size: Source bytes of a piece.
        failed: Called once, with the error, when the device fails.
        freed: Called when an entry is free again.
    """

    def __init__(
        self,
        device: Device,
        piece_size: int,
        *,
        failed: Callable[[Ring, Exception], None],
        freed: Callable[[], None],
    ) -> None:
        self.device = device
        self.description = ""
        self.error: Exception | None = None
        self.num_bytes = 0
        self._piece_size = piece_size
        self._failed, self._freed = failed, freed
        self._changed = threading.Condition()
        self._order = threading.Lock()
        self._free: deque[_Entry] = deque()
        self._away: deque[tuple[Work, _Entry, Event]] = deque()
        self._closing = False
        self._streams: tuple[Stream, ...] = ()
        self.entries = 0
        self._thread = threading.Thread(
            target=self._wait, name=f"mxconvert-{device.name}", daemon=True
        )

    def open(self) -> None:
        """Allocate the ring, a shorter one if there is little room.

        Raises:
            Exception: The device cannot be used.
        """
        self.description = self.device.open()
        entries: list[_Entry] = []
        while len(entries) < ENTRIES:
            try:
                entries.append(_Entry(self.device, self._piece_size))
            except Exception:
                if len(entries) < _FEWEST:
                    raise
                break
        self._streams = tuple(self.device.stream() for _ in range(_STREAMS))
        self.entries = len(entries)
        self._thread.start()
        with self._changed:
            self._free.extend(entries)

    @property
    def load(self) -> int:
        """Pieces that are on the device now."""
        return len(self._away)

    @property
    def is_full(self) -> bool:
        """Whether a piece would have to wait."""
        return not self._free

    @property
    def memory(self) -> int:
        """Bytes of device memory of the whole ring."""
        return self.entries * sum(sizes(self._piece_size, self.device.programs_blocks).values())

    def offer(self, work: Work) -> bool:
        """Take a piece if there is room for it; it comes back in any case then."""
        with self._changed:
            if self.error is not None or self._closing or not self._free:
                return False
            entry = self._free.popleft()
        error = None
        with self._order:
            try:
                event = self._enqueue(entry, work)
            except Exception as found:  # noqa: BLE001  (whatever a driver raises)
                error = found
            else:
                with self._changed:
                    error = self.error
                    if error is None:
                        self._away.append((work, entry, event))
                        self._changed.notify()
        if error is not None:
            self.fail(error)
            work.back(Outcome(self.device.name, error))
        return True

    def _enqueue(self, entry: _Entry, work: Work) -> Event:
        failpoints.hit("device.enqueue", self.device.name)
        copy_in, compute, copy_out = self._streams
        self._copy_in(copy_in, entry, work)
        compute.wait(copy_in.record())
        for launch in work.launches:
            compute.launch(launch, entry.buffers)
        copy_out.wait(compute.record())
        self._copy_out(copy_out, entry, work)
        return copy_out.record()

    @staticmethod
    def _copy_in(stream: Stream, entry: _Entry, work: Work) -> None:
        buffers, host = entry.buffers, entry.host
        for begin, end in copies_in(work.launches):
            stream.copy_in(work.slot.input[begin:end], buffers["source"], begin)
        if work.factors.size:
            size = work.factors.nbytes
            host["factors"][:size] = work.factors.data.cast("B")
            stream.copy_in(host["factors"][:size], buffers["factors"], 0)
        found = np.frombuffer(host["found"], np.int64).reshape(-1, 2)
        found[: len(work.launches)] = (0, NO_PLACE)
        size = len(work.launches) * _FOUND_BYTES
        stream.copy_in(host["found"][:size], buffers["found"], 0)

    def _copy_out(self, stream: Stream, entry: _Entry, work: Work) -> None:
        buffers, host = entry.buffers, entry.host
        for begin, end in joined(launch.output for launch in work.launches):
            stream.copy_out(buffers["output"], begin, work.slot.output[begin:end])
        for begin, end in joined(launch.scales for launch in work.launches):
            stream.copy_out(buffers["scales"], begin, work.slot.scales[begin:end])
        stream.copy_out(buffers["found"], 0, host["found"][: len(work.launches) * _FOUND_BYTES])
        if size := num_programs(self.device, work) * _SUMS_BYTES:
            stream.copy_out(buffers["sums"], 0, host["sums"][:size])

    # ------------------------------------------------------------------ the thread that waits

    def _wait(self) -> None:
        while True:
            with self._changed:
                while not self._away and not self._closing and self.error is None:
                    self._changed.wait()
                if not self._away:
                    return
                work, entry, event = self._away[0]
            try:
                event.synchronize()
                failpoints.hit("device.done", self.device.name)
                outcome = entry.outcome(self.device, work)
            except Exception as error:  # noqa: BLE001  (whatever a driver raises)
                self.fail(error)
                return
            with self._changed:
                if self.error is not None:  # `fail` has handed it back
                    return
                self._away.popleft()
                self._free.append(entry)
                self.num_bytes += work.num_bytes
            work.back(outcome)
            self._freed()

    def fail(self, error: Exception) -> None:
        """Use the device no more and hand back what it has."""
        with self._changed:
            if self.error is not None:
                return
            self.error = error
            away, self._away = list(self._away), deque()
            self._free.clear()
            self._changed.notify_all()
        self._failed(self, error)
        for work, _, _ in away:
            work.back(Outcome(self.device.name, error))
        self._freed()

    def close(self, seconds: float) -> None:
        """Wait for what is under way, so long at most, and let go of the device."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(seconds)
        if not self._thread.is_alive():
            with contextlib.suppress(Exception):  # a lost device cannot be let go of
                self.device.close()
