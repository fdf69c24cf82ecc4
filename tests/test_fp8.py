"""FP8 and its scales, by definition."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxconvert.errors import SourceError
from mxconvert.fp8 import (
    block_factors,
    decode_scales,
    dequantize_rows,
    fp8_values,
    has_bf16,
    stored_shape,
    to_bf16,
)
from mxconvert.model import BlockScale, TensorInfo
from tests.support import decode, encode
from tests.support.fp8 import one_rounding, spread


def value_of(code: int, exponent_bits: int) -> float:
    """OCP 8-bit floating point specification, revision 1.0, section 5."""
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    sign = -1 if code & 0x80 else 1
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & (2**mantissa_bits - 1)
    if exponent_bits == 5 and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent_bits == 4 and code & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        magnitude = Fraction(mantissa, 2**mantissa_bits) * Fraction(2) ** (1 - bias)
    else:
        magnitude = (1 + Fraction(mantissa, 2**mantissa_bits)) * Fraction(2) ** (exponent - bias)
    return math.copysign(float(magnitude), sign)


@pytest.mark.parametrize(("dtype", "exponent_bits"), [("F8_E4M3", 4), ("F8_E5M2", 5)])
def test_all_256_codes(dtype: str, exponent_bits: int) -> None:
    expected = np.array([value_of(code, exponent_bits) for code in range(256)], np.float32)
    found = fp8_values(dtype)
    assert found.dtype == np.float32
    assert np.array_equal(found, expected, equal_nan=True)
    signs = np.arange(256) >= 128
    numbers = ~np.isnan(found)
    assert np.array_equal(np.signbit(found)[numbers], signs[numbers])


def test_landmarks_of_the_formats() -> None:
    """The largest, the smallest normal and the smallest number of both."""
    e4m3, e5m2 = fp8_values("F8_E4M3"), fp8_values("F8_E5M2")
    assert (e4m3[0x7E], e4m3[0x08], e4m3[0x01]) == (448, 2**-6, 2**-9)
    assert (e5m2[0x7B], e5m2[0x04], e5m2[0x01]) == (57344, 2**-14, 2**-16)
    assert np.isinf(e5m2[0x7C])
    assert np.isnan(e4m3[[0x7F, 0xFF]]).all()


@pytest.mark.parametrize("dtype", ["F8_E8M0", "BF16", "F16", "F32"])
def test_scales_of_every_dtype(dtype: str) -> None:
    """Every power of two from the smallest to the largest, subnormal ones included."""
    lowest, highest = {"F8_E8M0": (-127, 127), "F16": (-24, 15)}.get(dtype, (-133, 127))
    values = np.ldexp(1.0, np.arange(lowest, highest + 1))
    found = decode_scales(dtype, bytearray(encode(values, dtype)))
    assert found.dtype == np.float32
    assert np.array_equal(found, values)


def test_the_nan_of_e8m0() -> None:
    assert np.isnan(decode_scales("F8_E8M0", bytearray([254, 255]))).tolist() == [False, True]


# --------------------------------------------------------------------------- dequantizing


def weight(shape: tuple[int, int], block: tuple[int, int], dtype: str = "F8_E4M3") -> TensorInfo:
    rows, columns = shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    scale = TensorInfo("w_scale", "F32", grid, "f", 0, 4 * grid[0] * grid[1])
    size = rows * columns
    return TensorInfo("w", dtype, shape, "f", 0, size, scale=BlockScale(scale, *block))


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((256, 256), (128, 128)),
        ((200, 192), (128, 128)),  # both last blocks are smaller
        ((72, 40), (128, 128)),  # smaller than a block
        ((96, 64), (96, 64)),  # one scale
        ((96, 64), (1, 64)),  # one for each row
        ((50, 96), (7, 32)),
        ((5, 3), (2, 2)),
    ],
)
@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_each_element_has_its_block_s_scale(
    shape: tuple[int, int], block: tuple[int, int], dtype: str
) -> None:
    """Whole and from any row on; one rounding to float32 and no other."""
    info = weight(shape, block, dtype)
    assert info.scale is not None
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[~np.isfinite(fp8_values(dtype)[codes])] = 3
    grid = rng.uniform(1e-4, 1, info.scale.tensor.shape).astype(np.float32)
    exact = decode(codes.tobytes(), dtype, shape) * spread(grid.astype(np.float64), block, shape)
    expected = one_rounding(exact)
    assert not np.array_equal(exact, expected)
    found = dequantize_rows(info, grid, 0, memoryview(codes.tobytes()))
    assert np.array_equal(found, expected)
    for first in (1, shape[0] // 2, shape[0] - 1):
        some = dequantize_rows(info, grid, first, memoryview(codes[first:].tobytes()))
        assert np.array_equal(some, expected[first:])


@pytest.mark.parametrize(("shape", "block"), [((200, 192), (128, 128)), ((96, 64), (1, 64))])
def test_factors_of_blocks_of_32(shape: tuple[int, int], block: tuple[int, int]) -> None:
    """What a kernel that multiplies by itself is given."""
    info = weight(shape, block)
    assert info.scale is not None
    grid = np.arange(1, math.prod(info.scale.tensor.shape) + 1, dtype=np.float32)
    grid = grid.reshape(info.scale.tensor.shape)
    expected = spread(grid.astype(np.float64), block, shape)[:, ::32].reshape(-1)
    assert np.array_equal(block_factors(info, grid, 0, expected.size), expected)
    assert np.array_equal(block_factors(info, grid, 3, 20), expected[3:23])


def single(code: int, scale: float, dtype: str = "F8_E4M3") -> np.float32:
    info = weight((1, 1), (1, 1), dtype)
    grid = np.array([[scale]], np.float32)
    return np.float32(dequantize_rows(info, grid, 0, memoryview(bytes([code])))[0, 0])


def test_subnormal_products_are_not_flushed() -> None:
    """Below 2^-126 float32 rounds to its subnormals, to even at a tie, and then to zero."""
    assert single(0x38, 2.0**-149) == np.float32(2.0**-149)
    assert single(0x01, 2.0**-140) == np.float32(2.0**-149)
    assert single(0x30, 2.0**-149) == 0  # half of it: a tie to the even zero
    assert single(0x3C, 2.0**-149) == np.float32(2.0**-148)  # 1.5 of it
    assert np.signbit(single(0xB0, 2.0**-149))


@given(st.integers(0, 255), st.floats(2.0**-100, 2.0**100, width=32))
def test_one_float32_multiply(code: int, scale: float) -> None:
    value = value_of(code, 4)
    found = single(code, scale)
    if math.isnan(value):
        assert np.isnan(found)
    else:
        assert found == np.float32(np.float64(value) * np.float64(scale))


def test_overflow_is_seen_later() -> None:
    """Infinity comes out, for the check that all values go through."""
    assert np.isinf(single(0x7E, 2.0**127))


def test_a_zero_scale_needs_zero_weights() -> None:
    info = weight((4, 64), (2, 32))
    grid = np.array([[1, 0], [2, 3]], np.float32)
    codes = np.full((4, 64), 0x38, np.uint8)
    codes[:2, 32:] = 0x80  # minus zero is zero
    found = dequantize_rows(info, grid, 0, memoryview(codes.tobytes()))
    assert not found[:2, 32:].any()
    assert (found[2:, 32:] == 3).all()
    codes[1, 63] = 1
    with pytest.raises(SourceError, match="a scale is 0, but weights of w"):
        dequantize_rows(info, grid, 0, memoryview(codes.tobytes()))
    assert dequantize_rows(info, grid, 2, memoryview(codes[2:].tobytes())).shape == (2, 64)


def test_the_stored_shape_of_a_whole_weight() -> None:
    assert stored_shape(weight((4, 64), (2, 32))) == (4, 64)


# ------------------------------------------------------------------------------- to BF16


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_rounding_to_bf16(values: list[float]) -> None:
    """Nearest, ties to even; what rounds to infinity is told apart."""
    array = np.array(values, np.float32)
    expected: Any = np.frombuffer(encode(array.astype(np.float64), "BF16"), np.uint16)
    finite = np.isfinite(decode(expected.tobytes(), "BF16", (len(values),)))
    assert np.array_equal(has_bf16(array), finite)
    assert np.array_equal(to_bf16(array)[finite], expected[finite])


def test_the_edge_of_bf16() -> None:
    largest = np.uint32([0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000])
    values = np.concatenate([largest, largest | np.uint32(0x80000000)]).view(np.float32)
    assert has_bf16(values).tolist() == [True, True, False, False, False, False] * 2
