"""The proxy's side towards the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.faults.exchange import readable
from tests.support.faults.wire import framed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.support.faults.exchange import Exchange
    from tests.support.faults.rules import Action
    from tests.support.faults.wire import Response, Stream


class Upstream:
    """The connection to the server that serves one client connection; made when needed."""

    def __init__(self, connect: Any) -> None:
        self._connect = connect
        self._stream: Stream | None = None

    def forward(self, exchange: Exchange, actions: Iterable[Action]) -> Response:
        """Send a request; return its answer, whose body is yet to be read."""
        if self._stream is None or readable(self._stream.socket):  # readable: it has closed
            self._stream = self._connect()
        stream = self._stream
        stream.socket.sendall(exchange.request.head())
        answer = self._permission(exchange, stream) if exchange.expects else None
        if answer is None:
            answer = self._upload(exchange, actions, stream)
        if answer is None:
            answer = _final(exchange, stream)
        if "close" in (answer.headers.get("connection") or "").lower():
            self._stream = None
        return answer

    @staticmethod
    def _permission(exchange: Exchange, stream: Stream) -> Response | None:
        """Wait until the body may go; return the answer of a server that does not want it."""
        client = exchange.client
        if not client.pending:
            ready = readable(client.socket, stream.socket, timeout=None)
            if stream.socket.fileno() in ready:
                answer = stream.response(exchange.request.method)
                if answer.status != 100:
                    exchange.hang_up = True
                    return answer
                exchange.allow()
        return None

    def _upload(
        self, exchange: Exchange, actions: Iterable[Action], stream: Stream
    ) -> Response | None:
        """Send the body; return an answer that comes before its end."""
        length = exchange.request.length
        pieces: Iterable[bytes] = exchange.body()
        for action in actions:
            pieces = action.upload(exchange, pieces)
        for piece in pieces:
            try:
                stream.socket.sendall(framed(piece, length))
            except OSError:
                return self._early(exchange, stream)
            if readable(stream.socket) and (answer := self._early(exchange, stream)):
                return answer
        if length is None:
            stream.socket.sendall(b"0\r\n\r\n")
        return None

    def _early(self, exchange: Exchange, stream: Stream) -> Response | None:
        """Return the answer that the server gave before the body's end, but for a 100."""
        answer = stream.response(exchange.request.method)
        if answer.status == 100:
            return None
        self._stream, exchange.hang_up = None, True
        return answer


def _final(exchange: Exchange, stream: Stream) -> Response:
    while (answer := stream.response(exchange.request.method)).status == 100:
        pass
    return answer
