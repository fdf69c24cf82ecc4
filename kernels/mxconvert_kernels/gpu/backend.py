"""The GPU's kernels behind the interface of the CPU's: buffers of the host in, buffers out.

Each call copies to the device, launches, waits and copies back: for tests, checks and small
tensors.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from mxconvert_kernels.buffers import (
    byte_length,
    count_blocks,
    count_scaled_blocks,
    count_widened_blocks,
)
from mxconvert_kernels.gpu.launch import (
    Launcher,
    Matrix,
    describe,
    nothing_found,
    what_was_found,
    what_was_summed,
)
from mxconvert_kernels.numpy_backend import NumpyBackend
from mxconvert_kernels.program_sums import SUMS
from mxconvert_kernels.spec import FloatType, NonFinite, ScaleRule

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from mxconvert_kernels.error_sums import ErrorSums


class TritonBackend:
    """Kernels on one GPU, or in Triton's interpreter if TRITON_INTERPRET is set.

    Raises:
        RuntimeError: There is no GPU that torch can use.
    """

    name = "triton"

    def __init__(self, device: str | None = None, launcher: Launcher | None = None) -> None:
        if device is None:
            device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
        if device != "cpu" and not torch.cuda.is_available():
            raise RuntimeError("torch finds no GPU")
        self.device = torch.device(device)
        self.launcher = launcher or Launcher.for_device(self.device)
        self._host = NumpyBackend()

    def describe(self) -> str:
        """Return device, variant and versions."""
        place = "interpreter" if self.device.type == "cpu" else torch.cuda.get_device_name()
        return f"{place}, {self.launcher.variant.name.lower()}, {describe()}"

    def quantize(
        self,
        src: Buffer,
        dtype: FloatType,
        rule: ScaleRule,
        packed: Buffer,
        scales: Buffer,
        *,
        sums: ErrorSums | None = None,
    ) -> NonFinite:
        """See `Backend.quantize`."""
        blocks = count_blocks(
            byte_length(src, "src"),
            dtype,
            byte_length(packed, "packed", writable=True),
            byte_length(scales, "scales", writable=True),
            "src",
        )
        out = packed, scales
        return self._quantize(src, blocks, dtype, rule, factors=None, out=out, sums=sums)

    def quantize_scaled(  # noqa: PLR0917  (a parameter for each buffer)
        self,
        source: Buffer,
        dtype: FloatType,
        rule: ScaleRule,
        factors: Buffer,
        packed: Buffer,
        scales: Buffer,
        sums: ErrorSums | None = None,
    ) -> NonFinite:
        """See `Backend.quantize_scaled`."""
        blocks = count_scaled_blocks(
            byte_length(source, "source"),
            dtype,
            byte_length(factors, "factors"),
            byte_length(packed, "packed", writable=True),
            byte_length(scales, "scales", writable=True),
        )
        out = packed, scales
        return self._quantize(source, blocks, dtype, rule, factors=factors, out=out, sums=sums)

    def _quantize(
        self,
        source: Buffer,
        blocks: int,
        dtype: FloatType,
        rule: ScaleRule,
        *,
        factors: Buffer | None,
        out: tuple[Buffer, Buffer],
        sums: ErrorSums | None,
    ) -> NonFinite:
        packed, scales = (self._empty(buffer) for buffer in out)
        found = nothing_found(self.device)
        parts = None
        if sums is not None:
            shape = self.launcher.programs(blocks), SUMS
            parts = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self.launcher.quantize(
            self._copied(source),
            Matrix.flat(blocks),
            dtype=dtype,
            rule=rule,
            packed=packed,
            scales=scales,
            factors=None if factors is None else self._copied(factors).view(torch.float32),
            found=found,
            sums=parts,
        )
        _copy_back(packed, out[0])
        _copy_back(scales, out[1])
        if sums is not None and parts is not None:
            sums.add(what_was_summed(parts))
        return what_was_found(found)

    def dequantize(self, packed: Buffer, scales: Buffer, dtype: FloatType, out: Buffer) -> None:
        """See `Backend.dequantize`; other types than BF16 are made on the host."""
        if dtype is not FloatType.BF16:
            self._host.dequantize(packed, scales, dtype, out)
            return
        count_blocks(
            byte_length(out, "out", writable=True),
            dtype,
            byte_length(packed, "packed"),
            byte_length(scales, "scales"),
            "out",
        )
        output = self._empty(out)
        self.launcher.dequantize(self._copied(packed), self._copied(scales), output)
        _copy_back(output, out)

    def widen_scaled(
        self, source: Buffer, dtype: FloatType, factors: Buffer, output_bf16: Buffer
    ) -> NonFinite:
        """See `Backend.widen_scaled`."""
        count_widened_blocks(
            byte_length(source, "source"),
            dtype,
            byte_length(factors, "factors"),
            byte_length(output_bf16, "output_bf16", writable=True),
        )
        output, found = self._empty(output_bf16), nothing_found(self.device)
        by_block = self._copied(factors).view(torch.float32)
        self.launcher.widen(self._copied(source), dtype, by_block, output, found=found)
        _copy_back(output, output_bf16)
        return what_was_found(found)

    def scan(self, src: Buffer, dtype: FloatType) -> NonFinite:
        """See `Backend.scan`; done on the host, which the data comes from."""
        return self._host.scan(src, dtype)

    def _copied(self, buffer: Buffer) -> torch.Tensor:
        if not byte_length(buffer, "buffer"):
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return torch.frombuffer(bytearray(buffer), dtype=torch.uint8).to(self.device)

    def _empty(self, buffer: Buffer) -> torch.Tensor:
        size = byte_length(buffer, "buffer")
        return torch.empty(size, dtype=torch.uint8, device=self.device)


def _copy_back(tensor: torch.Tensor, buffer: Any) -> None:
    with memoryview(buffer) as view:
        if view.nbytes:
            view.cast("B")[:] = tensor.cpu().numpy().data
