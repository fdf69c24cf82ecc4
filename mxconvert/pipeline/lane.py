"""Ordered work without a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

Continuation = Callable[[], None]
Task = Callable[[], Continuation]


class OrderedLane:
    """Runs numbered tasks strictly in order, on whichever thread completes the order.

    A thread that submits a task out of turn leaves it here and goes on with other work.
    A task returns a continuation that runs after the lane is free for the next task.
    Tasks must not raise.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._busy = False
        self._ready: dict[int, Task] = {}

    def submit(self, number: int, task: Task) -> None:
        """Hand in task ``number``; every number from 0 on must come exactly once."""
        with self._lock:
            self._ready[number] = task
            due = self._take()
        while due is not None:
            continuation = due()
            with self._lock:
                self._next += 1
                self._busy = False
            continuation()
            with self._lock:
                due = self._take()

    def _take(self) -> Task | None:
        """Return the next task if it is there and may run; the lane is busy with it then."""
        if self._busy:
            return None
        due = self._ready.pop(self._next, None)
        self._busy = due is not None
        return due
