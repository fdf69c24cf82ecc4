"""What the pipeline asks of a GPU: memory, streams that run side by side, events between them.

A stream does what it is given in its order and later than it is given; what two streams do is
ordered by events alone. `TorchDevice` is CUDA and ROCm; the tests bring one whose streams are
threads of the CPU, with memory of its own and delays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mxconvert.pipeline.devices.launches import Launch

    Buffer = Any
    """Memory of a device; only the device that allocated it looks inside."""

    Buffers = Mapping[str, Buffer]


class Event(Protocol):
    """A place in what a stream does."""

    def synchronize(self) -> None:
        """Wait until the stream has come here.

        Raises:
            Exception: Something that the device did went wrong, or it is lost.
        """


class Stream(Protocol):
    """Work in order. Calls return at once; any of them may raise what an earlier one caused."""

    def copy_in(self, host: memoryview, buffer: Buffer, at: int) -> None:
        """Copy host bytes to a buffer, from its byte ``at`` on."""

    def copy_out(self, buffer: Buffer, at: int, host: memoryview) -> None:
        """Copy a buffer's bytes from ``at`` on to the host."""

    def launch(self, launch: Launch, buffers: Buffers) -> None:
        """Run a kernel on the buffers that `ring.SIZES` names."""

    def wait(self, event: Event) -> None:
        """Let what follows wait for an event of another stream."""

    def record(self) -> Event:
        """Return the event of this place."""


class Device(Protocol):
    """One GPU. Calls may come from any thread.

    Attributes:
        name: ``cuda:0``.
        programs_blocks: Blocks of 32 elements for each program of a launch.
    """

    name: str
    programs_blocks: int

    def open(self) -> str:
        """Begin to use the device; return what it is, in words.

        Raises:
            Exception: It cannot be used.
        """

    def allocate(self, size: int) -> Buffer:
        """Return ``size`` bytes of device memory, aligned to 16.

        Raises:
            Exception: There is no room.
        """

    def stream(self) -> Stream:
        """Return a new stream."""

    def pin(self, host: memoryview) -> None:
        """Have host memory stay where it is, so that copies run beside other things."""

    def close(self) -> None:
        """Let go of everything."""
