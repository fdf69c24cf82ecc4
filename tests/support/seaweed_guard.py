"""Run a server in the background until a given process ends; `seaweed` starts this file.

``python seaweed_guard.py WATCHED FOLDER SOCKETS COMMAND...``: leaves the caller's process group,
writes its own process id to ``FOLDER/guard.pid``, runs COMMAND in FOLDER with its output in
``FOLDER/log``, and ends it when process WATCHED is gone, whether that ended well or was killed.
Then it removes the data: FOLDER, and SOCKETS (a comma-separated list), which the server puts
elsewhere. A server that ends by itself leaves FOLDER, with a file ``ended``. If the guard itself
is killed the kernel ends the server.

It imports nothing of the tests, so that it starts in some 20 ms and stays small.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(watched: int, server: subprocess.Popen[bytes]) -> None:
    """Return when one of the two processes has ended."""
    poll = select.poll()
    for pid in (watched, server.pid):
        try:
            poll.register(os.pidfd_open(pid), select.POLLIN)
        except ProcessLookupError:
            return
    poll.poll()


def main(watched: int, folder: Path, sockets: list[str], command: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    (folder / "guard.pid").write_text(str(os.getpid()))
    with (
        (folder / "log").open("ab") as log,
        subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_end_with_parent,  # noqa: PLW1509  (one thread)
        ) as server,
    ):
        try:
            _wait(watched, server)
        finally:
            died = server.poll() is not None
            server.kill()
            server.wait()
            for path in sockets:
                Path(path).unlink(missing_ok=True)
            if died:
                (folder / "ended").touch()  # the log stays, to be read
            else:
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # the caller need not wait for us
    os.setsid()
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","), sys.argv[4:])
