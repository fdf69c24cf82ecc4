"""What quantization did to the values of a tensor, in sums that merge."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ErrorSums:
    """Sums over source values x and the values q that their codes decode to.

    `Backend.quantize` adds to them; blocks that hold a NaN or an infinity add nothing.
    docs/explanation/numerics.md says how exact the numbers are.
    """

    elements: int = 0
    blocks: int = 0
    sum_x2: float = 0.0
    """Of x ** 2."""
    sum_q2: float = 0.0
    """Of q ** 2."""
    sum_err2: float = 0.0
    """Of (x - q) ** 2."""
    max_abs_err: float = 0.0
    """The largest |x - q|."""
    flushed: int = 0
    """Values x other than zero whose q is zero."""
    saturated: int = 0
    """Values x with |x| > 6 scales, the largest magnitude there is."""
    exponents: tuple[int, int, int] = (0, 0, 0)
    """Blocks with a scale below, at and above the floor exponent; all-zero blocks are at it."""

    def add(self, other: ErrorSums) -> None:
        """Add the sums of other blocks."""
        self.elements += other.elements
        self.blocks += other.blocks
        self.sum_x2 += other.sum_x2
        self.sum_q2 += other.sum_q2
        self.sum_err2 += other.sum_err2
        self.max_abs_err = max(self.max_abs_err, other.max_abs_err)
        self.flushed += other.flushed
        self.saturated += other.saturated
        below, floor, above = other.exponents
        self.exponents = (
            self.exponents[0] + below,
            self.exponents[1] + floor,
            self.exponents[2] + above,
        )
