"""Azurite, Microsoft's stand-in for Azure, where somebody has installed it.

``npm install azurite`` makes ``azurite-blob``, which is looked for on the ``PATH`` and in the
variable ``AZURITE_BLOB``; without it its tests are skipped.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
import uuid
from email.utils import formatdate
from typing import TYPE_CHECKING
from urllib.request import ProxyHandler, Request, build_opener

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_HOST = "127.0.0.1"
_START_S = 30.0
_opener = build_opener(ProxyHandler({}))

AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = base64.b64encode(b"a key for tests").decode()


def _program(name: str) -> str:
    path = os.environ.get(name.replace("-", "_").upper()) or shutil.which(name)
    if not path:
        pytest.skip(f"needs {name}")
    return path


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def _running(command: list[str], port: int, folder: Path, **env: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("wb") as log:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        process = subprocess.Popen(command, env={**os.environ, **env}, cwd=folder, **streams)
    try:
        end = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection((_HOST, port)):
                break
            assert time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """Run a server of Azure's protocol; yield its URL, which ends in the account."""
    port = _free_port()
    where = ["--blobHost", _HOST, "--blobPort", str(port), "--location", str(folder)]
    how = ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    account = f"{AZURITE_ACCOUNT}:{AZURITE_KEY}"
    command = [_program("azurite-blob"), *where, *how]
    with _running(command, port, folder, AZURITE_ACCOUNTS=account):
        yield f"http://{_HOST}:{port}/{AZURITE_ACCOUNT}"


def make_azure_container(endpoint: str) -> str:
    """Create a container with a new name and return it."""
    name = f"test-{uuid.uuid4().hex[:16]}"
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "".join(f"{key}:{value}\n" for key, value in headers.items())
    resource = f"/{AZURITE_ACCOUNT}/{AZURITE_ACCOUNT}/{name}\nrestype:container"
    text = f"PUT{chr(10) * 12}{signed}{resource}".encode()
    digest = hmac.digest(base64.b64decode(AZURITE_KEY), text, hashlib.sha256)
    headers["Authorization"] = f"SharedKey {AZURITE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    headers["Content-Length"] = "0"
    request = Request(f"{endpoint}/{name}?restype=container", headers=headers, method="PUT")  # noqa: S310
    _opener.open(request).close()
    return name
