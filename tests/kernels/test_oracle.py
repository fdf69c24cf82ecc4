"""Every backend gives the oracle's bytes, and the oracle gives what floats of 64 bits give."""

from __future__ import annotations

import numpy as np
import pytest
from mxconvert_kernels import BLOCK_SIZE, FloatType, ScaleRule, get_backend
from mxconvert_kernels.reference import decode, magnitude_code, magnitude_units

from tests.kernels.blocks import (
    UNSIGNED,
    anchored_bits,
    assert_same,
    dequantize,
    quantize,
    random_bits,
    spread_bits,
    to_floats,
)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def test_random_bits(fast_backend, dtype, rule):
    bits = random_bits(dtype, 400, seed=1)
    expected = quantize(get_backend("reference"), bits, dtype, rule)
    assert expected.nonfinite
    assert_same(quantize(fast_backend, bits, dtype, rule), expected)


def test_spread_bits(fast_backend, dtype, rule):
    edges = [spread_bits(dtype, 60, seed=top, top=top) for top in range(6)]
    highest = (1 << dtype.layout.exponent_bits) - 2
    edges += [spread_bits(dtype, 60, seed=top, top=top) for top in range(highest - 3, highest + 1)]
    # Around the switch between 16-bit lanes and lifted ones.
    edges += [spread_bits(dtype, 60, seed=top, top=top) for top in range(30, 34) if top <= highest]
    bits = np.concatenate([*edges, spread_bits(dtype, 800, seed=2)])
    expected = quantize(get_backend("reference"), bits, dtype, rule)
    assert_same(quantize(fast_backend, bits, dtype, rule), expected)


def test_backends_agree_on_many_blocks(dtype, rule):
    bits = np.concatenate([spread_bits(dtype, 60_000, seed=3), random_bits(dtype, 20_000, seed=4)])
    expected = quantize(get_backend("numpy"), bits, dtype, rule)
    assert_same(quantize(get_backend("llvm"), bits, dtype, rule), expected)


@pytest.mark.parametrize("dtype", [FloatType.BF16, FloatType.F16])
def test_every_value_under_every_maximum_exponent(dtype, rule):
    layout = dtype.layout
    shift = layout.mantissa_bits
    fields = range((1 << layout.exponent_bits) - 1)
    mantissas = [0, (1 << shift >> 3) - 1, 1 << shift >> 1, (3 << shift >> 2) + 1, (1 << shift) - 1]
    for mantissa in mantissas:
        anchors = [field << shift | mantissa for field in fields]
        bits = np.concatenate([anchored_bits(dtype, anchor) for anchor in anchors])
        expected = quantize(get_backend("numpy"), bits, dtype, rule)
        assert_same(quantize(get_backend("llvm"), bits, dtype, rule), expected)


@pytest.mark.parametrize("field", [0, 1, 2, 3, 31, 32, 127, 252, 253, 254])
def test_every_bf16_value_under_one_maximum(fast_backend, field, rule):
    bits = anchored_bits(FloatType.BF16, field << 7 | 0x61)
    expected = quantize(get_backend("reference"), bits, FloatType.BF16, rule)
    assert_same(quantize(fast_backend, bits, FloatType.BF16, rule), expected)


@pytest.mark.parametrize("dtype", [FloatType.BF16, FloatType.F16])
def test_every_16_bit_pattern_fills_a_block(fast_backend, dtype, rule):
    bits = np.repeat(np.arange(1 << 16, dtype=np.uint16), BLOCK_SIZE).reshape(-1, BLOCK_SIZE)
    found = quantize(fast_backend, bits, dtype, rule)
    other = get_backend("numpy" if fast_backend.name == "llvm" else "llvm")
    assert_same(found, quantize(other, bits, dtype, rule))
    sample = slice(None, None, 97)
    expected = quantize(get_backend("reference"), bits[sample].copy(), dtype, rule)
    np.testing.assert_array_equal(found.scales[sample], expected.scales)
    np.testing.assert_array_equal(found.packed[sample], expected.packed)


def test_dequantize_every_code_under_every_scale(fast_backend, dtype):
    packed = np.repeat(
        np.array([[2 * i | (2 * i + 1) << 4 for i in range(8)] * 2], np.uint8), 256, 0
    )
    scales = np.arange(256, dtype=np.uint8)
    expected = [[decode(code, byte, dtype) for code in range(16)] * 2 for byte in range(256)]
    found = dequantize(fast_backend, packed, scales, dtype)
    np.testing.assert_array_equal(found, np.array(expected, UNSIGNED[dtype]))


def test_the_oracle_decodes_as_float64_does(dtype):
    values = np.concatenate([E2M1, -E2M1]) * 2.0 ** (np.arange(255.0)[:, None] - 127)
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16 if dtype is FloatType.F16 else np.float32)
    found = [[decode(code, byte, dtype) for code in range(16)] for byte in range(255)]
    floats = to_floats(np.array(found, UNSIGNED[dtype]), dtype)
    np.testing.assert_array_equal(floats, rounded.astype(np.float64))
    np.testing.assert_array_equal(np.signbit(floats), np.signbit(rounded))
    assert np.isnan(to_floats(np.array([decode(3, 255, dtype)], UNSIGNED[dtype]), dtype)).all()


def test_the_oracle_encodes_as_float64_does():
    bits = spread_bits(FloatType.F32, 40, seed=5, top=128).ravel()
    values = np.abs(to_floats(bits, FloatType.F32))
    distances = np.abs(values[:, None] - E2M1)
    for value, bit, distance in zip(values, bits, distances, strict=True):
        units = magnitude_units(int(bit), FloatType.F32)
        nearest = np.flatnonzero(distance == distance.min())
        expected = (
            7 if value > 6 else nearest[nearest % 2 == 0][0] if len(nearest) > 1 else nearest[0]
        )
        assert magnitude_code(units, 127) == expected


def test_scan_finds_the_first(fast_backend, dtype):
    for size in (0, 1, 31, 127, 128, 129, 1000):
        bits = np.zeros(size, UNSIGNED[dtype])
        assert fast_backend.scan(bits, dtype) == get_backend("reference").scan(bits, dtype)
        for place in {0, size // 3, size - 1} if size else ():
            bits[place] = dtype.layout.infinity
            found = fast_backend.scan(bits, dtype)
            assert found == get_backend("reference").scan(bits, dtype)
            assert found


def test_round_trip_of_every_code_under_every_scale(backend, rule):
    """Decode then encode, in blocks that contain a 6 (case NUM-01)."""
    row = [2 * i | (2 * i + 1) << 4 for i in range(8)]
    row[4] = 9 << 4  # code 8, negative zero, does not survive: it becomes 0
    scales = np.arange(253, dtype=np.uint8)
    packed = np.repeat(np.array([row * 2], np.uint8), scales.size, axis=0)
    for dtype in (FloatType.BF16, FloatType.F32):
        found = quantize(backend, dequantize(backend, packed, scales, dtype), dtype, rule)
        np.testing.assert_array_equal(found.scales, scales)
        np.testing.assert_array_equal(found.packed, packed)


def test_rules_are_ordered(dtype):
    """Floor <= even <= rceil, and the search stays within one of floor."""
    bits = spread_bits(dtype, 5000, seed=6)
    bytes_of = {
        rule: quantize(get_backend(), bits, dtype, rule).scales.astype(int) for rule in ScaleRule
    }
    assert (bytes_of[ScaleRule.FLOOR] <= bytes_of[ScaleRule.EVEN]).all()
    assert (bytes_of[ScaleRule.EVEN] <= bytes_of[ScaleRule.RCEIL]).all()
    assert (abs(bytes_of[ScaleRule.MSE] - bytes_of[ScaleRule.FLOOR]) <= 1).all()
