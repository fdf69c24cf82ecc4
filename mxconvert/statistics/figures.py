"""Sums over quantized elements, and the figures that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

Exponents = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What is added up over elements x and their decoded values q; sums of disjoint parts add.

    Attributes:
        elements: How many there are.
        blocks: Groups that share a scale.
        sum_x2: Sum of x^2.
        sum_q2: Sum of q^2.
        sum_err2: Sum of (q - x)^2.
        max_abs_err: Largest |q - x|.
        flushed: Elements that are not zero and became zero.
        saturated: Elements with |x| larger than 6 times their scale, the largest value.
        exponents: Blocks whose scale is one below, equal to, one above the floor scale, which
            is floor(log2(max |x|)) - 2, at least 2^-127 (also for a block of zeros). Blocks
            further away, which only other tools make, are in none of the three.
    """

    elements: int = 0
    blocks: int = 0
    sum_x2: float = 0.0
    sum_q2: float = 0.0
    sum_err2: float = 0.0
    max_abs_err: float = 0.0
    flushed: int = 0
    saturated: int = 0
    exponents: Exponents = (0, 0, 0)

    def __add__(self, other: Sums) -> Sums:
        """Return the sums over the elements of both."""
        mine, theirs = self.exponents, other.exponents
        return Sums(
            elements=self.elements + other.elements,
            blocks=self.blocks + other.blocks,
            sum_x2=self.sum_x2 + other.sum_x2,
            sum_q2=self.sum_q2 + other.sum_q2,
            sum_err2=self.sum_err2 + other.sum_err2,
            max_abs_err=max(self.max_abs_err, other.max_abs_err),
            flushed=self.flushed + other.flushed,
            saturated=self.saturated + other.saturated,
            exponents=(mine[0] + theirs[0], mine[1] + theirs[1], mine[2] + theirs[2]),
        )

    @property
    def relative_rmse(self) -> float:
        """sqrt(sum (q - x)^2 / sum x^2); of zeros: 0 if they stayed zero, else infinite."""
        if self.sum_x2 == 0:
            return 0.0 if self.sum_err2 == 0 else math.inf
        return math.sqrt(self.sum_err2 / self.sum_x2)

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise in dB; infinite without an error."""
        error = self.relative_rmse
        if error == 0:
            return math.inf
        return -20 * math.log10(error) if math.isfinite(error) else -math.inf

    @property
    def cosine(self) -> float:
        """Cosine of the angle between x and q: 1 if both are zero, 0 if one of them is."""
        product = math.sqrt(self.sum_x2) * math.sqrt(self.sum_q2)
        if product == 0:
            return 1.0 if self.sum_x2 == self.sum_q2 else 0.0
        dot = (self.sum_x2 + self.sum_q2 - self.sum_err2) / 2
        return min(max(dot / product, -1.0), 1.0)

    @property
    def flushed_share(self) -> float:
        """Part of the elements that became zero."""
        return self.flushed / self.elements if self.elements else 0.0

    @property
    def saturated_share(self) -> float:
        """Part of the elements that exceed the largest value."""
        return self.saturated / self.elements if self.elements else 0.0
