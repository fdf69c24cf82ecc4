"""Constants of the lane arithmetic that the vector backends share.

A lane holds the magnitude bits of a float whose mantissa is `mantissa_bits` wide and whose exponent
has float32's bias: 16-bit lanes hold BF16, 32-bit lanes hold F32, and F16 after exact conversion.
docs/explanation/cpu-kernels.md derives the arithmetic.
"""

from __future__ import annotations

from typing import Final

from mxconvert_kernels.spec import FloatLayout, ScaleRule

LIFT_EXPONENT: Final = 64
"""Blocks of tiny values are multiplied by 2 ** 64 first, so that none of them is subnormal."""

LIFT_BELOW_FIELD: Final = 32
"""Blocks whose maximum has a smaller exponent field than this are lifted.

Above it, a subnormal element is less than 2 ** -29 of the scale: it counts as zero both for its
code and for the squared error, whether or not the processor flushes subnormals.
"""

SUBNORMAL_TO_LIFTED: Final = 149 - LIFT_EXPONENT
"""A subnormal's bits, converted to float32 as an integer, are 2 ** 149 times its value."""

FLOAT32_MANTISSA_BITS: Final = 23

CAPPED_SCALE_BYTE: Final = 253
"""The one scale byte at which a finite block maximum can decode beyond BF16's range."""


def rule_bias(rule: ScaleRule, mantissa_bits: int) -> int:
    """What to add to the maximum's bits so that its exponent field becomes the rule's.

    `even` carries from a mantissa of 1.75, `rceil` from any above 1.5 (that is, amax > 6 scales).
    """
    quarter = 1 << (mantissa_bits - 2)
    return {ScaleRule.EVEN: quarter, ScaleRule.RCEIL: 2 * quarter - 1}.get(rule, 0)


def cap_bits(mantissa_bits: int) -> int:
    """The bits of 1.75 * 2 ** 127, which rounds to a code above 3 under scale byte 253."""
    return (254 << mantissa_bits) | (3 << (mantissa_bits - 2))


def raise_gate(mantissa_bits: int) -> int:
    """Only a maximum with a mantissa above this (7 scales) can gain from the exponent above."""
    return 3 << (mantissa_bits - 2)


def lower_gate(mantissa_bits: int) -> int:
    """Only a maximum with a mantissa up to this can gain from the exponent below.

    4.46875 scales, and half an error unit more where the mantissa resolves it.
    """
    exact = 15 << mantissa_bits >> 7
    half_error_unit = 1 << mantissa_bits >> 13
    return exact + half_error_unit


def lowest_factor_field(layout: FloatLayout) -> int:
    """The exponent field of a factor from which on no product is subnormal.

    The smallest element other than zero is 2 ** (1 - bias - mantissa_bits).
    """
    return layout.bias + layout.mantissa_bits
