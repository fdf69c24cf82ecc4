"""Rule `mse`: three candidates are enough, the gates skip nothing, the arithmetic fits 32 bits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from mxconvert_kernels import FloatType, ScaleRule, get_backend
from mxconvert_kernels.lanes import lower_gate, raise_gate
from mxconvert_kernels.reference import magnitude_units, quantize_block, squared_error
from mxconvert_kernels.spec import E2M1_HALVES, ERROR_FRACTION_BITS, WHOLE_TYPES

from tests.kernels.blocks import codes, encode, quantize, spread_bits, to_floats

UNIT = 1 << ERROR_FRACTION_BITS
HIGHEST = 8 * UNIT
"""A magnitude below 8 scales rounds to at most this many error units."""


def squared_errors(step: int) -> np.ndarray:
    """The least squared error of each whole number of units, with `step` added to the exponent."""
    grid = np.array(E2M1_HALVES, np.int64) * (UNIT << (step + 4)) // 32
    magnitudes = np.arange(HIGHEST + 1)
    return ((magnitudes[:, None] - grid) ** 2).min(axis=1)


HERE = squared_errors(0)


def test_squared_errors_fit_in_32_bits():
    assert all(32 * squared_errors(step).max() < 2**31 for step in (-1, 0, 1))


@pytest.mark.parametrize("dtype", WHOLE_TYPES)
def test_the_error_depends_on_the_rounded_magnitude_alone(dtype):
    """Where rounding to units crosses a tie, both codes are equally far from the rounded value."""
    bits = spread_bits(dtype, 60, seed=7, top=dtype.layout.bias + 2)
    for row in bits.tolist():
        units = [magnitude_units(element, dtype) for element in row]
        floor = max(units).bit_length() - 1 - 149 - 2 + 127
        rounded = [int(np.rint(np.ldexp(float(x), -(floor + 12)))) for x in units]
        for step in (-1, 0, 1):
            expected = int(squared_errors(step)[rounded].sum())
            assert squared_error(units, floor, floor + step) == expected


def test_gate_of_the_exponent_above():
    """No magnitude up to 7 scales has less error under twice the scale."""
    gain = HERE - squared_errors(1)
    assert gain[: 7 * UNIT + 1].max() == 0
    assert gain[7 * UNIT + 1] > 0
    # A maximum that rounds to more than 7 scales has a mantissa above the gate.
    for dtype in WHOLE_TYPES:
        shift = dtype.layout.mantissa_bits
        assert raise_gate(shift) / (1 << shift) == 0.75


def test_gate_of_the_exponent_below():
    """Up to 4.46875 scales, 31 other elements can make up for the maximum's error."""
    gain = HERE - squared_errors(-1)
    most = int(gain.max())
    assert most == (UNIT // 4) ** 2
    possible = np.flatnonzero(gain + 31 * most >= 0)
    as_maximum = possible[possible >= 4 * UNIT]
    assert as_maximum.max() == 4.46875 * UNIT
    for dtype in WHOLE_TYPES:
        shift = dtype.layout.mantissa_bits
        gate = 4 * (1 + lower_gate(shift) / (1 << shift)) * UNIT
        assert np.rint(gate) == 4.46875 * UNIT  # the gate rounds to the last possible maximum,
        above = 4 * (1 + (lower_gate(shift) + 1) / (1 << shift)) * UNIT
        assert np.rint(above) > 4.46875 * UNIT  # and the next value does not


def test_gates_in_the_vicinity(fast_backend):
    """Maxima around both gates in F32, where they fall between error units."""
    near = np.arange(-40, 41) * 2.0**-21
    rows = [[4.46875 + 2.0**-11 + delta, *[0.25] * 31] for delta in near]
    rows += [[4.46875 + delta, *[0.75] * 31] for delta in near]
    rows += [[7.0 + 2.0**-11 + delta] for delta in near] + [[7.0 + delta] for delta in near]
    bits = encode(rows, FloatType.F32)
    expected = quantize(get_backend("reference"), bits, FloatType.F32, ScaleRule.MSE)
    found = quantize(fast_backend, bits, FloatType.F32, ScaleRule.MSE)
    assert found.scales.tolist() == expected.scales.tolist()
    assert len(set(found.scales.tolist())) == 3


def constructed_blocks() -> np.ndarray:
    """Blocks on which a neighbour of the floor exponent may win: one maximum, equal others."""
    maxima = [4.0, 4.125, 4.375, 4.46875, 4.5, 6.0, 7.0, 7.0625, 7.25, 7.5, 7.9375]
    others = [0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.5, 3.0, 3.5]
    rows = [
        [top] + [other] * count
        for top in maxima
        for other in others
        for count in (1, 2, 3, 7, 15, 30, 31)
    ]
    return encode(rows, FloatType.BF16)


def test_three_candidates_contain_the_optimum():
    """No exponent from four below to four above the floor's has less squared error."""
    bits = np.concatenate(
        [constructed_blocks(), spread_bits(FloatType.BF16, 20_000, seed=8, top=129)]
    )
    magnitudes = np.abs(to_floats(bits, FloatType.BF16))
    found = quantize(get_backend(), bits, FloatType.BF16, ScaleRule.MSE)
    grid = np.array(E2M1_HALVES) / 2

    def exact_errors(scale):
        points = grid * np.broadcast_to(scale, (len(bits),))[:, None]
        ties = (points[:, 1:] + points[:, :-1]) / 2
        nearest = (magnitudes[:, :, None] > ties[:, None]).sum(axis=2)
        return ((magnitudes - np.take_along_axis(points, nearest, 1)) ** 2).sum(axis=1)

    chosen = exact_errors(2.0 ** (found.scales.astype(float) - 127))
    amax = magnitudes.max(axis=1)
    floor = np.exp2(np.floor(np.log2(np.where(amax > 0, amax, 1))) - 2)
    errors = [exact_errors(floor * 2.0**step) for step in range(-4, 5)]
    # Inputs are rounded to error units, so a block may miss the optimum by a hair.
    slack = 32 * 6 * floor**2 / UNIT
    assert (chosen <= np.min(errors, axis=0) + slack).all()
    steps = np.unique(found.scales[amax > 0].astype(int) - 127 - np.log2(floor[amax > 0]))
    assert steps.tolist() == [-1, 0, 1]


def test_exhaustive_small_blocks():
    """The oracle's choice among three is the choice among nine, on blocks of one or two values."""
    tops = [4.0 + i / 16 for i in range(64)]
    for top, other in ((top, other) for top in tops for other in (0.0, 0.3125, 0.75, 1.8125)):
        row = encode([[top, *[other] * 31]], FloatType.BF16)[0].tolist()
        units = [magnitude_units(element, FloatType.BF16) for element in row]
        errors = {step: _exact_error(units, 127 + step) for step in range(-4, 5)}
        best = min(errors, key=lambda step: (errors[step], step))
        chosen, _ = quantize_block(row, FloatType.BF16, ScaleRule.MSE)
        assert chosen == 127 + best


def _exact_error(units: list[int], scale_byte: int) -> int:
    """The squared error in units of 2 ** -150, without any rounding."""
    grid = [halves << (scale_byte + 22) for halves in E2M1_HALVES]
    ties = [(low + high) // 2 for low, high in pairwise(grid)]
    return sum((2 * unit - grid[sum(2 * unit > tie for tie in ties)]) ** 2 for unit in units)


def test_the_search_never_loses_to_another_rule(dtype):
    bits = spread_bits(dtype, 20_000, seed=9, top=dtype.layout.bias + 2)
    values = to_floats(bits, dtype)

    def error(rule: ScaleRule) -> np.ndarray:
        found = quantize(get_backend(), bits, dtype, rule)
        signed = np.concatenate([E2M1_HALVES, np.negative(E2M1_HALVES)]) / 2
        scales = 2.0 ** (found.scales.astype(float) - 127)
        return ((values - signed[codes(found.packed)] * scales[:, None]) ** 2).sum(axis=1)

    least = error(ScaleRule.MSE)
    # Scales are at most 1 here; rounding to error units moves each term by less than 12 units.
    slack = 32 * 12 / UNIT if dtype is not FloatType.BF16 else 1e-2
    for rule in (ScaleRule.EVEN, ScaleRule.FLOOR, ScaleRule.RCEIL):
        assert (least <= error(rule) + slack).all()
