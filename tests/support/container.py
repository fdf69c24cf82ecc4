"""The safetensors container by hand: struct and json, no library, no checks.

Layout: 8 bytes little-endian header length, the JSON header, then the tensors' bytes.
The writer takes any header, right or wrong, since broken files are what it is for.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

ABSENT: Any = object()
"""For ``metadata``: write no ``__metadata__`` key at all."""

PT: Mapping[str, str] = {"format": "pt"}
"""The metadata that transformers writes and loaders expect."""


class Tensor(NamedTuple):
    """One tensor as it is stored: safetensors dtype string, shape, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def header_of(tensors: Mapping[str, Tensor], metadata: Any = PT) -> dict[str, Any]:
    """Return a correct header document for tensors stored in the order given."""
    header: dict[str, Any] = {} if metadata is ABSENT else {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        end = offset + len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return header


def raw_safetensors(
    path: Path | str,
    entries: Mapping[str, Tensor],
    *,
    metadata: Any = PT,
    pad: int = 8,
    header: Any = None,
    length: int | None = None,
    tail: bytes = b"",
) -> Path:
    """Write a safetensors file, right or wrong, and return its path.

    Args:
        path: The file to write.
        entries: Tensors in storage order; their data is written one after the other.
        metadata: Value of ``__metadata__``; any JSON value, or `ABSENT`.
        pad: Pad the header with spaces to a multiple of this many bytes (1: no padding).
        header: Replaces the header: ``bytes`` as they are, anything else as JSON.
        length: Replaces the header length in the first 8 bytes.
        tail: Extra bytes after the last tensor.
    """
    document = header_of(entries, metadata) if header is None else header
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    raw += b" " * (-len(raw) % pad)
    target = Path(path)
    with target.open("wb") as file:
        file.write(struct.pack("<Q", len(raw) if length is None else length) + raw)
        for entry in entries.values():
            file.write(entry.data)
        file.write(tail)
    return target


def read_header(path: Path | str) -> tuple[dict[str, Any], int]:
    """Return a file's header document and the offset of its first data byte."""
    with Path(path).open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), 8 + length


def read_safetensors(path: Path | str) -> dict[str, Tensor]:
    """Return every tensor of a well-formed file, in header order."""
    header, base = read_header(path)
    header.pop("__metadata__", None)
    blob = Path(path).read_bytes()
    return {
        name: Tensor(
            entry["dtype"],
            tuple(entry["shape"]),
            blob[base + entry["data_offsets"][0] : base + entry["data_offsets"][1]],
        )
        for name, entry in header.items()
    }


def sparse_safetensors(
    path: Path | str, layout: Mapping[str, tuple[str, tuple[int, ...], int]]
) -> None:
    """Write a well-formed file whose tensors are one hole: zeros that take no disk.

    Args:
        path: The file to write.
        layout: Name -> dtype, shape and bytes, in storage order.
    """
    header: dict[str, Any] = {"__metadata__": dict(PT)}
    end = 0
    for name, (dtype, shape, size) in layout.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with Path(path).open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
