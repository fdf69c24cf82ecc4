"""The kernels in numpy, for machines on which llvmlite cannot be loaded.

Blocks are processed in chunks that stay in the processor's second-level cache. Legend: B is the
number of blocks of a chunk; lanes are signed integers that hold magnitude bits, `[B, 32]`; arrays
named for one property of a block (`amax`, `tiny`, `scale_bytes`) are `[B]`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from mxconvert_kernels.buffers import (
    byte_length,
    count_blocks,
    count_elements,
    count_scaled_blocks,
    count_widened_blocks,
)
from mxconvert_kernels.lanes import (
    CAPPED_SCALE_BYTE,
    FLOAT32_MANTISSA_BITS,
    LIFT_BELOW_FIELD,
    LIFT_EXPONENT,
    SUBNORMAL_TO_LIFTED,
    cap_bits,
    lower_gate,
    raise_gate,
    rule_bias,
)
from mxconvert_kernels.numpy_scaled import multiply, narrow
from mxconvert_kernels.numpy_sums import sum_blocks
from mxconvert_kernels.reference import decode
from mxconvert_kernels.spec import (
    ALL_FINITE,
    BLOCK_SIZE,
    E2M1_HALVES,
    ELEMENT_EMAX,
    ERROR_FRACTION_BITS,
    NAN_SCALE_BYTE,
    PACKED_BLOCK_BYTES,
    SCALE_BIAS,
    FloatType,
    NonFinite,
    ScaleRule,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

    from mxconvert_kernels.error_sums import ErrorSums

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

CHUNK_BLOCKS: Final = 1024
SCAN_CHUNK_ELEMENTS: Final = 1 << 16
HALVES: Final = np.array(E2M1_HALVES, np.int32)


class NumpyBackend:
    """Vectorised kernels; each call runs on the calling thread."""

    name = "numpy"

    def quantize(
        self,
        src: Buffer,
        dtype: FloatType,
        rule: ScaleRule,
        packed: Buffer,
        scales: Buffer,
        *,
        sums: ErrorSums | None = None,
    ) -> NonFinite:
        """See `Backend.quantize`."""
        blocks = count_blocks(
            byte_length(src, "src"),
            dtype,
            byte_length(packed, "packed", writable=True),
            byte_length(scales, "scales", writable=True),
            "src",
        )
        if blocks == 0:
            return ALL_FINITE
        bits = np.frombuffer(memoryview(src), _unsigned(dtype)).reshape(blocks, BLOCK_SIZE)
        packed_out = np.frombuffer(memoryview(packed), np.uint8).reshape(blocks, PACKED_BLOCK_BYTES)
        scales_out = np.frombuffer(memoryview(scales), np.uint8)
        found = ALL_FINITE
        for chunk in _chunks(blocks, CHUNK_BLOCKS):
            outputs = packed_out[chunk], scales_out[chunk]
            in_chunk = _quantize_chunk(bits[chunk], dtype, rule, *outputs)
            if sums is not None:
                sums.add(sum_blocks(bits[chunk], dtype, *outputs))
            found = _add(found, in_chunk, chunk.start * BLOCK_SIZE)
        return found

    def dequantize(self, packed: Buffer, scales: Buffer, dtype: FloatType, out: Buffer) -> None:
        """See `Backend.dequantize`."""
        blocks = count_blocks(
            byte_length(out, "out", writable=True),
            dtype,
            byte_length(packed, "packed"),
            byte_length(scales, "scales"),
            "out",
        )
        if blocks == 0:
            return
        table = _pair_table(dtype)
        bytes_in = np.frombuffer(memoryview(packed), np.uint8).reshape(blocks, PACKED_BLOCK_BYTES)
        scales_in = np.frombuffer(memoryview(scales), np.uint8)
        pairs_out = np.frombuffer(memoryview(out), table.dtype).reshape(blocks, PACKED_BLOCK_BYTES)
        for chunk in _chunks(blocks, CHUNK_BLOCKS):
            index = scales_in[chunk, None].astype(np.intp) << 8 | bytes_in[chunk]
            pairs_out[chunk] = table[index]

    def quantize_scaled(  # noqa: PLR0917  (a parameter for each buffer)
        self,
        source: Buffer,
        dtype: FloatType,
        rule: ScaleRule,
        factors: Buffer,
        packed: Buffer,
        scales: Buffer,
        sums: ErrorSums | None = None,
    ) -> NonFinite:
        """See `Backend.quantize_scaled`."""
        blocks = count_scaled_blocks(
            byte_length(source, "source"),
            dtype,
            byte_length(factors, "factors"),
            byte_length(packed, "packed", writable=True),
            byte_length(scales, "scales", writable=True),
        )
        found = ALL_FINITE
        for chunk, bits in _scaled_chunks(source, dtype, factors, blocks):
            outputs = (
                _rows(packed, np.uint8, blocks)[chunk],
                _rows(scales, np.uint8, blocks)[chunk, 0],
            )
            in_chunk = _quantize_chunk(bits, FloatType.F32, rule, *outputs)
            if sums is not None:
                sums.add(sum_blocks(bits, FloatType.F32, *outputs))
            found = _add(found, in_chunk, chunk.start * BLOCK_SIZE)
        return found

    def widen_scaled(
        self, source: Buffer, dtype: FloatType, factors: Buffer, output_bf16: Buffer
    ) -> NonFinite:
        """See `Backend.widen_scaled`."""
        blocks = count_widened_blocks(
            byte_length(source, "source"),
            dtype,
            byte_length(factors, "factors"),
            byte_length(output_bf16, "output_bf16", writable=True),
        )
        for chunk, bits in _scaled_chunks(source, dtype, factors, blocks):
            _rows(output_bf16, np.dtype("<u2"), blocks)[chunk] = narrow(bits)
        return self.scan(output_bf16, FloatType.BF16)

    def scan(self, src: Buffer, dtype: FloatType) -> NonFinite:
        """See `Backend.scan`."""
        elements = count_elements(byte_length(src, "src"), dtype, "src")
        if elements == 0:
            return ALL_FINITE
        bits = np.frombuffer(memoryview(src), _unsigned(dtype))
        found = ALL_FINITE
        for chunk in _chunks(elements, SCAN_CHUNK_ELEMENTS):
            magnitudes = bits[chunk] & dtype.layout.magnitude_mask
            found = _add(found, _find_nonfinite(magnitudes, dtype), chunk.start)
        return found


def _quantize_chunk(
    bits: Array, dtype: FloatType, rule: ScaleRule, packed: Array, scales: Array
) -> NonFinite:
    """Quantize `[B, 32]` elements into `[B, 16]` bytes and `[B]` scales."""
    layout = dtype.layout
    magnitudes = bits & layout.magnitude_mask
    amax = _max_of_rows(magnitudes)
    bad = amax >= layout.infinity
    found = ALL_FINITE
    if bad.any():
        found = _find_nonfinite(magnitudes, dtype)
        bits = np.where(bad[:, None], bits.dtype.type(0), bits)
        magnitudes = bits & layout.magnitude_mask
        amax[bad] = 0
    signs = _signs(bits)
    if dtype is FloatType.BF16:
        scale_bytes, codes = _quantize_bf16(magnitudes.view(np.int16), amax, rule)
    else:
        if dtype is FloatType.F16:
            magnitudes = magnitudes.view(np.float16).astype(np.float32)
        scale_bytes, codes = _quantize_wide(magnitudes.view(np.int32), rule)
    codes |= signs
    _pack(codes, packed)
    scales[:] = np.where(bad, NAN_SCALE_BYTE, scale_bytes)
    return found


def _quantize_bf16(lanes: Array, amax: Array, rule: ScaleRule) -> tuple[Array, Array]:
    """Scale bytes int32 `[B]` and unsigned codes int16 `[B, 32]` of 16-bit lanes."""
    mantissa_bits = FloatType.BF16.layout.mantissa_bits
    amax = amax.astype(np.int32)
    tiny = amax < LIFT_BELOW_FIELD << mantissa_bits
    scale_bytes = _choose_scale_bytes(lanes, amax, tiny, rule, mantissa_bits)
    # Any normal scale will do for the blocks of zeros; the other tiny ones are done again below.
    codes = _codes(lanes, np.where(tiny, LIFT_EXPONENT, scale_bytes), mantissa_bits)
    redo = np.flatnonzero(tiny & (amax > 0))
    if redo.size:
        wide = lanes[redo].astype(np.int32) << (FLOAT32_MANTISSA_BITS - mantissa_bits)
        scale_bytes[redo], codes[redo] = _quantize_wide(wide, rule)
    return scale_bytes, codes


def _quantize_wide(lanes: Array, rule: ScaleRule) -> tuple[Array, Array]:
    """Scale bytes int32 `[B]` and unsigned codes int16 `[B, 32]` of 32-bit lanes."""
    amax = _max_of_rows(lanes)
    tiny = amax < LIFT_BELOW_FIELD << FLOAT32_MANTISSA_BITS
    if tiny.any():
        lanes = np.where(tiny[:, None], _lift(lanes), lanes)
    scale_bytes = _choose_scale_bytes(lanes, amax, tiny, rule, FLOAT32_MANTISSA_BITS)
    lifted_bytes = scale_bytes + LIFT_EXPONENT * tiny
    codes = _codes(lanes, lifted_bytes, FLOAT32_MANTISSA_BITS)
    return scale_bytes, codes.astype(np.int16)


def _lift(lanes: Array) -> Array:
    """Multiply tiny values by 2 ** 64, exactly and without arithmetic on subnormals."""
    as_integers = lanes.astype(np.float32).view(np.int32)
    from_subnormal = as_integers - (SUBNORMAL_TO_LIFTED << FLOAT32_MANTISSA_BITS)
    from_normal = lanes + (LIFT_EXPONENT << FLOAT32_MANTISSA_BITS)
    lifted = np.where(lanes < 1 << FLOAT32_MANTISSA_BITS, from_subnormal, from_normal)
    return np.where(lanes == 0, 0, lifted)


def _choose_scale_bytes(
    lanes: Array, amax: Array, tiny: Array, rule: ScaleRule, mantissa_bits: int
) -> Array:
    """Scale bytes int32 `[B]`.

    Args:
        lanes: Magnitudes `[B, 32]`, lifted where `tiny` says so.
        amax: The block maxima, not lifted, int32.
        tiny: Which blocks are (to be) lifted.
        rule: How to choose.
        mantissa_bits: Of the lanes.
    """
    biased = amax + rule_bias(rule, mantissa_bits)
    scale_bytes: Array = np.maximum((biased >> mantissa_bits) - ELEMENT_EMAX, 0)
    if rule is ScaleRule.MSE:
        _move_to_least_error(scale_bytes, lanes, amax, tiny, mantissa_bits)
    else:
        scale_bytes -= (scale_bytes == CAPPED_SCALE_BYTE) & (amax >= cap_bits(mantissa_bits))
    return scale_bytes


def _move_to_least_error(
    floor: Array, lanes: Array, amax: Array, tiny: Array, mantissa_bits: int
) -> None:
    """Step the floor exponents that lose to a neighbour, in place."""
    mantissa = amax & ((1 << mantissa_bits) - 1)
    may_rise = (mantissa > raise_gate(mantissa_bits)) & (floor < CAPPED_SCALE_BYTE - 1)
    may_fall = (mantissa <= lower_gate(mantissa_bits)) & (floor > 0)
    for may, step in ((may_rise, 1), (may_fall, -1)):
        rows = np.flatnonzero(may)
        if mantissa_bits != FLOAT32_MANTISSA_BITS:
            rows = rows[~tiny[rows]]  # `_quantize_bf16` hands those to the wide lanes
        if rows.size == 0:
            continue
        lifted_bytes = floor[rows] + LIFT_EXPONENT * tiny[rows]
        here, there = _squared_errors(lanes[rows], lifted_bytes, step, mantissa_bits)
        # Ties go to the smaller exponent: stay rather than rise, fall rather than stay.
        floor[rows] += step * (there < here if step > 0 else there <= here)


def _squared_errors(
    lanes: Array, floor: Array, step: int, mantissa_bits: int
) -> tuple[Array, Array]:
    """Squared errors int32 `[B]` at the floor exponent and `step` away, in fixed point."""
    wide = lanes.astype(np.int32) << (FLOAT32_MANTISSA_BITS - mantissa_bits)
    inverse_unit = (2 * SCALE_BIAS + ERROR_FRACTION_BITS - floor) << FLOAT32_MANTISSA_BITS
    scaled = wide.view(np.float32) * inverse_unit.astype(np.int32).view(np.float32)[:, None]
    wanted = np.rint(scaled).astype(np.int32)
    here = _squared_error(wanted, _codes(lanes, floor, mantissa_bits), 0)
    there = _squared_error(wanted, _codes(lanes, floor + step, mantissa_bits), step)
    return here, there


def _squared_error(wanted: Array, codes: Array, step: int) -> Array:
    difference = wanted - (HALVES[codes] << (ERROR_FRACTION_BITS - 1 + step))
    total: Array = np.einsum("ij,ij->i", difference, difference)
    return total


def _codes(lanes: Array, scale_bytes: Array, mantissa_bits: int) -> Array:
    """Magnitude codes `[B, 32]`, as wide as the lanes, under normal scales.

    Args:
        lanes: Magnitudes `[B, 32]`.
        scale_bytes: Scale bytes, in 2 ... 252, plus the lift of the lanes.
        mantissa_bits: Of the lanes.
    """
    shift = mantissa_bits - 1  # E2M1 keeps one mantissa bit
    # 0 stands for a quarter of the scale, above which codes are not zero.
    distance = lanes - ((scale_bytes - 2) << mantissa_bits).astype(lanes.dtype)[:, None]
    np.maximum(distance, 0, out=distance)
    codes: Array = distance >> shift
    codes &= 1
    codes += distance
    codes += (1 << (shift - 1)) - 1 - (2 << shift)
    codes >>= shift
    below_one = np.minimum(distance, 1)
    distance += 1 << shift
    distance >>= mantissa_bits + 1
    below_one += distance
    np.maximum(codes, below_one, out=codes)
    np.minimum(codes, len(E2M1_HALVES) - 1, out=codes)
    return codes


def _signs(bits: Array) -> Array:
    """Sign bits of the codes, int16 `[B, 32]`; a negative zero has none."""
    width = bits.dtype.itemsize * 8
    negative = bits - (bits != 0)  # turns -0.0 into the largest positive pattern
    negative >>= width - 4
    negative &= 8
    signs: Array = negative.astype(np.int16, copy=False)
    return signs


def _pack(codes: Array, packed: Array) -> None:
    """Write int16 codes `[B, 32]` as bytes `[B, 16]`."""
    pairs = codes.view(np.uint32)
    pairs |= pairs >> 12
    pairs &= 0xFF
    packed[...] = pairs


def _max_of_rows(lanes: Array) -> Array:
    """The maximum of each row of 32; reducing a short axis is slower than moving it first."""
    maxima: Array = np.ascontiguousarray(lanes.T).max(axis=0)
    return maxima


def _find_nonfinite(magnitudes: Array, dtype: FloatType) -> NonFinite:
    mask = (magnitudes >= dtype.layout.infinity).ravel()
    count = int(np.count_nonzero(mask))
    return NonFinite(count, int(mask.argmax())) if count else ALL_FINITE


def _add(found: NonFinite, more: NonFinite, offset: int) -> NonFinite:
    """Add what was found in a chunk that begins at element `offset`."""
    if not more:
        return found
    first = found.first if found else more.first + offset
    return NonFinite(found.count + more.count, first)


def _scaled_chunks(
    source: Buffer, dtype: FloatType, factors: Buffer, blocks: int
) -> Iterator[tuple[slice, Array]]:
    """Chunks of blocks with the float32 bits of their values `[B, 32]`."""
    for chunk in _chunks(blocks, CHUNK_BLOCKS):
        elements = _rows(source, np.uint8, blocks)[chunk]
        by_block = _rows(factors, np.dtype("<u4"), blocks)[chunk, 0]
        yield chunk, multiply(elements, dtype, np.ascontiguousarray(by_block))


def _rows(buffer: Buffer, kind: Any, blocks: int) -> Array:
    """A buffer with one row for each of one or more blocks."""
    return np.frombuffer(memoryview(buffer), kind).reshape(blocks, -1)


def _chunks(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _unsigned(dtype: FloatType) -> np.dtype[Any]:
    return np.dtype(f"<u{dtype.itemsize}")


@cache
def _pair_table(dtype: FloatType) -> Array:
    """The bits of two elements for each scale byte and packed byte, `[65536]`."""
    pair_type = np.dtype(f"<u{2 * dtype.itemsize}")
    rows = [[decode(code, scale, dtype) for code in range(16)] for scale in range(256)]
    values = np.array(rows, pair_type)
    packed = np.arange(256)
    low, high = values[:, packed & 15], values[:, packed >> 4]
    pairs: Array = low | high << (8 * dtype.itemsize)
    return pairs.ravel()
