"""What a verification found, as records and as JSON."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

SCHEMA_VERSION = 1
SHOWN_PER_FILE = 1000
"""Findings of one kind in one file that are kept; more are counted."""


class Level(StrEnum):
    """How deep to look; each level includes those before it."""

    STRUCTURE = "structure"
    DIGEST = "digest"
    NUMERIC = "numeric"

    @property
    def depth(self) -> int:
        """0, 1 or 2."""
        return list(Level).index(self)


class Check(StrEnum):
    """The part of a verification that a finding comes from."""

    MANIFEST = "manifest"
    FILES = "files"
    STRUCTURE = "structure"
    CONFIG = "config"
    DIGEST = "digest"
    NUMERIC = "numeric"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that makes the artifact fail.

    Attributes:
        check: The part that found it.
        code: Stable identifier, listed in ``docs/reference/verify.md``.
        message: What, expected against found; complete without the other fields.
        path: The file concerned, relative to the artifact.
        tensor: The tensor concerned.
        expected: What should be there.
        found: What is there.
    """

    check: Check
    code: str
    message: str
    path: str | None = None
    tensor: str | None = None
    expected: str | None = None
    found: str | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """Something the user should know that does not make the artifact fail."""

    code: str
    message: str
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """Quantization error of decoded weights against the source.

    The relative RMSE of a tensor is sqrt(sum((decoded - source)^2) / sum(source^2)).
    """

    tensors: int
    mean: float
    maximum: float
    worst_tensor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The outcome of a verification.

    Attributes:
        target: The folder or URL, as given.
        level: The level asked for.
        artifact_id: SHA-256 of the manifest that was checked against, if there is one.
        findings: Everything that makes it fail, in a stable order.
        notes: Everything worth knowing that does not.
        not_checked: What this run did not look at, in words.
        checked: ``(path, check)`` pairs that were looked at, sorted.
        counts: Numbers of files, tensors and bytes, by name.
        ignored: The patterns of files that were left aside.
        strict: Whether every extra file fails.
        error: Quantization error, where it was measured.
        location: URL of the artifact's folder at a store: with a slash and a path, the URL
            of a file.
    """

    target: str
    level: Level
    artifact_id: str | None
    findings: tuple[Finding, ...]
    notes: tuple[Note, ...]
    not_checked: tuple[str, ...]
    checked: tuple[tuple[str, Check], ...]
    counts: dict[str, int]
    ignored: tuple[str, ...] = ()
    strict: bool = False
    error: ErrorSummary | None = None
    location: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``verify --json`` prints, see the reference."""
        return {
            "schema_version": SCHEMA_VERSION,
            "type": "verify",
            "ok": self.ok,
            "target": self.target,
            "location": self.location,
            "level": self.level.value,
            "artifact_id": self.artifact_id,
            "strict": self.strict,
            "ignored": list(self.ignored),
            "counts": dict(sorted(self.counts.items())),
            "findings": [
                {
                    "check": item.check.value,
                    "code": item.code,
                    "path": item.path,
                    "tensor": item.tensor,
                    "expected": item.expected,
                    "found": item.found,
                    "message": item.message,
                }
                for item in self.findings
            ],
            "notes": [
                {"code": note.code, "path": note.path, "message": note.message}
                for note in self.notes
            ],
            "not_checked": list(self.not_checked),
            "error": _error_json(self.error),
        }


def _error_json(error: ErrorSummary | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {
        "tensors": error.tensors,
        "relative_rmse_mean": error.mean,
        "relative_rmse_max": error.maximum,
        "worst_tensor": error.worst_tensor,
    }


def printable(text: str) -> str:
    """Escape what a name may smuggle into a terminal or break an encoder with."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


_ORDER = {check: position for position, check in enumerate(Check)}


@dataclass(slots=True)
class Collector:
    """Gathers what the parts of a verification say; may be shared between threads."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    checked: set[tuple[str, Check]] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    error: ErrorSummary | None = None
    _kinds: Counter[tuple[Check, str, str | None]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(
        self,
        check: Check,
        code: str,
        message: str,
        *,
        path: str | None = None,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        """Record a finding; past `SHOWN_PER_FILE` of a kind in a file, only count it.

        ``expected`` and ``found`` are appended to the message when both are given.
        """
        if expected is not None and found is not None:
            message = f"{message}: expected {expected}, found {found}"
        finding = Finding(
            check=check,
            code=code,
            message=printable(message),
            path=None if path is None else printable(path),
            tensor=None if tensor is None else printable(tensor),
            expected=None if expected is None else printable(str(expected)),
            found=None if found is None else printable(str(found)),
        )
        with self._lock:
            self.counts["findings"] += 1
            self._kinds[check, code, path] += 1
            if self._kinds[check, code, path] <= SHOWN_PER_FILE:
                self.findings.append(finding)

    def note(self, code: str, message: str, path: str | None = None) -> None:
        """Record something that does not fail."""
        with self._lock:
            shown = None if path is None else printable(path)
            self.notes.append(Note(code, printable(message), shown))

    def skip(self, what: str) -> None:
        """Record that something was not looked at."""
        with self._lock:
            if what not in self.not_checked:
                self.not_checked.append(what)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a number of the report."""
        with self._lock:
            self.counts[name] += amount

    def look(self, path: str, check: Check) -> None:
        """Record that ``check`` looked at ``path``."""
        with self._lock:
            self.checked.add((printable(path), check))

    def failed_paths(self) -> set[str]:
        """Return the files with at least one finding."""
        with self._lock:
            return {path for (_, _, path) in self._kinds if path is not None}

    def ordered(self) -> tuple[Finding, ...]:
        """Return the findings by check, path and tensor, with a line for those cut off."""
        findings = list(self.findings)
        for (check, code, path), total in self._kinds.items():
            if total > SHOWN_PER_FILE:
                more = f"{path}: {total - SHOWN_PER_FILE} more findings of kind {code}"
                findings.append(Finding(check=check, code=code, message=more, path=path))
        return tuple(
            sorted(findings, key=lambda f: (_ORDER[f.check], f.path or "", f.code, f.tensor or ""))
        )
