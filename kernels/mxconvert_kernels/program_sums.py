"""What the programs of a GPU launch store, read on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mxconvert_kernels.error_sums import ErrorSums
from mxconvert_kernels.spec import BLOCK_SIZE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SUMS: Final = 9
"""Float64 of a program: sums of x2, q2 and err2, the largest error, and how many elements were
flushed and saturated, how many blocks are below and above the floor exponent and how many count."""

NO_PLACE: Final = 2**63 - 1
"""What stands for the place of the first element that is not finite before one is found."""

_LARGEST = 3


def add_up(programs: NDArray[np.float64]) -> ErrorSums:
    """Return the sums of neighbouring programs, added in their order.

    Args:
        programs: Float64 ``[programs, SUMS]``.
    """
    totals = programs.sum(0).tolist()
    x2, q2, err2, _, flushed, saturated, below, above, blocks = totals
    count, below, above = int(blocks), int(below), int(above)
    return ErrorSums(
        elements=count * BLOCK_SIZE,
        blocks=count,
        sum_x2=x2,
        sum_q2=q2,
        sum_err2=err2,
        max_abs_err=float(programs[:, _LARGEST].max()) if len(programs) else 0.0,
        flushed=int(flushed),
        saturated=int(saturated),
        exponents=(below, count - below - above, above),
    )
