"""The buffers that pieces travel in, and how many of them a memory budget allows."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from mxconvert.errors import UsageError
from mxconvert.pipeline.pieces import MIN_PIECE_SIZE, PIECE_SIZE, output_capacity

DEFAULT_MAX_MEMORY = 512 * 1024 * 1024
"""Default of ``--max-memory``: resident bytes of the whole process."""

_SLOTS_PER_JOB = 2
_SPARE_SLOTS = 2
_THREAD_OVERHEAD = 512 * 1024
_HEADROOM = 24 * 1024 * 1024  # interpreter growth, journal records, file handles


class Slot:
    """An input and an output buffer, reused from piece to piece."""

    def __init__(self, piece_size: int) -> None:
        self._input = mmap.mmap(-1, piece_size)
        self._output = mmap.mmap(-1, max(output_capacity(piece_size), mmap.PAGESIZE))
        self.input = memoryview(self._input)
        self.output = memoryview(self._output)


@dataclass(frozen=True, slots=True)
class Budget:
    """What fits into the memory budget.

    Attributes:
        jobs: Worker threads.
        slots: Pieces in flight.
        piece_size: Source bytes per piece.
        active_files: Output files that are cut at the same time.
    """

    jobs: int
    slots: int
    piece_size: int
    active_files: int


def resident_bytes() -> int:
    """Return the resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def usable_cores() -> int:
    """Return the processors this process may run on."""
    return len(os.sched_getaffinity(0))


def plan_budget(
    jobs: int, max_memory: int, held: int, resident: int, *, granule: int = 0
) -> Budget:
    """Fit jobs and buffers into the budget: fewer jobs rather than more memory.

    Args:
        jobs: Wanted worker threads.
        max_memory: Bytes that the process may have resident.
        held: Bytes of output that each active file may hold back.
        resident: Bytes that are resident already.
        granule: Source bytes that a piece must at least have room for.

    Raises:
        UsageError: Not even one small piece fits; states the least that would.
    """
    room = max_memory - resident - _HEADROOM
    smallest = max(MIN_PIECE_SIZE, -(-granule // MIN_PIECE_SIZE) * MIN_PIECE_SIZE)
    piece_size = max(PIECE_SIZE, smallest)
    while piece_size // 2 >= smallest and _needed(2, 1, piece_size, held) > room:
        piece_size //= 2
    if _needed(2, 1, piece_size, held) > room:
        least = resident + _HEADROOM + _needed(2, 1, smallest, held)
        raise UsageError(
            f"--max-memory: {max_memory} bytes are too few for this model, "
            f"it needs at least {least}",
            hint=f"pass --max-memory {-(-least // (1024 * 1024))}MiB or more",
            code="memory-budget",
        )
    while jobs > 1 and _needed(_slots(jobs), _active(jobs), piece_size, held) > room:
        jobs -= 1
    slots = _slots(jobs)
    while slots > 2 and _needed(slots, _active(jobs), piece_size, held) > room:  # noqa: PLR2004
        slots -= 1
    return Budget(jobs, slots, piece_size, _active(jobs))


def _slots(jobs: int) -> int:
    return _SLOTS_PER_JOB * jobs + _SPARE_SLOTS


def _active(jobs: int) -> int:
    return max(1, jobs // 2)


def _needed(slots: int, active: int, piece_size: int, held: int) -> int:
    per_slot = piece_size + output_capacity(piece_size)
    # A file still being committed and the next one may both hold output back.
    return slots * (per_slot + _THREAD_OVERHEAD) + (active + 1) * held
