"""What ``pull --dry-run`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxconvert.cli import runtime
from mxconvert.cli.progress import emit
from mxconvert.cli.tables import Table, print_pairs

if TYPE_CHECKING:
    from mxconvert.transfer.pull import PullPreview


def print_preview(preview: PullPreview, *, json: bool) -> None:
    """Print which experts each rank holds, and what would be fetched."""
    if json:
        emit("preview", **preview.to_json())
        return
    if preview.ranks:
        table = Table("rank", "experts", "", right=(0,))
        for rank in preview.ranks:
            table.add(str(rank.rank), rank.experts, "wanted" if rank.wanted else "")
        table.print()
    print_pairs(
        ("artifact", preview.artifact),
        ("part", preview.selection),
        ("whole", f"{preview.files} files, {runtime.size(preview.file_bytes)}"),
        ("of tensors", f"{preview.parts} new files, {runtime.size(preview.part_bytes)}"),
        ("left", f"{preview.left_files} files"),
    )
