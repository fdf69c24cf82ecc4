"""The few PTX instructions of the kernels, executed in numpy.

It reads the assembly that is compiled for GPUs, so that selectors, masks and the order of operands
are tested, and the arithmetic for all inputs. What it cannot show is that a GPU does what the PTX
ISA says; rounding follows PTX ISA 8.8, sections 9.7.4 (bf16x2) and 9.7.9 (prmt, cvt).
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
from mxconvert_kernels.spec import E2M1_HALVES

Words = Any
"""uint32 arrays, one element for each run of the assembly."""

CANONICAL_NAN = np.uint16(0x7FFF)


def run(assembly: str, inputs: list[Words]) -> Words:
    """Run the assembly with `inputs` as $1, $2 ... and return $0."""
    registers: dict[str, Words] = {f"${i + 1}": words for i, words in enumerate(inputs)}
    shape = inputs[0].shape
    for line in assembly.strip().removeprefix("{").removesuffix("}").split(";"):
        text = line.strip()
        if not text or text.startswith(".reg"):
            continue
        if joined := re.fullmatch(r"mov\.b32 (\w+), \{(.*)\}", text):
            parts = [registers[name.strip()] for name in joined[2].split(",")]
            registers[joined[1]] = sum(part << np.uint32(8 * i) for i, part in enumerate(parts))
            continue
        name, operands = text.split(None, 1)
        target, *names = (operand.strip() for operand in operands.split(","))
        values = [_value(registers, operand, shape) for operand in names]
        with np.errstate(over="ignore", invalid="ignore"):
            registers[target] = INSTRUCTIONS[name](*values)
    return registers["$0"]


def _value(registers: dict[str, Words], operand: str, shape: tuple[int, ...]) -> Words:
    if operand in registers:
        return registers[operand]
    digits = operand.replace("0f", "0x") if operand.startswith("0f") else operand
    return np.full(shape, int(digits, 0), np.uint32)


def _halves(words: Words) -> Words:
    return np.ascontiguousarray(words).view(np.uint16)


def _floats(words: Words) -> Words:
    """Both halves as float64."""
    wide = _halves(words).astype(np.uint32) << 16
    return wide.view(np.float32).astype(np.float64)


def _to_bf16(values: Words) -> Words:
    """Rounded to nearest even; the double rounding by way of float32 meets no tie here."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), CANONICAL_NAN, rounded).astype(np.uint16)


def _fma_bf16x2(one: Words, other: Words, addend: Words) -> Words:
    return _to_bf16(_floats(one) * _floats(other) + _floats(addend)).view(np.uint32)


def _choose(one: Words, other: Words, *, largest: bool, nan: bool) -> Words:
    first, second = _floats(one), _floats(other)
    take = np.isnan(second) | (first > second if largest else first < second)
    chosen = np.where(take & ~np.isnan(first), _halves(one), _halves(other))
    if nan:
        chosen = np.where(np.isnan(first) | np.isnan(second), CANONICAL_NAN, chosen)
    return chosen.astype(np.uint16).view(np.uint32)


def _prmt(low: Words, high: Words, selector: Words) -> Words:
    """Four bytes of eight; bit 3 of a selector copies the sign of its byte to all its bits."""
    found = np.zeros_like(low)
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    for i in range(4):
        select = int(selector.flat[0]) >> (4 * i) & 15
        byte = (both >> np.uint64(8 * (select & 7))) & np.uint64(0xFF)
        if select & 8:
            byte = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
        found |= byte.astype(np.uint32) << np.uint32(8 * i)
    return found


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    found = np.zeros_like(a)
    for row in range(8):
        if int(table.flat[0]) >> row & 1:
            term = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
            found |= term
    return found


def _fma_f32(one: Words, other: Words, addend: Words) -> Words:
    """With a power of two as factor, and zero to add: the product in float64 is exact."""
    floats = [words.view(np.float32).astype(np.float64) for words in (one, other, addend)]
    return (floats[0] * floats[1] + floats[2]).astype(np.float32).view(np.uint32)


def _to_e2m1x2(high: Words, low: Words) -> Words:
    return _to_e2m1(low) | _to_e2m1(high) << np.uint32(4)


def _to_e2m1(words: Words) -> Words:
    values = words.view(np.float32).astype(np.float64)
    magnitudes = np.abs(values)
    points = np.array(E2M1_HALVES) / 2
    code = np.zeros(words.shape, np.uint32)
    for lower, (left, right) in enumerate(itertools.pairwise(points)):
        middle = (left + right) / 2
        up = (magnitudes > middle) | ((magnitudes == middle) & (lower % 2 == 1))
        code = np.where(up, np.uint32(lower + 1), code)
    sign = (words >> np.uint32(28)) & np.uint32(8)
    return np.where(np.isnan(values), np.uint32(7), code | sign)


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _fma_bf16x2,
    "min.bf16x2": lambda a, b: _choose(a, b, largest=False, nan=False),
    "max.bf16x2": lambda a, b: _choose(a, b, largest=True, nan=False),
    "max.NaN.bf16x2": lambda a, b: _choose(a, b, largest=True, nan=True),
    "fma.rn.f32": _fma_f32,
    "cvt.rn.satfinite.e2m1x2.f32": _to_e2m1x2,
}
