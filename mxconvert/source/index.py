"""The shard index: ``*.safetensors.index.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from mxconvert.errors import LocalError, SourceError, brief
from mxconvert.safetensors_format import unique_keys
from mxconvert.source.shards import refuse_lfs_pointer

if TYPE_CHECKING:
    from mxconvert.source.listing import Listing

DEFAULT_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """A checked index: where it stands, tensor name -> file, and the size it declares."""

    path: str
    weight_map: dict[str, str]
    total_size: object


def load_json(listing: Listing, name: str, *, unique: bool = False) -> Any:
    """Parse a JSON file of the folder; ``unique`` refuses an object with a key twice.

    Raises:
        SourceError: A Git LFS pointer, not UTF-8 JSON, a byte order mark, a key twice.
        LocalError: The file cannot be read.
    """
    try:
        raw = listing.path(name).read_bytes()
    except OSError as error:
        raise LocalError.unreadable(listing.path(name), error) from error
    refuse_lfs_pointer(raw, name)
    if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise SourceError(
            f"{name}: begins with a byte order mark ({raw[:3].hex(' ')}), expected plain UTF-8",
            hint="save the file as UTF-8 without a byte order mark",
            code="byte-order-mark",
        )
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys if unique else None)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise SourceError(
            f"{name}: no valid UTF-8 JSON: {error}", hint="fetch the file again"
        ) from error


def load_index(listing: Listing) -> ShardIndex | None:
    """Return the folder's index, or ``None`` where it has none.

    Raises:
        SourceError: Several indexes to choose from, a malformed one, or an entry that
            would lead outside the folder.
    """
    top = [name for name in listing.indexes if "/" not in name]
    if not top:
        return None
    if len(top) > 1 and DEFAULT_INDEX not in top:
        raise SourceError(
            f"several indexes: {', '.join(top)}", hint=f"keep one, named {DEFAULT_INDEX}"
        )
    path = DEFAULT_INDEX if DEFAULT_INDEX in top else top[0]
    document = load_json(listing, path, unique=True)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{path}: has no weight_map object", hint="fetch the index again")
    for tensor, file in weight_map.items():
        _check_entry(path, tensor, file)
    metadata = document.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return ShardIndex(path, weight_map, total_size)


def _check_entry(path: str, tensor: str, file: object) -> None:
    if isinstance(file, str) and is_safe_name(file):
        return
    raise SourceError(
        f"{path}: tensor {brief(tensor)} is mapped to {brief(file)}, "
        "expected the relative path of a file in this folder",
        hint="nothing outside the folder is read; correct the index",
        code="unsafe-path",
    )


def is_safe_name(name: str) -> bool:
    """Whether a relative path stays in its folder, in its one normal POSIX spelling."""
    if name in ("", ".") or "\\" in name or "\0" in name or name[1:2] == ":":
        return False
    pure = PurePosixPath(name)
    return not pure.is_absolute() and ".." not in pure.parts and pure.as_posix() == name
