"""Pieces of an upload, whose own errors are not the store's."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Foreign(BaseException):
    """Carries an error of whoever makes the pieces past what translates the store's."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def guarded(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield pieces; raise `Foreign` in place of an error of theirs."""
    try:
        yield from pieces
    except Exception as error:  # (any: it goes on as it is)
        raise Foreign(error) from error


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise what a `Foreign` carries."""
    try:
        yield
    except Foreign as foreign:
        raise foreign.error from None
