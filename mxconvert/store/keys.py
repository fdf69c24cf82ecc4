"""Keys as paths: what a store that has folders may be asked for."""

from __future__ import annotations

from mxconvert.errors import StoreError, StoreFault

PARTIAL = ".partial"
"""Ends the name of what is not written to its end yet; never listed, never a key."""

LOCK_FILE = ".mxconvert.lock"
"""Beside objects on file systems that cannot lock a folder; never listed."""


def segments(key: str, where: str) -> list[str]:
    """Return the segments of a key.

    Raises:
        StoreError: One of them is empty, ``.`` or ``..``, or the key names our own files.
    """
    parts = key.split("/")
    if {"", ".", ".."} & set(parts) or "\0" in key or is_own(parts[-1]):
        raise StoreError(StoreFault.REFUSED, f"{where}: cannot be a key of this store")
    return parts


def is_own(name: str) -> bool:
    """Whether a file is a store's own and no object."""
    return name.endswith(PARTIAL) or name == LOCK_FILE
