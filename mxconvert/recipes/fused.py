"""Experts that are stored together: all of a layer in one tensor.

Described as data, for each family: where the tensor is, which projections it holds, in
which order, and which way round. The shapes that a config gives are compared with what
is stored, since two layouts can have the same number of elements, and with
2 I = H even the same shape.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mxconvert.recipes.base import MoESizes


@dataclass(frozen=True, kw_only=True)
class Fused:
    """One kind of fused tensor of a family.

    A matrix has the shape ``[E, n * P, K]`` or, transposed, ``[E, K, n * P]``: E experts,
    P projections with n output rows each, K inputs. A vector has ``[E, n * P]``. A stacked
    matrix holds one projection, its experts below each other: ``[E * n, K]`` or, transposed,
    ``[E * K, n]``.

    Attributes:
        pattern: Regular expression of its name, with the groups ``prefix`` (the module of
            all experts) and ``layer``.
        projections: What it holds, in its order; also names of the output.
        kind: ``weight`` or ``bias``.
        transposed: Whether the input dimension comes first; ``None`` where releases of the
            family differ, so that the sizes in the config decide.
        interleaved: Whether the projections' rows alternate instead of following each
            other.
        stacked: Whether the experts have no dimension of their own.
        suffix: What an FP8 tensor's scales are called: its own name and this.
    """

    pattern: str
    projections: tuple[str, ...]
    kind: str = "weight"
    transposed: bool | None = False
    interleaved: bool = False
    stacked: bool = False
    suffix: str = "_scale_inv"

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The compiled pattern."""
        return re.compile(self.pattern)

    @property
    def is_down(self) -> bool:
        """Whether it leads from the experts' inner size back to the hidden size."""
        return self.projections[0].startswith(("down", "w2"))

    def name(self, prefix: str, expert: int, projection: str) -> str:
        """Return what a part is called in the output."""
        experts = prefix if prefix.endswith(".experts") else f"{prefix}.experts"
        return f"{experts}.{expert}.{projection}.{self.kind}"

    def shape(self, sizes: MoESizes, *, transposed: bool) -> tuple[int | None, ...]:
        """Return its shape for the sizes of a model; ``None`` where the config says nothing.

        Args:
            sizes: Those of one layer.
            transposed: Whether the input dimension comes first.
        """
        outputs, inputs = sizes.hidden, sizes.inner
        if not self.is_down:
            outputs, inputs = _product(sizes.inner, len(self.projections)), sizes.hidden
        if self.kind == "bias":
            return sizes.experts, outputs
        rows, columns = (inputs, outputs) if transposed else (outputs, inputs)
        if self.stacked:
            return _product(sizes.experts, rows), columns
        return sizes.experts, rows, columns

    def rows(self, position: int, total: int) -> tuple[int, int, int]:
        """Return ``(start, stop, step)`` of a projection's output rows.

        Args:
            position: Of the projection in `projections`.
            total: Output rows of all projections together.
        """
        count = len(self.projections)
        if self.interleaved:
            return position, total, count
        share = total // count
        return position * share, (position + 1) * share, 1


def _product(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one * other
