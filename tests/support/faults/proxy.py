"""The proxy: one thread for each client connection, with its own connection to the server."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

from tests.support.faults.exchange import Exchange, Record
from tests.support.faults.rules import Action, Cut, Rule
from tests.support.faults.signing import sign
from tests.support.faults.upstream import Upstream
from tests.support.faults.wire import PIECE, Request, Response, Stream, framed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.seaweed import S3Server

_LINGER_S = 2.0


def _close(sock: socket.socket, *, reset: bool = False) -> None:
    with contextlib.suppress(OSError):
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class FaultProxy:
    """A proxy in front of a server. Use as a context manager; see the package's docstring.

    Attributes:
        server: What it forwards to.
        endpoint: Its own URL.
        log: Every request since the start, in order of arrival.
        latency: Seconds to wait before each request is forwarded.
        rate: Bytes per second of all bodies together, both ways; None: no limit.
        trusted: Key ids whose requests are signed anew with the server's own key.
    """

    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.log: list[Record] = []
        self.rules: list[Rule] = []
        self.latency = 0.0
        self.rate: float | None = None
        self.trusted: set[str] = set()
        self.closing = threading.Event()
        self._errors: list[str] = []
        self._free = 0.0
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        parts = urlsplit(server.endpoint)
        self._address = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # What tests use.

    def add(self, action: Action, op: str | tuple[str, ...] = (), **conditions: Any) -> Rule:
        """Add a rule (`Rule` documents the conditions) and return it."""
        rule = Rule(action, op, **conditions)
        self.rules.append(rule)
        return rule

    def remove(self, *rules: Rule) -> None:
        """Remove these rules; all without an argument."""
        self.rules = [rule for rule in self.rules if rules and rule not in rules]

    def requests(self, op: str | tuple[str, ...] = (), **conditions: Any) -> list[Record]:
        """Return the log's records of some requests; conditions as for `Rule`."""
        rule = Rule(Action(), op, **conditions)
        return [record for record in list(self.log) if rule.matches(_as_request(record))]

    def sent(self, op: str | tuple[str, ...] = (), **conditions: Any) -> int:
        """Return how many bytes of bodies went to the client."""
        return sum(record.sent for record in self.requests(op, **conditions))

    def received(self, op: str | tuple[str, ...] = (), **conditions: Any) -> int:
        """Return how many bytes of bodies came from the client."""
        return sum(record.received for record in self.requests(op, **conditions))

    def settle(self, timeout: float = 5.0) -> list[Record]:
        """Wait until no request is under way (a client may have its answer before); the log."""
        end = time.monotonic() + timeout
        while under_way := [record for record in list(self.log) if record.ended is None]:
            assert time.monotonic() < end, f"still under way: {under_way}"
            time.sleep(0.002)
        return self.log

    def environment(self, **more: str) -> dict[str, str]:
        """Return the variables that lead a command through the proxy."""
        return self.server.environment(self.endpoint, **more)

    def close(self) -> None:
        """End all connections; fail if the proxy itself failed."""
        self.closing.set()
        _close(self._listener)
        with self._lock:
            sockets = list(self._sockets)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in self._threads), "the proxy does not end"
        assert not self._errors, "the proxy failed:\n" + "\n".join(self._errors)

    def paced(self, piece: bytes) -> Iterator[bytes]:
        """Yield a piece as fast as the rate allows."""
        if not self.rate:
            yield piece
            return
        size = max(1024, int(self.rate / 50))
        for at in range(0, len(piece), size):
            part = piece[at : at + size]
            with self._lock:
                now = time.monotonic()
                self._free = max(self._free, now) + len(part) / self.rate
                pause = self._free - now
            self.closing.wait(pause)
            yield part

    # Connections.

    def _start(self, target: Any, *args: object) -> None:
        thread = threading.Thread(target=self._guarded, args=(target, *args), daemon=True)
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _guarded(self, target: Any, *args: object) -> None:
        try:
            target(*args)
        except Exception:  # noqa: BLE001  (close() reports it)
            self._errors.append(traceback.format_exc())

    def _accept(self) -> None:
        number = 0
        while not self.closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._connection, client, number)
            number += 1

    @contextlib.contextmanager
    def _held(self, sock: socket.socket) -> Iterator[Stream]:
        """Know of a socket while it is open, so that `close` can end it."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._sockets.add(sock)
        reset = False
        try:
            yield Stream(sock)
        except Cut as cut:
            reset = cut.reset
            raise
        finally:
            with self._lock:
                self._sockets.discard(sock)
            _close(sock, reset=reset)

    def _connection(self, client: socket.socket, number: int) -> None:
        with contextlib.suppress(Cut, OSError), contextlib.ExitStack() as stack:
            stream = stack.enter_context(self._held(client))
            upstream = Upstream(lambda: stack.enter_context(self._held(self._connect())))
            while not self.closing.is_set():
                first, headers = stream.head()
                method, target, _ = first.split(" ")
                exchange = Exchange(self, Request(method, target, headers, number), stream)
                self.log.append(exchange.record)
                try:
                    self._serve(exchange, upstream)
                except (Cut, OSError):
                    exchange.record.cut = True
                    raise
                finally:
                    exchange.record.ended = time.monotonic()
                if exchange.hang_up:
                    self._linger(client)
                    return

    def _linger(self, client: socket.socket) -> None:
        """Let the client read the answer before a body that nobody reads resets all."""
        client.shutdown(socket.SHUT_WR)
        client.settimeout(_LINGER_S)
        while not self.closing.is_set() and client.recv(PIECE):
            pass

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._address)

    # One request.

    def _serve(self, exchange: Exchange, upstream: Upstream) -> None:
        actions: list[Action] = []
        answer = self._before(exchange, actions)
        if answer is None:
            if self.latency:
                self.closing.wait(self.latency)
            if exchange.changed or exchange.request.access_key in self.trusted:
                sign(exchange.request, self.server)
            answer = upstream.forward(exchange, actions)
        elif not exchange.hang_up:
            exchange.drain()
        for action in actions:
            action.response(exchange, answer)
        self._reply(exchange, answer)

    def _before(self, exchange: Exchange, actions: list[Action]) -> Response | None:
        """Run the request hooks of the rules that fire, up to the first that answers."""
        for rule in list(self.rules):
            if rule.fires(exchange.request):
                actions.append(rule.action)
                exchange.record.faults.append(type(rule.action).__name__)
                if (answer := rule.action.request(exchange)) is not None:
                    return answer
        return None

    def _reply(self, exchange: Exchange, answer: Response) -> None:
        client, record = exchange.client.socket, exchange.record
        answer.bodiless = answer.bodiless or exchange.request.method == "HEAD"
        if exchange.hang_up:
            answer.headers.set("Connection", "close")
        record.status = answer.status
        client.sendall(answer.head())
        if not answer.bodiless:
            for piece in answer.body:
                for part in self.paced(piece):
                    record.sent += len(part)  # first: the client may look once it has them
                    client.sendall(framed(part, answer.length))
            if answer.length is None:
                client.sendall(b"0\r\n\r\n")
        closes = (exchange.request.headers, answer.headers)
        if any("close" in (each.get("connection") or "").lower() for each in closes):
            exchange.hang_up = True


def _as_request(record: Record) -> Request:
    request = Request(record.method, quote(record.path), record.headers, record.connection)
    request.set_query(record.query)
    return request
