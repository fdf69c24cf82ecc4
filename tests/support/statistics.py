"""Seeded report records of a model that was never made, for tests of what shows them.

The figures have the size of real ones: a relative RMSE near 0.115 that drifts with the layer and
differs by projection, and a few experts that stand out.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from mxconvert.statistics import Histograms, Record, Sums, TensorStats

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NAME = "model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_ERROR = {"gate_proj": 0.113, "up_proj": 0.115, "down_proj": 0.119, "w2": 0.12, "w3": 0.114}


def weight(
    name: str,
    error: float,
    *,
    layer: int | None = None,
    expert: int | None = None,
    projection: str | None = None,
    role: str = "expert",
    file: str = "model-experts-00000-00000.safetensors",
    shape: tuple[int, int] = (256, 512),
) -> TensorStats:
    """Return the record of a weight with the relative RMSE ``error``."""
    elements = shape[0] * shape[1]
    blocks = elements // 32
    sum_x2 = elements * 0.0004
    sums = Sums(
        elements=elements,
        blocks=blocks,
        sum_x2=sum_x2,
        sum_q2=sum_x2 * (1 - error**2),
        sum_err2=sum_x2 * error**2,
        max_abs_err=error / 8,
        flushed=int(elements * (0.05 + error / 4)),
        saturated=elements // 80,
        exponents=(blocks // 100, blocks - blocks // 100 - blocks // 11, blocks // 11),
    )
    return TensorStats(
        name=name,
        file=file,
        layer=layer,
        expert=expert,
        projection=projection,
        role=role,
        shape=shape,
        dtype="BF16",
        sums=sums,
    )


def model_records(
    layers: Sequence[int],
    experts: int,
    projections: Sequence[str] = PROJECTIONS,
    *,
    name: str = NAME,
    seed: int = 0,
) -> Iterator[Record]:
    """Yield the records of a model, a file for each expert; every 97th cell stands out."""
    rng = random.Random(seed)
    for expert in range(experts):
        file = f"model-experts-{expert:05d}-{expert:05d}.safetensors"
        for layer in layers:
            strange = 0.02 if (layer * experts + expert) % 97 == 50 else 0.0
            for projection in projections:
                error = _ERROR.get(projection, 0.115) + strange + 0.00004 * layer
                yield weight(
                    name.format(layer=layer, expert=expert, projection=projection),
                    error + rng.gauss(0, 0.0006),
                    layer=layer,
                    expert=expert,
                    projection=projection,
                    file=file,
                )
        yield Histograms(
            file=file,
            codes=tuple(1000 + 90 * (8 - abs(code % 8 - 2)) for code in range(16)),
            scales={0: 3, **{byte: 2000 // (1 + abs(byte - 119) ** 2) for byte in range(112, 125)}},
            sampled="1/16 of pieces",
        )
