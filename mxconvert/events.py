"""What a long command tells its observer while it works.

The library never prints. It hands these records to a `Reporter`; the command line
renders them as a progress bar, plain lines or JSON lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Work begins. ``total_bytes`` is what progress counts up to."""

    what: str
    total_bytes: int
    total_files: int
    resumed_bytes: int = 0
    resumed_files: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Advanced:
    """``num_bytes`` more bytes are done."""

    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFinished:
    """A file is complete under its final name (quantize) or checked (verify)."""

    path: str
    size_bytes: int
    ok: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something the user should know; not an error.

    ``severity`` is ``"info"`` or ``"warning"``; ``code`` is stable for machines.
    """

    severity: str
    code: str
    message: str


Event = Started | Advanced | FileFinished | Notice


class Reporter(Protocol):
    """Receives events. May be called from several threads at once."""

    def __call__(self, event: Event) -> None:
        """Take one event; must not raise."""


def ignore(event: Event) -> None:
    """Drop every event: the reporter of library callers that do not care."""
