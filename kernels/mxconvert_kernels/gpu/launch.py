"""Launches the device code on tensors that lie on a device, and never waits for it.

A launch goes to torch's current stream. Nothing is allocated: results go where the caller says. A
caller that wants to know when, records an event; what is not finite and the error sums are device
memory too, to be read when everything is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import triton

from mxconvert_kernels.gpu import device
from mxconvert_kernels.gpu.kinds import KINDS, RULES, Layout, Variant
from mxconvert_kernels.program_sums import NO_PLACE, SUMS, add_up
from mxconvert_kernels.spec import (
    ALL_FINITE,
    BLOCK_SIZE,
    FACTOR_BYTES,
    PACKED_BLOCK_BYTES,
    SCALED_TYPES,
    FloatType,
    NonFinite,
    ScaleRule,
)

if TYPE_CHECKING:
    from mxconvert_kernels.error_sums import ErrorSums

_FIRST_BF16X2: Final = (8, 0)
_WITH_E2M1X2: Final = ((10, 0), (10, 3))
_WARPS: Final = 4
_BLOCKS_OF_AMD: Final = 256  # a block for each thread
_BLOCKS: Final = 128
_BLOCKS_INTERPRETED: Final = 1024  # a program costs more than its blocks


@dataclass(frozen=True, slots=True)
class Matrix:
    """Where the elements of a matrix ``[rows, columns]`` lie, in elements from its first one.

    Attributes:
        rows: Output rows, N.
        columns: Input columns, K, a multiple of 32.
        row_pitch: Elements from a row to the next.
        column_pitch: Elements from a column to the next: 1 unless it is stored transposed.
    """

    rows: int
    columns: int
    row_pitch: int
    column_pitch: int = 1

    @classmethod
    def flat(cls, blocks: int) -> Matrix:
        """Return so many blocks, one after the other."""
        return cls(blocks, BLOCK_SIZE, BLOCK_SIZE)

    @property
    def blocks(self) -> int:
        """Blocks of 32 along the rows."""
        return self.rows * self.columns // BLOCK_SIZE

    @property
    def extent(self) -> int:
        """Elements from the first to behind the last."""
        if not self.rows or not self.columns:
            return 0
        return (self.rows - 1) * self.row_pitch + (self.columns - 1) * self.column_pitch + 1

    @property
    def layout(self) -> Layout:
        """How the device code reads it."""
        if self.column_pitch != 1:
            return Layout.COLUMNS
        return Layout.FLAT if self.row_pitch == self.columns else Layout.ROWS


@dataclass(frozen=True, slots=True)
class Launcher:
    """Launches kernels of one kind of device.

    Attributes:
        variant: Which instructions it has; see `Launcher.for_device`.
        blocks: Blocks for each program.
    """

    variant: Variant = Variant.PORTABLE
    blocks: int = _BLOCKS

    @classmethod
    def for_device(cls, device: torch.device) -> Launcher:
        """Return the launcher that suits a device, the portable one where none is better."""
        if device.type != "cuda":
            return cls(blocks=_BLOCKS_INTERPRETED)
        if torch.version.hip is not None:
            return cls(blocks=_BLOCKS_OF_AMD)
        capability = torch.cuda.get_device_capability(device)
        if capability in _WITH_E2M1X2:
            return cls(Variant.E2M1X2)
        return cls(Variant.BF16X2 if capability >= _FIRST_BF16X2 else Variant.PORTABLE)

    def programs(self, blocks: int) -> int:
        """Return how many programs so many blocks need."""
        return -(-blocks // self.blocks)

    def quantize(
        self,
        source: torch.Tensor,
        matrix: Matrix,
        *,
        dtype: FloatType,
        rule: ScaleRule,
        packed: torch.Tensor,
        scales: torch.Tensor,
        factors: torch.Tensor | None = None,
        found: torch.Tensor | None = None,
        sums: torch.Tensor | None = None,
    ) -> None:
        """Launch the quantization of a matrix to MXFP4.

        Args:
            source: uint8, from the matrix's first element on, aligned to 4 bytes.
            matrix: Where the elements lie in it.
            dtype: Of the elements.
            rule: How scales are chosen.
            packed: uint8 ``[rows * columns / 2]``, the even element in the low nibble.
            scales: uint8 ``[rows * columns / 32]``.
            factors: float32 like ``scales``, for FP8.
            found: int64 ``[2]`` of `nothing_found`: what is not finite is added.
            sums: float64 ``[programs(blocks), SUMS]`` that receives the error sums.

        Raises:
            ValueError: A tensor has another size or type than the matrix needs.
        """
        if (dtype in SCALED_TYPES) != (factors is not None):
            raise ValueError(f"factors: {dtype} {'needs' if factors is None else 'has no'} factors")
        if matrix.columns % BLOCK_SIZE:
            raise ValueError(f"matrix: {matrix.columns} columns are not a multiple of {BLOCK_SIZE}")
        blocks = matrix.blocks
        _check("source", source, torch.uint8, matrix.extent * dtype.itemsize, at_least=True)
        _check("packed", packed, torch.uint8, blocks * PACKED_BLOCK_BYTES)
        _check("scales", scales, torch.uint8, blocks)
        if factors is not None:
            _check("factors", factors, torch.float32, blocks)
        if found is not None:
            _check("found", found, torch.int64, 2)
        if sums is not None:
            _check("sums", sums, torch.float64, self.programs(blocks) * SUMS)
        if not blocks:
            return
        layout = matrix.layout
        if layout is Layout.ROWS and matrix.row_pitch * dtype.itemsize % FACTOR_BYTES:
            layout = Layout.COLUMNS  # rows begin between words
        device.quantize[(self.programs(blocks),)](
            _words(source, dtype, layout),
            scales if factors is None else factors,
            packed,
            scales,
            scales if found is None else found,
            scales if sums is None else sums,
            blocks,
            matrix.rows,
            matrix.columns // BLOCK_SIZE,
            matrix.row_pitch,
            matrix.column_pitch,
            KIND=KINDS[dtype],
            RULE=RULES[rule],
            LAYOUT=int(layout),
            VARIANT=int(self.variant),
            SCALED=factors is not None,
            FIND=found is not None,
            SUM=sums is not None,
            BLOCKS=self.blocks,
            num_warps=_WARPS,
            enable_fp_fusion=True,
        )

    def dequantize(self, packed: torch.Tensor, scales: torch.Tensor, output: torch.Tensor) -> None:
        """Launch the decoding of blocks to BF16.

        Args:
            packed: uint8, 16 for each block, the even element in the low nibble.
            scales: uint8, one for each block.
            output: uint8, 64 for each block, aligned to 4 bytes.

        Raises:
            ValueError: A tensor has another size or type.
        """
        blocks = scales.numel()
        _check("packed", packed, torch.uint8, blocks * PACKED_BLOCK_BYTES)
        _check("scales", scales, torch.uint8, blocks)
        _check("output", output, torch.uint8, blocks * BLOCK_SIZE * FloatType.BF16.itemsize)
        if blocks:
            device.dequantize[(self.programs(blocks),)](
                packed, scales, output.view(torch.int32), blocks,
                BLOCKS=self.blocks, num_warps=_WARPS, enable_fp_fusion=True,
            )  # fmt: skip

    def widen(
        self,
        source: torch.Tensor,
        dtype: FloatType,
        factors: torch.Tensor,
        output: torch.Tensor,
        *,
        found: torch.Tensor | None = None,
    ) -> None:
        """Launch the widening of FP8 times factors to BF16.

        Args:
            source: uint8, 32 for each block, aligned to 2 bytes.
            dtype: Of its elements.
            factors: float32, one for each block.
            output: uint8, 64 for each block, aligned to 4 bytes.
            found: int64 ``[2]`` of `nothing_found`: what is not finite is added.

        Raises:
            ValueError: A tensor has another size or type.
        """
        blocks = factors.numel()
        if dtype not in SCALED_TYPES:
            raise ValueError(f"dtype: expected one of {', '.join(SCALED_TYPES)}, found {dtype}")
        _check("source", source, torch.uint8, blocks * BLOCK_SIZE)
        _check("factors", factors, torch.float32, blocks)
        _check("output", output, torch.uint8, blocks * BLOCK_SIZE * FloatType.BF16.itemsize)
        if blocks:
            device.widen[(self.programs(blocks),)](
                source.view(torch.int16), factors, output.view(torch.int32),
                factors if found is None else found, blocks,
                KIND=KINDS[dtype], FIND=found is not None,
                BLOCKS=self.blocks, num_warps=_WARPS, enable_fp_fusion=True,
            )  # fmt: skip


def nothing_found(device: torch.device) -> torch.Tensor:
    """Return the int64 ``[2]`` to which launches add what is not finite: count and first index."""
    return torch.tensor([0, NO_PLACE], dtype=torch.int64, device=device)


def what_was_found(found: torch.Tensor) -> NonFinite:
    """Read what launches added; waits for them."""
    count, first = found.tolist()
    return NonFinite(count, first) if count else ALL_FINITE


def what_was_summed(sums: torch.Tensor) -> ErrorSums:
    """Add up what the programs of launches stored, in their order; waits for them."""
    return add_up(sums.reshape(-1, SUMS).cpu().numpy())


def describe() -> str:
    """Return what does the work."""
    return f"triton {triton.__version__}, torch {torch.__version__}"


def _words(source: torch.Tensor, dtype: FloatType, layout: Layout) -> torch.Tensor:
    """Return the source as integers of the size that the device code loads."""
    alone = layout is Layout.COLUMNS or dtype is FloatType.F32
    size = dtype.itemsize if alone else 2 * dtype.itemsize
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    return source[: source.numel() // size * size].view(kind)


def _check(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, length: int, *, at_least: bool = False
) -> None:
    found = tensor.numel()
    fits = found >= length if at_least else found == length
    if tensor.dtype != dtype or not tensor.is_contiguous() or not fits:
        raise ValueError(
            f"{name}: expected {'at least ' if at_least else ''}{length} contiguous {dtype}, found "
            f"{found} {'' if tensor.is_contiguous() else 'strided '}{tensor.dtype}"
        )
