"""Measuring: the sums equal those of a slow loop; verify leaves the file alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mxconvert.quantize import FloatType, Quantizer, load_backend
from mxconvert.statistics import REPORT_NAME
from mxconvert.statistics.measure import Counts, as_float64, floor_scales, measure_blocks
from tests.support import decode_mxfp4
from tests.support.numbers import encode
from tests.verify_base import make_artifact, verify

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS = 40
LARGEST = 6.0


def values(dtype: str) -> np.ndarray:
    """Blocks of usual weights, of zeros, with outliers, far above and far below."""
    rng = np.random.default_rng(7)
    found = rng.standard_normal((BLOCKS, 32)) * 0.02
    found[0] = 0
    found[1, 3] = 1.0
    found[2] *= 2.0**-10
    found[3] *= 2.0**8
    found[4, ::2] = 0
    return as_float64(bytearray(encode(found, dtype)), dtype)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("rule", ["mse", "even", "floor", "rceil"])
def test_the_sums_are_those_of_a_slow_loop(dtype: str, rule: str) -> None:
    """Every figure of a report rests on these; the loop is the definition, word for word."""
    original = values(dtype)
    codes, scales = bytearray(original.size // 2), bytearray(BLOCKS)
    raw = memoryview(bytearray(encode(original, dtype)))
    backend = load_backend("numpy")
    Quantizer(backend, rule).quantize(raw, dtype, memoryview(codes), memoryview(scales))
    decoded = bytearray(original.size * 4)
    backend.dequantize(codes, scales, FloatType.F32, decoded)

    sums = measure_blocks(original, as_float64(decoded, "F32"), np.frombuffer(scales, np.uint8))

    packed, bytes_of_scales = np.frombuffer(codes, np.uint8), np.frombuffer(scales, np.uint8)
    stored = decode_mxfp4(packed.reshape(BLOCKS, 16), bytes_of_scales.reshape(BLOCKS, 1)).ravel()
    x2 = q2 = err2 = worst = 0.0
    flushed = saturated = 0
    steps = [0, 0, 0]
    for block, scale in enumerate(scales):
        part = [float(x) for x in original[block * 32 : block * 32 + 32]]
        amax = max(map(abs, part))
        floor = max(math.floor(math.log2(amax)) - 2 + 127, 0) if amax else 0
        steps[scale - floor + 1] += 1
        for place, x in enumerate(part):
            q = float(stored[block * 32 + place])
            x2, q2, err2 = x2 + x * x, q2 + q * q, err2 + (q - x) ** 2
            worst = max(worst, abs(q - x))
            flushed += x != 0 and q == 0
            saturated += abs(x) > LARGEST * 2.0 ** (scale - 127)
    assert (sums.elements, sums.blocks) == (BLOCKS * 32, BLOCKS)
    assert (sums.sum_x2, sums.sum_q2, sums.sum_err2) == pytest.approx((x2, q2, err2))
    assert sums.max_abs_err == worst
    assert (sums.flushed, sums.saturated, list(sums.exponents)) == (flushed, saturated, steps)
    assert sums.flushed > 0
    assert (rule == "floor") == (steps[1] == BLOCKS)
    assert (rule == "rceil") <= (sums.saturated == 0)


def test_floor_scales_at_the_borders() -> None:
    maxima = np.array([0.0, 1.0, np.nextafter(2.0, 0), 2.0, 2.0**-126, 2.0**-149, 2.0**127])
    assert floor_scales(maxima).tolist() == [0, 125, 125, 126, 0, 0, 252]


def test_counts_are_of_single_codes() -> None:
    """A byte holds two codes, the low half first; both count."""
    counts = Counts()
    counts.add(bytearray([0x1F, 0x11]), bytearray([3]))
    counts.add(bytearray([0x00]), bytearray([3, 250]))
    assert counts.codes.tolist() == [2, 3] + [0] * 13 + [1]
    assert {byte: n for byte, n in enumerate(counts.scales.tolist()) if n} == {3: 2, 250: 1}


@pytest.mark.parametrize("strict", [False, True])
def test_verify_leaves_a_report_beside_the_artifact_alone(
    shared_source: Path, tmp_path: Path, strict: bool
) -> None:
    """The report is no part of an artifact: neither a finding nor a note, even when strict."""
    target = make_artifact(shared_source, tmp_path / "a")
    (target / REPORT_NAME).write_bytes(b"anything")
    report = verify(target, strict=strict)
    assert report.ok
    assert not [note for note in report.notes if REPORT_NAME in note.message]
