"""Turn what the user typed into a local path."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mxconvert.errors import UsageError

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://")


def local_path(location: str, what: str) -> Path:
    """Return the local path of a plain path or a ``file://`` URL.

    Raises:
        UsageError: A remote URL, which quantize and inspect do not read yet.
    """
    match = _SCHEME.match(location)
    if match is None:
        return Path(location)
    if match.group(1).lower() == "file":
        parts = urlsplit(location)
        if parts.netloc not in ("", "localhost"):
            raise UsageError(f"{what} {location}: a file URL with a host", hint="use file:///path")
        return Path(unquote(parts.path))
    raise UsageError(
        f"{what} {location}: {match.group(1)}:// is not supported here; only local folders are",
        hint="copy the checkpoint to a local or mounted folder first",
        code="remote-not-supported",
    )
