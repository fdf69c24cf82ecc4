"""Work on many items at once, in bounded memory."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Task = TypeVar("Task")
Result = TypeVar("Result")
_MOST = 8
_WAITING_PER_JOB = 2
_LOOK_SECONDS = 0.1
_PATIENCE_SECONDS = 3.0


def default_jobs() -> int:
    """Return how many threads to use when nobody says: one per usable core, at most 8."""
    return min(len(os.sched_getaffinity(0)), _MOST)


def map_bounded(
    work: Callable[[Task], Result], tasks: Iterable[Task], jobs: int
) -> Iterator[Result]:
    """Call ``work`` on every task from ``jobs`` threads; yield the results in order.

    Tasks are drawn only as threads become free, so ``tasks`` may be a generator whose
    items are large. The first exception ends the run once the started tasks are done.
    """
    with ThreadPoolExecutor(jobs, thread_name_prefix="work") as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(work, task))
                if len(waiting) >= jobs * _WAITING_PER_JOB:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def run_bounded(work: Callable[[Task], None], tasks: Iterable[Task], jobs: int) -> None:
    """Do as `map_bounded` and drop the results."""
    for _ in map_bounded(work, tasks, jobs):
        pass


def map_watched(
    work: Callable[[Task], Result], tasks: Iterable[Task], jobs: int, check: Callable[[], None]
) -> Iterator[Result]:
    """Do as `map_bounded` where threads may hang, for example in a dead connection.

    ``check`` is called while nothing is ready and raises to end the run; threads that do
    not end within some seconds are left behind then.
    """
    free = threading.Semaphore(jobs)
    waiting: deque[Future[Result]] = deque()

    def run(task: Task, future: Future[Result]) -> None:
        try:
            future.set_result(work(task))
        except BaseException as error:  # noqa: BLE001  (raised where the result is asked for)
            future.set_exception(error)
        finally:
            free.release()

    def oldest() -> Result:
        while not wait(list(waiting)[:1], _LOOK_SECONDS).done:
            check()
        return waiting.popleft().result()

    try:
        for task in tasks:
            while not free.acquire(timeout=_LOOK_SECONDS):
                check()
            waiting.append(Future())
            threading.Thread(target=run, args=(task, waiting[-1]), daemon=True).start()
            while waiting and (waiting[0].done() or len(waiting) >= jobs * _WAITING_PER_JOB):
                yield oldest()
        while waiting:
            yield oldest()
    finally:
        wait(waiting, _PATIENCE_SECONDS)
