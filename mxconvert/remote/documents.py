"""Small files of an artifact at a store, read into memory and compared with its manifest."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from mxconvert.digest import ChunkHasher
from mxconvert.errors import StoreError, StoreFault

if TYPE_CHECKING:
    from mxconvert.manifest import FileEntry
    from mxconvert.remote.manifests import RemoteArtifact
    from mxconvert.store import Client

_TRIES = 4


def read_document(client: Client, artifact: RemoteArtifact, entry: FileEntry) -> bytes:
    """Return the bytes of a file of an artifact.

    Args:
        client: At the URL.
        artifact: The artifact.
        entry: The file; it is held in memory.

    Raises:
        StoreError: Among others ``CORRUPT``: it arrives wrong each time.
    """
    key = artifact.key(entry.path)
    for _ in range(_TRIES):
        hasher, data = ChunkHasher(artifact.manifest.chunk_size), bytearray()
        for piece in client.pieces(key, 0, entry.size):
            hasher.update(piece)
            data += piece
        digest = hasher.finish(hashlib.sha256(data).hexdigest())
        if digest.chunks == entry.chunks and digest.sha256 == entry.sha256:
            return bytes(data)
    raise StoreError(
        StoreFault.CORRUPT,
        f"{client.store.url(key)}: arrived {_TRIES} times otherwise than the manifest says",
        hint="the object is damaged at the store: `mxconvert verify URL` tells; push the "
        "artifact again",
    )
