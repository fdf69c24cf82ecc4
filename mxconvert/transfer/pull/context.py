"""What the files of a pull share."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mxconvert.events import Notice
from mxconvert.transfer.pull.output import ALIGNMENT

if TYPE_CHECKING:
    from pathlib import Path

    from mxconvert.events import Reporter
    from mxconvert.remote import RemoteArtifact
    from mxconvert.store import Client
    from mxconvert.transfer.pull.journal import PullJournal
    from mxconvert.transfer.pull.subset import Wanted


@dataclass(slots=True)
class PullTally:
    """What a pull has done; shared between threads."""

    files: int = 0
    resumed_bytes: int = 0
    refetched_chunks: int = 0
    told_not_direct: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, files: int = 0, resumed_bytes: int = 0, refetched_chunks: int = 0) -> None:
        """Add to the counts."""
        with self._lock:
            self.files += files
            self.resumed_bytes += resumed_bytes
            self.refetched_chunks += refetched_chunks

    def is_first_not_direct(self) -> bool:
        """Whether this is the first call."""
        with self._lock:
            is_first, self.told_not_direct = not self.told_not_direct, True
        return is_first


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
        direct: Whether to write past the page cache.
        wanted: What the folder shall hold.
    """

    client: Client
    artifact: RemoteArtifact
    target: Path
    journal: PullJournal
    sha256: bool
    report: Reporter
    tally: PullTally
    direct: bool
    wanted: Wanted

    def tell_not_direct(self) -> None:
        """Report, once, that direct writes cannot be had here."""
        if self.tally.is_first_not_direct():
            self.report(
                Notice(
                    severity="warning",
                    code="not-direct",
                    message=f"{self.target}: --direct has no effect: the file system takes no "
                    f"such writes in multiples of {ALIGNMENT} bytes, or the artifact's chunks, "
                    f"of {self.chunk_size} bytes, are none",
                )
            )

    @property
    def chunk_size(self) -> int:
        """Bytes of a digest chunk."""
        return self.artifact.manifest.chunk_size
