"""Faults of transport: answers in the server's place, cuts, flips, stalls."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from tests.support.faults.rules import Action, Cut
from tests.support.faults.wire import Headers, Response

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tests.support.faults.exchange import Exchange

XML = '<?xml version="1.0" encoding="UTF-8"?>\n'


class Respond(Action):
    """Answer in the server's place, which never sees the request.

    Args:
        status: HTTP status (200 with a code is the error of a late failure).
        code: S3's error code, such as ``SlowDown``.
        message: The error's message.
        headers: Further header fields.
        extra: Further elements of the error, such as ``{"Region": "eu-west-1"}``.
        body: The body instead of S3's XML; ``b""`` for none.
        drain: Read the request's body first; otherwise answer at once, then close.
    """

    def __init__(
        self,
        status: int,
        code: str = "",
        message: str = "injected",
        *,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, str] | None = None,
        body: bytes | None = None,
        drain: bool = True,
    ) -> None:
        self.status, self.drain = status, drain
        self.headers = Headers([("Content-Type", "application/xml"), *(headers or {}).items()])
        self.headers.append(("x-amz-request-id", "INJECTED0FAULT"))
        fields = {"Code": code, "Message": message, "RequestId": "INJECTED0FAULT"} | dict(
            extra or {}
        )
        text = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields.items())
        self.body = f"{XML}<Error>{text}</Error>".encode() if body is None else body

    def request(self, exchange: Exchange) -> Response:
        exchange.hang_up = exchange.hang_up or not self.drain
        answer = Response(self.status, Headers(self.headers))
        answer.replace_body(self.body)
        return answer


class HangUp(Action):
    """Close the connection in place of an answer; the server never sees the request.

    Args:
        reset: With RST.
        drain: Read the request's body first.
    """

    def __init__(self, *, reset: bool = False, drain: bool = True) -> None:
        self.reset, self.drain = reset, drain

    def request(self, exchange: Exchange) -> None:
        if self.drain:
            exchange.drain()
        raise Cut(reset=self.reset)


class LoseAnswer(Action):
    """Let the server do its work, then close the connection without its answer."""

    def __init__(self, *, reset: bool = False) -> None:
        self.reset = reset

    def response(self, exchange: Exchange, response: Response) -> None:
        for _ in response.body:
            pass
        raise Cut(reset=self.reset)


class NeverAnswer(Action):
    """Take the request with all its body, then say nothing until `release` (then close).

    Args:
        forward: Let the server do its work first.
    """

    def __init__(self, *, forward: bool = False) -> None:
        self.forward, self._released = forward, threading.Event()

    def release(self) -> None:
        """Close the connections that wait, and those to come."""
        self._released.set()

    def request(self, exchange: Exchange) -> None:
        if not self.forward:
            exchange.drain()
            exchange.wait(self._released)
            raise Cut

    def response(self, exchange: Exchange, response: Response) -> None:
        exchange.wait(self._released)
        raise Cut


class CutBody(Action):
    """Close the connection within the answer's body.

    Args:
        after: Where: a share of the body (float) or a number of bytes (int).
        reset: With RST.
        chunked: Announce no length, so that only the missing last chunk tells.
    """

    def __init__(self, after: float = 0.5, *, reset: bool = False, chunked: bool = False) -> None:
        self.after, self.reset, self.chunked = after, reset, chunked

    def response(self, exchange: Exchange, response: Response) -> None:
        end = _place(self.after, response)
        response.body = self._cut(response.body, end)
        if self.chunked:
            response.length = None

    def _cut(self, pieces: Iterable[bytes], end: int) -> Iterator[bytes]:
        yield from upto(pieces, end)
        raise Cut(reset=self.reset)


class Stall(Action):
    """Send the head and some of the answer's body, then nothing until `release`.

    Args:
        after: Where, as for `CutBody`.
    """

    def __init__(self, after: float = 0) -> None:
        self.after, self._released = after, threading.Event()

    def release(self) -> None:
        """Send the rest, and stall no more."""
        self._released.set()

    def response(self, exchange: Exchange, response: Response) -> None:
        response.body = self._stall(exchange, response.body, _place(self.after, response))

    def _stall(self, exchange: Exchange, pieces: Iterable[bytes], at: int) -> Iterator[bytes]:
        pieces = iter(pieces)
        for piece in split_at(pieces, at):
            if piece is None:
                exchange.wait(self._released)
            else:
                yield piece


class Flip(Action):
    """Flip one bit of the answer's body.

    Args:
        offset: Of the byte; negative counts from the end.
        bit: Which, 0 the lowest.
    """

    def __init__(self, offset: int = 0, bit: int = 0) -> None:
        self.offset, self.mask = offset, 1 << bit

    def response(self, exchange: Exchange, response: Response) -> None:
        response.body = flipped(response.body, self._at(response.length), self.mask)

    def _at(self, length: int | None) -> int:
        if self.offset >= 0:
            return self.offset
        assert length is not None, "a negative offset needs a Content-Length"
        return length + self.offset


class FlipUpload(Flip):
    """Flip one bit of the request's body; its signature and checksums stay."""

    def upload(self, exchange: Exchange, pieces: Iterable[bytes]) -> Iterator[bytes]:
        return flipped(pieces, self._at(exchange.request.length), self.mask)

    def response(self, exchange: Exchange, response: Response) -> None:
        """Leave the answer."""


class CutUpload(Action):
    """Close the connection once some bytes of the request's body have come."""

    def __init__(self, after: int, *, reset: bool = False) -> None:
        self.after, self.reset = after, reset

    def upload(self, exchange: Exchange, pieces: Iterable[bytes]) -> Iterator[bytes]:
        yield from upto(pieces, self.after)
        raise Cut(reset=self.reset)


class Delay(Action):
    """Wait before the request is forwarded."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def request(self, exchange: Exchange) -> None:
        exchange.proxy.closing.wait(self.seconds)


class Call(Action):
    """Call a function with the `Exchange`: before forwarding, or once the server has answered."""

    def __init__(self, function: Callable[[Exchange], object], *, after: bool = False) -> None:
        self.function, self.after = function, after

    def request(self, exchange: Exchange) -> None:
        if not self.after:
            self.function(exchange)

    def response(self, exchange: Exchange, response: Response) -> None:
        if self.after:
            self.function(exchange)


class SetHeaders(Action):
    """Set fields of the answer's head; None removes one."""

    def __init__(self, **fields: str | None) -> None:
        self.fields = {name.replace("_", "-"): value for name, value in fields.items()}

    def response(self, exchange: Exchange, response: Response) -> None:
        for name, value in self.fields.items():
            response.headers.remove_field(name.lower())
            if value is not None:
                response.headers.append((name, value))


def _place(after: float, response: Response) -> int:
    if isinstance(after, int):
        return after
    assert response.length is not None, "a share of a body needs its Content-Length"
    return int(response.length * after)


def split_at(pieces: Iterable[bytes], at: int) -> Iterator[bytes | None]:
    """Yield pieces with a None at an offset, if there is one."""
    for piece in pieces:
        if 0 <= at < len(piece):
            if at:
                yield piece[:at]
            yield None
            yield piece[at:]
        else:
            yield piece
        at -= len(piece)
    if at == 0:
        yield None


def upto(pieces: Iterable[bytes], end: int) -> Iterator[bytes]:
    """Yield the first bytes of a body."""
    for piece in split_at(pieces, end):
        if piece is None:
            return
        yield piece


def flipped(pieces: Iterable[bytes], at: int, mask: int) -> Iterator[bytes]:
    """Yield a body with bits of one byte inverted."""
    flip = False
    for piece in split_at(pieces, at):
        if piece is None:
            flip = True
        elif flip:
            yield bytes([piece[0] ^ mask]) + piece[1:]
            flip = False
        else:
            yield piece
