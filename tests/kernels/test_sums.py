"""The error sums: every backend against exact integers, at any scale and in any pieces."""

from __future__ import annotations

import ctypes
import math
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mxconvert_kernels import BLOCK_SIZE, ErrorSums, FloatType, ScaleRule, get_backend
from mxconvert_kernels.llvm import jit, sums
from mxconvert_kernels.llvm.backend import LlvmBackend

from tests.kernels.blocks import (
    UNSIGNED,
    anchored_bits,
    assert_same,
    codes,
    encode,
    quantize,
    random_bits,
    spread_bits,
    sum_errors,
    to_floats,
)
from tests.kernels.interpreter import INTERPRETING

TOLERANCE = 1e-5
"""Relative, of each sum of squares."""

LOST = 1e-12
"""What sum_err2 may lose beyond that, of sum_x2: squares below float32's range."""


class PortableBackend(LlvmBackend):
    """Without the instructions that only some processors have."""

    name = "portable"

    def __init__(self) -> None:
        super().__init__()
        self._native = False


portable = cache(PortableBackend)


@pytest.fixture(params=["triton"] if INTERPRETING else ["llvm", "portable", "numpy"])
def summing(request):
    """Each backend but the oracle."""
    return portable() if request.param == "portable" else get_backend(request.param)


def assert_close(found: ErrorSums, expected: ErrorSums) -> None:
    for name in ("elements", "blocks", "flushed", "saturated", "exponents", "max_abs_err"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("sum_x2", "sum_q2", "sum_err2"):
        lost = LOST * expected.sum_x2 if name == "sum_err2" else 0
        limit = TOLERANCE * getattr(expected, name) + lost
        assert abs(getattr(found, name) - getattr(expected, name)) <= limit, name


def assert_sums(backend, bits, dtype, rule) -> ErrorSums:
    expected = sum_errors(get_backend("reference"), bits, dtype, rule)
    assert_close(sum_errors(backend, bits, dtype, rule), expected)
    return expected


# --------------------------------------------------------------------------- the oracle


def test_the_oracle_by_hand():
    """Scale 1: 7 saturates to 6, 0.25 is flushed, 2.5 ties to 2, zeros are zeros."""
    bits = encode([[7.0, -0.25, 2.5, -3.0]], FloatType.BF16)
    found = sum_errors(get_backend("reference"), bits, FloatType.BF16, ScaleRule.FLOOR)
    assert found == ErrorSums(
        elements=32,
        blocks=1,
        sum_x2=49 + 0.0625 + 6.25 + 9,
        sum_q2=36.0 + 4 + 9,
        sum_err2=1 + 0.0625 + 0.25,
        max_abs_err=1.0,
        flushed=1,
        saturated=1,
        exponents=(0, 1, 0),
    )


@pytest.mark.parametrize("top", [3, 40, 100, 127, 200, 254])
def test_the_oracle_agrees_with_fractions(top, rule):
    bits = spread_bits(FloatType.BF16, 20, seed=top, top=top)
    found = ErrorSums()
    result = quantize(get_backend("reference"), bits, FloatType.BF16, rule)
    packed, scales = np.zeros_like(result.packed), np.zeros_like(result.scales)
    get_backend("reference").quantize(bits, FloatType.BF16, rule, packed, scales, sums=found)
    halves = np.array([0, 1, 2, 3, 4, 6, 8, 12] * 2)[codes(result.packed)]
    x2 = q2 = err2 = Fraction(0)
    for row, half_row, byte in zip(
        np.abs(to_floats(bits, FloatType.BF16)), halves, result.scales, strict=True
    ):
        half_scale = Fraction(2) ** (int(byte) - 128)
        for x, half in zip(row, half_row, strict=True):
            q = int(half) * half_scale
            x2 += Fraction(x) ** 2
            q2 += q**2
            err2 += (Fraction(x) - q) ** 2
    assert (found.sum_x2, found.sum_q2, found.sum_err2) == (float(x2), float(q2), float(err2))


# --------------------------------------------------------------------------- all backends


def test_bytes_are_the_same_with_sums(summing, dtype, rule):
    bits = np.concatenate([spread_bits(dtype, 1000, seed=20), random_bits(dtype, 300, seed=21)])
    expected = quantize(summing, bits, dtype, rule)
    packed, scales = np.zeros_like(expected.packed), np.zeros_like(expected.scales)
    nonfinite = summing.quantize(bits, dtype, rule, packed, scales, sums=ErrorSums())
    assert_same(type(expected)(packed, scales, nonfinite), expected)


def test_random_bits(summing, dtype, rule):
    """Any pattern; blocks with a NaN or an infinity do not count."""
    bits = random_bits(dtype, 300, seed=22)
    expected = assert_sums(summing, bits, dtype, rule)
    if dtype is not FloatType.BF16 or expected.blocks:
        assert expected.blocks < 300


def test_blocks_that_are_not_finite_add_nothing(summing, dtype, rule):
    bits = spread_bits(dtype, 200, seed=23)
    alone = sum_errors(summing, bits[1::2].copy(), dtype, rule)
    bits[::2, 5] = dtype.layout.infinity
    found = sum_errors(summing, bits, dtype, rule)
    assert_close(found, alone)
    assert found.blocks == 100


@pytest.mark.parametrize("top", [0, 1, 2, 3, 29, 30, 31, 32, 33, 127, 252, 253, 254])
def test_ends_of_the_exponent_range(summing, dtype, rule, top):
    highest = (1 << dtype.layout.exponent_bits) - 2
    bits = spread_bits(dtype, 130, seed=top, top=min(top, highest))
    assert_sums(summing, bits, dtype, rule)


@pytest.mark.parametrize("scale_byte", [85, 86, 87, 88, 166, 167, 168, 169])
def test_where_float32_ends(summing, scale_byte, rule):
    """Both sides of the limits between blocks summed in float32 and in float64."""
    for dtype in (FloatType.BF16, FloatType.F32):
        bits = spread_bits(dtype, 150, seed=scale_byte, top=scale_byte + 2)
        assert_sums(summing, bits, dtype, rule)


def test_ties_and_their_neighbours(summing, dtype, rule):
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0]
    rows = [[4.0, *ties[:-1], *(-tie for tie in ties[:-1])], [7.0, *ties], [6.0, *ties[:-2]]]
    bits = np.repeat(encode(rows, dtype), 3, axis=0)
    unit = UNSIGNED[dtype](1)
    bits[1::3, 1:9] -= unit
    bits[2::3, 1:9] += unit
    expected = assert_sums(summing, bits, dtype, rule)
    assert expected.flushed
    assert expected.saturated or rule in {ScaleRule.RCEIL, ScaleRule.EVEN, ScaleRule.MSE}


@pytest.mark.parametrize("field", [1, 33, 88, 89, 127, 169, 170, 254])
def test_every_bf16_value_under_one_maximum(summing, field, rule):
    assert_sums(summing, anchored_bits(FloatType.BF16, field << 7 | 0x61), FloatType.BF16, rule)


def test_zeros(summing, dtype, rule):
    bits = np.zeros((130, BLOCK_SIZE), UNSIGNED[dtype])
    bits[:, 3] = dtype.layout.magnitude_mask + 1  # negative zero
    expected = ErrorSums(elements=130 * 32, blocks=130, exponents=(0, 130, 0))
    assert sum_errors(summing, bits, dtype, rule) == expected
    bits[64] = encode([[1.5, 0.5]], dtype)[0]
    assert_sums(summing, bits, dtype, rule)


def test_exact_values_have_no_error(summing, dtype, rule):
    grid = [0.5, 1.0, -1.5, 2.0, 3.0, -4.0, 6.0]
    rows = [[value * 2.0**shift for value in grid] for shift in range(-9, 10)] * 10
    found = sum_errors(summing, encode(rows, dtype), dtype, rule)
    assert (found.sum_err2, found.max_abs_err, found.flushed, found.saturated) == (0, 0, 0, 0)
    assert found.sum_x2 == pytest.approx(found.sum_q2, rel=TOLERANCE)


@pytest.mark.parametrize("blocks", [0, 1, 63, 64, 65, 127, 128, 129, 1023, 1025])
def test_any_number_of_blocks(summing, dtype, blocks):
    bits = spread_bits(dtype, blocks, seed=24, top=dtype.layout.bias)
    assert_sums(summing, bits, dtype, ScaleRule.MSE)


def test_every_saturated_and_flushed_lane_counts(summing, dtype):
    """Chunks whose counts are as large as they get."""
    rows = [[7.9375] * 31 + [0.25]] * 64 + [[4.0] + [0.25] * 31] * 64
    found = sum_errors(summing, encode(rows, dtype), dtype, ScaleRule.FLOOR)
    assert (found.saturated, found.flushed) == (31 * 64, 32 * 64 - 64 + 64)


def test_zeros_are_not_flushed(summing, dtype, rule):
    """In whole chunks, flushed elements are the zero codes less the zeros, of either sign."""
    bits = spread_bits(dtype, 256, seed=28, top=dtype.layout.bias)
    bits[64:128, ::3] = 0
    bits[130, 5] = dtype.layout.magnitude_mask + 1
    bits[200, :31] = 0
    expected = assert_sums(summing, bits, dtype, rule)
    assert 0 < expected.flushed < 256 * 32


@pytest.mark.parametrize("place", [0, 63, 64, 100, 127, 128, 191])
def test_one_far_block_among_near_ones(summing, place, rule):
    """Its chunk is summed block by block, the chunks before and after are not."""
    bits = spread_bits(FloatType.BF16, 192, seed=29, top=127)
    bits[place] = spread_bits(FloatType.BF16, 1, seed=30, top=250)[0]
    assert_sums(summing, bits, FloatType.BF16, rule)
    bits[place, 7] = FloatType.BF16.layout.infinity
    assert assert_sums(summing, bits, FloatType.BF16, rule).blocks == 191


def test_all_three_exponents(summing):
    rows = [[4.0, *[0.25] * 31], [5.0, 1.0], [7.75, 4.0]]
    found = sum_errors(summing, encode(rows * 43, FloatType.BF16), FloatType.BF16, ScaleRule.MSE)
    assert found.exponents == (43, 43, 43)


def test_sums_that_span_magnitudes(summing):
    """Blocks from 2 ** -120 to 2 ** 120 mixed: none hides another of its own magnitude."""
    for top in (7, 87, 127, 167, 247):
        bits = spread_bits(FloatType.BF16, 640, seed=top, top=top)
        bits[::2] = spread_bits(FloatType.BF16, 320, seed=25, top=top - 5)
        assert_sums(summing, bits, FloatType.BF16, ScaleRule.EVEN)


def test_many_blocks(dtype, rule):
    """Against numpy, which sums in float64: rounding does not add up over a large tensor."""
    bits = spread_bits(dtype, 120_000, seed=26, top=dtype.layout.bias - 6)
    expected = sum_errors(get_backend("numpy"), bits, dtype, rule)
    for backend in (get_backend("llvm"), portable()):
        assert_close(sum_errors(backend, bits, dtype, rule), expected)


@pytest.mark.skipif(INTERPRETING, reason="a million elements take the interpreter too long")
def test_equal_blocks_do_not_drift(summing):
    """The same terms again and again would round the same way each time."""
    row = encode([[5.03125, 0.8046875, -1.203125, 0.10009765625] * 8], FloatType.BF16)
    one = sum_errors(get_backend("reference"), row, FloatType.BF16, ScaleRule.MSE)
    many = sum_errors(summing, np.repeat(row, 100_000, axis=0), FloatType.BF16, ScaleRule.MSE)
    for name in ("sum_x2", "sum_q2", "sum_err2"):
        assert getattr(many, name) == pytest.approx(100_000 * getattr(one, name), rel=TOLERANCE)


# --------------------------------------------------------------------------- merging


@given(cuts=st.lists(st.integers(0, 400), max_size=6), seed=st.integers(0, 5))
@pytest.mark.parametrize("name", ["llvm", "numpy"])
def test_pieces_add_up(name, cuts, seed):
    backend, dtype, rule = get_backend(name), FloatType.BF16, ScaleRule.MSE
    bits = spread_bits(dtype, 400, seed=seed, top=128)
    bits[seed::7] = 0
    total = ErrorSums()
    edges = [0, *sorted(cuts), 400]
    for begin, end in pairwise(edges):
        total.add(sum_errors(backend, bits[begin:end], dtype, rule))
    assert_close(total, sum_errors(get_backend("numpy"), bits, dtype, rule))


def test_calls_add_to_what_is_there(summing, dtype):
    bits = spread_bits(dtype, 50, seed=27, top=dtype.layout.bias)
    once = sum_errors(summing, bits, dtype, ScaleRule.EVEN)
    packed, scales = np.zeros(50 * 16, np.uint8), np.zeros(50, np.uint8)
    for _ in range(2):
        summing.quantize(bits, dtype, ScaleRule.EVEN, packed, scales, sums=once)
    one = sum_errors(summing, bits, dtype, ScaleRule.EVEN)
    assert once.elements == 3 * one.elements
    assert once.max_abs_err == one.max_abs_err
    assert once.exponents == tuple(3 * count for count in one.exponents)
    assert once.sum_err2 == pytest.approx(3 * one.sum_err2, rel=1e-15)


def test_a_wrong_size_adds_nothing(summing):
    found = ErrorSums()
    with pytest.raises(ValueError, match="packed"):
        summing.quantize(
            bytes(64), FloatType.BF16, ScaleRule.EVEN, bytearray(15), bytearray(1), sums=found
        )
    assert found == ErrorSums()


def test_adding_nothing():
    found = ErrorSums(elements=32, blocks=1, sum_x2=2.5, max_abs_err=0.5, exponents=(0, 1, 0))
    found.add(ErrorSums())
    assert found == ErrorSums(
        elements=32, blocks=1, sum_x2=2.5, max_abs_err=0.5, exponents=(0, 1, 0)
    )


# --------------------------------------------------------------------------- precision


def test_the_bound_that_is_documented():
    assert 2 * sums.CHUNK_BLOCKS * 2.0**-24 < TOLERANCE
    assert math.isclose(2.0**-126 * 31, 0, abs_tol=LOST * 2.0 ** (-2 * 40))


def test_memory_of_a_call_is_aligned():
    memory = sums.SumsMemory()
    assert memory.scratch % 64 == 0
    assert not any((ctypes.c_char * 8).from_address(memory.result).raw)


def test_the_host_has_what_it_has():
    assert jit.host_has([])
    assert not jit.host_has(["no such feature"])
