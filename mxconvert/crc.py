"""CRC64-NVME, by awscrt; loaded when it is first needed, since that takes a while."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


@cache
def _library() -> Any:
    from awscrt import checksums  # noqa: PLC0415  (60 ms that many commands do not need)

    return checksums


def crc64nvme(data: Buffer, previous: int = 0) -> int:
    """Return the CRC of ``data`` that follows on bytes with the CRC ``previous``."""
    crc: int = _library().crc64nvme(data, previous)
    return crc


def combine_crc64nvme(first: int, second: int, second_length: int) -> int:
    """Return the CRC of two runs of bytes from theirs and the second's length."""
    crc: int = _library().combine_crc64nvme(first, second, second_length)
    return crc
