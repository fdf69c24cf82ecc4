"""Put an artifact's folder at the S3 server by hand, as `mxconvert push` is documented to."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.seaweed import S3Server

MANIFEST = "mxconvert.manifest.json"


def artifact_id(root: Path) -> str:
    """Return the SHA-256 of a folder's manifest."""
    return hashlib.sha256((root / MANIFEST).read_bytes()).hexdigest()


def put_file(s3: S3Server, bucket: str, key: str, data: bytes, *, digests: bool = True) -> None:
    """Put one object, with CRC64-NVME and the SHA-256 as metadata unless told otherwise."""
    kept = {
        "ChecksumAlgorithm": "CRC64NVME",
        "Metadata": {"mxconvert-sha256": hashlib.sha256(data).hexdigest()},
    }
    s3.put(bucket, key, data, **(kept if digests else {}))


def put_ref(s3: S3Server, bucket: str, prefix: str, tag: str, target: str) -> None:
    """Write a tag's pointer."""
    data = json.dumps({"id": target, "schema_version": 1}).encode() + b"\n"
    s3.put(bucket, f"{prefix}/refs/{tag}.json", data)


def publish(
    s3: S3Server,
    bucket: str,
    root: Path,
    prefix: str = "m",
    *,
    tag: str | None = "latest",
    flat: bool = False,
    digests: bool = True,
) -> str:
    """Put every file of an artifact's folder, the manifest last; return the keys' common begin.

    Args:
        s3: The server.
        bucket: Its bucket.
        root: The folder.
        prefix: Of the URL.
        tag: The pointer to write; None writes none.
        flat: Whether the files lie at the URL itself.
        digests: Whether the store is given CRC64-NVME and SHA-256 to keep.
    """
    found = artifact_id(root)
    base = f"{prefix}/" if flat else f"{prefix}/{found[:16]}/"
    paths = [path for path in root.rglob("*") if path.is_file()]
    for path in sorted(paths, key=lambda path: path.name == MANIFEST):
        key = base + path.relative_to(root).as_posix()
        put_file(s3, bucket, key, path.read_bytes(), digests=digests)
    if tag is not None and not flat:
        put_ref(s3, bucket, prefix, tag, found)
    return base
