"""The dequantization kernels: `0 dequantize(packed, scales, out, blocks)`.

The eight magnitudes of a block follow from its scale byte alone. They come from a table that the
oracle computes (4 or 8 KiB, in the module), and each element selects its own; scales at the edges
of the range and NaN need no code of their own.
"""

from __future__ import annotations

from mxconvert_kernels.llvm.emit import I8, I16, I32, I64, POINTER, Emitter, Value, vector
from mxconvert_kernels.reference import decode
from mxconvert_kernels.spec import (
    BLOCK_SIZE,
    NAN_SCALE_BYTE,
    PACKED_BLOCK_BYTES,
    SIGN_BIT,
    FloatType,
)


def build(dtype: FloatType) -> str:
    """The kernel's module, for elements of `dtype` in `out`."""
    emitter = Emitter("dequantize", [POINTER, POINTER, POINTER, I64])
    packed, scales, out, blocks = emitter.arguments
    element = I32 if dtype is FloatType.F32 else I16
    magnitudes = [
        [decode(code, scale_byte, dtype) for code in range(SIGN_BIT)]
        for scale_byte in range(NAN_SCALE_BYTE + 1)
    ]
    table = emitter.table("magnitudes", element, magnitudes)
    row_bytes = SIGN_BIT * dtype.itemsize

    def body(block: Value, carried: list[Value]) -> list[Value]:
        pairs = emitter.load(packed, block * PACKED_BLOCK_BYTES, vector(I8, PACKED_BLOCK_BYTES))
        codes = _unpack(pairs).resize(element)
        scale_byte = emitter.load(scales, block, I8).zext(I64)
        row = emitter.load(table, scale_byte * row_bytes, vector(element, SIGN_BIT))
        sign = (codes & SIGN_BIT) << (element.width - 4)
        emitter.store(_look_up(row, codes) | sign, out, block * (BLOCK_SIZE * dtype.itemsize))
        return carried

    return emitter.finish(emitter.loop(blocks, [emitter.constant(I64, 0)], body)[0])


def _unpack(pairs: Value) -> Value:
    """The codes in `<16 x i8>`, low nibble first, as `<32 x i16>`."""
    wide = pairs.zext(I32)
    return ((wide & 0x0F) | ((wide & 0xF0) << 12)).bitcast(vector(I16, BLOCK_SIZE))


def _look_up(row: Value, codes: Value) -> Value:
    """The entry of an eight-element row for the low three bits of each code."""
    entries = [row.lanes([code] * BLOCK_SIZE) for code in range(SIGN_BIT)]
    for bit in (1, 2, 4):
        is_clear = (codes & bit).compare("==", 0)
        pairs = zip(entries[::2], entries[1::2], strict=True)
        entries = [is_clear.select(even, odd) for even, odd in pairs]
    return entries[0]
