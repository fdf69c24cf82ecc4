"""Hand-derived blocks with literal results (cases NUM-01, 02, 03, 05, 06 and 07)."""

from __future__ import annotations

import numpy as np
import pytest
from mxconvert_kernels import FloatType, NonFinite, ScaleRule

from tests.kernels.blocks import codes, encode, quantize, to_floats
from tests.kernels.blocks import dequantize as decode

MSE, EVEN, FLOOR, RCEIL = ScaleRule
BF16, F16, F32 = FloatType.BF16, FloatType.F16, FloatType.F32

TIES_AND_NEIGHBOURS = {
    0.25: 0,
    0.251953125: 1,
    0.74609375: 1,
    0.75: 2,
    0.75390625: 2,
    1.25: 2,
    1.75: 4,
    2.5: 4,
    3.5: 6,
    4.96875: 6,
    5.0: 6,
    5.03125: 7,
}
HALF_GRID = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0.5, -0.5, -1, -1.5, -2, -3, -4, -6]


def test_ties_and_neighbours(backend, dtype, rule):
    values = [sign * value for value in TIES_AND_NEIGHBOURS for sign in (1, -1)]
    found = quantize(backend, encode([[6.0, *values]], dtype), dtype, rule)
    assert found.scales.tolist() == [127]
    expected = [code | sign for code in TIES_AND_NEIGHBOURS.values() for sign in (0, 8)]
    assert codes(found.packed)[0, :25].tolist() == [7, *expected]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (FLOOR, [(127, 6), (127, 6), (127, 6), (127, 6), (127, 6), (128, 8)]),
        (EVEN, [(127, 6), (127, 6), (127, 6), (128, 8), (128, 8), (128, 8)]),
        (RCEIL, [(127, 6), (128, 6), (128, 6), (128, 8), (128, 8), (128, 8)]),
        (MSE, [(127, 6), (127, 6), (127, 6), (127, 6), (128, 8), (128, 8)]),
    ],
)
def test_near_the_top_of_a_binade(backend, dtype, rule, expected):
    bits = encode([[6.0], [6.5], [6.96875], [7.0], [7.5], [8.0]], dtype)
    found = quantize(backend, bits, dtype, rule)
    decoded = to_floats(decode(backend, found.packed, found.scales, BF16), BF16)[:, 0]
    assert list(zip(found.scales.tolist(), decoded.tolist(), strict=True)) == expected


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros(backend, dtype, rule, zero):
    bits = encode([[1.0], [zero] * 32, [1.0, zero, zero]], dtype)
    found = quantize(backend, bits, dtype, rule)
    assert found.scales[1] == 0
    assert not found.packed[1].any()
    assert codes(found.packed)[2].tolist() == [6] + [0] * 31
    decoded = decode(backend, found.packed, found.scales, dtype)
    assert not decoded[1].any()


def test_a_small_negative_value_keeps_its_sign(backend, dtype, rule):
    found = quantize(backend, encode([[6.0, -0.0625, 0.0625, -0.0]], dtype), dtype, rule)
    assert codes(found.packed)[0, :4].tolist() == [7, 8, 0, 0]


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_down_to_the_subnormals(backend, dtype, rule):
    tiny = [1.5 * 2.0**-125, 2.0**-126, 2.0**-127, 2.0**-128, 2.0**-129, 2.0**-133]
    found = quantize(backend, encode([[value] for value in tiny], dtype), dtype, rule)
    assert found.scales.tolist() == [0] * 6
    assert codes(found.packed)[:, 0].tolist() == [7, 4, 2, 1, 0, 0]


def test_packing_order(backend, dtype, rule):
    found = quantize(backend, encode([HALF_GRID * 2], dtype), dtype, rule)
    assert found.scales.tolist() == [127]
    assert found.packed.tobytes().hex(" ") == " ".join(["10 32 54 76 91 ba dc fe"] * 2)


def test_f32_is_not_rounded_to_bf16_first(backend):
    bits = encode([[6.998046875]], F32)
    scales = {rule: int(quantize(backend, bits, F32, rule).scales[0]) for rule in ScaleRule}
    assert scales == {MSE: 127, EVEN: 127, FLOOR: 127, RCEIL: 128}


def test_f16_subnormals_count_in_full(backend, rule):
    values = [[2.0**-20, -(2.0**-21), 3 * 2.0**-24], [2.0**-24]]
    half = quantize(backend, encode(values, F16), F16, rule)
    single = quantize(backend, encode(values, F32), F32, rule)
    assert half.scales.tolist() == single.scales.tolist() == [105, 101]
    assert half.packed.tolist() == single.packed.tolist()
    assert codes(half.packed)[0, :3].tolist() == [6, 12, 2]


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_nothing_decodes_beyond_bf16(backend, dtype, rule):
    largest = to_floats(np.array([dtype.layout.infinity - 1], "<u4"), F32)
    if dtype is BF16:
        largest = to_floats(np.array([dtype.layout.infinity - 1], np.uint16), BF16)
    values = [[1.75 * 2.0**127], [float(largest[0])], [1.625 * 2.0**127], [1.5 * 2.0**127]]
    found = quantize(backend, encode(values, dtype), dtype, rule)
    assert found.scales.tolist() == [252, 252, 253 if rule is RCEIL else 252, 252]
    assert codes(found.packed)[:, 0].tolist() == [7, 7, 5 if rule is RCEIL else 7, 7]
    assert np.isfinite(to_floats(decode(backend, found.packed, found.scales, BF16), BF16)).all()


def test_the_search_can_choose_the_exponent_below(backend, dtype):
    # One 4.0 and 31 quarters: scale 1 loses each quarter (squared error 31/16), scale 1/2 keeps
    # them and turns 4 into 3 (squared error 1).
    found = quantize(backend, encode([[4.0] + [0.25, -0.25] * 15 + [0.25]], dtype), dtype, MSE)
    assert found.scales.tolist() == [126]
    assert codes(found.packed)[0, :3].tolist() == [7, 1, 9]


@pytest.mark.parametrize(
    ("values", "scale_byte"),
    [
        # 4.46875 as 3.0 costs (143/32 - 3)**2 - (143/32 - 4)**2 = 31/16: exactly what 31 quarters
        # gain. A tie goes to the smaller exponent, a quarter fewer decides for the larger.
        ([4.46875] + [0.25] * 31, 126),
        ([4.46875] + [0.25] * 30, 127),
        # 7.0 as 6 or as 8: a tie.
        ([7.0], 127),
        ([7.03125], 128),
        # 7.5 gains 2 at scale 2; each 1.5 then loses 1/4.
        ([7.5] + [1.5] * 8, 127),
        ([7.5] + [1.5] * 7, 128),
    ],
)
def test_ties_in_squared_error(backend, dtype, values, scale_byte):
    found = quantize(backend, encode([values], dtype), dtype, MSE)
    assert found.scales.tolist() == [scale_byte]


def test_nonfinite_blocks(backend, dtype, rule):
    bits = encode([[1.0]] * 5, dtype)
    infinity = dtype.layout.infinity
    sign = dtype.layout.magnitude_mask + 1
    bits[1, 7] = infinity + 1
    bits[1, 30] = sign | infinity
    bits[4, 31] = dtype.layout.magnitude_mask
    found = quantize(backend, bits, dtype, rule)
    assert found.nonfinite == NonFinite(count=3, first=39)
    assert found.nonfinite
    assert found.scales.tolist()[1::3] == [255, 255]
    assert not found.packed[[1, 4]].any()
    assert found.scales[0] != 255
    assert backend.scan(bits, dtype) == found.nonfinite
