"""The GPUs of a run: opened beside it, checked before they are trusted, given what fits."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.errors import MissingExtraError
from mxconvert.events import Notice
from mxconvert.pipeline.devices.check import check_device
from mxconvert.pipeline.devices.ring import Ring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mxconvert.events import Reporter
    from mxconvert.pipeline.devices.protocol import Device
    from mxconvert.pipeline.devices.ring import Work
    from mxconvert.pipeline.slots import Slot
    from mxconvert.quantize import Quantizer

_CLOSE_SECONDS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What a device did in a run.

    Attributes:
        name: ``cuda:0``, or ``cpu``.
        description: What it is.
        source_bytes: Of the pieces that it made.
        memory: Bytes of its memory that the ring takes.
        error: Why it was given up, ``None`` if it was not.
    """

    name: str
    description: str
    source_bytes: int
    memory: int = 0
    error: str | None = None


class Devices:
    """Some GPUs and the pieces on them.

    Args:
        devices: Each makes one; it is opened on a thread of its own.
        quantizer: The host's kernels, with which each device is compared first.
        piece_size: Source bytes of a piece.
        helped: Whether the host makes a piece rather than wait for a device.
        required: Whether `start` waits, and fails if none can be used.
        report: Told about devices that cannot be used, or no longer.
    """

    def __init__(
        self,
        devices: Sequence[Callable[[], Device]],
        quantizer: Quantizer,
        piece_size: int,
        *,
        helped: bool,
        required: bool,
        report: Reporter,
    ) -> None:
        self._required = required
        self._makers = devices
        self._quantizer = quantizer
        self._piece_size = piece_size
        self._helped = helped
        self._report = report
        self._changed = threading.Condition()
        self._rings: list[Ring] = []
        self._uses: list[DeviceUse] = []
        self._opening = len(devices)
        self._closing = False
        self._slots: list[Slot] = []
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to open the devices; the host can work meanwhile.

        Raises:
            MissingExtraError: One is required and none can be used.
        """
        for number, make in enumerate(self._makers):
            thread = threading.Thread(
                target=self._open, args=(make,), name=f"mxconvert-open-{number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        if self._required:
            self._wait_open()

    def pin(self, slots: Iterable[Slot]) -> None:
        """Pin the memory of slots, for devices that open later, too."""
        with self._changed:
            self._slots = list(slots)
            rings = list(self._rings)
        for ring in rings:
            self._pin(ring.device)

    def _pin(self, device: Device) -> None:
        for slot in self._slots:
            for view in (slot.input, slot.output, slot.scales):
                device.pin(view)

    def _open(self, make: Callable[[], Device]) -> None:
        name, ring = "GPU", None
        try:
            device = make()
            name = device.name
            ring = Ring(device, self._piece_size, failed=self._failed, freed=self._freed)
            ring.open()
            check_device(ring, self._quantizer, self._piece_size)
            self._pin(device)
        except Exception as error:  # noqa: BLE001  (whatever torch, Triton or a driver raises)
            if ring is None or ring.error is None:
                self._give_up(name, "", error)
            if ring is not None:
                ring.close(_CLOSE_SECONDS)
            ring = None
        with self._changed:
            if ring is not None and not self._closing:
                self._rings.append(ring)
            self._opening -= 1
            self._changed.notify_all()

    def _wait_open(self) -> None:
        with self._changed:
            while self._opening:
                self._changed.wait()
            if self._rings:
                return
            reasons = "; ".join(f"{use.name}: {use.error}" for use in self._uses)
        raise MissingExtraError(
            f"no GPU can be used: {reasons}",
            hint="leave --backend and --device away to run on the CPU; `mxconvert doctor "
            "--backend triton` tells more",
            code="no-gpu",
        )

    def offer(self, work: Work) -> bool:
        """Give a piece to the device with the fewest; ``False`` if the host shall make it.

        Where the host does not help this waits for a device.
        """
        while True:
            with self._changed:
                rings = sorted(self._rings, key=lambda ring: ring.load)
            if any(ring.offer(work) for ring in rings):
                return True
            with self._changed:
                # `_freed` takes the lock: an entry that was freed since shows as a low load.
                if self._helped or self._closing or not (self._rings or self._opening):
                    return False
                if all(ring.is_full for ring in self._rings):
                    self._changed.wait()

    def _freed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _failed(self, ring: Ring, error: Exception) -> None:
        with self._changed:
            if ring in self._rings:
                self._rings.remove(ring)
        self._give_up(ring.device.name, ring.description, error, ring.num_bytes)

    def _give_up(self, name: str, description: str, error: Exception, num_bytes: int = 0) -> None:
        text = " ".join(str(error).split()) or type(error).__name__
        use = DeviceUse(
            name=name, description=description, source_bytes=num_bytes, error=text[:500]
        )
        with self._changed:
            self._uses.append(use)
        self._report(
            Notice(
                severity="warning",
                code="device-failed",
                message=f"{name}: {use.error}; the run goes on without it",
            )
        )

    @property
    def programs_blocks(self) -> int:
        """Blocks for each program, on every open device; 0 while there is none."""
        with self._changed:
            return max((ring.device.programs_blocks for ring in self._rings), default=0)

    def uses(self) -> tuple[DeviceUse, ...]:
        """Return what each device did."""
        with self._changed:
            working = [
                DeviceUse(
                    name=ring.device.name,
                    description=ring.description,
                    source_bytes=ring.num_bytes,
                    memory=ring.memory,
                )
                for ring in self._rings
            ]
            return tuple(sorted((*self._uses, *working), key=lambda use: use.name))

    def wake(self) -> None:
        """Let nobody wait for a device any longer."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """Wait, for a few seconds, for what is under way, and let go of the devices."""
        self.wake()
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
        for ring in list(self._rings):
            ring.close(_CLOSE_SECONDS)
