"""The buffers that pieces travel in, and how many of them a memory budget allows."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mxconvert.errors import UsageError
from mxconvert.pipeline.pieces import MIN_PIECE_SIZE, PIECE_SIZE, output_capacity, scales_capacity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEFAULT_MAX_MEMORY = 512 * 1024 * 1024
"""Default of ``--max-memory``: resident bytes of the whole process."""

_SLOTS_PER_JOB = 2
_SPARE_SLOTS = 2
_FEWEST = 2  # slots, and tensors that wait for their rest if there are threads to fill them
_THREAD_OVERHEAD = 512 * 1024
SLOTS_PER_DEVICE = 4
DEVICE_PIECE_SIZE = 8 * 1024 * 1024
"""Source bytes of a piece for a GPU: what the host does for each should take less time than its
copy, 0.15 ms at 55 GB/s."""

_HEADROOM = 24 * 1024 * 1024  # interpreter growth, journal records, file handles


class Slot:
    """The buffers of a piece, reused from piece to piece.

    Attributes:
        input: What is read.
        output: What is made but for scales. Those of all parts lie together, and so do all
            codes, so that one launch on a GPU can make several parts.
        scales: E8M0 scales.
    """

    def __init__(self, piece_size: int) -> None:
        self.input = _buffer(piece_size)
        self.output = _buffer(output_capacity(piece_size))
        self.scales = _buffer(scales_capacity(piece_size))
        self._piece_size = piece_size

    def copy(self) -> Slot:
        """Return a new slot with the same input.

        Into the buffers of this one a device that failed may still write.
        """
        made = Slot(self._piece_size)
        made.input[:] = self.input
        return made


def _buffer(size: int) -> memoryview:
    """Return memory of its own pages, which can be pinned."""
    return memoryview(mmap.mmap(-1, max(size, mmap.PAGESIZE)))


@dataclass(frozen=True, slots=True)
class Budget:
    """What fits into the memory budget.

    Attributes:
        jobs: Worker threads.
        slots: Pieces in flight.
        piece_size: Source bytes per piece.
        active_files: Output files that are cut at the same time.
        held: Bytes of output that may wait for the rest of their tensors. One tensor may
            always wait.
    """

    jobs: int
    slots: int
    piece_size: int
    active_files: int
    held: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a plan needs of memory.

    Attributes:
        held: For a piece size, the most bytes of output that wait for the rest of one tensor.
        granule: Source bytes that a piece must at least have room for.
        chunk: Bytes that a thread takes beside its piece.
    """

    held: Callable[[int], int] = lambda _: 0
    granule: int = 0
    chunk: int = 0


def resident_bytes() -> int:
    """Return the resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def return_free_memory() -> None:
    """Give the system back what the C library's allocator holds free, where it can (glibc).

    Reading the headers of a large checkpoint leaves some 80 MiB behind, which would count
    as resident though nobody uses them.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def usable_cores() -> int:
    """Return the processors this process may run on."""
    return len(os.sched_getaffinity(0))


def plan_budget(
    jobs: int, max_memory: int, resident: int, needs: Needs, *, devices: int = 0
) -> Budget:
    """Fit jobs and buffers into the budget: fewer jobs rather than more memory.

    Args:
        jobs: Wanted worker threads.
        max_memory: Bytes that the process may have resident.
        resident: Bytes that are resident already.
        needs: Of the plan.
        devices: GPUs, each of which has some pieces at a time, and better large ones.

    Raises:
        UsageError: Not even one small piece fits; states the least that would.
    """
    room = max_memory - resident - _HEADROOM
    smallest = max(1, -(-needs.granule // MIN_PIECE_SIZE)) * MIN_PIECE_SIZE
    piece_size = max(DEVICE_PIECE_SIZE if devices else PIECE_SIZE, smallest)
    while piece_size > smallest and _needed(1, _FEWEST, piece_size, 1, needs) > room:
        piece_size = max(piece_size // 2, smallest)
    if _needed(1, _FEWEST, piece_size, 1, needs) > room:
        least = resident + _HEADROOM + _needed(1, _FEWEST, smallest, 1, needs)
        raise UsageError(
            f"--max-memory: {max_memory} bytes are too few for this model, "
            f"it needs at least {least}",
            hint=f"pass --max-memory {-(-least // (1024 * 1024))}MiB or more",
            code="memory-budget",
        )
    jobs, slots, waiting = next(
        chosen
        for chosen in _choices(jobs, devices * SLOTS_PER_DEVICE)
        if _needed(*chosen[:2], piece_size, chosen[2], needs) <= room
    )
    return Budget(jobs, slots, piece_size, _active(jobs), waiting * needs.held(piece_size))


def _choices(jobs: int, extra: int) -> Iterator[tuple[int, int, int]]:
    """Yield jobs, slots and how many tensors may wait, the most work first."""
    if extra:
        yield from (
            (count, _slots(count) + extra, _active(count) + 1) for count in range(jobs, 0, -1)
        )
    for count in range(jobs, 0, -1):
        # A file still being committed and the next one may both hold output back.
        fewest = 1 if count == 1 else _FEWEST
        yield from ((count, _slots(count), n) for n in range(_active(count) + 1, fewest - 1, -1))
    yield from ((1, slots, 1) for slots in range(_slots(1) - 1, _FEWEST - 1, -1))


def _slots(jobs: int) -> int:
    return _SLOTS_PER_JOB * jobs + _SPARE_SLOTS


def _active(jobs: int) -> int:
    return max(1, jobs // 2)


def _needed(jobs: int, slots: int, piece_size: int, waiting: int, needs: Needs) -> int:
    buffers = piece_size + output_capacity(piece_size) + scales_capacity(piece_size)
    per_slot = buffers + _THREAD_OVERHEAD
    return slots * per_slot + waiting * needs.held(piece_size) + jobs * needs.chunk
