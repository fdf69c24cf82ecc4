"""What is read in one request: neighbouring tensors of a file. Pure: no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.model import PACKED_SUFFIX, SCALE_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mxconvert.manifest import TensorRecord

RUN_BYTES = 32 * 2**20
"""Bytes of a run, unless one tensor has more."""

GAP_BYTES = 256 * 2**10
"""Unwanted bytes between tensors that are read along rather than begin another request."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that are handed over together: one, or codes and scales that become one.

    Attributes:
        name: What it is called.
        records: As they are stored.
        decoded: Whether it is codes and scales that become BF16.
    """

    name: str
    records: tuple[TensorRecord, ...]
    decoded: bool = False

    @property
    def begin(self) -> int:
        """First byte in the file."""
        return self.records[0].begin

    @property
    def end(self) -> int:
        """Byte after the last one."""
        return self.records[-1].end


@dataclass(frozen=True, slots=True)
class Run:
    """Units that one request reads.

    Attributes:
        number: Its place among all runs.
        units: In the order of their bytes.
    """

    number: int
    units: tuple[Unit, ...]

    @property
    def file(self) -> str:
        """The file that they lie in."""
        return self.units[0].records[0].file

    @property
    def begin(self) -> int:
        """First byte."""
        return self.units[0].begin

    @property
    def end(self) -> int:
        """Byte after the last one."""
        return self.units[-1].end

    @property
    def size(self) -> int:
        """Bytes to read."""
        return self.end - self.begin


def units_of(records: Iterable[TensorRecord], *, decoded: bool) -> Iterator[Unit]:
    """Yield what is handed over, in the order of the records.

    Args:
        records: As the artifact stores them; scales follow their codes.
        decoded: Whether codes and scales become one tensor ``X.weight``.
    """
    held: TensorRecord | None = None
    for record in records:
        if held is not None:
            stem = held.name.removesuffix(PACKED_SUFFIX)
            if record.name == stem + SCALE_SUFFIX:
                yield Unit(stem + ".weight", (held, record), decoded=True)
                held = None
                continue
            yield Unit(held.name, (held,))
            held = None
        if decoded and record.name.endswith(PACKED_SUFFIX):
            held = record
        else:
            yield Unit(record.name, (record,))
    if held is not None:
        yield Unit(held.name, (held,))


def runs_of(units: Iterable[Unit], run_bytes: int = RUN_BYTES) -> list[Run]:
    """Return runs of units in their order; those of a run lie near each other in a file."""
    runs: list[Run] = []
    group: list[Unit] = []
    for unit in units:
        if group and not _fits(group, unit, run_bytes):
            runs.append(Run(len(runs), tuple(group)))
            group = []
        group.append(unit)
    if group:
        runs.append(Run(len(runs), tuple(group)))
    return runs


def _fits(group: Sequence[Unit], unit: Unit, run_bytes: int) -> bool:
    last = group[-1]
    return (
        last.records[0].file == unit.records[0].file
        and 0 <= unit.begin - last.end <= GAP_BYTES
        and unit.end - group[0].begin <= run_bytes
    )
