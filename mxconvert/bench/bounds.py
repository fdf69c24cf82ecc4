"""From rates to the time that a checkpoint takes at least, and what holds it back.

Each resource alone gives a bound; the largest is the least time. ``docs/reference/bench.md``
states the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.bench.stages import INPUT_STAGES, OUTPUT_SHARE, OUTPUT_STAGES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mxconvert.model import Plan

TYPICAL_QUANTIZED_SHARE = 0.98
"""Part of a large MoE's bytes that are routed experts; that of Kimi-K3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is to be converted, in bytes.

    Attributes:
        source_bytes: Read.
        quantized_bytes: The part of them that becomes MXFP4; the rest is copied.
        output_bytes: Written.
        assumed: Whether the parts are assumed rather than planned from a checkpoint.
    """

    source_bytes: int
    quantized_bytes: int
    output_bytes: int
    assumed: bool

    @classmethod
    def of_size(cls, source_bytes: int) -> Workload:
        """Return a large MoE of that size in BF16, of which 98 % are routed experts."""
        quantized = round(source_bytes * TYPICAL_QUANTIZED_SHARE)
        output = source_bytes - quantized + round(quantized * OUTPUT_SHARE)
        return cls(
            source_bytes=source_bytes,
            quantized_bytes=quantized,
            output_bytes=output,
            assumed=True,
        )

    @classmethod
    def of_plan(cls, plan: Plan) -> Workload:
        """Return what a plan reads and writes."""
        return cls(
            source_bytes=sum(file.source_size for file in plan.files),
            quantized_bytes=plan.quantized.source_bytes,
            output_bytes=plan.file_bytes,
            assumed=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was measured.

    Attributes:
        disk_read: Bytes per second, read from the disk and not from its cache.
        disk_write: Bytes per second, on the disk when counted.
        one_disk: Whether both are the same disk, so that one waits for the other.
        cpu_seconds: Per stage and byte that the stage handles, see `Stages.per_own_byte`.
        processors: How many may work at a time.
        lanes: How many output files are written at a time.
    """

    disk_read: float
    disk_write: float
    one_disk: bool
    cpu_seconds: Mapping[str, float]
    processors: float
    lanes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least seconds that one resource needs for the whole checkpoint."""

    name: str
    seconds: float


def find_bounds(work: Workload, rates: Rates) -> tuple[Bound, ...]:
    """Return the bounds, the largest first."""
    found = (Bound(name=name, seconds=seconds) for name, seconds in _bounds(work, rates))
    return tuple(sorted(found, key=lambda bound: -bound.seconds))


def _bounds(work: Workload, rates: Rates) -> Iterator[tuple[str, float]]:
    read = work.source_bytes / rates.disk_read
    write = work.output_bytes / rates.disk_write
    if rates.one_disk:
        yield "disk read and write", read + write
    yield "disk read", read
    yield "disk write", write
    yield "processors", cpu_seconds(work, rates.cpu_seconds) / rates.processors
    sha256 = work.output_bytes * rates.cpu_seconds["SHA-256"]
    yield "SHA-256 of files in order", sha256 / rates.lanes


def cpu_seconds(work: Workload, per_byte: Mapping[str, float]) -> float:
    """Return the CPU seconds of all stages; a copied byte passes all but the kernel."""
    return (
        work.source_bytes * sum(per_byte[stage] for stage in INPUT_STAGES)
        + work.quantized_bytes * per_byte["kernel"]
        + work.output_bytes * sum(per_byte[stage] for stage in OUTPUT_STAGES)
    )
