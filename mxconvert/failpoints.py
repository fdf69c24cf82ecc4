"""Deterministic failures at named places, for tests of crash safety.

``MXCONVERT_FAILPOINTS="writer.before-rename:2=kill"`` kills the process with SIGKILL
when that place is reached for the second time. Actions:

* ``kill``, ``term``, ``int``, ``stop``: send that signal to this process (a stopped one
  waits for SIGCONT, so that a test can act meanwhile);
* ``enospc``: raise ``OSError(ENOSPC)``, from then on at every hit;
* ``eio``: raise ``OSError(EIO)`` once;
* ``bug``: raise an exception that nobody expects;
* ``hang``: the thread sleeps for a minute.

Unset, a hit costs one dictionary look-up on an empty mapping.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

from mxconvert.errors import UsageError

ENVIRONMENT_VARIABLE = "MXCONVERT_FAILPOINTS"
_SIGNALS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    "stop": signal.SIGSTOP,
}
_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}
_ACTIONS = (*_SIGNALS, *_ERRORS, "bug", "hang")
_HANG_SECONDS = 60.0


def _parse(text: str) -> dict[str, tuple[int, str]]:
    points: dict[str, tuple[int, str]] = {}
    for entry in filter(None, text.split(",")):
        place, _, action = entry.partition("=")
        name, _, nth = place.partition(":")
        if action not in _ACTIONS or (nth and not nth.isdigit()):
            raise UsageError(
                f"{ENVIRONMENT_VARIABLE}: cannot read {entry!r}",
                hint=f"write NAME[:N]=ACTION with ACTION one of {', '.join(_ACTIONS)}",
            )
        points[name] = (int(nth or 1), action)
    return points


_points = _parse(os.environ.get(ENVIRONMENT_VARIABLE, ""))
_hits: dict[str, int] = {}
_lock = threading.Lock()


def hit(name: str, path: str = "") -> None:
    """Act if ``name`` is armed and has now been reached the armed number of times.

    Raises:
        OSError: At ``path``, for the actions ``enospc`` and ``eio``.
        RuntimeError: For the action ``bug``.
    """
    if name not in _points:
        return
    nth, action = _points[name]
    with _lock:
        _hits[name] = _hits.get(name, 0) + 1
        due = _hits[name] == nth or (action == "enospc" and _hits[name] > nth)
    if due:
        _act(action, path)


def _act(action: str, path: str) -> None:
    if action in _ERRORS:
        raise OSError(_ERRORS[action], os.strerror(_ERRORS[action]), path)
    if action == "bug":
        raise RuntimeError("failpoint")
    if action == "hang":
        time.sleep(_HANG_SECONDS)
        return
    if action == "stop":  # to this thread: it goes no step further before it stops
        signal.pthread_kill(threading.get_ident(), _SIGNALS[action])
    else:
        os.kill(os.getpid(), _SIGNALS[action])
