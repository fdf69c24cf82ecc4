"""The variants in PTX, their assembly executed in numpy: the bytes of the portable form.

No test here shows what a GPU does with the assembly: that has been compiled, not run.
"""

from __future__ import annotations

import numpy as np
import pytest
from mxconvert_kernels import BLOCK_SIZE, FloatType, get_backend
from mxconvert_kernels.spec import SCALED_TYPES, WHOLE_TYPES

from tests.kernels import ptx
from tests.kernels.blocks import anchored_bits, assert_same, quantize, random_bits, spread_bits
from tests.kernels.interpreter import run_assembly
from tests.kernels.test_scaled import EDGES, any_factors, quantize_scaled, random_blocks

pytestmark = pytest.mark.interpreter

BF16 = FloatType.BF16


@pytest.fixture(params=["BF16X2", "E2M1X2"])
def variant(request, monkeypatch):
    from mxconvert_kernels.gpu.backend import TritonBackend
    from mxconvert_kernels.gpu.kinds import Variant
    from mxconvert_kernels.gpu.launch import Launcher

    run_assembly(monkeypatch)
    return TritonBackend("cpu", Launcher(Variant[request.param], blocks=512))


@pytest.fixture
def ran(monkeypatch):
    """How often assembly ran: a test must not pass because a kernel took the portable form."""
    runs = []
    run = ptx.run
    monkeypatch.setattr(ptx, "run", lambda text, inputs: runs.append(1) or run(text, inputs))
    return runs


def test_all_codes_of_bf16(variant, rule, ran):
    codes = np.arange(1 << 16, dtype=np.uint16)
    mixed = np.random.default_rng(1).permutation(codes[(codes & 0x7FFF) < 0x7F80])
    for bits in (codes.reshape(-1, BLOCK_SIZE), mixed.reshape(-1, BLOCK_SIZE)):
        expected = quantize(get_backend("reference"), bits, BF16, rule)
        assert_same(quantize(variant, bits, BF16, rule), expected)
    assert ran


def test_all_values_below_a_maximum(variant, rule, ran):
    """At each end and in the middle, and where the scale is capped."""
    anchors = [f << 7 | m for f in (0, 1, 2, 127, 253, 254) for m in (0, 64, 95, 96, 127)]
    bits = np.concatenate([anchored_bits(BF16, anchor)[::2] for anchor in anchors])
    expected = quantize(get_backend("numpy"), bits, BF16, rule)
    assert_same(quantize(variant, bits, BF16, rule), expected)
    assert ran


@pytest.mark.parametrize("source", [*WHOLE_TYPES, *SCALED_TYPES], ids=str)
def test_every_source(variant, source, rule):
    """Each source by the way it can take."""
    if source in SCALED_TYPES:
        factors = np.concatenate([EDGES, any_factors(60, seed=2)])
        blocks = random_blocks(source, factors, seed=3)
        expected = quantize_scaled(get_backend("numpy"), blocks, source, rule)
        assert_same(quantize_scaled(variant, blocks, source, rule), expected)
    else:
        bits = np.concatenate([spread_bits(source, 200, seed=4), random_bits(source, 60, seed=5)])
        expected = quantize(get_backend("numpy"), bits, source, rule)
        assert_same(quantize(variant, bits, source, rule), expected)


def test_the_emulator_by_hand():
    """The semantics that the assembly relies on, from the PTX ISA's tables."""
    low, high = np.array([0x33221180], np.uint32), np.array([0x77665544], np.uint32)
    assert ptx.run("{ prmt.b32 $0, $1, $2, 0x8740; }", [low, high])[0] == 0xFF774480
    sign, rest = np.array([0x80], np.uint32), np.array([0xFF], np.uint32)
    assert ptx.run("{ lop3.b32 $0, $1, $2, 0x0F, 0xF8; }", [sign, rest])[0] == 0x8F
    text = "{ fma.rn.bf16x2 $0, $1, $2, $3; }"
    one_and_minus_zero = np.array([0x80003F80], np.uint32)
    two, zero = np.array([0x40004000], np.uint32), np.array([0], np.uint32)
    assert ptx.run(text, [one_and_minus_zero, two, zero])[0] == 0x00004000
    vanishing, tiny = np.array([0x80018001], np.uint32), np.array([0x00800080], np.uint32)
    assert ptx.run(text, [vanishing, tiny, zero])[0] == 0x80008000
    floats = [np.array([value], np.float32).view(np.uint32) for value in (-0.25, 5.0)]
    text = "{ cvt.rn.satfinite.e2m1x2.f32 $0, $1, $2; }"
    assert ptx.run(text, floats)[0] == 0x86
