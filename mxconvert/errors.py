"""Errors a user can meet. Each carries its exit status and the next thing to try.

The status numbers are part of the command line's contract, see
``docs/reference/exit-status.md``.
"""

from __future__ import annotations

import reprlib
from enum import IntEnum, StrEnum

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlong = 40
_SHORT.maxlevel = 3


def brief(value: object) -> str:
    """Return ``repr(value)``, shortened where it would fill a message: input can be anything."""
    return _SHORT.repr(value)


class ExitStatus(IntEnum):
    """Process exit statuses of every mxconvert command."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    PARTIAL = 3
    VERIFY = 4
    SOURCE = 5
    STORE = 6
    LOCAL = 7
    MISSING = 8
    SIGINT = 130
    SIGTERM = 143


class MxConvertError(Exception):
    """Base of all expected failures.

    Attributes:
        message: What is wrong: the thing, expected against found.
        hint: The next command or action to try, or ``None``.
        code: A stable short identifier for machines, for example ``truncated-shard``.
        exit_status: What the process exits with.
    """

    exit_status = ExitStatus.FAILURE

    def __init__(self, message: str, *, hint: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or type(self).__name__.removesuffix("Error").lower()


class UsageError(MxConvertError):
    """Arguments that contradict each other or the source."""

    exit_status = ExitStatus.USAGE


class PartialError(MxConvertError):
    """Some files failed; the finished ones are kept and a rerun resumes."""

    exit_status = ExitStatus.PARTIAL


class VerificationError(MxConvertError):
    """An artifact does not match its manifest, its source or its own structure."""

    exit_status = ExitStatus.VERIFY


class SourceError(MxConvertError):
    """A source checkpoint that is damaged, inconsistent or unsupported."""

    exit_status = ExitStatus.SOURCE


class LocalError(MxConvertError):
    """Local disk, permission or lock trouble."""

    exit_status = ExitStatus.LOCAL

    @classmethod
    def unreadable(cls, path: object, error: OSError) -> LocalError:
        """Return the error for a file or folder that cannot be read."""
        return cls(f"{path}: {error.strerror or error}", hint=f"make {path} readable")


class StoreFault(StrEnum):
    """What an object store or the way to it did; decides whether trying again can help."""

    THROTTLED = "throttled"
    TRANSIENT = "transient"
    STALLED = "stalled"
    EXPIRED = "expired-credentials"
    SKEWED = "clock-skew"
    NO_CREDENTIALS = "no-credentials"
    DENIED = "denied"
    MISSING = "not-found"
    NO_BUCKET = "no-bucket"
    CHANGED = "changed"
    UNSUPPORTED = "unsupported"
    CORRUPT = "corrupt"
    REFUSED = "refused"


class StoreError(MxConvertError):
    """An object store, its credentials or the network, after retries.

    Attributes:
        fault: What kind of trouble it is.
        retry_after: Seconds that the store asked to wait, or ``None``.
    """

    exit_status = ExitStatus.STORE

    def __init__(
        self,
        fault: StoreFault,
        message: str,
        *,
        hint: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint, code=fault.value)
        self.fault = fault
        self.retry_after = retry_after


class MissingExtraError(MxConvertError):
    """A missing optional dependency, GPU or engine."""

    exit_status = ExitStatus.MISSING


class Interrupted(MxConvertError):  # noqa: N818  (an event, not an error of the program)
    """The command was stopped by SIGINT or SIGTERM."""

    def __init__(self, signum: int) -> None:
        super().__init__("interrupted", code="interrupted")
        self.exit_status = ExitStatus(128 + signum)
