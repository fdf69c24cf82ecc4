"""A threaded HTTP server on loopback that stand-ins for services are built on."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler


class LoopbackServer(ABC):
    """Serve on a free port of 127.0.0.1. Use as a context manager."""

    @abstractmethod
    def handler(self) -> type[BaseHTTPRequestHandler]:
        """Return the class that answers a request."""

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"
