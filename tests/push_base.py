"""A bucket behind the fault proxy, and pushes to it, for the tests of writing."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tests.support import fail_cleanly, run_cli, snapshot, start_cli
from tests.support.large import INDEX, MANIFEST, LargeArtifact, at_store, chunked, describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from tests.support import Result, Running
    from tests.support.faults import FaultProxy, Record
    from tests.support.seaweed import S3Server

PREFIX = "models/m"
WRITES = ("PutObject", "UploadPart", "CopyObject", "CompleteMultipartUpload")
BODIES = ("PutObject", "UploadPart")


@dataclass(kw_only=True)
class Site:
    """Where a test pushes to.

    Attributes:
        s3: The server, past the proxy.
        bucket: A new bucket.
        proxy: What commands talk to.
        prefix: Of the URL.
    """

    s3: S3Server
    bucket: str
    proxy: FaultProxy
    prefix: str = PREFIX

    @property
    def url(self) -> str:
        """The URL that artifacts are pushed to."""
        return f"s3://{self.bucket}/{self.prefix}"

    def base(self, artifact: LargeArtifact) -> str:
        """Return what the keys of a version begin with."""
        return f"{self.prefix}/{artifact.version}/"

    def run(self, command: str, *args: object, retry: str = "20s", **env: str) -> Result:
        """Run a command in this process, through the proxy."""
        return at_store(command, *args, env=self.proxy.environment(**env), retry=retry)

    def push(self, artifact: LargeArtifact, *options: object, **more: Any) -> Result:
        """Push in this process, with ``--json``."""
        return self.run("push", artifact.folder, self.url, "--json", *options, **more)

    def pull(self, target: Path, *options: object, version: str = "", **more: Any) -> Result:
        """Pull in this process, with ``--json``."""
        return self.run("pull", self.url + version, target, "--json", *options, **more)

    def arguments(self, artifact: LargeArtifact, *options: object) -> tuple[object, ...]:
        """Return the arguments of a push in a process of its own."""
        return ("push", artifact.folder, self.url, "--json", "--retry-for", "20s", *options)

    def start(
        self, artifact: LargeArtifact, *options: object, env: Mapping[str, str] | None = None
    ) -> Running:
        """Start a push in a process of its own."""
        given = self.proxy.environment(**(env or {}))
        return start_cli(*self.arguments(artifact, *options), env=given)

    def process(
        self, artifact: LargeArtifact, *options: object, env: Mapping[str, str] | None = None
    ) -> Result:
        """Push in a process of its own, to its end."""
        given = self.proxy.environment(**(env or {}))
        return run_cli(*self.arguments(artifact, *options), env=given)

    def fails(self, artifact: LargeArtifact, status: int, *mentions: str, **more: Any) -> Result:
        """Push; assert that it fails cleanly and publishes nothing."""
        result = self.push(artifact, *more.pop("options", ()), **more)
        fail_cleanly(result, status, *mentions)
        self.assert_unpublished(artifact)
        return result

    # What is at the store, asked of the server itself.

    def assert_published(self, artifact: LargeArtifact, *, tag: str | None = "latest") -> None:
        """The version is whole, byte for byte; nothing is left over; the tag points at it."""
        self.assert_whole(artifact)
        assert self.s3.uploads(self.bucket) == []
        assert [key for key in self.s3.keys(self.bucket) if ".probe-" in key] == []
        if tag is not None:
            data = self.s3.get(self.bucket, f"{self.prefix}/refs/{tag}.json")
            assert data == f'{{"id": "{artifact.id}", "schema_version": 1}}\n'.encode()

    def assert_whole(self, artifact: LargeArtifact) -> None:
        """The version's folder holds exactly the artifact's bytes."""
        base = self.base(artifact)
        found = self.s3.objects(self.bucket, base)
        digests = {
            key.removeprefix(base): hashlib.sha256(data).hexdigest() for key, data in found.items()
        }
        assert digests == artifact.digests

    def assert_unpublished(self, artifact: LargeArtifact) -> None:
        """No manifest is there, no tag points there, and what has a final name is right."""
        base = self.base(artifact)
        found = self.s3.objects(self.bucket, base)
        assert base + MANIFEST not in found
        for key, data in found.items():
            path = key.removeprefix(base)
            assert hashlib.sha256(data).hexdigest() == artifact.digests[path], path
        if base + INDEX in found:
            assert len(found) == len(artifact.files)
        for key in self.s3.keys(self.bucket, f"{self.prefix}/refs/"):
            assert artifact.id.encode() not in self.s3.get(self.bucket, key)

    # What went over the wire.

    def sent(self, artifact: LargeArtifact, path: str = "*") -> int:
        """Return the bytes of an artifact's files that went to the proxy."""
        self.proxy.settle()
        return self.proxy.received(BODIES, key=self.base(artifact) + path)

    def parts_done(self) -> list[int]:
        """Return the numbers of the parts that were taken, in order."""
        return [int(r.query["partNumber"]) for r in self.done("UploadPart")]

    def done(self, op: str | tuple[str, ...] = WRITES, **conditions: Any) -> list[Record]:
        """Return the requests that succeeded."""
        self.proxy.settle()
        return [r for r in self.proxy.requests(op, **conditions) if 200 <= r.status < 300]


def assert_pulled(target: Path, artifact: LargeArtifact) -> None:
    assert snapshot(target) == artifact.digests


def assert_not_finished(target: Path, artifact: LargeArtifact, path: str) -> None:
    """A file did not get its name, nor did the manifest; what has one is right."""
    found = snapshot(target)
    assert MANIFEST not in found
    assert path not in found
    for name in found.keys() & artifact.digests.keys():
        assert found[name] == artifact.digests[name]


def copy_of(artifact: LargeArtifact, folder: Path) -> LargeArtifact:
    """Return a copy of an artifact, to be changed; large files cost no space."""
    shutil.copytree(artifact.folder, folder, copy_function=shutil.copy)
    return describe(folder)


def changed_sidecar(artifact: LargeArtifact, folder: Path) -> LargeArtifact:
    """Return another version, whose README.md is longer."""
    shutil.copytree(artifact.folder, folder)
    with (folder / "README.md").open("ab") as file:
        file.write(b"longer than before\n")
    return chunked(folder)


def manifest_size(artifact: LargeArtifact) -> int:
    """Return the bytes of an artifact's manifest."""
    return (artifact.folder / MANIFEST).stat().st_size


def flip(path: Path, offset: int) -> None:
    """Change one byte of a file, as a bad disk does: size and times stay."""
    info = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def gaps(records: Iterable[Record]) -> list[float]:
    """Return the seconds between the end of each request and the begin of the next."""
    return [b.began - (a.ended or a.began) for a, b in pairwise(records)]


def most_at_once(records: list[Record]) -> int:
    """Return how many requests were under way at once, at most."""
    marks = sorted(
        [(r.began, 1) for r in records] + [(r.ended or time.monotonic(), -1) for r in records]
    )
    active = most = 0
    for _, step in marks:
        active += step
        most = max(most, active)
    return most
