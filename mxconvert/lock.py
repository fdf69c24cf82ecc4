"""One run per output folder.

A lock is a file that names its holder. It is created by linking a finished file to its
name, which is atomic on network file systems too, and it says enough to tell a dead
holder from a living one. The holder keeps a ``flock`` on it as well: two containers may
share a host's name, but do not see each other's processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mxconvert.errors import LocalError
from mxconvert.events import Notice, Reporter

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK_NAME = "lock"
_MODE = 0o644
_PATIENCE, _PATIENCE_SECONDS = 40, 0.05
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock.

    ``started`` is seconds since the epoch; ``ticks`` is the process's start time in
    clock ticks since boot, so that a reused process id is not mistaken for the holder.
    """

    pid: int
    host: str
    started: int
    ticks: int

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.started))
        return f"process {self.pid} on host {self.host}, started {when}"

    @property
    def is_local(self) -> bool:
        """Whether the holder ran on this host."""
        return self.host == socket.gethostname()

    @property
    def is_visible(self) -> bool:
        """Whether its process can be seen from here."""
        return _ticks(self.pid) == self.ticks


def _ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return -1
    fields = stat.rpartition(")")[2].split()
    return -1 if fields[0] in "ZX" else int(fields[19])  # field 22 of proc(5): starttime


class Lock:
    """Holds ``folder/lock`` from `acquire` to `release`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        self._holder = Holder(
            os.getpid(), socket.gethostname(), int(time.time()), _ticks(os.getpid())
        )
        self._text = json.dumps(asdict(self._holder))
        self._fd = -1

    def acquire(self, report: Reporter, *, break_lock: bool = False) -> None:
        """Take the lock or fail at once.

        Args:
            report: Told when the lock of a dead run is taken over.
            break_lock: Take over a lock whose holder cannot be seen from here as well.

        Raises:
            LocalError: Somebody else holds it; names the holder.
        """
        mine = self._path.with_name(f"{LOCK_NAME}.{uuid.uuid4().hex}")
        try:
            while not self._try_link(mine):
                with contextlib.suppress(FileNotFoundError), _alone(self._path.parent):
                    self._make_way(report, break_lock=break_lock)
            # Remains of killed runs; a run that tries just now writes its file anew.
            for remains in self._path.parent.glob(f"{LOCK_NAME}.*"):
                remains.unlink(missing_ok=True)
        except LocalError:
            self._close()
            raise
        except OSError as error:
            self._close()
            raise LocalError(f"{self._path}: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                mine.unlink(missing_ok=True)

    def _try_link(self, mine: Path) -> bool:
        # A run that ends removes the folder: what was written here may be gone again.
        self._path.parent.mkdir(exist_ok=True)
        try:
            mine.unlink(missing_ok=True)  # of a killed run with this process's number
            self._write(mine)
            os.link(mine, self._path)
        except (FileExistsError, FileNotFoundError):
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            return self._try_create()
        return True

    def _try_create(self) -> bool:
        """Take the lock where the file system has no hard links."""
        try:
            self._write(self._path)
        except FileExistsError:
            return False
        return True

    def _write(self, path: Path) -> None:
        """Write the holder to a new file and keep it open with a ``flock`` on it."""
        self._close()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        with contextlib.suppress(OSError):  # not on every network file system
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._fd, self._text.encode())

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _make_way(self, report: Reporter, *, break_lock: bool) -> None:
        """Remove the lock of a dead run, or raise."""
        try:
            raw = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return  # released meanwhile
        holder = _parse(raw)
        if not _may_take_over(holder, self._path, break_lock=break_lock):
            elsewhere = "; if that host is gone for good, pass --break-lock"
            here = holder is not None and holder.is_local and holder.is_visible
            raise LocalError(
                f"{self._path.parent.parent}: another run is working here: "
                f"{holder or 'unreadable lock file'}",
                hint="wait for it to end" + ("" if here else elsewhere),
                code="locked",
            )
        # Rename before removing: of two runs that see the same dead lock, one wins.
        stale = self._path.with_name(f"{LOCK_NAME}.stale.{self._holder.pid}")
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(stale)
            if stale.read_text(encoding="utf-8") != raw:  # somebody new was faster
                with contextlib.suppress(FileExistsError):
                    os.link(stale, self._path)
                stale.unlink()
                return
            stale.unlink()
            report(
                Notice(
                    severity="warning",
                    code="lock-taken-over",
                    message=f"took over the lock of a run that ended: {holder or 'unreadable'}",
                )
            )

    def release(self) -> None:
        """Give the lock up, unless somebody has broken it meanwhile."""
        with contextlib.suppress(OSError):
            if self._path.read_text(encoding="utf-8") == self._text:
                self._path.unlink()
        self._close()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one run of this host at a time judge and remove a lock."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _flock_patiently(fd)
        yield
    finally:
        os.close(fd)


def _flock_patiently(fd: int) -> None:
    """Wait a little for a ``flock``; a stopped process must not hold up everybody."""
    for _ in range(_PATIENCE):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PATIENCE_SECONDS)
        except OSError:  # not on every network file system
            return
        else:
            return


def _may_take_over(holder: Holder | None, path: Path, *, break_lock: bool) -> bool:
    """Whether a lock's holder is dead, or asked to be taken for dead and not known to live."""
    if holder is None or not holder.is_local:
        return break_lock
    if holder.is_visible:
        return False
    return break_lock or not _is_held(path)


def _is_held(path: Path) -> bool:
    """Whether some process has a ``flock`` on a file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def _parse(raw: str) -> Holder | None:
    try:
        return Holder(**json.loads(raw))
    except (ValueError, TypeError):
        return None
