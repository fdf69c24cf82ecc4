"""Device code: MXFP4 in Triton, the same bytes as the CPU's kernels. Nothing else is in this file.

A program takes `BLOCKS` blocks of 32 elements. A lane holds the two elements of one output byte,
`low` the even one and `high` the odd one, as float32 `[BLOCKS, 16]`. Scaling by a power of two is
exact, and rounding adds a number whose last place is the wanted step; the page
docs/explanation/gpu-kernels.md derives both. No step flushes subnormal numbers. Kinds, rules,
layouts and variants are numbers: see `kinds`.
"""

import triton
import triton.language as tl

from mxconvert_kernels.gpu import ptx

_REGISTERS = tl.constexpr(ptx.REGISTERS)
_CODES_OF_WORDS = tl.constexpr(ptx.CODES_OF_WORDS)
_CODES_OF_VALUES = tl.constexpr(ptx.CODES_OF_VALUES)
_LARGER_OF_BOTH = tl.constexpr(ptx.LARGER_OF_BOTH)
_NO_PLACE = tl.constexpr(2**63 - 1)

# ----------------------------------------------------------------------------- elements


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _as_bits(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _power_of_two(exponent):
    """2 ** exponent for -126 ... 127, float32."""
    return _as_float((exponent + 127) << 23)


@triton.jit
def _widen(bits, KIND: tl.constexpr):
    """Float32 of one element in the low bits of an int32; what lies above it does not matter."""
    if KIND == 0:  # BF16
        return _as_float(bits << 16)
    elif KIND == 1:  # F16
        return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == 2:  # F32
        return _as_float(bits)
    elif KIND == 3:  # F8_E4M3: its fields at the top of float32's, 120 binades too low
        magnitude = (bits & 0x7F) << 20
        value = _as_bits(_as_float(magnitude) * 1.329227995784916e36)  # 2 ** 120
        value = tl.where(magnitude == 0x07F00000, 0x7FC00000, value)
        return _as_float(value | ((bits & 0x80) << 24))
    else:  # F8_E5M2: the upper half of a float16
        return ((bits & 0xFF) << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _split_words(word, KIND: tl.constexpr):
    """The elements of a pair that was loaded at once."""
    if KIND == 0:
        return _as_float(word << 16), _as_float(word & -65536)
    elif KIND == 1:
        return _widen(word, KIND), _widen(word >> 16, KIND)
    else:
        return _widen(word, KIND), _widen(word >> 8, KIND)


@triton.jit
def _load_words(source, starts, inside):
    """Pairs of adjacent elements, int32 `[BLOCKS, 16]`; `starts` counts pairs."""
    lanes = starts[:, None] + tl.arange(0, 16)[None, :]
    return tl.load(source + lanes, mask=inside[:, None], other=0).to(tl.int32)


@triton.jit
def _load_pairs(source, starts, inside, pitch, KIND: tl.constexpr, LAYOUT: tl.constexpr):
    """The elements of blocks as float32, low and high.

    Args:
        source: Pairs of elements if they are adjacent (but for F32), else elements.
        starts: Of each block, in elements.
        inside: Which blocks there are.
        pitch: From an element to its neighbour, for layout COLUMNS.
        KIND: Of elements.
        LAYOUT: Of the matrix.
    """
    if LAYOUT == 2:
        pairs = starts[:, None] + (tl.arange(0, 16) * 2)[None, :] * pitch
        low = tl.load(source + pairs, mask=inside[:, None], other=0).to(tl.int32)
        high = tl.load(source + pairs + pitch, mask=inside[:, None], other=0).to(tl.int32)
        return _widen(low, KIND), _widen(high, KIND)
    elif KIND == 2:
        lanes = starts[:, None] + tl.arange(0, 32)[None, :]
        word = tl.load(source + lanes, mask=inside[:, None], other=0)
        low, high = tl.split(tl.reshape(word, (word.shape[0], 16, 2)))
        return _as_float(low), _as_float(high)
    else:
        return _split_words(_load_words(source, starts // 2, inside), KIND)


@triton.jit
def _starts(number, rows, per_row, row_pitch, column_pitch, LAYOUT: tl.constexpr):
    """Where blocks begin in the source, in elements, and where they stand in the output.

    Adjacent threads read adjacent elements: so of a matrix stored by columns, blocks of adjacent
    rows are neighbours.
    """
    if LAYOUT == 0:
        return number * 32, number
    elif LAYOUT == 1:
        return number // per_row * row_pitch + number % per_row * 32, number
    else:
        row, in_row = number % rows, number // rows
        return row * row_pitch + in_row * 32 * column_pitch, row * per_row + in_row


# ------------------------------------------------------------------------------- scales


@triton.jit
def _max_of_rows(low, high):
    """The largest magnitude of each block, as bits of float32: NaN is above infinity."""
    largest = tl.maximum(_as_bits(low) & 0x7FFFFFFF, _as_bits(high) & 0x7FFFFFFF)
    return tl.max(largest, axis=1)


@triton.jit
def _scale_byte(amax, RULE: tl.constexpr):
    """The scale byte of rules that look at the maximum alone; of `mse` the floor exponent."""
    bias: tl.constexpr = 0x200000 if RULE == 1 else 0x3FFFFF if RULE == 3 else 0
    byte = tl.maximum(((amax + bias) >> 23) - 2, 0)
    if RULE == 1 or RULE == 3:  # 253 would decode beyond BF16 from 1.75 * 2 ** 127 on
        byte -= ((byte == 253) & (amax >= 0x7F600000)).to(tl.int32)
    return byte


@triton.jit
def _scaled(low, high, byte):
    """Values in scales. Adding zero turns -0.0 into 0.0; it takes no time within one fma."""
    factor = _power_of_two(127 - byte)[:, None]
    return tl.fma(low, factor, 0.0), tl.fma(high, factor, 0.0)


# -------------------------------------------------------------------------------- codes


@triton.jit
def _rounded(magnitude):
    """A magnitude in scales to bits whose last three are its code; ties to even, up to 6.

    In [2 ** 22, 2 ** 23) the last place is a half: the first sum rounds to halves, the others a
    half and a quarter of the value, from where two and four halves per step are right.
    """
    halves = magnitude + 4194304.0
    ones = magnitude * 0.5 + 4194305.0
    twos = magnitude * 0.25 + 4194306.0
    return _as_bits(tl.minimum(tl.minimum(halves, ones), tl.minimum(twos, 4194307.5)))


@triton.jit
def _nibble(value):
    """The code with its sign of a value in scales; -0.0 has none."""
    return (_rounded(tl.abs(value)) & 7) | ((_as_bits(value) >> 28) & 8)


@triton.jit
def _decoded(code_bits):
    """The magnitude of a code, in scales: E2M1 is a float32 whose exponent is 126 too low."""
    return _as_float((code_bits & 7) << 22) * 8.507059173023462e37  # 2 ** 126


# --------------------------------------------------------------------------------- search


@triton.jit
def _value(magnitude):
    """What a magnitude's code stands for, both in scales; the code itself costs more.

    Added to a float32 of a binade, the binade times 2 ** 22 + 1 leaves its first mantissa bit
    only, rounded to nearest even. Below 1 values are as far apart as from 1 to 2.
    """
    capped = tl.minimum(magnitude, 6.0)
    binade = tl.maximum(_as_bits(capped) & 0x7F800000, 0x3F800000)
    rounder = _as_float(binade) * 4194305.0
    return (rounder + capped) - rounder


@triton.jit
def _more_error(magnitude, ratio, unratio):
    """By how much the squared error under the neighbour's scale exceeds that under the floor's.

    Everything is a multiple of 2 ** -11 and small: float32 holds it exactly, in any order of sums.

    Args:
        magnitude: In floor scales; an error counts in whole 2 ** -10 of them.
        ratio: The neighbour's scale in floor scales.
        unratio: The reverse.
    """
    value, other = _value(magnitude), _value(magnitude * unratio) * ratio
    wanted = (magnitude + 8192.0) - 8192.0
    return (value - other) * (2.0 * wanted - value - other)


@triton.jit
def _least_error(low, high, amax, floor):
    """The scale byte of rule `mse`: the floor exponent, or the one neighbour that can do better."""
    mantissa = amax & 0x7FFFFF
    rises = (mantissa > 0x600000) & (floor < 252)
    falls = (mantissa <= 0x0F0400) & (floor > 0)
    step = rises.to(tl.int32) - falls.to(tl.int32)
    ratio, unratio = _power_of_two(step)[:, None], _power_of_two(-step)[:, None]
    low, high = _scaled(low, high, floor)
    low, high = tl.abs(low), tl.abs(high)
    more = tl.sum(_more_error(low, ratio, unratio) + _more_error(high, ratio, unratio), axis=1)
    # Ties go to the smaller exponent: stay rather than rise, fall rather than stay.
    moves = (rises & (more < 0)) | (falls & (more <= 0))
    return floor + tl.where(moves, step, 0)


# ------------------------------------------------------------------------------------ PTX


@triton.jit
def _larger_of_both(one, other):
    return tl.inline_asm_elementwise(
        _LARGER_OF_BOTH, "=r,r,r", [one, other], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _max_of_words(word):
    """The largest magnitude of each row of BF16 pairs, as bits of float32."""
    both = tl.reduce(word & 0x7FFF7FFF, 1, _larger_of_both)
    return tl.maximum(both & 0x7FFF0000, both << 16)


@triton.jit
def _codes_of_words(word, byte, kept):
    inverse = (254 - byte) << 7
    inverse = (inverse | (inverse << 16))[:, None].broadcast_to(word.shape)
    operands = [word, inverse, kept.broadcast_to(word.shape)]
    return tl.inline_asm_elementwise(
        _CODES_OF_WORDS, _REGISTERS, operands, dtype=tl.uint8, is_pure=True, pack=4
    )


@triton.jit
def _codes_of_values(low, high, kept):
    operands = [low, high, kept.broadcast_to(low.shape)]
    return tl.inline_asm_elementwise(
        _CODES_OF_VALUES, _REGISTERS, operands, dtype=tl.uint8, is_pure=True, pack=4
    )


# --------------------------------------------------------------------------- what is found


@triton.jit
def _is_bad(value):
    return (_as_bits(value) & 0x7FFFFFFF) >= 0x7F800000


@triton.jit
def _find(low, high, place, bad, found):
    """Count what is not finite, and keep the first's index; most programs have nothing to do.

    Args:
        low: The even elements.
        high: The odd ones.
        place: Index of each even element in the output.
        bad: Which blocks hold something.
        found: int64 `[2]`: the count is added to, the index lowered.
    """
    if tl.sum(bad.to(tl.int32), axis=0) > 0:
        low_bad, high_bad = _is_bad(low) & bad[:, None], _is_bad(high) & bad[:, None]
        count = tl.sum(tl.sum(low_bad.to(tl.int64) + high_bad.to(tl.int64), axis=1), axis=0)
        first = tl.where(low_bad, place, tl.where(high_bad, place + 1, _NO_PLACE))
        tl.atomic_add(found, count)
        tl.atomic_min(found + 1, tl.min(tl.min(first, axis=1), axis=0))


@triton.jit
def _sum_of(low, high, weight, counted):
    """The sum over a program of what was summed in scales over blocks, in float64."""
    by_block = tl.sum(low + high, axis=1).to(tl.float64) * weight
    return tl.sum(tl.where(counted, by_block, 0.0), axis=0)


@triton.jit
def _count_of(low, high, counted):
    by_block = tl.sum(low.to(tl.int32) + high.to(tl.int32), axis=1)
    return tl.sum(tl.where(counted, by_block, 0), axis=0).to(tl.float64)


@triton.jit
def _scale(byte):
    """The scale of a byte in 0 ... 254, float32; 2 ** -127 is subnormal."""
    return _as_float(tl.where(byte == 0, 1 << 22, byte << 23))


@triton.jit
def _sum_errors(low, high, amax, byte, counted, sums):
    """Store a program's nine error sums, float64; see `launch.SUMS`.

    Squares are summed in scales over a block. The largest error is taken as it is: in scales, that
    of a tiny element beside a huge one would be too small for float32.
    """
    exact = ((byte - 127 + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    weight = exact * exact
    low_u, high_u = _scaled(low, high, byte)
    low_u, high_u = tl.abs(low_u), tl.abs(high_u)
    low_q, high_q = _value(low_u), _value(high_u)
    low_e, high_e = low_u - low_q, high_u - high_q
    scale = _scale(byte)[:, None]
    largest = tl.maximum(tl.abs(tl.abs(low) - low_q * scale), tl.abs(tl.abs(high) - high_q * scale))
    largest = tl.max(largest, axis=1).to(tl.float64)
    floor = _scale_byte(amax, 2)
    below, above = (byte < floor) & counted, (byte > floor) & counted
    flushed_low, flushed_high = (low_q == 0) & (low != 0), (high_q == 0) & (high != 0)
    tl.store(sums, _sum_of(low_u * low_u, high_u * high_u, weight, counted))
    tl.store(sums + 1, _sum_of(low_q * low_q, high_q * high_q, weight, counted))
    tl.store(sums + 2, _sum_of(low_e * low_e, high_e * high_e, weight, counted))
    tl.store(sums + 3, tl.max(tl.where(counted, largest, 0.0), axis=0))
    tl.store(sums + 4, _count_of(flushed_low, flushed_high, counted))
    tl.store(sums + 5, _count_of(low_u > 6.0, high_u > 6.0, counted))
    tl.store(sums + 6, tl.sum(below.to(tl.int32), axis=0).to(tl.float64))
    tl.store(sums + 7, tl.sum(above.to(tl.int32), axis=0).to(tl.float64))
    tl.store(sums + 8, tl.sum(counted.to(tl.int32), axis=0).to(tl.float64))


# -------------------------------------------------------------------------------- kernels


@triton.jit
def quantize(
    source, factors, packed, scales, found, sums,
    blocks, rows, per_row, row_pitch, column_pitch,
    KIND: tl.constexpr, RULE: tl.constexpr, LAYOUT: tl.constexpr, VARIANT: tl.constexpr,
    SCALED: tl.constexpr, FIND: tl.constexpr, SUM: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Quantize a matrix `[N, K]` in blocks of 32 along K.

    Args:
        source: Elements, as integers: pairs of adjacent 16-bit or 8-bit ones, single ones of 32
            bits or in layout COLUMNS.
        factors: float32, one for each block in the output's order, if `SCALED`.
        packed: uint8, receives 16 bytes for each block, the even element in the low nibble.
        scales: uint8, receives a scale byte for each.
        found: int64 `[2]` if `FIND`, see `_find`.
        sums: float64 `[programs, 9]` if `SUM`, see `_sum_errors`.
        blocks: How many: N K / 32.
        rows: N.
        per_row: K / 32.
        row_pitch: Elements from one row to the next.
        column_pitch: Elements from one column to the next.
        KIND: Of elements.
        RULE: How scales are chosen.
        LAYOUT: Of the matrix.
        VARIANT: Which instructions to use.
        SCALED: Multiply each element by its block's factor first.
        FIND: Count and place what is not finite.
        SUM: Sum what quantization does to the values.
        BLOCKS: For each program.
    """
    program = tl.program_id(0).to(tl.int64)
    number = program * BLOCKS + tl.arange(0, BLOCKS)
    inside = number < blocks
    starts, places = _starts(number, rows, per_row, row_pitch, column_pitch, LAYOUT)
    if KIND == 0 and LAYOUT < 2 and VARIANT > 0:
        word = _load_words(source, starts // 2, inside)
        low, high = _split_words(word, KIND)
        amax = _max_of_words(word)
    else:
        low, high = _load_pairs(source, starts, inside, column_pitch, KIND, LAYOUT)
        if SCALED:
            factor = tl.load(factors + places, mask=inside, other=0.0)[:, None]
            low, high = low * factor, high * factor
        amax = _max_of_rows(low, high)
    byte = _scale_byte(amax, RULE)
    if RULE == 0:
        byte = _least_error(low, high, amax, byte)
    finite = amax < 0x7F800000
    kept = -finite.to(tl.int32)[:, None]  # all bits or none
    if KIND == 0 and LAYOUT < 2 and VARIANT == 1:
        codes = _codes_of_words(word, byte, kept)
    else:
        low_value, high_value = _scaled(low, high, byte)
        if VARIANT == 2:
            codes = _codes_of_values(low_value, high_value, kept)
        else:
            codes = ((_nibble(low_value) | (_nibble(high_value) << 4)) & kept).to(tl.uint8)
    lanes = places[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(packed + lanes, codes, mask=inside[:, None])
    tl.store(scales + places, tl.where(finite, byte, 255).to(tl.uint8), mask=inside)
    if FIND:
        _find(low, high, lanes * 2, inside & (finite == 0), found)
    if SUM:
        _sum_errors(low, high, amax, byte, inside & finite, sums + program * 9)


@triton.jit
def dequantize(packed, scales, output, blocks, BLOCKS: tl.constexpr):
    """Decode blocks to BF16; exact in its range, infinite beyond it, NaN under scale byte 255.

    Args:
        packed: uint8, 16 bytes for each block, the even element in the low nibble.
        scales: uint8, a scale byte for each.
        output: int32, receives pairs of BF16, 16 for each block.
        blocks: How many.
        BLOCKS: For each program.
    """
    number = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = number < blocks
    lanes = number[:, None] * 16 + tl.arange(0, 16)[None, :]
    codes = tl.load(packed + lanes, mask=inside[:, None], other=0).to(tl.int32)
    byte = tl.load(scales + number, mask=inside, other=0).to(tl.int32)
    scale = _scale(byte)[:, None]
    low = _as_bits(_decoded(codes) * scale)
    high = _as_bits(_decoded(codes >> 4) * scale)
    is_nan = (byte == 255)[:, None]
    low, high = tl.where(is_nan, 0x7FC00000, low), tl.where(is_nan, 0x7FC00000, high)
    low = ((low >> 16) & 0x7FFF) | ((codes & 0x08) << 12)
    high = (high & 0x7FFF0000) | ((codes & 0x80) << 24)
    tl.store(output + lanes, low | high, mask=inside[:, None])


@triton.jit
def _narrowed(value):
    """BF16 bits of float32, to nearest, ties to even; NaN becomes 0x7FC0 with its sign."""
    bits = _as_bits(value)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    rounded = tl.where(magnitude > 0x7F800000, 0x7FC0, rounded)
    return rounded | ((bits >> 16) & 0x8000)


@triton.jit
def widen(
    source, factors, output, found, blocks, KIND: tl.constexpr, FIND: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Turn FP8 times factors into BF16.

    Args:
        source: int16, pairs of FP8, 16 for each block.
        factors: float32, one for each block.
        output: int32, receives pairs of BF16.
        found: int64 `[2]` if `FIND`: what is not finite in BF16, see `_find`.
        blocks: How many.
        KIND: Of elements.
        FIND: Count and place what is not finite.
        BLOCKS: For each program.
    """
    number = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = number < blocks
    low, high = _load_pairs(source, number * 32, inside, 1, KIND, 0)
    factor = tl.load(factors + number, mask=inside, other=0.0)[:, None]
    # Processors disagree about the sign of NaN; here it is that of the product.
    sign = _as_bits(factor)
    low_sign, high_sign = _as_bits(low) ^ sign, (_as_bits(high) ^ sign) & -2147483648
    low, high = _narrowed(low * factor), _narrowed(high * factor)
    low = (low & 0x7FFF) | ((low_sign >> 16) & 0x8000)
    high = ((high & 0x7FFF) << 16) | high_sign
    lanes = number[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(output + lanes, low | high, mask=inside[:, None])
    if FIND:
        low_value, high_value = _as_float(low << 16), _as_float(high)
        bad = tl.max((_is_bad(low_value) | _is_bad(high_value)).to(tl.int32), axis=1) > 0
        _find(low_value, high_value, lanes * 2, inside & bad, found)
