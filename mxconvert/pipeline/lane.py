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
        while True:
            with self._lock:
                if self._busy or self._next not in self._ready:
                    return
                self._busy = True
                due = self._ready.pop(self._next)
            continuation = due()
            with self._lock:
                self._next += 1
                self._busy = False
            continuation()
