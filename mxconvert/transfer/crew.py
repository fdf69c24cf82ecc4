"""Threads that work off tasks which lead to further tasks."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from mxconvert.store import Abandoned

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mxconvert.store import Client

_PATIENCE_SECONDS = 3.0
_LOOK_SECONDS = 0.1


class Task(Protocol):
    """A piece of work; returns what follows from it."""

    def __call__(self) -> Iterable[Task]:
        """Do it."""


class Crew:
    """Runs tasks from ``size`` threads.

    A task returns the tasks that follow from it; these go first, so that what was begun
    is ended before more is begun, and memory does not grow with the number of tasks. The
    first exception ends everything: requests of the client that still wait give up.
    """

    def __init__(self, size: int, client: Client) -> None:
        self._size = size
        self._client = client
        self._changed = threading.Condition()
        self._follow_ups: deque[Task] = deque()
        self._active = 0
        self._error: BaseException | None = None
        self._tasks: Iterator[Task] = iter(())
        self._threads: list[threading.Thread] = []

    @property
    def is_over(self) -> bool:
        """Whether no thread works any more: one that hangs may outlive `run`."""
        return not any(thread.is_alive() for thread in self._threads)

    def run(self, tasks: Iterable[Task]) -> None:
        """Do every task and what follows from it.

        Raises:
            BaseException: The first one that a task raised, or that reached this thread.
        """
        with self._client.watched():
            self._run(tasks)
        self._client.check()  # a signal that came when all was done

    def _run(self, tasks: Iterable[Task]) -> None:
        self._tasks = iter(tasks)
        self._threads = [
            threading.Thread(target=self._work, name=f"transfer-{i}", daemon=True)
            for i in range(self._size)
        ]
        for thread in self._threads:
            thread.start()
        try:
            while not self.is_over and not self._has_failed():
                self._wait_for_one()
                self._client.check()
        except BaseException as error:  # noqa: BLE001  (a signal; raised again below)
            self._fail(error)
        self._wait_for_all()
        if self._error is not None:
            raise self._error

    def _wait_for_one(self) -> None:
        """Wait a moment, but no longer than until a thread ends that is waited for."""
        thread = next((thread for thread in self._threads if thread.is_alive()), None)
        if thread is not None:
            thread.join(_LOOK_SECONDS)

    def _wait_for_all(self) -> None:
        """Wait for all threads; after a failure, for a moment only.

        A thread that waits for a dead connection must not hold up the end: whatever it
        has done is as good as what a killed process has done.
        """
        until = time.monotonic() + _PATIENCE_SECONDS
        for thread in self._threads:
            patience = max(0.0, until - time.monotonic()) if self._has_failed() else None
            thread.join(patience)

    def _has_failed(self) -> bool:
        return self._error is not None

    def _work(self) -> None:
        while (task := self._next()) is not None:
            follow_ups: Iterable[Task] = ()
            try:
                follow_ups = tuple(task())
            except Abandoned:
                pass
            except BaseException as error:  # noqa: BLE001  (raised by `run`)
                self._fail(error)
            with self._changed:
                self._follow_ups.extend(follow_ups)
                self._active -= 1
                self._changed.notify_all()

    def _next(self) -> Task | None:
        with self._changed:
            while self._error is None:
                try:
                    task = self._follow_ups.popleft() if self._follow_ups else next(self._tasks)
                except StopIteration:
                    if not self._active:
                        self._changed.notify_all()
                        return None
                    self._changed.wait()
                    continue
                except BaseException as error:  # noqa: BLE001  (of the iterator; see `run`)
                    self._error = self._error or error
                    break
                self._active += 1
                return task
            self._changed.notify_all()
        return None

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._client.give_up()
