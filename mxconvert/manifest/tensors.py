"""The tensor list: one JSON line per stored tensor, in one zstd frame.

Lines are canonical and written by hand, since a large model has half a million of
them; reading builds the record, writes the line again and compares, which checks
types, key order, duplicate keys and spelling at once.
"""

from __future__ import annotations

import io
import struct
from json.encoder import encode_basestring as quote
from typing import TYPE_CHECKING, Any

import zstandard

from mxconvert.errors import VerificationError
from mxconvert.manifest.canonical import decode_strict, encode_canonical
from mxconvert.manifest.fields import Fields, is_count, is_hex
from mxconvert.manifest.records import SCHEMA_VERSION, SourceRecord, TensorRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LIST_TYPE = "mxconvert-tensors"
_LEVEL = 3
_BATCH_LINES = 1024
_LINE_LIMIT = 16 * 1024 * 1024
_XXH_DIGITS = 32
_FRAME_HEADER = 6  # magic, descriptor and window descriptor: RFC 8878, 3.1.1.1
_DESCRIPTOR = 4  # offset of the descriptor byte
_UNSIZED = 0b0000_0100  # descriptor: checksum, no content size, not one segment
_SIZED = 0b1100_0100  # the same with a content size of 8 bytes


# --------------------------------------------------------------------------- writing


def _numbers(values: Iterable[int]) -> str:
    return "[" + ",".join(map(str, values)) + "]"


def _source_json(source: SourceRecord) -> str:
    axes = "" if source.axes is None else f'"axes":{_numbers(source.axes)},'
    selection = (
        ""
        if source.selection is None
        else f'"selection":[{",".join(map(_numbers, source.selection))}],'
    )
    return (
        f'{{{axes}"dtype":"{source.dtype}","name":{quote(source.name)},{selection}'
        f'"shape":{_numbers(source.shape)},"xxh3_128":"{source.xxh3_128}"}}'
    )


def encode_record(record: TensorRecord) -> str:
    """Return a record's canonical line, without its newline."""
    experts = "null" if record.experts is None else _numbers(record.experts)
    layer = "null" if record.layer is None else str(record.layer)
    sources = ",".join(map(_source_json, record.sources))
    return (
        f'{{"dtype":"{record.dtype}","experts":{experts},"file":{quote(record.file)},'
        f'"layer":{layer},"name":{quote(record.name)},"range":[{record.begin},{record.end}],'
        f'"shape":{_numbers(record.shape)},"sources":[{sources}],"xxh3_128":"{record.xxh3_128}"}}'
    )


class TensorListWriter:
    """Compresses records as they come; holds the compressed bytes only.

    Records must come sorted by (file, begin).
    """

    def __init__(self, count: int) -> None:
        self._expected = count
        self._added = 0
        self._last = ("", -1)
        self._compressor = zstandard.ZstdCompressor(
            level=_LEVEL, write_checksum=True, write_content_size=False, threads=0
        ).compressobj()
        self._size = 0
        self._frame = bytearray()
        self._lines: list[str] = []
        header = {"count": count, "schema_version": SCHEMA_VERSION, "type": LIST_TYPE}
        self._compress(encode_canonical(header))

    def add(self, record: TensorRecord) -> None:
        """Take the next record.

        Raises:
            ValueError: Out of order.
        """
        key = (record.file, record.begin)
        if key < self._last:
            raise ValueError(f"tensor {record.name!r}: {key} comes after {self._last}")
        self._last = key
        self._added += 1
        self._lines.append(encode_record(record))
        if len(self._lines) == _BATCH_LINES:
            self._flush()

    def _flush(self) -> None:
        if self._lines:
            self._compress(("\n".join(self._lines) + "\n").encode())
            self._lines.clear()

    def _compress(self, data: bytes) -> None:
        self._size += len(data)
        self._frame += self._compressor.compress(data)

    def finish(self) -> bytes:
        """Return the file's bytes.

        Raises:
            ValueError: Another number of records than announced.
        """
        if self._added != self._expected:
            raise ValueError(f"{self._added} tensor records, announced were {self._expected}")
        self._flush()
        self._frame += self._compressor.flush()
        return _with_content_size(bytes(self._frame), self._size)


def _with_content_size(frame: bytes, size: int) -> bytes:
    """Insert the content size, known only at the end of a stream, into a zstd frame."""
    if frame[_DESCRIPTOR] != _UNSIZED:
        raise AssertionError(f"unexpected zstd frame descriptor {frame[_DESCRIPTOR]:#x}")
    header = frame[:_DESCRIPTOR] + bytes([_SIZED]) + frame[_DESCRIPTOR + 1 : _FRAME_HEADER]
    return header + struct.pack("<Q", size) + frame[_FRAME_HEADER:]


def encode_tensors(records: Iterable[TensorRecord], count: int | None = None) -> bytes:
    """Return the tensor list's bytes.

    Args:
        records: Sorted by (file, begin).
        count: How many there are; without it the records are collected first.

    Raises:
        ValueError: Out of order, or another number than ``count``.
    """
    if count is None:
        records = list(records)
        count = len(records)
    writer = TensorListWriter(count)
    for record in records:
        writer.add(record)
    return writer.finish()


# --------------------------------------------------------------------------- reading


def iter_tensors(data: bytes, where: str = "mxconvert.tensors.jsonl.zst") -> Iterator[TensorRecord]:
    """Read a tensor list, line by line.

    Args:
        data: The file's bytes.
        where: What messages call it.

    Raises:
        VerificationError: Damaged, not canonical, out of order, overlapping within a
            file, or another number of records than its first line says.
    """
    lines = _lines(data, where)
    count = _parse_header(next(lines, b""), where)
    last_file, last_end, found = "", 0, 0
    for line in lines:
        found += 1
        record = _parse_line(line, f"{where}: line {found + 1}")
        if record.file < last_file or (record.file == last_file and record.begin < last_end):
            raise _bad(where, f"tensor {record.name!a} is out of order or overlaps the one before")
        last_file, last_end = record.file, record.end
        yield record
    if found != count:
        raise _bad(where, f"{found} tensors, its first line says {count}")


def _bad(where: str, what: str) -> VerificationError:
    return VerificationError(
        f"{where}: {what}", hint="fetch the file again", code="bad-tensor-list"
    )


def _lines(data: bytes, where: str) -> Iterator[bytes]:
    reader = zstandard.ZstdDecompressor().stream_reader(data)
    buffered = io.BufferedReader(reader, 1024 * 1024)
    try:
        while line := buffered.readline(_LINE_LIMIT):
            if not line.endswith(b"\n"):
                raise _bad(where, "its last line is cut off or a line is too long")
            yield line[:-1]
    except zstandard.ZstdError as error:
        raise _bad(where, f"cannot be decompressed: {error}") from error


def _parse_header(line: bytes, where: str) -> int:
    try:
        fields = Fields(decode_strict(line), f"{where}: line 1")
    except ValueError as error:
        raise _bad(where, f"line 1 is not JSON: {error}") from error
    kind, version, count = (
        fields.text("type"),
        fields.count("schema_version"),
        fields.count("count"),
    )
    if (kind, version) != (LIST_TYPE, SCHEMA_VERSION):
        raise VerificationError(
            f"{where}: type {kind!r} version {version}, expected {LIST_TYPE!r} "
            f"version {SCHEMA_VERSION}",
            hint="use a version of mxconvert that knows it",
            code="unknown-schema",
        )
    fields.done()
    return count


def _parse_line(line: bytes, where: str) -> TensorRecord:
    try:
        record = _build(decode_strict(line))
        same = encode_record(record).encode() == line
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _bad(where, f"not a tensor record: {error!r}") from error
    if not same:
        raise _bad(where, "not a tensor record in canonical form")
    if not _sensible(record):
        raise _bad(where, f"tensor {record.name!a}: a number or digest is out of range")
    return record


def _build(entry: Any) -> TensorRecord:
    begin, end = entry["range"]
    experts = entry["experts"]
    return TensorRecord(
        entry["name"],
        entry["file"],
        entry["dtype"],
        tuple(entry["shape"]),
        begin,
        end,
        entry["xxh3_128"],
        entry["layer"],
        None if experts is None else tuple(experts),
        tuple(map(_build_source, entry["sources"])),
    )


def _build_source(entry: Any) -> SourceRecord:
    selection, axes = entry.get("selection"), entry.get("axes")
    return SourceRecord(
        entry["name"],
        entry["dtype"],
        tuple(entry["shape"]),
        entry["xxh3_128"],
        None if selection is None else tuple(map(tuple, selection)),
        None if axes is None else tuple(axes),
    )


def _sensible(record: TensorRecord) -> bool:
    """Check what the canonical form cannot: ranges of numbers, lengths of digests."""
    experts, layer = record.experts, record.layer
    return (
        is_count(record.begin)
        and is_count(record.end, record.begin)
        and all(map(is_count, record.shape))
        and is_hex(record.xxh3_128, _XXH_DIGITS)
        and (layer is None or is_count(layer))
        and (experts is None or (len(experts) == 2 and is_count(experts[1], experts[0])))  # noqa: PLR2004
        and (experts is None or is_count(experts[0]))
        and all(map(_sensible_source, record.sources))
    )


def _sensible_source(source: SourceRecord) -> bool:
    selection, axes = source.selection, source.axes
    return (
        all(map(is_count, source.shape))
        and is_hex(source.xxh3_128, _XXH_DIGITS)
        and (selection is None or _sensible_selection(selection, source.shape))
        and (axes is None or sorted(axes) == list(range(len(source.shape))))
    )


def _sensible_selection(selection: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> bool:
    return len(selection) == len(shape) and all(
        len(part) == 3 and 0 <= part[0] <= part[1] <= size and part[2] >= 1  # noqa: PLR2004
        for part, size in zip(selection, shape, strict=True)
    )
