"""CUDA and ROCm through torch, kernels in Triton; needs the extra ``gpu``.

The name ``interpreter`` is Triton's interpreter on the CPU (TRITON_INTERPRET=1), where every
call does its work before it returns: slow, for tests of everything but timing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from mxconvert_kernels.gpu.launch import Launcher, Matrix, describe
from mxconvert_kernels.spec import FloatType, ScaleRule

from mxconvert.pipeline.devices.choice import INTERPRETER
from mxconvert.pipeline.devices.launches import FACTOR_BYTES, Kind
from mxconvert.quantize import SUMS

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from mxconvert.pipeline.devices.launches import Launch
    from mxconvert.pipeline.devices.protocol import Buffers, Event

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class TorchDevice:
    """One GPU of torch's; see `Device`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._interpreted = name == INTERPRETER
        self.device = torch.device("cpu" if self._interpreted else name)
        self.launcher = Launcher.for_device(self.device)
        self.programs_blocks = self.launcher.blocks
        self._pinned: list[int] = []
        self._is_pinned = not self._interpreted

    def open(self) -> str:
        """See `Device.open`."""
        if self._interpreted:
            return f"Triton's interpreter, {describe()}"
        properties = torch.cuda.get_device_properties(self.device)
        variant = self.launcher.variant.name.lower()
        return f"{properties.name}, {variant} kernels, {describe()}"

    def allocate(self, size: int) -> Any:
        """See `Device.allocate`."""
        return torch.empty(max(size, 16), dtype=torch.uint8, device=self.device)

    def stream(self) -> TorchStream:
        """See `Device.stream`."""
        made = None if self._interpreted else torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return TorchStream(self, made)

    def pin(self, host: memoryview) -> None:
        """See `Device.pin`; where the system allows no more, copies are right but wait."""
        if not self._is_pinned:
            return
        address = torch.frombuffer(host, dtype=torch.uint8).data_ptr()
        if int(_runtime().cudaHostRegister(address, host.nbytes, _PORTABLE)) == 0:
            self._pinned.append(address)

    def close(self) -> None:
        """See `Device.close`."""
        while self._pinned:
            _runtime().cudaHostUnregister(self._pinned.pop())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class TorchStream:
    """One of torch's streams, or none in the interpreter; see `Stream`."""

    def __init__(self, device: TorchDevice, stream: Any) -> None:
        self._device, self._stream = device, stream

    def _current(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return contextlib.nullcontext()
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context

    def _host(self, host: memoryview) -> Any:
        return torch.frombuffer(host, dtype=torch.uint8)

    def copy_in(self, host: memoryview, buffer: Any, at: int) -> None:
        """See `Stream.copy_in`."""
        with self._current():
            buffer[at : at + host.nbytes].copy_(self._host(host), non_blocking=True)

    def copy_out(self, buffer: Any, at: int, host: memoryview) -> None:
        """See `Stream.copy_out`."""
        with self._current():
            self._host(host).copy_(buffer[at : at + host.nbytes], non_blocking=True)

    def launch(self, launch: Launch, buffers: Buffers) -> None:
        """See `Stream.launch`."""
        with self._current():
            _LAUNCH[launch.kind](self._device, launch, buffers)

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        if self._stream is not None:
            self._stream.wait_event(event)

    def record(self) -> Event:
        """See `Stream.record`."""
        if self._stream is None:
            return _Past()
        event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._stream.record_event(event)
        return event


class _Past:
    """The event of a stream that has done everything already."""

    def synchronize(self) -> None:
        """Return at once."""


def _factors(launch: Launch, buffers: Buffers) -> Any:
    begin, end = launch.factors
    if begin == end:
        return None
    whole = buffers["factors"].view(torch.float32)
    return whole[begin // FACTOR_BYTES : end // FACTOR_BYTES]


def _found(launch: Launch, buffers: Buffers) -> Any:
    whole = buffers["found"].view(torch.int64)
    return whole[2 * launch.number : 2 * launch.number + 2]


def _sums(device: TorchDevice, launch: Launch, buffers: Buffers) -> Any:
    if not launch.measure:
        return None
    begin = launch.first_program
    count = device.launcher.programs(launch.blocks)
    whole = buffers["sums"].view(torch.float64)
    return whole[begin * SUMS : (begin + count) * SUMS]


def _quantize(device: TorchDevice, launch: Launch, buffers: Buffers) -> None:
    matrix = Matrix.flat(launch.blocks)
    if launch.transposed is not None:
        rows, columns = launch.transposed
        matrix = Matrix(rows, columns, row_pitch=1, column_pitch=rows)
    device.launcher.quantize(
        buffers["source"][slice(*launch.source)],
        matrix,
        dtype=FloatType(launch.dtype),
        rule=ScaleRule(launch.rule),
        packed=buffers["output"][slice(*launch.output)],
        scales=buffers["scales"][slice(*launch.scales)],
        factors=_factors(launch, buffers),
        found=_found(launch, buffers),
        sums=_sums(device, launch, buffers),
    )


def _decode(device: TorchDevice, launch: Launch, buffers: Buffers) -> None:
    part = launch.parts[0]
    device.launcher.dequantize(
        buffers["source"][part.at : part.at + part.size],
        buffers["source"][part.scales_at : part.scales_at + part.stored_scales_size],
        buffers["output"][slice(*launch.output)],
    )


def _widen(device: TorchDevice, launch: Launch, buffers: Buffers) -> None:
    device.launcher.widen(
        buffers["source"][slice(*launch.source)],
        FloatType(launch.dtype),
        _factors(launch, buffers),
        buffers["output"][slice(*launch.output)],
        found=_found(launch, buffers),
    )


_LAUNCH = {Kind.QUANTIZE: _quantize, Kind.DECODE: _decode, Kind.WIDEN: _widen}
