"""How a signal handler asks a run to end."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class StopToken:
    """Set from a signal handler; long loops look at it.

    ``armed`` says that such a loop is running and will see `signum` within a fraction
    of a second; otherwise the handler has to raise.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.armed = False

    def set(self, signum: int) -> None:
        """Ask for the end."""
        self.signum = signum

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Say that the caller looks at `signum`."""
        self.armed = True
        try:
            yield
        finally:
            self.armed = False
