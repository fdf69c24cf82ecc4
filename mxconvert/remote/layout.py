"""Names of things below a store's URL."""

from __future__ import annotations

import re

from mxconvert.errors import UsageError
from mxconvert.store import is_tag

FOLDER_DIGITS = 16
REFS = "refs/"
PROBE = f"{REFS}.probe-"
"""What keys of probes begin with; `mxconvert gc` removes those that a killed run has left."""
LATEST = "latest"
MANIFEST_LIMIT = 512 * 2**20
"""Bytes of a manifest that are read at most; Kimi-K3's has 11 MB."""

_ID = re.compile(r"[0-9a-f]{16,64}")


def is_id(version: str) -> bool:
    """Whether a version is an id, or its first 16 digits or more, rather than a tag."""
    return _ID.fullmatch(version) is not None


def is_folder(name: str) -> bool:
    """Whether the first segment of a key is the folder of a version."""
    return len(name) == FOLDER_DIGITS and is_id(name)


def check_id(text: str) -> str:
    """Return an expected id, or its first 16 digits or more.

    Raises:
        UsageError: Neither.
    """
    if not is_id(text):
        raise UsageError(
            f"--expect-id {text!r}: expected 16 to 64 lowercase hexadecimal digits",
            hint="the id is the SHA-256 of mxconvert.manifest.json",
            code="bad-id",
        )
    return text


def folder_of(artifact_id: str) -> str:
    """Return the folder of an artifact: the first 16 digits of its id."""
    return artifact_id[:FOLDER_DIGITS]


def ref_key(tag: str) -> str:
    """Return the key of a tag's pointer.

    Raises:
        UsageError: Not a name for a tag, or one that would be read as an id.
    """
    if not is_tag(tag) or is_id(tag):
        raise UsageError(
            f"tag {tag!r}: expected a letter or digit, then letters, digits, '.', '_' or '-', and "
            "not 16 or more hexadecimal digits, which name an id",
            code="bad-tag",
        )
    return f"{REFS}{tag}.json"
