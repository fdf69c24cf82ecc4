"""Manifests at a store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.errors import StoreError, StoreFault
from mxconvert.manifest import MANIFEST_NAME, artifact_id, parse_manifest
from mxconvert.remote.layout import MANIFEST_LIMIT

if TYPE_CHECKING:
    from mxconvert.manifest import Manifest
    from mxconvert.store import Client

_TRIES = 4


@dataclass(frozen=True, slots=True)
class RemoteArtifact:
    """An artifact at a store.

    Attributes:
        folder: Its folder below the store's URL; empty if it lies at the URL itself.
        id: SHA-256 of its manifest.
        data: The manifest's bytes.
        manifest: The manifest, checked.
    """

    folder: str
    id: str
    data: bytes
    manifest: Manifest

    def key(self, path: str) -> str:
        """Return the key of one of its files."""
        return f"{self.folder}/{path}" if self.folder else path


def read_manifest(client: Client, folder: str, expect_id: str = "") -> RemoteArtifact | None:
    """Return the artifact in a folder, ``None`` if no manifest is there.

    A bit of it may flip on the way, and nothing else would notice. So it is read again
    unless it has the id that is expected, until the same bytes have come twice: these are
    what the store holds.

    Args:
        client: At the URL.
        folder: Below it; empty for the URL itself.
        expect_id: What the id should begin with; the folder's name by default.

    Raises:
        VerificationError: Not a manifest.
        StoreError: Among others ``CORRUPT``: it comes different each time.
    """
    key = f"{folder}/{MANIFEST_NAME}" if folder else MANIFEST_NAME
    expected, seen = expect_id or folder, set[str]()
    for _ in range(_TRIES):
        try:
            data = client.get(key, MANIFEST_LIMIT).data
        except StoreError as error:
            if error.fault is StoreFault.MISSING:
                return None
            raise
        found = artifact_id(data)
        if found in seen or (expected and found.startswith(expected)):
            manifest = parse_manifest(data, client.store.url(key))
            return RemoteArtifact(folder, found, data, manifest)
        seen.add(found)
    raise StoreError(
        StoreFault.CORRUPT,
        f"{client.store.url(key)}: arrived {_TRIES} times, each time with other bytes: expected "
        f"id {expected or 'unknown'}, found {', '.join(sorted(seen))}",
        hint="something on the way to the store changes what is sent",
    )
