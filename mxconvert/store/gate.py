"""How many requests are under way, and how fast bytes go: both adapt to the store.

The number of requests follows additive increase, multiplicative decrease, as TCP does:
a store that throttles says how much it takes, and more requests than that only fail.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_DECREASE = 0.6
_CALM_SECONDS = 1.0  # one burst of errors is one reason to slow down, not one per request
_SLICE_SECONDS = 0.2


class Gate:
    """Lets up to ``limit`` requests through at once; ``limit`` moves between 1 and ``most``."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._limit = float(most)
        self._clock = clock
        self._active = 0
        self._closed_until = self._lowered_at = 0.0
        self._changed = threading.Condition()

    @property
    def limit(self) -> int:
        """Requests let through at once just now."""
        return int(self._limit)

    @contextlib.contextmanager
    def slot(self, check: Callable[[], None]) -> Iterator[float]:
        """Wait for a place and hold it; ``check`` raises to end the wait.

        Gives the seconds that other requests have taken up all places: this one was not
        tried then, so they are no failure of it.
        """
        queued = 0.0
        with self._changed:
            while (full := self._active >= self.limit) or self._clock() < self._closed_until:
                check()
                began = self._clock()
                self._changed.wait(_SLICE_SECONDS)
                queued += self._clock() - began if full else 0.0
            self._active += 1
        try:
            yield queued
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify()

    def succeeded(self) -> None:
        """Note a request that went well: after ``limit`` of them there is room for one more."""
        if self._limit >= self.most:
            return
        with self._changed:
            self._limit = min(self.most, self._limit + 1 / self._limit)
            self._changed.notify()

    def overloaded(self, retry_after: float | None) -> None:
        """Note that the store has too much to do, and when it wants to be asked again."""
        with self._changed:
            now = self._clock()
            if retry_after:
                self._closed_until = max(self._closed_until, now + retry_after)
            if now - self._lowered_at >= _CALM_SECONDS:
                self._lowered_at = now
                self._limit = max(1.0, self._limit * _DECREASE)


class RateLimit:
    """Spreads bytes over time so that their sum stays below a rate."""

    def __init__(
        self, bytes_per_second: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, num_bytes: int, sleep: Callable[[float], None]) -> None:
        """Wait, with ``sleep``, until ``num_bytes`` more may go."""
        if self._rate is None:
            return
        with self._lock:
            begin = max(self._clock(), self._free_at)
            self._free_at = begin + num_bytes / self._rate
        wait = begin - self._clock()
        if wait > 0:
            sleep(wait)
