"""Process-wide things of the command line: signals, streams, errors, units."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mxconvert.errors import Interrupted, MxConvertError, UsageError
from mxconvert.stop import StopToken

if TYPE_CHECKING:
    from types import FrameType

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)$", re.ASCII)
_DURATION = re.compile(r"(?:(\d+)h)?\s*(?:(\d+)m(?:in)?)?\s*(?:(\d+(?:\.\d+)?)s?)?", re.ASCII)
_MINUTE, _HOUR = 60, 3600


@dataclass
class State:
    """What options of the current command ask of the process."""

    debug: bool = False
    json: bool = False
    stop: StopToken = field(default_factory=StopToken)


state = State()


# ---------------------------------------------------------------------------- signals


def install_signal_handlers() -> None:
    """Turn the first SIGINT or SIGTERM into an orderly end, the second into an exit."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _on_signal)


def _on_signal(signum: int, _frame: FrameType | None) -> None:
    if state.stop.signum is not None:
        os._exit(128 + signum)
    armed = state.stop.armed
    state.stop.set(signum)
    if not armed:
        raise Interrupted(signum)


# ----------------------------------------------------------------------------- output


def print_error(error: MxConvertError) -> None:
    """Write one message to stderr: what, and what to try next."""
    if state.json:
        record = {
            "type": "error",
            "schema_version": 1,
            "code": error.code,
            "exit_status": int(error.exit_status),
            "message": error.message,
            "hint": error.hint,
        }
        print(json.dumps(record), file=sys.stderr)
        return
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"\nhint: {error.hint}", file=sys.stderr)


def print_json(document: Any, *, indent: int | None = 2) -> None:
    """Write one JSON document to stdout."""
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    if not _can_print(text):
        text = json.dumps(document, indent=indent)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def open_missing_streams() -> None:
    """Put /dev/null in the place of standard streams that were closed before the start.

    Otherwise the next file that is opened gets the number of one of them, and whatever a
    library writes to its standard error goes into that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def tolerate_any_text() -> None:
    """Let stdout escape what its encoding lacks, as stderr does; names can be anything."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


# ------------------------------------------------------------------------------ units


def parse_size(text: str, option: str = "") -> int:
    """Return the bytes of ``256MiB``, ``5GB`` or ``1000``.

    Args:
        text: What was typed.
        option: The option, for the message.

    Raises:
        UsageError: Not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None or not float(match[1]):
        raise UsageError(
            f"{option} {text!r} is not a size".strip(), hint="write for example 256MiB or 5GB"
        )
    return int(float(match[1]) * factor)


def parse_duration(text: str, option: str = "") -> float:
    """Return the seconds of ``30s``, ``5m``, ``1h30m`` or ``90``.

    Args:
        text: What was typed.
        option: The option, for the message.

    Raises:
        UsageError: Not a time span, or none at all.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    hours, minutes, seconds = (float(part or 0) for part in match.groups()) if match else (0, 0, 0)
    total = hours * _HOUR + minutes * _MINUTE + seconds
    if not total:
        raise UsageError(
            f"{option} {text!r} is not a time span".strip(),
            hint="write for example 30s, 5m or 1h30m",
        )
    return total


def size(num_bytes: float) -> str:
    """Return bytes for people, in decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(num_bytes) < 1000 or unit == "TB":  # noqa: PLR2004
            digits = 0 if unit == "B" else 2
            return f"{num_bytes:.{digits}f} {unit}"
        num_bytes /= 1000
    raise AssertionError


def count(number: float) -> str:
    """Return a parameter count for people: 2.78 T, 104.2 B, 1.5 M."""
    for unit in ("", " K", " M", " B", " T"):
        if abs(number) < 1000 or unit == " T":  # noqa: PLR2004
            return f"{number:.0f}" if not unit else f"{number:.2f}{unit}"
        number /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """Return a time span for people: 42.1 s, 3 min 05 s, 2 h 10 min."""
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02d} min"
