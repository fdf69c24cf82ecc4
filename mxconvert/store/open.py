"""From a URL to the store behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxconvert.errors import UsageError
from mxconvert.store.options import Checksum, Engine

if TYPE_CHECKING:
    from mxconvert.store.base import Store
    from mxconvert.store.options import StoreOptions
    from mxconvert.store.url import StoreURL


def open_store(url: StoreURL, options: StoreOptions) -> Store:
    """Open the store at a URL; nothing is requested yet.

    Raises:
        UsageError: Unknown scheme or option.
        MissingExtraError: The scheme needs a package that is not installed.
    """
    if url.scheme == "s3" and _engine(options) is Engine.BOTOCORE:
        from mxconvert.store.s3 import S3Store  # noqa: PLC0415  (loads only what is used)

        return S3Store(url, options)
    if options.checksum is Checksum.ALWAYS:
        raise UsageError(
            f"--checksum always: no checksums can be sent to {url.scheme}:// with uploads",
            hint="leave it out; push notes a SHA-256 where the store keeps metadata",
            code="no-checksums",
        )
    if url.scheme in ("gs", "az"):
        from mxconvert.store.cloud import CloudStore  # noqa: PLC0415

        return CloudStore(url, options)
    if url.scheme == "hf":
        from mxconvert.store.hub import HubStore  # noqa: PLC0415

        return HubStore(url, options)
    if url.scheme == "file":
        from mxconvert.store.local import LocalStore  # noqa: PLC0415

        return LocalStore(url, options)
    from mxconvert.store.generic import GenericStore  # noqa: PLC0415

    return GenericStore(url, options)


def _engine(options: StoreOptions) -> Engine:
    given = options.text("engine") or Engine.BOTOCORE
    try:
        return Engine(given)
    except ValueError as error:
        raise UsageError(
            f"--store-option engine={given}: expected {' or '.join(Engine)}",
            code="bad-store-option",
        ) from error
