"""What a push is asked to do, and what it did."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """How an artifact is published.

    Attributes:
        part_size: Bytes of a part that the user asks for; ``None`` chooses.
        tags: Tags to move to the artifact.
        latest: Whether the tag ``latest`` is moved too.
        flat: Write to the URL itself instead of a folder named by the id.
        reuse: Whether files that another version holds are copied inside the store.
    """

    part_size: int | None = None
    tags: tuple[str, ...] = ()
    latest: bool = True
    flat: bool = False
    reuse: bool = True


class Outcome(StrEnum):
    """How a file came to be at the store."""

    SENT = "sent"
    COPIED = "copied"
    PRESENT = "present"


@dataclass(slots=True)
class Tally:
    """Files and bytes by outcome, and which were there already; shared between threads."""

    files: Counter[Outcome] = field(default_factory=Counter)
    bytes: Counter[Outcome] = field(default_factory=Counter)
    present: set[str] = field(default_factory=set)
    resumed_bytes: int = 0
    told: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, path: str, outcome: Outcome, size: int, resumed: int = 0) -> None:
        """Count a finished file; ``resumed`` bytes of it an earlier run had sent."""
        with self._lock:
            if outcome is Outcome.PRESENT:
                self.present.add(path)
            self.files[outcome] += 1
            self.bytes[outcome] += size
            self.resumed_bytes += resumed

    def first_telling(self) -> bool:
        """Whether nobody has asked this before."""
        with self._lock:
            first, self.told = not self.told, True
        return first


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """What a push did.

    Attributes:
        artifact: The artifact's id.
        url: Where it lies now.
        files: Files of the artifact, the manifest included.
        bytes: Their bytes.
        sent_files: Of these, files that were sent.
        sent_bytes: And their bytes, less what an earlier run had sent.
        copied_files: Files copied from another version inside the store.
        copied_bytes: And their bytes.
        present_files: Files that were there already.
        present_bytes: And their bytes.
        tags: Tags that point at the artifact now because of this push.
    """

    artifact: str
    url: str
    files: int
    bytes: int
    sent_files: int
    sent_bytes: int
    copied_files: int
    copied_bytes: int
    present_files: int
    present_bytes: int
    tags: tuple[str, ...]
