"""From ``URL@version`` to the artifact it names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.errors import StoreError, StoreFault, VerificationError
from mxconvert.manifest import MANIFEST_NAME
from mxconvert.remote.layout import LATEST, folder_of, is_id
from mxconvert.remote.manifests import RemoteArtifact, read_manifest
from mxconvert.remote.refs import read_ref
from mxconvert.remote.versions import describe_versions

if TYPE_CHECKING:
    from mxconvert.store import Client


def find_artifact(
    client: Client, version: str | None, expect_id: str | None = None
) -> RemoteArtifact:
    """Return the artifact that a version names.

    Args:
        client: At the URL.
        version: A tag or an id; ``None`` takes the artifact at the URL itself, else the
            tag ``latest``.
        expect_id: The id, or its first 16 digits or more, that the artifact must have.

    Raises:
        StoreError: No such version; the message lists those that are there.
        VerificationError: Not the expected id, or not a manifest.
    """
    found = _find(client, version, expect_id or "")
    if expect_id is not None and not found.id.startswith(expect_id):
        raise VerificationError(
            f"{client.store.url(found.key(MANIFEST_NAME))}: the artifact's id: expected "
            f"{expect_id}, found {found.id}",
            code="other-artifact",
        )
    return found


@dataclass(frozen=True, slots=True)
class Location:
    """Where a version should lie.

    Attributes:
        folder: Its folder below the store's URL; empty for the URL itself.
        id: What the SHA-256 of the manifest there has to begin with, if anything says so.
        missing: What is wrong if no manifest is there, in words.
    """

    folder: str
    id: str | None
    missing: str

    def key(self, path: str) -> str:
        """Return the key of a file of the artifact."""
        return f"{self.folder}/{path}" if self.folder else path


def locate(client: Client, version: str | None) -> Location:
    """Return where the artifact that a version names should lie, without reading it.

    Args:
        client: At the URL.
        version: As of `find_artifact`.

    Raises:
        StoreError: No such tag; the message lists the versions that are there.
        VerificationError: The tag's pointer is not one.
    """
    if version is None and _is_flat(client):
        return Location("", None, f"no {MANIFEST_NAME}")
    if version is not None and is_id(version):
        return Location(folder_of(version), version, f"no version {version}")
    tag = LATEST if version is None else version
    ref = read_ref(client, tag)
    if ref is None:
        neither = f"no {MANIFEST_NAME} and no tag {LATEST!r}"
        raise no_version(client, neither if version is None else f"no tag {tag!r}")
    missing = f"the tag {tag!r} points at {ref.id}, which is not there"
    return Location(folder_of(ref.id), ref.id, missing)


def _is_flat(client: Client) -> bool:
    """Whether a manifest lies at the URL itself.

    Without the right to list Amazon answers 403 for a key that is not there; whether that
    is all that is denied shows when the tag is read.
    """
    try:
        return client.find(MANIFEST_NAME) is not None
    except StoreError as error:
        if error.fault is not StoreFault.DENIED:
            raise
        return False


def _find(client: Client, version: str | None, expect_id: str) -> RemoteArtifact:
    place = locate(client, version)
    found = read_manifest(client, place.folder, place.id or expect_id)
    if found is None:
        raise no_version(client, place.missing)
    if place.id is not None and not found.id.startswith(place.id):
        raise _other(client, found, place.id)
    return found


def _other(client: Client, found: RemoteArtifact, expected: str) -> VerificationError:
    return VerificationError(
        f"{client.store.url(found.key(MANIFEST_NAME))}: the SHA-256 of the manifest: expected "
        f"{expected}, found {found.id}",
        hint="check the id; if it is right the manifest was changed or damaged: push the "
        "artifact again",
        code="other-artifact",
    )


def no_version(client: Client, what: str) -> StoreError:
    """Return the error for a version that is not there, with those that are."""
    return StoreError(
        StoreFault.MISSING,
        f"{client.store.label}: {what}",
        hint=describe_versions(client),
    )
