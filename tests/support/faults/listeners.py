"""Endpoints that are no server at all."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class SilentListener:
    """Accept connections and never say a word: for ``https``, a handshake that never completes.

    Use as a context manager.

    Attributes:
        endpoint: An ``https`` URL.
        accepted: How many connections were accepted.
    """

    def __init__(self, scheme: str = "https") -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted = 0
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        for each in self._open:
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.accepted += 1
                self._open.append(client)


def closed_endpoint() -> str:
    """Return a URL at which nothing listens: connections are refused."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
