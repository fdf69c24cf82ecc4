"""What the store already holds: here, and in other versions below the same URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxconvert.digest import xxh3_128
from mxconvert.errors import StoreError, StoreFault, VerificationError
from mxconvert.remote import folder_of, is_folder, read_manifest, refs_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxconvert.manifest import FileEntry, Manifest
    from mxconvert.store import Client, ObjectInfo

_MOST_VERSIONS = 8


def is_there(client: Client, info: ObjectInfo | None, entry: FileEntry, chunk_size: int) -> bool:
    """Whether an object is the file that an entry describes.

    By the store's CRC64-NVME or the SHA-256 noted when it was written; a store that keeps
    neither is read back. Its ETag means nothing.
    """
    found = says_the_same(info, entry)
    if info is None or found is not None:
        return bool(found)
    try:
        return _reads_the_same(client, info, entry, chunk_size)
    except StoreError as error:
        if error.fault not in (StoreFault.CHANGED, StoreFault.MISSING):
            raise
        return False


def says_the_same(info: ObjectInfo | None, entry: FileEntry) -> bool | None:
    """Whether an object is a file, by what the store says; ``None`` if it does not say."""
    if info is None or info.size != entry.size:
        return False
    if info.crc64nvme is not None:
        return info.crc64nvme == entry.crc64nvme
    return None if info.sha256 is None else info.sha256 == entry.sha256


def _reads_the_same(client: Client, info: ObjectInfo, entry: FileEntry, chunk_size: int) -> bool:
    hasher, index, left = xxh3_128(), 0, chunk_size
    for piece in client.pieces(info.key, 0, info.size, info.etag):
        view = memoryview(piece)
        while view:
            hasher.update(view[:left])
            view, left = view[left:], left - len(view[:left])
            if left:
                continue
            if hasher.hexdigest() != entry.chunks[index].xxh3_128:
                return False
            hasher, index, left = xxh3_128(), index + 1, chunk_size
    return left == chunk_size or hasher.hexdigest() == entry.chunks[index].xxh3_128


def copies(client: Client, manifest: Manifest, own_folder: str) -> dict[str, str]:
    """Return keys in other versions below the URL, by the SHA-256 of their content.

    Only content that ``manifest`` asks for is listed. What cannot be listed or read is
    left out: a copy saves time, nothing depends on it.
    """
    wanted = {(entry.sha256, entry.size) for entry in manifest.files if entry.size}
    found: dict[str, str] = {}
    for folder in _other_versions(client, own_folder):
        try:
            other = read_manifest(client, folder)
        except (StoreError, VerificationError):
            continue
        for entry in other.manifest.files if other else ():
            if other is not None and (entry.sha256, entry.size) in wanted:
                found.setdefault(entry.sha256, other.key(entry.path))
    return found


def _other_versions(client: Client, own_folder: str) -> list[str]:
    """Return folders of versions, those with a tag first, at most `_MOST_VERSIONS`."""
    try:
        names = dict.fromkeys((*_tagged(client), *_listed(client)))
    except (StoreError, VerificationError):
        return []
    names.pop(own_folder, None)
    return list(names)[:_MOST_VERSIONS]


def _tagged(client: Client) -> Iterator[str]:
    yield from (folder_of(ref.id) for ref in refs_of(client))


def _listed(client: Client) -> Iterator[str]:
    yield from filter(is_folder, client.folders())
