"""The report file: JSON lines in one zstd frame, written and read as a stream.

The first line is the `Header`, then come, output file by output file, its tensors and its
histograms, and last an `End` that counts the tensors.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO

import zstandard

from mxconvert.errors import LocalError
from mxconvert.model import REPORT_NAME
from mxconvert.statistics.records import (
    End,
    Header,
    Histograms,
    Line,
    Record,
    TensorStats,
    bad,
    encode,
    parse,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_LEVEL = 3
_LINE_LIMIT = 16 * 1024 * 1024
_TENSOR_LINE = b'{"type":"tensor",'  # stands in no string: quotes are escaped there


# --------------------------------------------------------------------------- writing


def encode_fragment(records: Iterable[Record]) -> bytes:
    """Return the lines of one output file: its tensors in file order, then its histograms.

    Raises:
        ValueError: A number that is not finite, or text that is not valid Unicode.
    """
    return b"".join(map(encode, records))


def encode_lines(fragments: Iterable[bytes], header: Header) -> Iterator[bytes]:
    """Yield a report's lines, not compressed.

    Args:
        fragments: What `encode_fragment` made, in the order of the plan's files.
        header: The first line.

    Raises:
        ValueError: A fragment is cut off.
    """
    yield encode(header)
    tensors = 0
    for fragment in fragments:
        if fragment and not fragment.endswith(b"\n"):
            raise ValueError("a fragment of the report ends within a line")
        tensors += fragment.count(_TENSOR_LINE)
        yield fragment
    yield encode(End(tensors=tensors))


def assemble(fragments: Iterable[bytes], header: Header) -> Iterator[bytes]:
    """Yield a report file's bytes, one fragment in memory at a time.

    Args:
        fragments: What `encode_fragment` made, in the order of the plan's files.
        header: The first line.

    Raises:
        ValueError: A fragment is cut off.
    """
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compressobj()
    for data in encode_lines(fragments, header):
        if compressed := compressor.compress(data):
            yield compressed
    yield compressor.flush()


# --------------------------------------------------------------------------- reading


def parse_fragment(data: bytes, where: str) -> list[Record]:
    """Read what `encode_fragment` made.

    Raises:
        VerificationError: Not such lines.
    """
    return [_record(parse(line, where), where) for line in data.splitlines()]


def _record(line: Line, where: str) -> Record:
    if not isinstance(line, TensorStats | Histograms):
        raise bad(where, f"a {type(line).__name__.lower()} line in the midst of the records")
    return line


def read_records(file: BinaryIO, where: str = REPORT_NAME) -> tuple[Header, Iterator[Record]]:
    """Read a report file as a stream.

    Args:
        file: Open for reading; it must stay open while the records are drawn.
        where: What messages call it.

    Returns:
        The header, and the records in the order of the file.

    Raises:
        VerificationError: Damaged, cut off, or another version; also while drawing.
    """
    lines = _lines(file, where)
    first = parse(next(lines, b""), f"{where}: line 1")
    if not isinstance(first, Header):
        raise bad(f"{where}: line 1", "not a header")
    return first, _records(lines, where)


def _records(lines: Iterator[bytes], where: str) -> Iterator[Record]:
    tensors, end = 0, None
    for number, data in enumerate(lines, start=2):
        place = f"{where}: line {number}"
        if end is not None:
            raise bad(place, "a line after the last one")
        line = parse(data, place)
        if isinstance(line, End):
            end = line
            continue
        tensors += isinstance(line, TensorStats)
        yield _record(line, place)
    if end is None:
        raise bad(where, "cut off: its last line is missing")
    if end.tensors != tensors:
        raise bad(where, f"{tensors} tensors, its last line says {end.tensors}")


def _lines(file: BinaryIO, where: str) -> Iterator[bytes]:
    reader = zstandard.ZstdDecompressor().stream_reader(file, closefd=False)
    buffered = io.BufferedReader(reader, 1024 * 1024)
    try:
        while line := buffered.readline(_LINE_LIMIT):
            if not line.endswith(b"\n"):
                raise bad(where, "a line is cut off or too long")
            yield line
    except zstandard.ZstdError as error:
        raise bad(where, f"cannot be decompressed: {error}") from error
    except OSError as error:
        raise LocalError.unreadable(where, error) from error
