"""PTX texts for `device`: what NVIDIA's instructions do faster than the portable form.

Each makes four bytes of codes. Operand 0 receives them; the last four operands are masks of all
bits or none, equal in a block, of which the first is used.
"""

from __future__ import annotations

from typing import Final

REGISTERS: Final = "=r" + 12 * ",r"
"""Constraints: one result, three times four operands."""

_WORD: Final = """
    fma.rn.bf16x2 t, ${word}, ${inverse}, zero;
    and.b32 m, t, 0x7FFF7FFF;
    fma.rn.bf16x2 a, m, one, k0;
    fma.rn.bf16x2 b, m, half, k1;
    fma.rn.bf16x2 c, m, quarter, k2;
    min.bf16x2 a, a, b;
    min.bf16x2 c, c, k3;
    min.bf16x2 a, a, c;
    shr.u32 t, t, 12;
    lop3.b32 a, a, t, 0x00070007, 0xE4;
    and.b32 r{number}, a, 0x000F000F;
"""
"""A word of two BF16 to their codes in bytes 0 and 2; adding zero turns -0.0 into 0.0.

As in float32, but halves are the last place from 2 ** 6 to 2 ** 7. `lop3` takes the lowest three
bits of the sum and the rest, so the sign, of the value.
"""

CODES_OF_WORDS: Final = (
    """
{
    .reg .b32 zero, one, half, quarter, k<4>, r<4>, m, t, a, b, c;
    mov.b32 zero, 0;
    mov.b32 one, 0x3F803F80;
    mov.b32 half, 0x3F003F00;
    mov.b32 quarter, 0x3E803E80;
    mov.b32 k0, 0x42804280;
    mov.b32 k1, 0x42824282;
    mov.b32 k2, 0x42844284;
    mov.b32 k3, 0x42874287;
"""
    + "".join(_WORD.format(word=1 + i, inverse=5 + i, number=i) for i in range(4))
    + """
    mad.lo.u32 a, r1, 256, r0;
    mad.lo.u32 b, r3, 256, r2;
    prmt.b32 r0, a, b, 0x5410;
    prmt.b32 r1, a, b, 0x7632;
    mad.lo.u32 a, r1, 16, r0;
    and.b32 $0, a, $9;
}
"""
)
"""Operands: four words of two BF16 each, four reciprocals of their scales, each twice in a word.

sm_80 and later.
"""

CODES_OF_VALUES: Final = """
{
    .reg .b8 c<4>;
    .reg .b32 all;
    cvt.rn.satfinite.e2m1x2.f32 c0, $5, $1;
    cvt.rn.satfinite.e2m1x2.f32 c1, $6, $2;
    cvt.rn.satfinite.e2m1x2.f32 c2, $7, $3;
    cvt.rn.satfinite.e2m1x2.f32 c3, $8, $4;
    mov.b32 all, {c0, c1, c2, c3};
    and.b32 $0, all, $9;
}
"""
"""Operands: four even elements and four odd ones in scales, float32. sm_100a and sm_103a."""

LARGER_OF_BOTH: Final = "max.NaN.bf16x2 $0, $1, $2;"
"""The larger of two BF16 in both halves of two words; NaN wins. sm_80 and later."""
