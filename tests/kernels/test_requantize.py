"""Quantizing what was dequantized gives the same values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mxconvert_kernels import BLOCK_SIZE, FloatType, ScaleRule, get_backend

from tests.kernels.blocks import UNSIGNED, dequantize, quantize, spread_bits, to_floats


def assert_requantizes(bits, dtype, rule):
    backend = get_backend()
    first = quantize(backend, bits, dtype, rule)
    decoded = dequantize(backend, first.packed, first.scales, dtype)
    second = quantize(backend, decoded, dtype, rule)
    again = dequantize(backend, second.packed, second.scales, dtype)
    np.testing.assert_array_equal(to_floats(again, dtype), to_floats(decoded, dtype))


@given(data=st.data())
@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("dtype", [FloatType.BF16, FloatType.F32])
def test_any_block(dtype, rule, data):
    layout = dtype.layout
    sign = layout.magnitude_mask + 1
    magnitude = st.integers(0, layout.infinity - 1)
    near = st.integers(0, (1 << layout.exponent_bits) - 2).flatmap(
        lambda top: st.integers(
            max(top - 6, 0) << layout.mantissa_bits, ((top + 1) << layout.mantissa_bits) - 1
        )
    )
    element = st.tuples(st.one_of(magnitude, near), st.booleans())
    block = data.draw(st.lists(element, min_size=BLOCK_SIZE, max_size=BLOCK_SIZE))
    bits = np.array([[m | (sign if negative else 0) for m, negative in block]], UNSIGNED[dtype])
    assert_requantizes(bits, dtype, rule)


@pytest.mark.parametrize("dtype", [FloatType.BF16, FloatType.F32])
def test_many_blocks(dtype, rule):
    assert_requantizes(spread_bits(dtype, 30_000, seed=10), dtype, rule)


def test_f16_within_its_normal_range(rule):
    """F16 cannot hold 65536, which 60000 may be quantized to; below, it holds all there is."""
    for top in range(16, 30):
        assert_requantizes(spread_bits(FloatType.F16, 500, seed=top, top=top), FloatType.F16, rule)
