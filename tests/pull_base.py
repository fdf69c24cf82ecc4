"""Artifacts of any shape at the S3 server, and pulls of them, for the tests of reading.

Pull, list and gc ask nothing of an artifact but its manifest, so these files need not be
a model's. Chunks of a few KiB make many requests of few bytes.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mxconvert.digest import ChunkHasher
from mxconvert.manifest import (
    MANIFEST_NAME,
    TENSORS_NAME,
    ArtifactTotals,
    FileEntry,
    FormatSpec,
    Generator,
    Manifest,
    ModelFacts,
    SourceIdentity,
    Treatment,
    artifact_id,
    encode_manifest,
)
from mxconvert.model import FileRole
from tests.support import fail_cleanly, run_cli, shell, start_cli
from tests.support.publish import publish, put_ref

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.support import Result, Running
    from tests.support.faults import FaultProxy
    from tests.support.seaweed import S3Server

CHUNK = 16 * 1024
SPAN = 4 * CHUNK
"""Bytes of one request."""

INDEX = "model.safetensors.index.json"
WEIGHTS = "model-00001-of-00001.safetensors"
QUICK = ("--retry-for", "2s", "--store-option", "read_timeout=2")
PREFIX = "models/m"


def noise(size: int, seed: int = 0) -> bytes:
    """Return bytes that depend on size and seed only."""
    return random.Random(seed).randbytes(size)


def small_files(weights: int = 10 * CHUNK + 77, seed: int = 0) -> dict[str, bytes]:
    """Return the files of an artifact with one weight file of several requests."""
    return {
        WEIGHTS: noise(weights, seed),
        INDEX: json.dumps({"metadata": {"seed": seed}, "weight_map": {}}).encode(),
        "config.json": b'{"architectures": ["T"]}',
        TENSORS_NAME: noise(300, seed + 1),
    }


def _role(path: str) -> FileRole:
    roles = {INDEX: FileRole.INDEX, TENSORS_NAME: FileRole.TENSORS, "config.json": FileRole.CONFIG}
    weights = FileRole.DENSE if path.endswith(".safetensors") else FileRole.SIDECAR
    return roles.get(path, weights)


def entry(path: str, data: bytes, chunk_size: int = CHUNK) -> FileEntry:
    """Return the manifest's entry of a file."""
    hasher = ChunkHasher(chunk_size)
    hasher.update(data)
    digest = hasher.finish(hashlib.sha256(data).hexdigest())
    return FileEntry.from_digest(path, _role(path), digest)


def manifest_of(files: Mapping[str, bytes], chunk_size: int = CHUNK) -> Manifest:
    """Return a manifest over files that need not be a model's."""
    none = Treatment(source_tensors=0, source_bytes=0, output_bytes=0)
    size = sum(map(len, files.values()))
    return Manifest(
        generator=Generator(name="mxconvert", version="0"),
        source=SourceIdentity(digest="0" * 64, files=1, tensors=0, size_bytes=0),
        options={},
        format=FormatSpec(),
        model=ModelFacts(architectures=("T",), model_type="t", recipe="t", num_experts=1),
        totals=ArtifactTotals(
            tensors=0,
            tensor_bytes=0,
            files=len(files),
            file_bytes=size,
            quantized=none,
            copied=none,
        ),
        files=tuple(entry(path, files[path], chunk_size) for path in sorted(files)),
        chunk_size=chunk_size,
    )


def write_folder(folder: Path, files: Mapping[str, bytes], manifest: Manifest) -> Path:
    """Write files and their manifest to a new folder."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, hidden ones too, by relative path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


@dataclass(frozen=True, kw_only=True)
class Published:
    """An artifact at the server.

    Attributes:
        id: The artifact's id.
        files: Every file by path, the manifest included.
        base: What its keys begin with.
        url: Of its prefix, without a version.
    """

    id: str
    files: dict[str, bytes]
    base: str
    url: str

    @property
    def payload(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(len(data) for path, data in self.files.items() if path != MANIFEST_NAME)

    def assert_whole(self, folder: Path) -> None:
        """A folder holds exactly the artifact: no journal, nothing partial."""
        assert contents(folder) == self.files
        assert not (folder / ".mxconvert").exists()

    def assert_unfinished(self, folder: Path) -> None:
        """What has a final name is right; the index comes last, the manifest is not there."""
        found = contents(folder)
        assert MANIFEST_NAME not in found
        final = {path for path in found if path in self.files}
        for path in final:
            assert found[path] == self.files[path], path
        if INDEX in final:
            assert final == self.files.keys() - {MANIFEST_NAME}

    def assert_honest(self, folder: Path) -> None:
        """A folder says no more than is true: it is whole, or has no manifest."""
        found = contents(folder)
        if MANIFEST_NAME not in found:
            self.assert_unfinished(folder)
            return
        assert {path: found.get(path) for path in self.files} == self.files


@dataclass(kw_only=True)
class Place:
    """A bucket behind the proxy, a folder to make artifacts in, and one to pull into.

    Attributes:
        s3: The server, past the proxy.
        bucket: A new bucket.
        proxy: What commands talk to.
        folder: For scratch.
        target: Where `pull` pulls to unless told otherwise.
    """

    s3: S3Server
    bucket: str
    proxy: FaultProxy
    folder: Path
    target: Path
    made: int = 0

    def url(self, prefix: str = PREFIX) -> str:
        """Return the URL of a prefix."""
        return f"s3://{self.bucket}/{prefix}"

    def publish(
        self,
        files: Mapping[str, bytes] | None = None,
        *,
        prefix: str = PREFIX,
        chunk_size: int = CHUNK,
        change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
        **options: Any,
    ) -> Published:
        """Put an artifact of these files at the server, past the proxy.

        Args:
            files: Small ones by default.
            prefix: Of the URL.
            chunk_size: Of its manifest.
            change: Changes the manifest.
            options: Of `tests.support.publish.publish`.
        """
        self.made += 1
        folder = self.folder / f"artifact-{self.made}"
        files = small_files() if files is None else files
        write_folder(folder, files, change(manifest_of(files, chunk_size)))
        base = publish(self.s3, self.bucket, folder, prefix, **options)
        found = contents(folder)
        return Published(
            id=artifact_id(found[MANIFEST_NAME]), files=found, base=base, url=self.url(prefix)
        )

    def tag(self, tag: str, artifact: str, prefix: str = PREFIX) -> None:
        """Point a tag at an artifact."""
        put_ref(self.s3, self.bucket, prefix, tag, artifact)

    def pull(self, url: str | None = None, *options: object, target: Path | None = None) -> Result:
        """Pull in this process."""
        return shell("pull", url or self.url(), target or self.target, *QUICK, *options)

    def arguments(self, *options: object) -> tuple[object, ...]:
        """Return the arguments of a pull in a process of its own."""
        return ("pull", self.url(), self.target, *QUICK, *options)

    def run(self, *options: object, env: Mapping[str, str] | None = None, **more: Any) -> Result:
        """Pull in a process of its own."""
        return run_cli(*self.arguments(*options), env=env, **more)

    def start(self, *options: object, env: Mapping[str, str] | None = None) -> Running:
        """Start a pull in a process of its own."""
        return start_cli(*self.arguments(*options), env=env)

    def fails(self, status: int, *mentions: str, options: tuple[object, ...] = ()) -> Result:
        """Pull; assert that it fails cleanly."""
        result = self.pull(None, *options)
        fail_cleanly(result, status, *mentions)
        return result

    def leave_unfinished(self) -> None:
        """Leave a pull in which the weights have come in part, and all that waits for nothing."""
        from tests.support.faults import access_denied

        rule = self.proxy.add(access_denied(), "GetObject", key=f"*/{WEIGHTS}", skip=1)
        self.fails(6, WEIGHTS, options=("-j", "1"))
        self.proxy.remove(rule)
        self.pull(None, "--include", "*.json", "--include", "*.zst").ok()
        self.proxy.settle()
        self.proxy.log.clear()
        assert (self.target / "config.json").exists()
        assert (self.target / (WEIGHTS + ".partial")).exists()
        assert not (self.target / INDEX).exists()

    def fetched(self, path: str = "*") -> int:
        """Return the bytes of files that the proxy has sent, the manifest and tags left out."""
        self.proxy.settle()
        return self.sent(path)

    def sent(self, path: str = "*") -> int:
        """Return what `fetched` does, so far: requests may be under way."""
        return sum(
            record.sent
            for record in self.proxy.requests("GetObject", key=f"*/{path}")
            if not record.key.endswith(MANIFEST_NAME) and "/refs/" not in record.key
        )


def with_sha256(path: str, sha256: str) -> Callable[[Manifest], Manifest]:
    """Return a change of a manifest: the SHA-256 of one file, in a manifest that is right."""

    def change(manifest: Manifest) -> Manifest:
        files = tuple(
            replace(each, sha256=sha256) if each.path == path else each for each in manifest.files
        )
        return replace(manifest, files=files)

    return change


def summary(result: Result) -> dict[str, Any]:
    """Return the last event of a ``--json`` run."""
    found: dict[str, Any] = json.loads(result.ok().stdout.splitlines()[-1])
    assert found["type"] == "summary"
    return found


COMMANDS = ("push", "pull", "verify", "list", "gc")


def command(name: str, place: Place, artifact: Path, url: str, *options: object) -> Result:
    """Run one of the commands that talk to a store; ``artifact`` is what push sends."""
    arguments = {
        "push": ("push", artifact, url, *QUICK),
        "pull": ("pull", url, place.target, *QUICK),
        "verify": ("verify", url, *QUICK),
        "list": ("list", url, *QUICK),
        "gc": ("gc", url, *QUICK),
    }
    return shell(*arguments[name], *options)
