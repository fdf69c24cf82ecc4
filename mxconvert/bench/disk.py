"""Rates of a folder's disk, plainly and through the pipeline's own reader and writer."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from mxconvert.bench.timing import rate, run_on_threads
from mxconvert.pipeline.pieces import PIECE_SIZE
from mxconvert.source import SourceReader
from mxconvert.writer import WeightFileWriter

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from mxconvert.model import Checkpoint, SourceFile

_SYNC_EVERY = 64 << 20


def write_synced(path: Path, limit: int, budget_s: float) -> float:
    """Write and sync 64 MiB at a time until time or ``limit`` bytes are used up.

    Syncing in steps keeps the time bounded on a slow disk.

    Returns:
        Bytes per second.

    Raises:
        OSError: The disk refuses.
    """
    piece = memoryview(os.urandom(PIECE_SIZE))  # nothing a file system could compress
    step = max(min(_SYNC_EVERY, limit) // PIECE_SIZE, 1)
    begin, done = time.perf_counter(), 0
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        while done < limit and time.perf_counter() - begin < budget_s:
            for _ in range(step):
                done += os.write(fd, piece)
            os.fsync(fd)
    finally:
        os.close(fd)
    return done / max(time.perf_counter() - begin, 1e-9)


def forget(path: Path, *, written: bool = True) -> None:
    """Ask the operating system to drop a file's pages, so that the disk is read again.

    Without effect on file systems in memory; below a virtual disk another cache may remain.

    Args:
        path: The file.
        written: Whether it was written just now, and so has to reach the disk first.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if written:
            os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def read_plainly(path: Path) -> float:
    """Read a file once from its begin, one thread; return bytes per second."""

    def once() -> int:
        buffer, done = memoryview(bytearray(PIECE_SIZE)), 0
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                done += count
        return done

    return rate(once)


def read_through(
    root: Path, files: Iterable[SourceFile], threads: int, limit: int, budget_s: float
) -> float:
    """Read pieces of a checkpoint's files through `SourceReader`; return bytes per second.

    Stops at ``limit`` bytes or when the time is used up, whichever is first.

    Raises:
        SourceError: The source changed.
        LocalError: The operating system reports a read error.
    """
    files = list(files)
    ranges = [
        (file.path, offset, min(PIECE_SIZE, file.size - offset))
        for file in files
        for offset in range(0, file.size, PIECE_SIZE)
    ][: max(limit // PIECE_SIZE, 1)]
    deadline = time.perf_counter() + budget_s
    done: list[int] = []
    buffers = [memoryview(bytearray(PIECE_SIZE)) for _ in range(threads)]

    def read(item: int) -> None:
        if time.perf_counter() < deadline:
            path, offset, size = ranges[item]
            reader.read_into(path, offset, buffers[item % threads][:size])
            done.append(size)

    def once() -> int:
        run_on_threads(threads, read, range(len(ranges)))
        return sum(done)

    with SourceReader(root, files) as reader:
        return rate(once)


def read_cold(checkpoint: Checkpoint, threads: int, limit: int, budget_s: float) -> float:
    """As `read_through`, after dropping the files' pages; the files are only read."""
    for file in checkpoint.files:
        forget(checkpoint.root / file.path, written=False)
    return read_through(checkpoint.root, checkpoint.files, threads, limit, budget_s)


def write_through(path: Path, size: int) -> float:
    """Write a file through `WeightFileWriter`, digests and fsync included; bytes per second.

    Raises:
        LocalError: The disk refuses.
    """
    piece = memoryview(os.urandom(PIECE_SIZE))
    pieces = max(size // PIECE_SIZE, 1)

    def once() -> int:
        writer = WeightFileWriter(path, pieces * PIECE_SIZE)
        writer.create()
        for _ in range(pieces):
            writer.append([piece])
            writer.hash_sha256([piece])
        writer.flush()
        writer.publish()
        return pieces * PIECE_SIZE

    speed = rate(once)
    path.unlink()
    return speed
