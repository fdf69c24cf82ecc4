"""What a pull is asked to do, and what it did."""

from __future__ import annotations

from dataclasses import dataclass, field

from mxconvert.selection import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions:
    """How an artifact is fetched.

    Attributes:
        version: Tag or id; ``None`` takes the artifact at the URL, else ``latest``.
        expect_id: The id, or its first digits, that the artifact must have.
        include: Globs of files to fetch now; a later pull fetches the rest.
        sha256: Whether each file's SHA-256 is compared too, before it gets its name.
        overwrite: Whether model files of another origin in the folder are replaced.
        wait: Whether to wait for another pull into the same folder.
        break_lock: Whether to take over the lock of a run on another host.
        direct: Whether to write past the page cache, where the file system can.
        request: Which part to fetch; all by default.
    """

    version: str | None = None
    expect_id: str | None = None
    include: tuple[str, ...] = ()
    sha256: bool = False
    overwrite: bool = False
    wait: bool = False
    break_lock: bool = False
    direct: bool = False
    request: Request = field(default_factory=Request)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """What a pull did.

    Attributes:
        artifact: The artifact's id.
        files: Files of the artifact, or of the part, the manifest included.
        bytes: Their bytes.
        fetched_files: Files that this run finished.
        fetched_bytes: Payload that this run fetched.
        resumed_bytes: What was there already, of an earlier run.
        left_files: Files that are still missing, because of ``include``.
        refetched_chunks: Chunks that arrived wrong and were fetched again.
        was_complete: Whether the folder held all of it before.
        selection: The part in words, ``None``: all.
    """

    artifact: str
    files: int
    bytes: int
    fetched_files: int
    fetched_bytes: int
    resumed_bytes: int
    left_files: int
    refetched_chunks: int
    was_complete: bool = False
    selection: str | None = None
