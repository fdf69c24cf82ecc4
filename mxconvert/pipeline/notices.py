"""What a conversion has to say of a source that it takes as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxconvert.events import Notice
from mxconvert.fp8 import scale_of
from mxconvert.safetensors_format import num_elements

if TYPE_CHECKING:
    from mxconvert.model import TensorInfo


def zero_scales_notice(weight: TensorInfo, count: int) -> Notice:
    """Return what to say of FP8 scales that are zero."""
    scale = scale_of(weight).tensor
    return Notice(
        severity="warning",
        code="zero-scale",
        message=f"{weight.name}: {count} of {num_elements(scale.shape)} scales in {scale.name} "
        "are 0, and so are all weights that they scale",
    )


def nonfinite_notice(tensor: TensorInfo, count: int, first: int) -> Notice:
    """Return what to say of values that are not finite and are copied.

    Args:
        tensor: Which holds them.
        count: Of the values.
        first: The first one, counted in the output.
    """
    return Notice(
        severity="warning",
        code="non-finite-copied",
        message=f"{tensor.name}: {count} of {num_elements(tensor.shape)} values are NaN or "
        f"infinite, the first is element {first}; copied as they are",
    )
