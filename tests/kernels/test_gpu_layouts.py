"""Matrices as checkpoints store them: rows apart, transposed, interleaved; read where they lie."""

from __future__ import annotations

import numpy as np
import pytest
from mxconvert_kernels import BLOCK_SIZE, FloatType, NonFinite, ScaleRule, get_backend

from tests.kernels.blocks import UNSIGNED, spread_bits

pytestmark = pytest.mark.interpreter

BF16, F16, F32, E4M3, E5M2 = FloatType
ROWS, COLUMNS = 5, 96
PITCH = 131


@pytest.fixture(params=[BF16, F16, F32], ids=str)
def kind(request) -> FloatType:
    return request.param


def matrix(dtype: FloatType) -> np.ndarray:
    """Bits of a matrix ``[ROWS, COLUMNS]``."""
    bits = spread_bits(dtype, ROWS * COLUMNS // BLOCK_SIZE, seed=3, top=dtype.layout.bias + 3)
    return bits.reshape(ROWS, COLUMNS)


def expected(bits: np.ndarray, dtype: FloatType) -> tuple[np.ndarray, np.ndarray, NonFinite]:
    packed = np.zeros(bits.size // 2, np.uint8)
    scales = np.zeros(bits.size // BLOCK_SIZE, np.uint8)
    flat = np.ascontiguousarray(bits)
    found = get_backend("numpy").quantize(flat, dtype, ScaleRule.MSE, packed, scales)
    return packed, scales, found


def launched(stored: np.ndarray, where, dtype: FloatType, factors=None):
    import torch
    from mxconvert_kernels.gpu.launch import Launcher, nothing_found, what_was_found

    packed = torch.full((where.blocks * 16,), 0xA5, dtype=torch.uint8)
    scales = torch.full((where.blocks,), 0xA5, dtype=torch.uint8)
    found = nothing_found(torch.device("cpu"))
    Launcher(blocks=8).quantize(
        torch.from_numpy(stored.reshape(-1).view(np.uint8).copy()),
        where,
        dtype=dtype,
        rule=ScaleRule.MSE,
        packed=packed,
        scales=scales,
        factors=None if factors is None else torch.from_numpy(factors.reshape(-1)),
        found=found,
    )
    return packed.numpy(), scales.numpy(), what_was_found(found)


def assert_same(found, wanted) -> None:
    np.testing.assert_array_equal(found[1], wanted[1])
    np.testing.assert_array_equal(found[0], wanted[0])
    assert found[2] == wanted[2]


@pytest.mark.parametrize("pitch", [COLUMNS, PITCH, PITCH + 1])
def test_rows_apart(kind: FloatType, pitch: int) -> None:
    """As in one expert's half of a fused matrix; rows may begin between two words."""
    from mxconvert_kernels.gpu.launch import Matrix

    bits = matrix(kind)
    stored = np.full((ROWS, pitch), 0xFFFF, UNSIGNED[kind])
    stored[:, :COLUMNS] = bits
    assert_same(launched(stored, Matrix(ROWS, COLUMNS, pitch), kind), expected(bits, kind))


@pytest.mark.parametrize("step", [1, 2])
def test_transposed_and_interleaved(kind: FloatType, step: int) -> None:
    """``[K, N]`` as Llama 4 has it, and every other column of it as gpt-oss has."""
    from mxconvert_kernels.gpu.launch import Matrix

    bits = matrix(kind)
    stored = np.full((COLUMNS, ROWS * step + 2), 0xFFFF, UNSIGNED[kind])
    stored[:, : ROWS * step : step] = bits.T
    where = Matrix(ROWS, COLUMNS, row_pitch=step, column_pitch=stored.shape[1])
    assert_same(launched(stored, where, kind), expected(bits, kind))


def test_the_first_that_is_not_finite_counts_in_the_output(kind: FloatType) -> None:
    """Not where it is stored: messages name rows and columns of the output."""
    from mxconvert_kernels.gpu.launch import Matrix

    bits = matrix(kind)
    bits[1, 70] = bits[3, 2] = kind.layout.infinity
    wanted = expected(bits, kind)
    assert wanted[2] == NonFinite(2, COLUMNS + 70)
    where = Matrix(ROWS, COLUMNS, row_pitch=1, column_pitch=ROWS)
    assert_same(launched(np.ascontiguousarray(bits.T), where, kind), wanted)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_scaled_fp8(dtype: FloatType, transposed: bool) -> None:
    """Factors stand in the order of the output's blocks."""
    from mxconvert_kernels.gpu.launch import Matrix

    rng = np.random.default_rng(8)
    elements = rng.integers(0, 0x7B, (ROWS, COLUMNS), np.uint8)
    factors = np.ldexp(rng.random((ROWS, COLUMNS // BLOCK_SIZE)) + 0.5, -9).astype(np.float32)
    packed, scales = np.zeros(ROWS * COLUMNS // 2, np.uint8), np.zeros(factors.size, np.uint8)
    found = get_backend("numpy").quantize_scaled(
        elements, dtype, ScaleRule.MSE, factors, packed, scales
    )
    where = Matrix(ROWS, COLUMNS, COLUMNS)
    stored = elements
    if transposed:
        where, stored = Matrix(ROWS, COLUMNS, 1, ROWS), np.ascontiguousarray(elements.T)
    assert_same(launched(stored, where, dtype, factors), (packed, scales, found))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": 40}, "40 columns are not a multiple of 32"),
        ({"rows": 6}, "source: expected at least"),
        ({"row_pitch": 97}, "source: expected at least"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, int], message: str) -> None:
    from mxconvert_kernels.gpu.launch import Matrix

    where = Matrix(**{"rows": ROWS, "columns": COLUMNS, "row_pitch": COLUMNS, **change})
    with pytest.raises(ValueError, match=message):
        launched(matrix(BF16), where, BF16)


def test_factors_are_for_fp8_and_nothing_else() -> None:
    from mxconvert_kernels.gpu.launch import Matrix

    where, factors = Matrix(ROWS, COLUMNS, COLUMNS), np.ones(15, np.float32)
    with pytest.raises(ValueError, match="BF16 has no factors"):
        launched(matrix(BF16), where, BF16, factors)
    with pytest.raises(ValueError, match="F8_E4M3 needs factors"):
        launched(np.zeros((ROWS, COLUMNS), np.uint8), where, E4M3)
