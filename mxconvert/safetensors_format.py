"""The safetensors container: a strict header parser and a header builder.

Layout (safetensors README, "Format"): 8 bytes little-endian length N, N bytes of JSON
(object of name -> {dtype, shape, data_offsets}, plus optional ``__metadata__`` of
string to string), then the tensors' bytes, row-major, little-endian, without holes.
``data_offsets`` count from the end of the header.

The builder writes what safetensors' own writer makes of the same tensors: dtype rank
descending, then name, compact JSON, padding with spaces to 8 bytes.
"""

from __future__ import annotations

import functools
import json
import struct
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from mxconvert.errors import SourceError, brief
from mxconvert.model import INT4_DTYPE, OutputTensor, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

HEADER_LIMIT = 100_000_000
"""Largest JSON header that the safetensors library opens."""

MAX_RANK = 64
"""Most dimensions a tensor may have, as in torch."""

PREFIX_SIZE = 8
METADATA_KEY = "__metadata__"

# Bits per element, in the order of the library's dtype enumeration, which is its sort
# order for writing (later first).
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    INT4_DTYPE: 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
_STORED_DTYPES = tuple(dtype for dtype in DTYPE_BITS if dtype != INT4_DTYPE)
_RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_BITS)}
_BITS_PER_BYTE = 8
_REPAIR = "fetch or write the file again; `mxconvert inspect` checks every header"


def num_elements(shape: Iterable[int]) -> int:
    """Return the product of the dimensions (1 for a scalar)."""
    count = 1
    for dim in shape:
        count *= dim
    return count


def tensor_size(dtype: str, shape: Iterable[int]) -> int:
    """Return the bytes of a tensor.

    Raises:
        ValueError: The bits of a sub-byte dtype do not fill whole bytes.
    """
    bits = DTYPE_BITS[dtype] * num_elements(shape)
    if bits % _BITS_PER_BYTE:
        raise ValueError(f"{bits} bits do not fill whole bytes")
    return bits // _BITS_PER_BYTE


def storage_order(dtype: str, name: str) -> tuple[int, str]:
    """Sort key of the library's writer: dtype rank descending, then name."""
    return (-_RANK[dtype], name)


# --------------------------------------------------------------------------- reading


def header_length(prefix: bytes, file: str, file_size: int) -> int:
    """Return the JSON header's length from a file's first 8 bytes.

    Raises:
        SourceError: The prefix is short, zero, past the limit or past the file's end.
    """
    if len(prefix) < PREFIX_SIZE:
        raise SourceError(
            f"{file}: truncated: {file_size} bytes found, a safetensors file has at least 10",
            hint=_REPAIR,
            code="truncated-shard",
        )
    (length,) = struct.unpack("<Q", prefix)
    if length > HEADER_LIMIT:
        raise SourceError(
            f"{file}: claims a header of {length} bytes; the limit is {HEADER_LIMIT}",
            hint="this is not a safetensors file, or it is damaged; " + _REPAIR,
            code="header-too-large",
        )
    if length < len(b"{}"):
        raise SourceError(
            f"{file}: claims a header of {length} bytes; the smallest is 2",
            hint=_REPAIR,
            code="bad-header",
        )
    if PREFIX_SIZE + length > file_size:
        raise SourceError(
            f"{file}: claims a header of {length} bytes, but the file has "
            f"{file_size - PREFIX_SIZE} bytes after its 8-byte prefix",
            hint=_REPAIR,
            code="truncated-shard",
        )
    return int(length)


def parse_header(raw: bytes, file: str, file_size: int) -> list[TensorInfo]:
    """Parse and check a JSON header.

    Args:
        raw: The JSON bytes, without the 8-byte prefix.
        file: The file's name, for the results and for messages.
        file_size: Its size; the tensors must end exactly there.

    Returns:
        The tensors in order of their offsets.

    Raises:
        SourceError: Anything that contradicts the format; the message names file and tensor.
    """
    document = _load_object(raw, file)
    _check_metadata(document.pop(METADATA_KEY, None), file)
    base = PREFIX_SIZE + len(raw)
    tensors = [_parse_entry(name, entry, file, base) for name, entry in document.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size))
    _check_coverage(tensors, file, base, file_size)
    return tensors


def read_metadata(raw: bytes, file: str) -> dict[str, str]:
    """Return the header's ``__metadata__`` (empty when absent or null)."""
    metadata = _load_object(raw, file).get(METADATA_KEY)
    _check_metadata(metadata, file)
    return dict(metadata or {})


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of a JSON parser's pairs (``object_pairs_hook``).

    Raises:
        ValueError: A key is there twice; parsers would silently take the last one.
    """
    result = dict(pairs)
    if len(result) != len(pairs):
        double, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {brief(double)} is there twice")
    return result


def _load_object(raw: bytes, file: str) -> dict[str, Any]:
    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise SourceError(
            f"{file}: the header is no valid UTF-8 JSON: {error}", hint=_REPAIR
        ) from error
    if not isinstance(document, dict):
        raise SourceError(
            f"{file}: the header is a JSON {type(document).__name__}, expected an object",
            hint=_REPAIR,
        )
    return document


def _check_metadata(metadata: object, file: str) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        raise SourceError(f"{file}: {METADATA_KEY} is not an object", hint=_REPAIR)
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise SourceError(
                f"{file}: {METADATA_KEY} key {brief(key)} holds {brief(value)}, expected a string",
                hint=_REPAIR,
            )


def is_utf8(text: str) -> bool:
    """Whether ``text`` can be written as UTF-8 (JSON can smuggle in lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and len(value) <= MAX_RANK and all(map(_is_count, value))


def _parse_entry(name: str, entry: object, file: str, base: int) -> TensorInfo:
    def bad(what: str) -> SourceError:
        return SourceError(f"{file}: tensor {brief(name)}: {what}", hint=_REPAIR, code="bad-header")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad("expected exactly dtype, shape and data_offsets")
    if not is_utf8(name):
        raise bad("the name is not valid Unicode")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _STORED_DTYPES:
        raise bad(f"unknown dtype {brief(dtype)}; known: {', '.join(_STORED_DTYPES)}")
    if not _is_shape(shape):
        raise bad(f"shape {brief(shape)} is not a list of at most {MAX_RANK} whole numbers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):  # noqa: PLR2004
        raise bad(f"data_offsets {brief(offsets)} are not two non-negative integers")
    begin, end = offsets
    if begin > end:
        raise bad(f"data_offsets begin at {begin}, after their end at {end}")
    try:
        shape, size = _shared_layout(sys.intern(dtype), tuple(shape))
    except ValueError as error:
        raise bad(f"dtype {dtype}, shape {brief(shape)}: {error}") from error
    if size != end - begin:
        raise bad(
            f"dtype {dtype}, shape {brief(list(shape))} need {brief(size)} bytes, "
            f"data_offsets span {end - begin}"
        )
    return TensorInfo(name, sys.intern(dtype), shape, file, base + begin, size)


@functools.lru_cache(maxsize=1024)
def _shared_layout(dtype: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Return a shape and its bytes: a hundred thousand experts share one object of each."""
    return shape, tensor_size(dtype, shape)


def _check_coverage(tensors: list[TensorInfo], file: str, base: int, file_size: int) -> None:
    end, previous = base, None
    for tensor in tensors:
        if tensor.offset < end:
            raise SourceError(
                f"{file}: tensors {brief(previous)} and {brief(tensor.name)} overlap: "
                f"the first ends at byte {end - base} of the data, the second begins at "
                f"{tensor.offset - base}",
                hint=_REPAIR,
                code="overlapping-tensors",
            )
        if tensor.offset > end:
            raise SourceError(
                f"{file}: {tensor.offset - end} bytes before tensor {brief(tensor.name)} "
                "belong to no tensor",
                hint=_REPAIR,
                code="hole",
            )
        if tensor.size:
            end, previous = tensor.offset + tensor.size, tensor.name
    if end > file_size:
        raise SourceError(
            f"{file}: truncated: {file_size} bytes found, its header needs {end} "
            f"(tensor {brief(previous)} ends there)",
            hint=_REPAIR,
            code="truncated-shard",
        )
    if end < file_size:
        raise SourceError(
            f"{file}: {file_size} bytes found, its header accounts for {end}",
            hint=_REPAIR,
            code="trailing-bytes",
        )


# --------------------------------------------------------------------------- writing


def build_header(tensors: Iterable[OutputTensor], metadata: Mapping[str, str]) -> bytes:
    """Return the complete header, prefix and padding included.

    Args:
        tensors: In storage order, with their final offsets.
        metadata: Written first, keys sorted, as the library does.
    """
    document: dict[str, Any] = {METADATA_KEY: dict(sorted(metadata.items()))} if metadata else {}
    for tensor in tensors:
        document[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.begin, tensor.end],
        }
    raw = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % PREFIX_SIZE)
    return struct.pack("<Q", len(raw)) + raw
