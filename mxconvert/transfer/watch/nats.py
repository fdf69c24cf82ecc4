"""News of moved tags over NATS: `push --announce` says it, `pull --watch --listen` hears it.

A message only makes a watcher look at its tag at once. Nothing in it is trusted, and one that is
lost costs time, since watchers look by themselves as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mxconvert.errors import MissingExtraError, UsageError
from mxconvert.events import Notice

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from mxconvert.events import Reporter

INSTALL = "pip install 'mxconvert[nats]'"
_SUBJECT = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_SCHEMES = ("nats", "tls")
_SECONDS = 5
_SLICE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Subject:
    """A subject at a server.

    Attributes:
        server: As the client takes it, with whatever credentials it holds.
        subject: The subject.
        label: Both without credentials, for messages.
    """

    server: str
    subject: str
    label: str


def parse_subject(text: str, option: str) -> Subject:
    """Read ``nats://[USER:PASSWORD@]HOST[:PORT]/SUBJECT``.

    Raises:
        UsageError: It is not that.
        MissingExtraError: The NATS client is not installed.
    """
    parts = urlsplit(text)
    subject = parts.path.strip("/")
    if parts.scheme not in _SCHEMES or not parts.hostname or not _SUBJECT.fullmatch(subject):
        raise UsageError(
            f"{option}: expected nats://HOST[:PORT]/SUBJECT or tls://...", code="bad-subject"
        )
    place = parts.netloc.rpartition("@")[2]
    with contextlib.suppress(ImportError):
        import nats  # noqa: F401, PLC0415

        return Subject(
            f"{parts.scheme}://{parts.netloc}", subject, f"{parts.scheme}://{place}/{subject}"
        )
    raise MissingExtraError(
        f"{option}: the package nats-py is not installed", hint=INSTALL, code="missing-extra"
    )


def announce(
    subject: Subject, url: str, artifact_id: str, tags: Iterable[str], report: Reporter
) -> None:
    """Say that tags point at an artifact now; that it cannot be said is a warning.

    Args:
        subject: Where.
        url: Of the artifact's versions.
        artifact_id: What the tags point at.
        tags: The tags.
        report: Told what went wrong.
    """
    messages = [
        json.dumps({"schema_version": 1, "url": url, "tag": tag, "id": artifact_id}).encode()
        for tag in tags
    ]

    async def send() -> None:
        async with _connected(subject, allow_reconnect=False) as client:
            for message in messages:
                await client.publish(subject.subject, message)
            await client.flush(_SECONDS)

    try:
        asyncio.run(asyncio.wait_for(send(), 2 * _SECONDS))
    except Exception as error:  # noqa: BLE001  (whatever the client raises: the push is done)
        report(_trouble("announce-failed", subject, error, "watchers find out when they look"))


@contextlib.asynccontextmanager
async def _connected(subject: Subject, **options: Any) -> AsyncIterator[Any]:
    """Connect, and close in any case: a client that is refused leaves its socket open."""
    from nats.aio.client import Client  # noqa: PLC0415

    client = Client()
    try:
        await client.connect(subject.server, connect_timeout=_SECONDS, error_cb=_ignore, **options)
        yield client
    finally:
        await client.close()
        await asyncio.sleep(0)  # for the transport to go


async def _ignore(error: Exception) -> None:
    """Let `announce` see errors where they are raised."""
    del error


def _trouble(code: str, subject: Subject, error: Exception, then: str) -> Notice:
    # The client's own words may repeat the URL with its password.
    what = type(error).__name__
    return Notice(severity="warning", code=code, message=f"{subject.label}: {what}; {then}")


class Listener:
    """Hears messages on a thread of its own; a server that goes away is waited for.

    Args:
        subject: What to listen to.
        check: Called while waiting; raises to end.
        report: Told that the server cannot be reached, once each time.
    """

    def __init__(self, subject: Subject, check: Callable[[], None], report: Reporter) -> None:
        self._subject, self._check, self._report = subject, check, report
        self._news = threading.Event()
        self._closing = threading.Event()
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mxconvert-nats", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Return when a message has come since the last call, or after so many seconds."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._check()
            if self._news.wait(min(left, _SLICE_SECONDS)):
                break
        self._news.clear()

    def close(self) -> None:
        """Stop listening."""
        self._closing.set()
        self._thread.join(_SECONDS)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                asyncio.run(self._listen())
            except Exception as error:  # noqa: BLE001  (whatever the client raises)
                then = "looking by itself until it is back"
                self._report(_trouble("listen-failed", self._subject, error, then))
                self._closing.wait(_SECONDS)

    async def _listen(self) -> None:
        async def heard(message: Any) -> None:
            del message
            self._news.set()

        async def again() -> None:
            self._news.set()  # something may have been missed

        patient = {"max_reconnect_attempts": -1, "reconnect_time_wait": 1}
        async with _connected(self._subject, reconnected_cb=again, **patient) as client:
            await client.subscribe(self._subject.subject, cb=heard)
            await client.flush(_SECONDS)
            self.ready.set()
            self._news.set()
            await asyncio.to_thread(self._closing.wait)
