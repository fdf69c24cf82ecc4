"""How a file is cut into parts: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.crc import combine_crc64nvme
from mxconvert.errors import UsageError

if TYPE_CHECKING:
    from mxconvert.manifest import FileEntry
    from mxconvert.store import PartLimits


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The parts of one file; all but the last have ``part_size`` bytes."""

    size: int
    part_size: int

    @property
    def count(self) -> int:
        """Number of parts; an empty file has one."""
        return max(1, -(-self.size // self.part_size))

    def range(self, number: int) -> tuple[int, int]:
        """Return ``[begin, end)`` of a part, numbered from 1."""
        begin = (number - 1) * self.part_size
        return begin, min(begin + self.part_size, self.size)


def plan_parts(
    size: int, *, chunk_size: int, limits: PartLimits, asked: int | None = None
) -> PartPlan:
    """Choose the size of a file's parts.

    It is a multiple of the manifest's chunks, so that the checksum of each part is known
    before its bytes are read, and large enough for the store's limit on their number.

    Args:
        size: Bytes of the file.
        chunk_size: Bytes of a digest chunk.
        limits: What the store takes.
        asked: What the user asks for; raised where it must be.

    Raises:
        UsageError: The file is larger than the store's largest object, or more is asked
            for than the store takes in a part.
    """
    if asked is not None and asked > limits.largest:
        raise UsageError(
            f"--part-size {asked}: the store takes parts of at most {limits.largest} bytes",
            code="part-size",
        )
    largest = limits.largest // chunk_size * chunk_size
    most = min(limits.object_size, limits.count * largest)
    if size > most:
        raise UsageError(
            f"a file of {size} bytes: the store takes objects of at most {most}",
            hint="quantize with a smaller --max-file-size, or say what the store takes with "
            "--store-option max_object_size=BYTES",
            code="too-large",
        )
    needed = max(asked or chunk_size, limits.smallest, -(-size // limits.count))
    return PartPlan(size, min(-(-needed // chunk_size) * chunk_size, largest))


def crc_of(entry: FileEntry, begin: int, end: int, chunk_size: int) -> str:
    """Return the CRC64-NVME of a range of whole chunks (or up to the end), hexadecimal."""
    crc = 0
    for index in range(begin // chunk_size, -(-end // chunk_size)):
        first, last = entry.chunk_range(index, chunk_size)
        crc = combine_crc64nvme(crc, int(entry.chunks[index].crc64nvme, 16), last - first)
    return f"{crc:016x}"
