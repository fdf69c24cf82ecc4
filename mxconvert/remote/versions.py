"""Which versions lie below a URL, as far as a listing shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.errors import StoreError, StoreFault, VerificationError
from mxconvert.events import ignore
from mxconvert.manifest import MANIFEST_NAME
from mxconvert.remote.layout import folder_of, is_folder
from mxconvert.remote.manifests import read_manifest
from mxconvert.remote.refs import refs_of

if TYPE_CHECKING:
    from mxconvert.events import Reporter
    from mxconvert.manifest import Manifest
    from mxconvert.remote.refs import Ref
    from mxconvert.store import Client

_SHOWN = 8
_OF_AN_OBJECT = frozenset({StoreFault.CORRUPT, StoreFault.DENIED, StoreFault.REFUSED})


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
    try:
        found = read_manifest(client, folder)
    except VerificationError as error:
        return Version(folder, None, tags, fault=error.message)
    except StoreError as error:
        if error.fault not in _OF_AN_OBJECT:
            raise
        return Version(folder, None, tags, fault=error.message)
    if found is None:
        return Version(folder, None, tags)
    return Version(folder, found.id, tags, found.manifest)


def describe_versions(client: Client) -> str:
    """Return a hint that lists what is there; never fails."""
    try:
        refs = refs_of(client)
        folders = sorted(filter(is_folder, client.folders()))
        names = [_described(client, name, refs) for name in folders[:_SHOWN]]
    except StoreError:
        return "check the URL; `mxconvert list URL` shows the versions below it"
    if not names:
        return "nothing was pushed there; check the URL"
    more = f" and {len(folders) - _SHOWN} more" if len(folders) > _SHOWN else ""
    return f"versions there: {', '.join(names)}{more}"


def _described(client: Client, folder: str, refs: list[Ref]) -> str:
    """Return a version with its tags, or that its push has not ended."""
    notes = [ref.tag for ref in refs if folder_of(ref.id) == folder]
    if client.find(f"{folder}/{MANIFEST_NAME}") is None:
        notes = ["unfinished"]
    return f"{folder} ({', '.join(notes)})" if notes else folder
