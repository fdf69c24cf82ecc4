"""The reader of source files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from mxconvert.model import SourceFile
from mxconvert.source import SourceReader
from mxconvert.source import reader as reader_module

if TYPE_CHECKING:
    import pytest


def open_files(folder: Path) -> int:
    """Count this process's descriptors of files in a folder; others' come and go."""
    return sum(link.resolve().is_relative_to(folder) for link in Path("/proc/self/fd").iterdir())


def write_files(folder: Path, count: int) -> list[SourceFile]:
    files = []
    for number in range(count):
        path = folder / f"{number}.bin"
        path.write_bytes(bytes([number]) * 64)
        info = path.stat()
        files.append(
            SourceFile(
                path=path.name,
                size=64,
                header_sha256="",
                mtime_ns=info.st_mtime_ns,
                inode=info.st_ino,
            )
        )
    return files


def test_a_checkpoint_of_many_shards_needs_few_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protects checkpoints of more shards than a process may open."""
    monkeypatch.setattr(reader_module, "_MAX_OPEN", 4)
    with SourceReader(tmp_path, write_files(tmp_path, 50)) as reader:

        def read(number: int) -> None:
            buffer = memoryview(bytearray(16))
            reader.read_into(f"{number % 50}.bin", 8, buffer)
            assert bytes(buffer) == bytes([number % 50]) * 16

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, range(1000)))
        assert open_files(tmp_path) <= 4
    assert open_files(tmp_path) == 0
