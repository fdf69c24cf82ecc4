"""Numbers that device code knows things by."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from mxconvert_kernels.spec import FloatType, ScaleRule

KINDS: Final = {
    FloatType.BF16: 0,
    FloatType.F16: 1,
    FloatType.F32: 2,
    FloatType.F8_E4M3: 3,
    FloatType.F8_E5M2: 4,
}
RULES: Final = {ScaleRule.MSE: 0, ScaleRule.EVEN: 1, ScaleRule.FLOOR: 2, ScaleRule.RCEIL: 3}


class Variant(IntEnum):
    """Which instructions the device code uses; all give the same bytes."""

    PORTABLE = 0
    """None that Triton does not have: NVIDIA, AMD, and its interpreter."""
    BF16X2 = 1
    """Two BF16 in one register, from sm_80 on; other elements as `PORTABLE`."""
    E2M1X2 = 2
    """The conversion to E2M1 of sm_100a and sm_103a."""


class Layout(IntEnum):
    """How the elements of a matrix ``[N, K]`` lie in memory."""

    FLAT = 0
    """One after the other."""
    ROWS = 1
    """Each row by itself, ``row_pitch`` elements from one to the next."""
    COLUMNS = 2
    """Neighbours of a row ``column_pitch`` elements apart, of a column ``row_pitch``."""
