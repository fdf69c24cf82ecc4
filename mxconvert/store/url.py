"""The grammar of places: ``s3://bucket/prefix@version`` and its relatives.

A URL is taken as it is typed: nothing in it is percent-decoded, so that a key with a
space, ``#``, ``%`` or ``@`` is written the way the store holds it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mxconvert.errors import UsageError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ALIASES = {"gcs": "gs", "abfs": "az", "azure": "az", "s3a": "s3", "s3n": "s3", "local": "file"}
_BUCKETED = frozenset({"s3", "gs", "az", "hf"})


@dataclass(frozen=True, slots=True)
class StoreURL:
    """Where artifacts lie.

    Attributes:
        scheme: ``s3``, ``gs``, ``az``, ``hf``, ``file``, ``memory`` or what fsspec knows.
        bucket: Bucket or container; empty where the scheme has none.
        prefix: Path below the bucket, without slashes at either end (``file`` keeps its first).
        version: Tag or id after the last ``@``, or ``None``.
    """

    scheme: str
    bucket: str
    prefix: str
    version: str | None = None

    @property
    def artifact_version(self) -> str | None:
        """The version of an artifact that the URL names; of ``hf`` it is a git revision."""
        return None if self.scheme == "hf" else self.version

    def __str__(self) -> str:
        path = "/".join(filter(None, (self.bucket, self.prefix)))
        return f"{self.scheme}://{path}"


def is_url(text: str) -> bool:
    """Whether a place is a URL rather than a path (``file://`` counts as a path)."""
    match = _SCHEME.fullmatch(text)
    return match is not None and _ALIASES.get(match[1].lower(), match[1].lower()) != "file"


def is_tag(text: str) -> bool:
    """Whether a text can name a version: a letter or digit, then letters, digits, ``._-``."""
    return _VERSION.fullmatch(text) is not None


def parse_url(text: str, what: str = "URL") -> StoreURL:
    """Read a store's URL, or a local path as one of scheme ``file``.

    Text after the last ``@`` of the last segment is a version if it can be a tag;
    a final slash says that it is part of the name.

    Raises:
        UsageError: No bucket, or a segment that no store can hold safely.
    """
    match = _SCHEME.fullmatch(text)
    scheme, path = (match[1].lower(), match[2]) if match else ("file", text)
    scheme = _ALIASES.get(scheme, scheme)
    path, version = _split_version(path)
    if _CONTROL.search(path):
        raise UsageError(f"{what} {text!r}: has a control character", code="bad-url")
    if scheme == "file":
        return StoreURL("file", "", path.rstrip("/") or "/", version)
    parts = [part for part in path.split("/") if part]
    if {".", ".."} & set(parts):
        raise UsageError(f"{what} {text}: has a '.' or '..' segment", code="bad-url")
    if scheme in _BUCKETED and not parts:
        raise UsageError(
            f"{what} {text}: names no bucket",
            hint=f"write {scheme}://BUCKET/PREFIX",
            code="bad-url",
        )
    if scheme in _BUCKETED:
        return StoreURL(scheme, parts[0], "/".join(parts[1:]), version)
    return StoreURL(scheme, "", path.strip("/"), version)


def _split_version(path: str) -> tuple[str, str | None]:
    head, slash, last = path.rpartition("/")
    name, at, version = last.rpartition("@")
    if not at or not is_tag(version) or not (name or slash):
        return path, None
    return head + slash + name, version
