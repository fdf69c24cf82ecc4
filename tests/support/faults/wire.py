"""HTTP/1.1 on plain sockets: heads, bodies in pieces, framing. Bounded memory throughout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote, urlencode

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Iterator

PIECE = 1 << 18
_HEAD_LIMIT = 1 << 17


class Closed(ConnectionError):  # noqa: N818  (no error: how a connection ends)
    """The peer ended the connection where a message was expected to begin or go on."""


class Headers(list[tuple[str, str]]):
    """Header fields in their order and case; look-up ignores case."""

    def get(self, name: str) -> str | None:
        """Return the first value of a field."""
        return next((value for key, value in self if key.lower() == name.lower()), None)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None

    def remove_field(self, *prefixes: str) -> None:
        """Remove the fields whose lower-case name is, or up to a final ``*`` begins with, one."""

        def named(key: str) -> bool:
            return any(
                key.startswith(each[:-1]) if each.endswith("*") else key == each
                for each in prefixes
            )

        self[:] = [(key, value) for key, value in self if not named(key.lower())]

    def set(self, name: str, value: str) -> None:
        """Put one value in the place of all of a field's."""
        self.remove_field(name.lower())
        self.append((name, value))


@dataclass
class Request:
    """A request's head; rules match it, actions may change it.

    Attributes:
        method: ``GET``, ...
        target: Path and query as they came, escapes and all.
        headers: As they came.
        connection: Which of the proxy's client connections, from 0.
    """

    method: str
    target: str
    headers: Headers
    connection: int = 0

    @property
    def raw_path(self) -> str:
        """The path as it came."""
        return self.target.partition("?")[0]

    @property
    def path(self) -> str:
        """The path, unescaped: ``/BUCKET/KEY``."""
        return unquote(self.raw_path)

    @property
    def query(self) -> dict[str, str]:
        """The query's parameters, unescaped; those without a value have an empty one."""
        return dict(parse_qsl(self.target.partition("?")[2], keep_blank_values=True))

    def set_query(self, query: dict[str, str]) -> None:
        """Replace the query."""
        encoded = urlencode(query, quote_via=lambda text, *_: _escape(text))
        self.target = self.raw_path + ("?" + encoded if query else "")

    @property
    def bucket(self) -> str:
        """First part of the path."""
        return self.path[1:].partition("/")[0]

    @property
    def key(self) -> str:
        """The rest of the path; empty for requests to the bucket."""
        return self.path[1:].partition("/")[2]

    @property
    def access_key(self) -> str | None:
        """Whose signature the Authorization header holds."""
        _, found, rest = (self.headers.get("authorization") or "").partition("Credential=")
        return rest.partition("/")[0] if found else None

    @property
    def length(self) -> int | None:
        """Content-Length; None for a chunked body, 0 for none."""
        if "chunked" in (self.headers.get("transfer-encoding") or "").lower():
            return None
        return int(self.headers.get("content-length") or 0)

    def head(self) -> bytes:
        """Return the head's bytes."""
        return _head(f"{self.method} {self.target} HTTP/1.1", self.headers)


@dataclass
class Response:
    """A response's head, and the pieces of its body.

    ``length`` is what is announced; None means chunked. ``bodiless`` answers announce a length
    that no body follows (HEAD, 204, 304).
    """

    status: int
    headers: Headers = field(default_factory=Headers)
    body: Iterable[bytes] = ()
    length: int | None = 0
    reason: str = "x"
    bodiless: bool = False

    def replace_body(self, body: bytes) -> None:
        """Put these bytes in the body's place and announce their length."""
        self.body, self.length = (body,), len(body)

    def head(self) -> bytes:
        """Return the head's bytes, with the framing that ``length`` asks for."""
        headers = Headers(self.headers)
        if not self.bodiless:
            headers.remove_field("content-length", "transfer-encoding")
            if self.length is None:
                headers.append(("Transfer-Encoding", "chunked"))
            else:
                headers.append(("Content-Length", str(self.length)))
        return _head(f"HTTP/1.1 {self.status} {self.reason}", headers)


def _escape(text: str) -> str:
    return quote(text, safe="-_.~")


def _head(first: str, headers: Headers) -> bytes:
    lines = [first, *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1")


class Stream:
    """Buffered reading from a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._buffer = bytearray()

    @property
    def pending(self) -> bool:
        """Whether bytes wait here, where select() does not see them."""
        return bool(self._buffer)

    def _fill(self) -> None:
        data = self.socket.recv(PIECE)
        if not data:
            raise Closed
        self._buffer += data

    def _until(self, mark: bytes) -> bytes:
        searched = 0
        while (at := self._buffer.find(mark, searched)) < 0:
            searched = max(0, len(self._buffer) - len(mark))
            if len(self._buffer) > _HEAD_LIMIT:
                raise ValueError("an endless head")
            self._fill()
        found = bytes(self._buffer[:at])
        del self._buffer[: at + len(mark)]
        return found

    def head(self) -> tuple[str, Headers]:
        """Read a message's head; return its first line and its fields."""
        first, *lines = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in lines)
        return first, Headers((name, value.strip()) for name, _, value in fields)

    def some(self, limit: int) -> bytes:
        """Return between one and ``limit`` bytes."""
        if not self._buffer:
            data = self.socket.recv(min(limit, PIECE))
            if not data:
                raise Closed
            return data
        data = bytes(self._buffer[:limit])
        del self._buffer[:limit]
        return data

    def exactly(self, length: int) -> Iterator[bytes]:
        """Yield a body of known length in pieces."""
        while length:
            piece = self.some(length)
            length -= len(piece)
            yield piece

    def chunked(self) -> Iterator[bytes]:
        """Yield what a chunked body holds; its trailer is dropped."""
        while size := int(self._until(b"\r\n").partition(b";")[0], 16):
            yield from self.exactly(size)
            self._until(b"\r\n")
        while self._until(b"\r\n"):
            pass

    def rest(self) -> Iterator[bytes]:
        """Yield everything until the peer closes."""
        try:
            while True:
                yield self.some(PIECE)
        except Closed:
            return

    def body(self, length: int | None) -> Iterator[bytes]:
        """Yield a body: of known length, or chunked for None."""
        return self.chunked() if length is None else self.exactly(length)

    def response(self, method: str) -> Response:
        """Read a response's head; its body is read as it is iterated."""
        first, headers = self.head()
        _, status, reason = (first + "  ").split(" ", 2)
        answer = Response(int(status), headers, reason=reason.strip() or "x")
        if method == "HEAD" or answer.status in {204, 304} or answer.status < 200:
            answer.bodiless = True
        elif "chunked" in (headers.get("transfer-encoding") or "").lower():
            answer.length, answer.body = None, self.chunked()
        elif (length := headers.get("content-length")) is not None:
            answer.length = int(length)
            answer.body = self.exactly(answer.length)
        else:
            answer.length, answer.body = None, self.rest()
        return answer


def framed(piece: bytes, length: int | None) -> bytes:
    """Return a piece of a body as it goes over the wire."""
    return b"%x\r\n%b\r\n" % (len(piece), piece) if length is None else piece
