"""The two ends that `bench_transfer` moves files to and from, both on loopback.

* `Sink`: nginx that only looks like S3. It keeps each part as a file and serves files with
  sendfile, which costs so little that the client is the bound. It checks no signature and no
  checksum, and refuses every conditional write over what is there.
* `Weed`: SeaweedFS, a real S3 server, started as the tests start it. It hashes what it gets
  (MD5, twice), so that uploads are bound by it.

A bucket of either holds one copy of the files; keys are file names, or lie below a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from typing import TYPE_CHECKING, Protocol

from botocore.exceptions import BotoCoreError, ClientError
from transfer_material import PIECE, files_in
from transfer_sink import nginx

from tests.support import seaweed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from transfer_material import Digests

END_S = 20.0
GONE = (RuntimeError, BotoCoreError, ClientError)
"""What a server that does not start, or has ended, leads to."""


class Server(Protocol):
    """Where clients move files to and from.

    Attributes:
        name: As in the table.
        endpoint: ``http://127.0.0.1:PORT``.
        access_key: Key id.
        secret_key: Its secret.
    """

    name: str
    endpoint: str
    access_key: str
    secret_key: str

    def make_bucket(self) -> str:
        """Return a new, empty bucket."""

    def drop_bucket(self, bucket: str) -> None:
        """Remove a bucket and what it holds."""

    def fill(self, bucket: str, folder: Path) -> None:
        """Put all files of a folder into a bucket, under their own names."""

    def settle(self, bucket: str) -> None:
        """Make what was uploaded readable."""

    def digests(self, bucket: str, keys: list[str]) -> Digests:
        """Return the SHA-256 of what lies under keys; an object that is missing has none."""

    def keys(self, bucket: str) -> list[str]:
        """Return all keys of a bucket."""


class Weed:
    """SeaweedFS; see the module."""

    name = "SeaweedFS"

    def __init__(self, server: seaweed.S3Server) -> None:
        self._server = server
        self._client = server.client()
        self.endpoint = server.endpoint
        self.access_key, self.secret_key = server.access_key, server.secret_key

    def make_bucket(self) -> str:
        bucket = self._server.make_bucket("bench")
        self._server.put(bucket, "first", b"1")  # makes the bucket's volumes, which takes 1 s
        self._server.delete(bucket, "first")
        return bucket

    def drop_bucket(self, bucket: str) -> None:
        for key in self.keys(bucket):
            self._server.delete(bucket, key)
        self._client.delete_bucket(Bucket=bucket)  # the volumes go with it, and their space

    def fill(self, bucket: str, folder: Path) -> None:
        for path in files_in(folder):
            with path.open("rb") as file:
                key = str(path.relative_to(folder))
                self._client.put_object(Bucket=bucket, Key=key, Body=file)

    def settle(self, bucket: str) -> None:
        """Nothing is left to do."""

    def keys(self, bucket: str) -> list[str]:
        return self._server.keys(bucket)

    def digests(self, bucket: str, keys: list[str]) -> Digests:
        found: Digests = {}
        for key in sorted(set(keys) & set(self.keys(bucket))):
            digest = hashlib.sha256()
            with contextlib.closing(
                self._client.get_object(Bucket=bucket, Key=key)["Body"]
            ) as body:
                while piece := body.read(PIECE):
                    digest.update(piece)
            found[key] = digest.hexdigest()
        return found


@contextlib.contextmanager
def weed(root: Path) -> Iterator[Weed]:
    """Run SeaweedFS with its data in a new folder.

    Raises:
        RuntimeError: It is not installed, or does not start.
    """
    root.mkdir()
    try:
        server = seaweed.shared_server(root, os.getpid())
    except AssertionError as error:
        raise RuntimeError(str(error)) from error
    try:
        yield Weed(server)
    finally:
        server.close()
        stop(root)


def stop(root: Path) -> None:
    """End the server whose data lies below a folder, and wait until it has removed them."""
    for guard in root.glob("*/guard.pid"):
        with contextlib.suppress(OSError):  # it has ended by itself
            seaweed.stop(guard.parent)
    end = time.monotonic() + END_S
    while any(root.glob("*/guard.pid")) and time.monotonic() < end:
        time.sleep(0.05)


SERVERS: dict[str, Callable[[Path], AbstractContextManager[Server]]] = {
    "sink": nginx,
    "seaweedfs": weed,
}
