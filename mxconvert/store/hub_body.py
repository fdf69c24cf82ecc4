"""Ranges of files of the Hub, through huggingface_hub's own HTTP session."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Explained = Callable[[], contextlib.AbstractContextManager[None]]

_PIECE = 2**20
_SECONDS = 30.0
_PARTIAL = 206


class HubBody:
    """The bytes of one answer."""

    def __init__(self, response: Any, begin: int, end: int, explained: Explained) -> None:
        self._response, self._explained = response, explained
        self.skip = 0 if response.status_code == _PARTIAL else begin
        self._todo = self.skip + end - begin
        self._pieces = _pieces(response)
        self._left = memoryview(b"")

    def read(self, most: int, /) -> memoryview:
        """See `Body.read`."""
        while not self._left and self._todo:
            with self._explained():
                piece = next(self._pieces, None)
            if piece is None:
                return self._left
            self._left = memoryview(piece)[: self._todo]
            self._todo -= len(self._left)
        view, self._left = self._left[:most], self._left[most:]
        return view

    def close(self) -> None:
        """See `Body.close`."""
        with contextlib.suppress(Exception):
            self._response.close()


def requested(hub: Any, url: str, begin: int, end: int) -> Any:
    """Ask for bytes ``[begin, end)`` of a file; return the answer, whose body is not read.

    huggingface_hub speaks through requests in older releases, and through httpx since.
    """
    headers = hub.utils.build_hf_headers()
    headers |= {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    session = hub.utils.get_session()
    if hasattr(session, "build_request"):
        request = session.build_request("GET", url, headers=headers, timeout=_SECONDS)
        response = session.send(request, stream=True, follow_redirects=True)
    else:
        response = session.get(url, headers=headers, stream=True, timeout=_SECONDS)
    try:
        if not 200 <= response.status_code < 300:  # noqa: PLR2004  (what is a success)
            _read_error(response)
            hub.utils.hf_raise_for_status(response)
    except BaseException:
        response.close()
        raise
    return response


def _read_error(response: Any) -> None:
    if hasattr(response, "read"):
        response.read()


def _pieces(response: Any) -> Iterator[bytes]:
    if hasattr(response, "iter_raw"):
        yield from response.iter_raw(_PIECE)
    else:
        yield from response.iter_content(_PIECE)
