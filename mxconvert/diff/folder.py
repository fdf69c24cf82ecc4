"""One of the two folders: its headers, its manifest, and what its tensor list promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.errors import LocalError, SourceError
from mxconvert.manifest import (
    MANIFEST_NAME,
    TENSORS_NAME,
    Manifest,
    artifact_id,
    iter_tensors,
    parse_manifest,
)
from mxconvert.model import BLOCK_SIZE, PACKED_SUFFIX, SCALE_SUFFIX
from mxconvert.plan.logical import logical_tensors
from mxconvert.provenance import recipe_of
from mxconvert.recipes.families import DENSE
from mxconvert.source import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mxconvert.model import Checkpoint, TensorInfo
    from mxconvert.recipes import Recipe

_BYTE = "U8"
_RANK = 2


@dataclass(frozen=True, slots=True)
class Unit:
    """What is compared as one: a tensor, perhaps with its scales, or codes and scales."""

    name: str
    parts: tuple[TensorInfo, ...]

    @property
    def packed(self) -> bool:
        """Whether it is a packed weight."""
        return len(self.parts) > 1 and self.parts[0].scale is None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its values."""
        shape = self.parts[0].shape
        return (*shape[:-1], shape[-1] * 2) if self.packed else shape

    @property
    def size(self) -> int:
        """Stored bytes."""
        return sum(part.size for part in self.parts)

    @property
    def form(self) -> str:
        """What it is, in words."""
        if self.packed:
            return f"MXFP4 {list(self.shape)}"
        return " x ".join(f"{part.dtype} {list(part.shape)}" for part in self.parts)


@dataclass(frozen=True, slots=True)
class Folder:
    """An opened folder.

    Attributes:
        checkpoint: Its headers.
        units: The tensors of the model by the name of the weight: of a checkpoint those that
            an artifact of it has, one by one where it stores them together.
        manifest: What an artifact says of itself.
        artifact: Its id.
        digests: XXH3-128 of each stored tensor by name, as the tensor list says.
        recipe: What its tensors mean.
    """

    checkpoint: Checkpoint
    units: Mapping[str, Unit]
    manifest: Manifest | None
    artifact: str | None
    digests: Mapping[str, str]
    recipe: Recipe


def open_folder(root: Path, other: Path) -> Folder:
    """Read a folder's headers, and manifest and tensor list if it has them.

    Args:
        root: The folder.
        other: The one that it is compared with: if that is an artifact, and this a checkpoint,
            its tensors are what the artifact's recipe makes of them.

    Raises:
        SourceError: Headers, index or config are damaged.
        VerificationError: Manifest or tensor list are.
        LocalError: Something cannot be read.
    """
    checkpoint = open_checkpoint(root)
    manifest, raw = _manifest(root)
    listed = None if manifest is None else _read(root / TENSORS_NAME)
    recipe = recipe_of(checkpoint, manifest or _manifest(other)[0]) or DENSE
    tensors = checkpoint.tensors if manifest is not None else _of_the_model(checkpoint, recipe)
    return Folder(
        checkpoint,
        pair_units(tensors),
        manifest,
        None if raw is None else artifact_id(raw),
        {} if listed is None else {r.name: r.xxh3_128 for r in iter_tensors(listed)},
        recipe,
    )


def _manifest(root: Path) -> tuple[Manifest, bytes] | tuple[None, None]:
    raw = _read(root / MANIFEST_NAME)
    if raw is None:
        return None, None
    return parse_manifest(raw, str(root / MANIFEST_NAME)), raw


def _of_the_model(checkpoint: Checkpoint, recipe: Recipe) -> Mapping[str, TensorInfo]:
    try:
        return logical_tensors(checkpoint.tensors, checkpoint.config, recipe).tensors
    except SourceError:  # of no family that is known: as stored
        return checkpoint.tensors


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LocalError.unreadable(path, error) from error


def pair_units(tensors: Mapping[str, TensorInfo]) -> dict[str, Unit]:
    """Return what is stored, codes and scales that fit each other as one weight."""
    units = {}
    for name, tensor in tensors.items():
        module, end = _split(name)
        codes = tensors.get(module + PACKED_SUFFIX) if end else None
        scales = tensors.get(module + SCALE_SUFFIX) if end else None
        if codes is None or scales is None or not _fit(codes, scales):
            units[name] = Unit(name, (tensor, tensor.scale.tensor) if tensor.scale else (tensor,))
        elif end == PACKED_SUFFIX:
            weight = f"{module}.weight"
            units[weight] = Unit(weight, (codes, scales))
    return units


def _split(name: str) -> tuple[str, str]:
    for end in (PACKED_SUFFIX, SCALE_SUFFIX):
        if name.endswith(end):
            return name.removesuffix(end), end
    return name, ""


def _fit(codes: TensorInfo, scales: TensorInfo) -> bool:
    if not codes.dtype == scales.dtype == _BYTE or len(codes.shape) < _RANK:
        return False
    *rows, columns = codes.shape
    return scales.shape == (*rows, columns * 2 // BLOCK_SIZE) and columns * 2 % BLOCK_SIZE == 0
