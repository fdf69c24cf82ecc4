"""Timing that suits a shared machine: medians, and memcpy measured in the same rounds."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    Task = Callable[[int, int], object]
    """Does the work on blocks begin ... end - 1."""

BLOCK = 32


class Pool:
    """Runs a task on all blocks, split over threads."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._executor = ThreadPoolExecutor(threads)

    def seconds(self, task: Task, blocks: int) -> float:
        """Wall time of one run."""
        edges = [blocks * i // self.threads for i in range(self.threads + 1)]
        start = perf_counter()
        if self.threads == 1:
            task(0, blocks)
        else:
            list(self._executor.map(task, edges[:-1], edges[1:]))
        return perf_counter() - start


def copy_task(target: np.ndarray, source: np.ndarray, block_bytes: int) -> Task:
    """memcpy of the blocks' bytes."""

    def copy(begin: int, end: int) -> None:
        offset = begin * block_bytes
        to, origin = target.ctypes.data + offset, source.ctypes.data + offset
        ctypes.memmove(to, origin, (end - begin) * block_bytes)

    return copy


def gaussian_bf16(elements: int) -> np.ndarray:
    """BF16 bits of normally distributed weights (standard deviation 0.02)."""
    rng = np.random.default_rng(0)
    period = min(elements, 1 << 22)
    values = (rng.standard_normal(period, np.float32) * np.float32(0.02)).view(np.uint32)
    return np.resize((values >> 16).astype(np.uint16), elements)


def median(values: list[float]) -> float:
    return statistics.median(values)


def describe_machine() -> str:
    """Processor and cores, as far as Linux tells."""
    info = Path("/proc/cpuinfo")
    names = {
        line.split(":", 1)[1].strip()
        for line in (info.read_text().splitlines() if info.exists() else ())
        if line.startswith("model name")
    }
    return f"{', '.join(names) or platform.machine()}, {os.cpu_count()} cores"
