"""What a verification is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.errors import UsageError
from mxconvert.remote import check_id
from mxconvert.sample import Sample
from mxconvert.verify.report import Level

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_MAX_ERROR = 0.25
"""Relative RMSE of a tensor beyond which it fails; MXFP4 of usual weights has 0.11 to 0.13."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """How deep to look, and at what.

    Attributes:
        level: ``structure`` reads headers, ``digest`` every byte, ``numeric`` the source too.
        source: The source checkpoint's folder; needed at level numeric.
        sample: ``N/T``: at level numeric compare every T-th weight, beginning with the
            N-th. Default: all, or a stated sample of a large source. At level digest
            compare every T-th chunk, counted over all files in the manifest's order.
        strict: Whether harmless extra files fail too.
        ignore: Globs of extra files and folders to leave aside.
        expect_id: The artifact's id, or its first 16 to 63 digits.
        manifest: Check against this manifest file instead of the folder's own.
        foreign: Whether another tool made the folder, so that it has no manifest.
        max_error: Largest relative RMSE of a tensor that is measured, not recomputed.
        jobs: Threads; ``None`` chooses.
    """

    level: Level = Level.DIGEST
    source: Path | None = None
    sample: str | None = None
    strict: bool = False
    ignore: tuple[str, ...] = ()
    expect_id: str | None = None
    manifest: Path | None = None
    foreign: bool = False
    max_error: float = DEFAULT_MAX_ERROR
    jobs: int | None = None

    def check(self) -> None:
        """Refuse options that make no sense.

        Raises:
            UsageError: Saying which and why.
        """
        if self.sample is not None:
            Sample.parse(self.sample)
            if self.level is Level.STRUCTURE:
                raise UsageError(
                    "--sample reads a part of the bytes, and this level reads none",
                    hint="leave one of them out: --sample N/T checks everything of the "
                    "structure as well",
                    code="contradiction",
                )
        if self.level is Level.NUMERIC and self.source is None:
            raise UsageError(
                "--level numeric makes every weight again from the source and needs --source",
                hint="add --source with the folder of the checkpoint it was made from",
                code="no-source",
            )
        if self.level is not Level.NUMERIC and self.source is not None:
            raise UsageError(
                f"level {self.level} compares with no source, one was given",
                hint="ask for level numeric, which does all that the other levels do",
                code="contradiction",
            )
        if self.expect_id is not None:
            check_id(self.expect_id)
        if self.foreign and (self.expect_id or self.manifest):
            raise UsageError(
                "--foreign is for folders without a manifest, --expect-id and --manifest need one",
                code="contradiction",
            )
        if self.jobs is not None and self.jobs < 1:
            raise UsageError(f"--jobs {self.jobs}: expected at least 1", code="bad-jobs")
        if not self.max_error > 0:
            raise UsageError(f"--max-error {self.max_error}: expected more than 0")
