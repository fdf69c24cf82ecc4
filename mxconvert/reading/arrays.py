"""Bytes as tensors: of numpy, of torch on the CPU, or of torch on a GPU."""

from __future__ import annotations

import mmap
import sys
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mxconvert.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

NUMPY_DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16,
    "U32": np.uint32, "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16,
    "F32": np.float32, "F64": np.float64, "BF16": np.uint16, "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8, "F8_E8M0": np.uint8,
}  # fmt: skip
"""Numpy has no BF16 and no FP8: their bits."""

_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "F32": "float32",
    "F64": "float64", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


class Framework(Protocol):
    """Makes memory, and tensors of it."""

    def allocate(self, size: int) -> memoryview:
        """Return memory, aligned to 64 bytes at least."""

    def tensor(self, data: memoryview, dtype: str, shape: Sequence[int]) -> Any:
        """Return a tensor over bytes of that memory."""

    def finish(self) -> None:
        """Wait until memory that was handed out is not read any more."""


class Numpy:
    """Arrays of numpy, over the memory that was read into."""

    def allocate(self, size: int) -> memoryview:
        """See `Framework.allocate`."""
        # Not numpy's own: it asks for huge pages, which cost virtual machines four times as much.
        return memoryview(mmap.mmap(-1, max(size, 1)))[:size]

    def tensor(self, data: memoryview, dtype: str, shape: Sequence[int]) -> Any:
        """See `Framework.tensor`."""
        kind = np.dtype(NUMPY_DTYPES[dtype])
        array = np.frombuffer(data, np.uint8)
        if array.ctypes.data % kind.itemsize:
            array = array.copy()
        return array.view(kind).reshape(shape)

    def finish(self) -> None:
        """Nothing is read later."""


class Torch:
    """Tensors of torch.

    On a GPU: the memory is pinned, and copies run on a stream of their own, for which the
    current stream waits.

    Raises:
        MissingExtraError: torch is not installed, or there is no such device.
    """

    def __init__(self, device: str) -> None:
        try:
            import torch  # noqa: PLC0415
        except ImportError as error:
            raise MissingExtraError(
                f"device {device!r}: torch is not installed",
                hint="pip install torch, or leave device and framework away for numpy",
                code="missing-extra",
            ) from error
        self._torch = torch
        try:
            self._device = torch.device(device)
            self._copies = None
            if self._device.type == "cuda":
                self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            text = " ".join(str(error).split())
            raise MissingExtraError(
                f"device {device!r}: {text}", hint="use device='cpu'", code="no-gpu"
            ) from error

    def allocate(self, size: int) -> memoryview:
        """See `Framework.allocate`."""
        pinned = self._copies is not None
        raw = self._torch.empty(size, dtype=self._torch.uint8, pin_memory=pinned)
        view: memoryview = raw.numpy().data
        return view

    def tensor(self, data: memoryview, dtype: str, shape: Sequence[int]) -> Any:
        """See `Framework.tensor`."""
        torch = self._torch
        kind = getattr(torch, _TORCH_NAMES[dtype])
        if not data.nbytes:
            return torch.empty(tuple(shape), dtype=kind, device=self._device)
        host = torch.frombuffer(data, dtype=torch.uint8)
        if host.data_ptr() % kind.itemsize:
            host = host.clone()
        made = host.to(self._device) if self._copies is None else self._copied(host, self._copies)
        return made.view(kind).reshape(tuple(shape))

    def _copied(self, host: Any, copies: Any) -> Any:
        current = self._torch.cuda.current_stream(self._device)
        with self._torch.cuda.stream(copies):
            made = host.to(self._device, non_blocking=True)
        current.wait_stream(copies)
        made.record_stream(current)
        return made

    def finish(self) -> None:
        """See `Framework.finish`."""
        if self._copies is not None:
            self._copies.synchronize()


def framework_of(name: str | None, device: str | None) -> Framework:
    """Return what makes tensors.

    Args:
        name: ``numpy``, ``torch`` or ``None``: torch if there is a device.
        device: As torch names it; ``None``: none.

    Raises:
        UsageError: Another name, or numpy on a device.
        MissingExtraError: See `Torch`.
    """
    if sys.byteorder != "little":
        raise UsageError("tensors are little-endian, this machine is not")
    chosen = name or ("numpy" if device is None else "torch")
    if chosen == "numpy" and device in (None, "cpu"):
        return Numpy()
    if chosen == "torch":
        return Torch(device or "cpu")
    raise UsageError(
        f"framework {name!r}, device {device!r}: expected numpy without a device, or torch",
        code="bad-framework",
    )
