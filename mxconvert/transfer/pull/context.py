"""What the files of a pull share."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from mxconvert.events import Reporter
    from mxconvert.remote import RemoteArtifact
    from mxconvert.store import Client
    from mxconvert.transfer.pull.journal import PullJournal


@dataclass(slots=True)
class PullTally:
    """What a pull has done; shared between threads."""

    files: int = 0
    resumed_bytes: int = 0
    refetched_chunks: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, files: int = 0, resumed_bytes: int = 0, refetched_chunks: int = 0) -> None:
        """Add to the counts."""
        with self._lock:
            self.files += files
            self.resumed_bytes += resumed_bytes
            self.refetched_chunks += refetched_chunks


@dataclass(frozen=True, slots=True)
class PullContext:
    """What all files of a pull share.

    Attributes:
        client: At the URL.
        artifact: What is pulled.
        target: The folder.
        journal: Of the folder.
        sha256: Whether to compare each file's SHA-256 as well.
        report: Told about progress.
        tally: Counts what was done.
    """

    client: Client
    artifact: RemoteArtifact
    target: Path
    journal: PullJournal
    sha256: bool
    report: Reporter
    tally: PullTally

    @property
    def chunk_size(self) -> int:
        """Bytes of a digest chunk."""
        return self.artifact.manifest.chunk_size
