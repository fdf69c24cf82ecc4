"""FP8 times factors: every backend against one multiplication of float32 and what F32 gives."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mxconvert_kernels import BLOCK_SIZE, ErrorSums, FloatType, NonFinite, ScaleRule, get_backend
from mxconvert_kernels.llvm import jit, scaled
from mxconvert_kernels.spec import SCALED_TYPES, WHOLE_TYPES
from mxconvert_kernels.units import float32_product, narrow_to_bf16

from tests.kernels.blocks import UNWRITTEN, Result, assert_same, quantize, sum_errors
from tests.kernels.interpreter import INTERPRETING
from tests.kernels.test_llvm import TARGETS, X86, flush_subnormals
from tests.kernels.test_sums import assert_close, portable

__all__ = ["flush_subnormals"]

E4M3, E5M2 = SCALED_TYPES
F32, BF16, MSE, EVEN = FloatType.F32, FloatType.BF16, ScaleRule.MSE, ScaleRule.EVEN
LARGEST = {E4M3: 0x7E, E5M2: 0x7B}
"""The largest finite element."""
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 4.46875, 5, 6, 7)
"""Where codes and scales change, in scales."""


@pytest.fixture(params=SCALED_TYPES)
def fp8(request):
    return request.param


@pytest.fixture(params=["triton"] if INTERPRETING else ["llvm", "portable", "numpy"])
def fast(request):
    """Each backend but the oracle."""
    return portable() if request.param == "portable" else get_backend(request.param)


class Blocks(NamedTuple):
    elements: np.ndarray
    factors: np.ndarray


# --------------------------------------------------------------------------- what is expected


@cache
def values(dtype) -> np.ndarray:
    """What each byte means, float32."""
    mantissa_bits, bias = (3, 7) if dtype is E4M3 else (2, 15)
    codes = np.arange(256)
    fields, mantissas = codes % 128 >> mantissa_bits, codes % (1 << mantissa_bits)
    hidden = np.where(fields > 0, 1 << mantissa_bits, 0)
    exact = np.ldexp((hidden + mantissas) * 1.0, np.maximum(fields, 1) - bias - mantissa_bits)
    if dtype is E4M3:
        exact[codes % 128 == 127] = math.nan
    else:
        exact[codes % 128 == 124] = math.inf
        exact[codes % 128 > 124] = math.nan
    return np.where(codes < 128, exact, -exact).astype(np.float32)


def products(blocks: Blocks, dtype) -> np.ndarray:
    """Float32 values `[blocks, 32]`, by numpy's multiplication."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values(dtype)[blocks.elements] * blocks.factors[:, None]


def quantize_scaled(backend, blocks: Blocks, dtype, rule, sums=None) -> Result:
    count = len(blocks.factors)
    packed = np.full((count, 16), UNWRITTEN, np.uint8)
    scales = np.full(count, UNWRITTEN, np.uint8)
    found = backend.quantize_scaled(
        blocks.elements, dtype, rule, blocks.factors, packed, scales, sums=sums
    )
    return Result(packed, scales, found)


def widen_scaled(backend, blocks: Blocks, dtype) -> tuple[np.ndarray, NonFinite]:
    out = np.full(blocks.elements.shape, UNWRITTEN, np.uint16)
    return out, backend.widen_scaled(blocks.elements, dtype, blocks.factors, out)


def narrowed(floats: np.ndarray) -> np.ndarray:
    """BF16 bits by way of float64, whose midpoints are exact."""
    bits = np.ascontiguousarray(floats).view(np.uint32)
    low, down = bits & 0xFFFF, bits >> 16
    up = (low > 0x8000) | ((low == 0x8000) & (down % 2 == 1))
    return (down + up).astype(np.uint16)


def assert_quantizes(backend, blocks: Blocks, dtype, rule) -> Result:
    floats = products(blocks, dtype)
    expected = quantize(get_backend("numpy"), floats, F32, rule)
    found = quantize_scaled(backend, blocks, dtype, rule)
    assert_same(found, expected)
    sums = ErrorSums()
    assert_same(quantize_scaled(backend, blocks, dtype, rule, sums), expected)
    assert_close(sums, sum_errors(get_backend("numpy"), floats, F32, rule))
    return found


def assert_widens(backend, blocks: Blocks, dtype) -> None:
    floats = products(blocks, dtype)
    out, found = widen_scaled(backend, blocks, dtype)
    is_nan = np.isnan(floats)
    np.testing.assert_array_equal(out[~is_nan], narrowed(floats)[~is_nan])
    assert set(out[is_nan].tolist()) <= {0x7FC0, 0xFFC0}
    assert found == get_backend("numpy").scan(out, BF16)


# --------------------------------------------------------------------------- blocks


def random_blocks(dtype, factors: np.ndarray, seed: int, *, any_code: bool = False) -> Blocks:
    """Elements in 32 bands of magnitude, or any pattern at all."""
    rng = np.random.default_rng(seed)
    shape = (len(factors), BLOCK_SIZE)
    if any_code:
        return Blocks(rng.integers(0, 256, shape, np.uint8), factors)
    tops = rng.integers(0, LARGEST[dtype] + 1, (len(factors), 1))
    down = rng.integers(0, 4 * 12, shape) * rng.integers(0, 2, shape)
    signs = rng.integers(0, 2, shape) << 7
    return Blocks((np.maximum(tops - down, 0) | signs).astype(np.uint8), factors)


def any_factors(count: int, seed: int) -> np.ndarray:
    """Every exponent alike, subnormal numbers included."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, F32.layout.infinity, count, np.uint32).view(np.float32)


def usual_factors(count: int, seed: int) -> np.ndarray:
    """As checkpoints have them."""
    return np.random.default_rng(seed).uniform(1e-4, 1e-2, count).astype(np.float32)


def tie_factors() -> np.ndarray:
    """Factors that put elements at and next to where codes change, by a few units each way."""
    exact = np.array([tie / m for tie in TIES for m in range(1, 16)], np.float32)
    steps = np.arange(-3, 4, dtype=np.int32)
    return (exact.view(np.int32)[:, None] + steps).ravel().view(np.float32)


POWERS_OF_TWO = np.ldexp(np.float64(1), np.arange(-149, 128)).astype(np.float32)
EDGES = np.array(
    [
        bits + step
        for bits in (
            *(field << 23 for field in (1, 9, 10, 11, 16, 17, 18, 23, 24, 31, 32, 33, 41, 48)),
            *(field << 23 for field in (238, 239, 240, 245, 246, 247, 253, 254)),
            0x33000000,
        )
        for step in (-1, 0, 1, 0x500000)
    ]
    + [0, 1, 2, 3, 5, 0x7F7FFFFF, 0x80000000],
    np.uint32,
).view(np.float32)
"""Both sides of where the kernels go another way, and of the ends of float32."""


# --------------------------------------------------------------------------- the oracle


def test_the_oracle_multiplies_as_fractions_do(fp8):
    """All elements by factors of all sizes: the nearest float32, which numpy gives too."""
    blocks = Blocks(
        np.tile(np.arange(256, dtype=np.uint8), (40, 1)),
        np.concatenate([any_factors(30, seed=1), EDGES[:5], EDGES[-7:-2]]),
    )
    floats = products(blocks, fp8)
    for row, factor, expected in zip(*blocks, floats, strict=True):
        bits = int(factor.view(np.uint32))
        found = [float32_product(int(element), fp8, bits) for element in row]
        is_nan = np.isnan(expected)
        np.testing.assert_array_equal(
            np.array(found, np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan]
        )
        assert all(found[i] & 0x7FFFFFFF == 0x7FC00000 for i in np.flatnonzero(is_nan))


def test_the_oracle_by_hand():
    """0x38 is 1, 0x01 the smallest element; products between two float32 go to the even one."""
    third, tiny = 0x3EAAAAAB, 0x00000003
    assert float32_product(0x38, E4M3, third) == third
    assert float32_product(0xB8, E4M3, third) == 0x80000000 | third
    assert float32_product(0x30, E4M3, tiny) == 2  # 0.5 * 3 units
    assert float32_product(0x34, E4M3, tiny) == 2  # 0.75 * 3 = 2.25
    assert float32_product(0x01, E4M3, 0x7F7FFFFF) == 0x7AFFFFFF
    assert float32_product(0x7F, E4M3, 0) == 0x7FC00000
    assert float32_product(0xFC, E5M2, 1) == 0xFF800000
    assert float32_product(0x7C, E5M2, 0) == 0x7FC00000
    exact = Fraction(13, 8) * Fraction(0xAAAAAB, 1 << 25)
    found = np.array(float32_product(0x3D, E4M3, third), np.uint32).view(np.float32)
    assert abs(Fraction(float(found)) - exact) <= Fraction(1, 1 << 25)


def test_the_oracle_narrows_as_numpy_does():
    bits = np.random.default_rng(2).integers(0, 1 << 32, 20_000, np.uint64).astype(np.uint32)
    bits[::2] = bits[::2] & 0xFFFF0000 | np.resize([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], 10_000)
    floats = bits.view(np.float32)
    floats = floats[~np.isnan(floats)]
    found = [narrow_to_bf16(int(element)) for element in floats.view(np.uint32)]
    np.testing.assert_array_equal(np.array(found, np.uint16), narrowed(floats))


@pytest.mark.parametrize("rule", ScaleRule)
def test_the_oracle_is_quantize_of_float32(fp8, rule):
    blocks = random_blocks(fp8, np.concatenate([any_factors(20, seed=3), EDGES]), seed=4)
    oracle = get_backend("reference")
    found_sums, found = ErrorSums(), quantize_scaled(oracle, blocks, fp8, rule)
    quantize_scaled(oracle, blocks, fp8, rule, found_sums)
    floats = products(blocks, fp8)
    assert_same(found, quantize(oracle, floats, F32, rule))
    assert found_sums == sum_errors(oracle, floats, F32, rule)


# --------------------------------------------------------------------------- all backends


def test_against_the_oracle(fast, fp8, rule):
    factors = np.concatenate([EDGES, any_factors(60, seed=5), tie_factors()[::29]])
    for any_code in (False, True):
        blocks = random_blocks(fp8, factors, seed=6, any_code=any_code)
        oracle = get_backend("reference")
        assert_same(
            quantize_scaled(fast, blocks, fp8, rule), quantize_scaled(oracle, blocks, fp8, rule)
        )
        sums, expected = ErrorSums(), ErrorSums()
        quantize_scaled(fast, blocks, fp8, rule, sums)
        quantize_scaled(oracle, blocks, fp8, rule, expected)
        assert_close(sums, expected)
        for found, wanted in zip(
            widen_scaled(fast, blocks, fp8), widen_scaled(oracle, blocks, fp8), strict=True
        ):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    "factors",
    [
        pytest.param(np.repeat(POWERS_OF_TWO, 8), id="powers of two"),
        pytest.param(np.repeat(tie_factors(), 4), id="ties"),
        pytest.param(np.repeat(EDGES, 12), id="edges"),
        pytest.param(any_factors(4000, seed=7), id="any"),
        pytest.param(usual_factors(4000, seed=8), id="usual"),
    ],
)
def test_same_as_float32(fast, fp8, rule, factors):
    blocks = random_blocks(fp8, factors, seed=9)
    assert_quantizes(fast, blocks, fp8, rule)
    assert_widens(fast, blocks, fp8)


def test_every_element_under_every_maximum(fast, fp8, rule):
    """Blocks that hold all elements up to a maximum, under factors with any last bits."""
    finite = np.arange(LARGEST[fp8] + 1)
    rows = []
    for largest in finite:
        below = np.concatenate([finite[: largest + 1], finite[: largest + 1] | 128])
        count = -(-below.size // (BLOCK_SIZE - 1))
        block = np.full((count, BLOCK_SIZE), largest)
        block[:, 1:] = np.resize(below, (count, BLOCK_SIZE - 1))
        rows.append(block)
    elements = np.concatenate(rows).astype(np.uint8)
    for factor in (1.0, 0.01, 1.75, 4.46875 / 7, 7 / 9, np.float32(7 / 15)):
        factors = np.full(len(elements), factor, np.float32)
        assert_quantizes(fast, Blocks(elements, factors), fp8, rule)


def test_any_pattern(fast, fp8, rule):
    """NaN and infinity among the elements, and products that overflow."""
    blocks = random_blocks(fp8, any_factors(500, seed=10), seed=11, any_code=True)
    blocks.elements[::2] &= 0xBF  # half of the blocks have no large elements
    assert assert_quantizes(fast, blocks, fp8, rule).nonfinite
    assert_widens(fast, blocks, fp8)


def test_zeros(fast, fp8, rule):
    elements = np.zeros((70, BLOCK_SIZE), np.uint8)
    elements[::2] = 0x80
    elements[5] = LARGEST[fp8]
    factors = np.ones(70, np.float32)
    factors[5] = 0
    found = assert_quantizes(fast, Blocks(elements, factors), fp8, rule)
    assert not found.scales.any()
    assert not found.packed.any()
    assert_widens(fast, Blocks(elements, factors), fp8)


def test_products_that_round_to_nothing(fast, fp8, rule):
    """Zero and smallest products beside larger ones; negative ones that vanish have no sign."""
    elements = np.tile(np.array([0x01, 0x81, 0x38, 0xB8] * 8, np.uint8), (40, 1))
    factors = np.arange(40, dtype=np.uint32).view(np.float32)
    assert_quantizes(fast, Blocks(elements, factors), fp8, rule)
    assert_widens(fast, Blocks(elements, factors), fp8)


@pytest.mark.parametrize(
    "unusual",
    [(0x00, 0.01), (0x80, 0.01), (0x38, 0), (0x38, 1e-40), (0x38, 1e38), (0x7F, 0.01), (1, 1e-30)],
)
def test_one_unusual_block(fast, fp8, rule, unusual):
    """Its chunk goes another way than the chunks before and after, block by block."""
    usual = random_blocks(fp8, usual_factors(192, seed=18), seed=19)
    usual.elements[:, 3] = 0x30  # no other block is all zero
    assert_quantizes(fast, usual, fp8, rule)
    for place in (0, 15, 16, 63, 64, 100, 127, 128):
        blocks = Blocks(usual.elements.copy(), usual.factors.copy())
        blocks.elements[place], blocks.factors[place] = unusual
        assert_quantizes(fast, blocks, fp8, rule)


def test_zero_blocks_among_others(fast, fp8, rule):
    blocks = random_blocks(fp8, usual_factors(256, seed=20), seed=21)
    blocks.elements[::3] &= 0x80
    assert_quantizes(fast, blocks, fp8, rule)


@pytest.mark.parametrize("blocks", [0, 1, 2, 63, 64, 65, 129, 1023, 1025, 2049])
@pytest.mark.parametrize("rule", [MSE, EVEN])
def test_any_number_of_blocks(fast, fp8, rule, blocks):
    made = random_blocks(fp8, any_factors(blocks, seed=12), seed=13)
    assert_quantizes(fast, made, fp8, rule)
    assert_widens(fast, made, fp8)


@given(data=st.data())
@pytest.mark.parametrize("name", ["llvm", "numpy"])
def test_any_block(name, data):
    dtype, rule = data.draw(st.sampled_from(SCALED_TYPES)), data.draw(st.sampled_from(ScaleRule))
    row = data.draw(st.lists(st.integers(0, 255), min_size=BLOCK_SIZE, max_size=BLOCK_SIZE))
    factor = data.draw(st.integers(0, F32.layout.infinity - 1))
    blocks = Blocks(np.array([row], np.uint8), np.array([factor], np.uint32).view(np.float32))
    assert_quantizes(get_backend(name), blocks, dtype, rule)
    assert_widens(get_backend(name), blocks, dtype)


# --------------------------------------------------------------------------- what is not finite


@pytest.mark.parametrize("place", [0, 31, 32, 700, 2047])
def test_where_the_first_is(backend, fp8, rule, place):
    elements = np.full((64, BLOCK_SIZE), 0x38, np.uint8)
    factors = np.full(64, 1e-4, np.float32)
    elements.reshape(-1)[place:] |= 0x7F
    found = quantize_scaled(backend, Blocks(elements, factors), fp8, rule)
    assert found.nonfinite == NonFinite(2048 - place, place)
    assert (found.scales[place // 32 :] == 255).all()
    assert not found.packed[place // 32 :].any()
    _, widened = widen_scaled(backend, Blocks(elements, factors), fp8)
    assert widened == found.nonfinite


def test_factors_that_callers_should_refuse(fast, fp8, rule):
    """Negative ones multiply; with NaN or infinity no block is finite."""
    blocks = random_blocks(fp8, usual_factors(192, seed=22), seed=23)
    blocks.factors[5::7] *= -1
    assert_quantizes(fast, blocks, fp8, rule)
    assert_widens(fast, blocks, fp8)
    blocks.factors[[70, 180]] = math.nan, math.inf
    found = quantize_scaled(fast, blocks, fp8, rule)
    assert_same(found, quantize_scaled(get_backend("reference"), blocks, fp8, rule))
    assert found.nonfinite.first == 70 * BLOCK_SIZE
    assert found.scales[[70, 180]].tolist() == [255, 255]
    assert widen_scaled(fast, blocks, fp8)[1] == found.nonfinite


def test_overflow_counts(backend, fp8, rule):
    elements = np.full((3, BLOCK_SIZE), 0x38, np.uint8)
    elements[1, 7] = elements[1, 9] = LARGEST[fp8]
    factors = np.array([1, 1e38, 1], np.float32)
    found = quantize_scaled(backend, Blocks(elements, factors), fp8, rule)
    assert found.nonfinite == NonFinite(2, 32 + 7)
    assert found.scales[1] == 255
    out, widened = widen_scaled(backend, Blocks(elements, factors), fp8)
    assert widened == found.nonfinite
    assert out[1, 7] == 0x7F80


def test_what_overflows_bf16_alone(backend, fp8):
    """The largest float32 rounds to infinity in BF16: not finite there, and fine in MXFP4."""
    elements = np.full((2, BLOCK_SIZE), 0x38 if fp8 is E4M3 else 0x3C, np.uint8)
    blocks = Blocks(elements, np.array([0x3F800000, 0x7F7FFFFF], np.uint32).view(np.float32))
    assert not quantize_scaled(backend, blocks, fp8, EVEN).nonfinite
    out, found = widen_scaled(backend, blocks, fp8)
    assert found == NonFinite(32, 32)
    assert (out[1] == 0x7F80).all()


def test_scan_knows_what_is_not_finite(backend, fp8):
    codes = np.resize(np.arange(256, dtype=np.uint8), 256 * 5 + 3)
    bad = ~np.isfinite(values(fp8)[codes])
    assert backend.scan(codes, fp8) == NonFinite(int(bad.sum()), int(bad.argmax()))
    assert not backend.scan(codes[: LARGEST[fp8]], fp8)
    whole = np.full(1024, 0x7F, np.uint8)
    assert backend.scan(whole, fp8) == NonFinite(1024, 0)


# --------------------------------------------------------------------------- buffers and targets


@pytest.mark.parametrize("offset", [1, 3])
def test_any_alignment(backend, fp8, offset):
    blocks = random_blocks(fp8, any_factors(5, seed=14), seed=15)
    expected = quantize_scaled(get_backend("numpy"), blocks, fp8, MSE)
    source, factors, packed, scales, out = (
        memoryview(bytearray(b"x" * offset + content + b"y"))
        for content in (
            blocks.elements.tobytes(),
            blocks.factors.tobytes(),
            bytes(5 * 16),
            bytes(5),
            bytes(5 * 64),
        )
    )
    inner = slice(offset, -1)
    backend.quantize_scaled(source[inner], fp8, MSE, factors[inner], packed[inner], scales[inner])
    backend.widen_scaled(source[inner], fp8, factors[inner], out[inner])
    widened, _ = widen_scaled(get_backend("numpy"), blocks, fp8)
    for view, content in (
        (packed, expected.packed),
        (scales, expected.scales),
        (out, widened),
    ):
        assert view.tobytes() == b"x" * offset + content.tobytes() + b"y"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((33, 4, 16, 1, 64), "source: expected a multiple of 32 bytes .*F8_E4M3.* found 33 bytes"),
        ((64, 4, 32, 2, 128), "factors: expected 8 bytes for 64 elements, found 4 bytes"),
        ((32, 4, 15, 1, 63), "(packed|output_bf16): expected (16|64) bytes .* found (15|63)"),
        ((32, 4, 16, 2, 65), "(scales|output_bf16): expected (1|64) bytes .* found (2|65)"),
    ],
)
def test_wrong_sizes(backend, sizes, message):
    source, factors, packed, scales, out = (bytearray(size) for size in sizes)
    with pytest.raises(ValueError, match=message):
        backend.quantize_scaled(source, E4M3, EVEN, factors, packed, scales)
    with pytest.raises(ValueError, match=message):
        backend.widen_scaled(source, E4M3, factors, out)


def test_types_are_checked(backend):
    packed, scales = bytearray(16), bytearray(1)
    for dtype in SCALED_TYPES:
        with pytest.raises(ValueError, match=f"dtype: expected BF16, F16 or F32, found {dtype}"):
            backend.quantize(bytes(32), dtype, EVEN, packed, scales)
        with pytest.raises(ValueError, match="dtype: expected BF16, F16 or F32"):
            backend.dequantize(packed, scales, dtype, bytearray(32))
    for dtype in WHOLE_TYPES:
        with pytest.raises(ValueError, match="dtype: expected F8_E4M3 or F8_E5M2, found"):
            backend.quantize_scaled(bytes(64), dtype, EVEN, bytes(4), packed, scales)
        with pytest.raises(ValueError, match="dtype: expected F8_E4M3 or F8_E5M2, found"):
            backend.widen_scaled(bytes(64), dtype, bytes(4), bytearray(64))


def test_flushing_changes_nothing(flush_subnormals, fast_backend, fp8, rule):
    """Whatever a library has left behind in this thread's modes."""
    factors = np.concatenate([EDGES, any_factors(200, seed=16), POWERS_OF_TWO[::3]])
    blocks = random_blocks(fp8, factors, seed=17)
    oracle = get_backend("reference")
    assert_same(
        quantize_scaled(fast_backend, blocks, fp8, rule),
        quantize_scaled(oracle, blocks, fp8, rule),
    )
    found_sums, expected_sums = ErrorSums(), ErrorSums()
    quantize_scaled(fast_backend, blocks, fp8, rule, found_sums)
    quantize_scaled(oracle, blocks, fp8, rule, expected_sums)
    assert found_sums.flushed == expected_sums.flushed
    assert found_sums.max_abs_err == expected_sums.max_abs_err
    for found, wanted in zip(
        widen_scaled(fast_backend, blocks, fp8), widen_scaled(oracle, blocks, fp8), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("target", "registers"), TARGETS)
def test_code_for_other_processors(target, registers, fp8):
    """No call into a runtime library is left anywhere."""
    modules = [
        scaled.build(fp8, search=search, sums=sums)
        for search in (False, True)
        for sums in (False, True)
    ]
    modules += [scaled.build_scan(fp8), scaled.build_widen(fp8)]
    for module in modules:
        assert_no_calls(jit.emit_assembly(module, target), registers)


def assert_no_calls(assembly: str, registers: str) -> None:
    import re

    assert re.search(registers, assembly)
    assert not re.search(r"^\s+(callq?|blr?)\s", assembly, re.MULTILINE)


def test_code_with_instructions_of_its_own(fp8):
    module = scaled.build(fp8, search=True, sums=True, native=True)
    assert_no_calls(jit.emit_assembly(module, jit.Target(X86, "znver4")), "zmm")


def test_other_kernels_are_not_compiled_for_fp8():
    """Compiling waits until FP8 is used."""
    from mxconvert_kernels.llvm.backend import LlvmBackend

    backend = LlvmBackend()
    backend.quantize(bytes(64), BF16, EVEN, bytearray(16), bytearray(1))
    assert not {dtype for _, dtype in backend._kernels} & set(SCALED_TYPES)
