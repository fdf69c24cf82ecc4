"""Which versions lie below a URL, as far as a listing shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.errors import StoreError, StoreFault, VerificationError
from mxconvert.events import ignore
from mxconvert.manifest import MANIFEST_NAME, artifact_id, parse_manifest
from mxconvert.remote.layout import MANIFEST_LIMIT, folder_of, is_folder
from mxconvert.remote.refs import refs_of

if TYPE_CHECKING:
    from mxconvert.events import Reporter
    from mxconvert.manifest import Manifest
    from mxconvert.store import Client

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Version:
    """A version below a URL.

    Attributes:
        folder: Its folder; empty for an artifact at the URL itself.
        id: SHA-256 of its manifest; ``None`` while none is there: a push that is not finished.
        tags: Tags that point at it.
        manifest: Its manifest, if there is one that can be read.
        fault: Why the manifest cannot be used.
    """

    folder: str
    id: str | None
    tags: tuple[str, ...]
    manifest: Manifest | None = None
    fault: str | None = None


def list_versions(client: Client, report: Reporter = ignore) -> list[Version]:
    """Return every version that a listing or a tag shows, sorted by folder.

    Tags that are damaged are reported.
    """
    refs = refs_of(client, report)
    folders = set(filter(is_folder, client.folders()))
    folders |= {folder_of(ref.id) for ref in refs}
    if client.find(MANIFEST_NAME) is not None:
        folders.add("")
    return [
        _version(client, folder, tuple(ref.tag for ref in refs if folder_of(ref.id) == folder))
        for folder in sorted(folders)
    ]


def _version(client: Client, folder: str, tags: tuple[str, ...]) -> Version:
    key = f"{folder}/{MANIFEST_NAME}" if folder else MANIFEST_NAME
    try:
        data = client.get(key, MANIFEST_LIMIT).data
        manifest = parse_manifest(data, client.store.url(key))
    except (StoreError, VerificationError) as error:
        missing = error.code == StoreFault.MISSING.value
        return Version(folder, None, tags, fault=None if missing else error.message)
    return Version(folder, artifact_id(data), tags, manifest)


def describe_versions(client: Client) -> str:
    """Return a hint that lists what is there; never fails."""
    try:
        refs = refs_of(client)
        folders = list(filter(is_folder, client.folders()))
    except StoreError:
        return "check the URL; `mxconvert list URL` shows the versions below it"
    tags = {folder_of(ref.id): ref.tag for ref in refs}
    names = [f"{name} ({tags[name]})" if name in tags else name for name in sorted(folders)]
    if not names:
        return "nothing was pushed there; check the URL"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"versions there: {', '.join(names[:_SHOWN])}{more}"
