"""What a pull would fetch, without a folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxconvert.placement import format_experts
from mxconvert.remote import find_artifact
from mxconvert.selection import plan_selection
from mxconvert.transfer.pull.subset import TensorList

if TYPE_CHECKING:
    from mxconvert.manifest import Manifest
    from mxconvert.selection import Request
    from mxconvert.store import Client
    from mxconvert.transfer.pull.options import PullOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPreview:
    """The experts of a rank, and whether they are asked for."""

    rank: int
    experts: str
    wanted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPreview:
    """What a pull into an empty folder would fetch.

    Attributes:
        artifact: The artifact's id.
        selection: The part, in words.
        placement: How experts are dealt out to ranks, ``None`` without ranks.
        ranks: All ranks of the group.
        files: Files that are fetched as they are.
        file_bytes: Their bytes.
        parts: New files, of some tensors of others.
        part_bytes: Bytes fetched for them.
        joint_bytes: Bytes of tensors that hold other experts as well.
        left_files: Files of which nothing is fetched.
    """

    artifact: str
    selection: str
    placement: str | None
    ranks: tuple[RankPreview, ...]
    files: int
    file_bytes: int
    parts: int
    part_bytes: int
    joint_bytes: int
    left_files: int

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


def preview_pull(client: Client, options: PullOptions) -> PullPreview:
    """Return what a pull would fetch.

    Raises:
        UsageError: A part that does not exist.
        StoreError: No such version, or the store fails.
    """
    artifact = find_artifact(client, options.version, options.expect_id)
    manifest, request = artifact.manifest, options.request
    selection = request.resolve(manifest)
    plan = plan_selection(manifest, selection, TensorList(client, artifact, Path()))
    parts = {part.source.path for part in plan.parts}
    taken = len(plan.files) + len(parts) + (plan.index is not None)
    ranks = request.ranks_of(manifest.model.num_experts)
    return PullPreview(
        artifact=artifact.id,
        selection="everything" if selection.is_everything else selection.describe(),
        placement=None if ranks is None else str(ranks.placement),
        ranks=_ranks(request, manifest),
        files=len(plan.files) + (plan.index is not None),
        file_bytes=sum(entry.size for entry in plan.files)
        + (0 if plan.index is None else plan.index.size),
        parts=len(plan.parts),
        part_bytes=sum(part.num_bytes for part in plan.parts),
        joint_bytes=plan.joint_bytes,
        left_files=len(manifest.files) - taken,
    )


def _ranks(request: Request, manifest: Manifest) -> tuple[RankPreview, ...]:
    ranks = request.ranks_of(manifest.model.num_experts)
    if ranks is None:
        return ()
    wanted = request.wanted_ranks(ranks)
    return tuple(
        RankPreview(rank=n, experts=format_experts(ranks.experts(n)), wanted=n in wanted)
        for n in range(ranks.world_size)
    )
