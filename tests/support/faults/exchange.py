"""One request on its way through the proxy, and its line in the log."""

from __future__ import annotations

import select
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support.faults.rules import Cut, operation
from tests.support.faults.wire import Headers, Request, Stream

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator, Mapping

    from tests.support.faults.proxy import FaultProxy

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_POLL_S = 0.02


@dataclass(kw_only=True)
class Record:
    """One request as it came and what became of it; filled in as that goes on.

    Attributes:
        op: S3 operation.
        method: HTTP method.
        path: Unescaped, bucket first.
        key: Key in the bucket.
        query: Unescaped parameters.
        headers: As the client sent them.
        connection: Number of the client's connection.
        began: Monotonic time of the head.
        ended: Monotonic time of the end; None while under way.
        received: Bytes of the request's body that came from the client.
        status: Status that was sent; 0 for none (yet).
        sent: Bytes of the answer's body that were sent.
        faults: Names of the actions that met it.
        cut: Whether the connection ended before the answer did.
    """

    op: str
    method: str
    path: str
    key: str
    query: dict[str, str]
    headers: Headers
    connection: int
    began: float
    ended: float | None = None
    received: int = 0
    status: int = 0
    sent: int = 0
    faults: list[str] = field(default_factory=list)
    cut: bool = False

    @property
    def range(self) -> str | None:
        """The Range header."""
        return self.headers.get("range")

    @property
    def signed(self) -> bool:
        """Whether it was signed, in a header or in the query."""
        return "authorization" in self.headers or "X-Amz-Signature" in self.query


class Exchange:
    """One request on its way; what the hooks of an action get.

    Attributes:
        request: The head; a hook that changes what the signature covers sets ``changed``.
        record: Its line in the log.
        proxy: The proxy, and ``proxy.server`` behind it.
        changed: Sign anew before forwarding.
        hang_up: Close the client's connection after the answer.
    """

    def __init__(self, proxy: FaultProxy, request: Request, client: Stream) -> None:
        self.proxy, self.request, self.client = proxy, request, client
        self.changed = self.hang_up = False
        self._expects = "100-continue" in (request.headers.get("expect") or "").lower()
        self._unread = request.length != 0
        self.record = Record(
            op=operation(request),
            method=request.method,
            path=request.path,
            key=request.key,
            query=request.query,
            headers=Headers(request.headers),
            connection=request.connection,
            began=time.monotonic(),
        )

    def change(
        self,
        *,
        remove: Iterable[str] = (),
        set: Mapping[str, str] | None = None,  # noqa: A002
        query: dict[str, str] | None = None,
    ) -> None:
        """Change header fields or the query; the signature is made anew, if there was one."""
        headers = self.request.headers
        if query is not None:
            self.request.set_query(query)
        headers.remove_field(*remove)
        for name, value in (set or {}).items():
            headers.set(name, value)
        self.changed = self.changed or self.request.access_key is not None

    @property
    def expects(self) -> bool:
        """Whether the client waits for leave to send the body."""
        return self._expects and self._unread

    def body(self) -> Iterator[bytes]:
        """Yield the request's body as it comes from the client; once."""
        if self._unread:
            self._unread = False
            for piece in self.client.body(self.request.length):
                for part in self.proxy.paced(piece):
                    self.record.received += len(part)
                    yield part

    def allow(self) -> None:
        """Tell a client that waits for it to send the body."""
        if self.expects:
            self._expects = False
            self.client.socket.sendall(_CONTINUE)

    def drain(self) -> None:
        """Read the request's body to its end."""
        self.allow()
        for _ in self.body():
            pass

    def wait(self, released: threading.Event) -> None:
        """Do nothing until released; `Cut` when the client or the proxy goes first."""
        while not released.wait(_POLL_S):
            if self.proxy.closing.is_set() or _gone(self.client.socket):
                raise Cut


def readable(*sockets: socket.socket, timeout: float | None = 0) -> set[int]:
    """Return the descriptors of those that have bytes, or an end, to read."""
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout is None else timeout * 1000)}


def _gone(sock: socket.socket) -> bool:
    """Whether the peer has closed."""
    try:
        return readable(sock) and not sock.recv(1, socket.MSG_PEEK)
    except OSError:
        return True
