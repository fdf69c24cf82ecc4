"""What is in a source: tensors, parts of them, files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Selection: TypeAlias = "Sequence[tuple[int, int, int]]"
"""Per dimension ``(start, stop, step)``, as `range` takes them."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor, or a part of one that is treated as a tensor.

    Attributes:
        name: Its name in the file, or what the part is called in the output.
        dtype: The safetensors dtype string, for example ``BF16``.
        shape: Dimensions, row-major; ``()`` is a scalar.
        file: The file's path relative to the checkpoint folder, POSIX form.
        offset: Where its first byte lies in that file, counted from the file's start.
        size: Bytes that it has, whatever lies between them.
        view: Which part of which stored tensor it is; ``None`` for a whole one.
        scale: What its elements are multiplied by; ``None`` unless they are scaled FP8,
            INT4, or MXFP4 on its way to BF16.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    size: int
    view: View | None = None
    scale: BlockScale | None = None

    @property
    def transposed(self) -> bool:
        """Whether it is stored input dimension first, against the order in the output."""
        return self.view is not None and self.view.axes is not None

    @property
    def stored(self) -> TensorInfo:
        """The stored tensor that it is, or is a part of."""
        return self if self.view is None else self.view.stored


@dataclass(frozen=True, slots=True)
class View:
    """Which part of a stored tensor, and how to read it; see `mxconvert.views`.

    The part is read as ``rows`` runs, ``pitch`` bytes from one to the next, of ``columns``
    elements that lie ``step`` elements apart.

    Attributes:
        stored: The stored tensor.
        selection: Per stored dimension ``(start, stop, step)``.
        axes: Order of the stored dimensions in the output if it is transposed, else ``None``.
        rows: Runs of elements.
        pitch: Bytes from the begin of a run to that of the next.
        columns: Elements of a run.
        step: Stored elements from one element of a run to the next.
    """

    stored: TensorInfo
    selection: tuple[tuple[int, int, int], ...]
    axes: tuple[int, ...] | None
    rows: int
    pitch: int
    columns: int
    step: int


@dataclass(frozen=True, slots=True)
class BlockScale:
    """The scales of an FP8, MXFP4 or INT4 weight: one for each block of rows and columns.

    Attributes:
        tensor: The stored scales, ``[ceil(N / rows), ceil(K / columns)]`` elements.
        rows: Rows of the weight that share a scale.
        columns: Columns that do.
        declared: Stored I64 ``[2]`` that state the weight's shape; ``None`` if none do.
    """

    tensor: TensorInfo
    rows: int
    columns: int
    declared: TensorInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A weight file of the source and what identifies it.

    ``header_sha256`` covers the 8-byte length and the JSON header. ``mtime_ns`` and
    ``inode`` notice a change during or between runs; they never reach an output.
    """

    path: str
    size: int
    header_sha256: str
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """A file that travels with the weights byte for byte (tokenizer, licence, code)."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file or tensor of the source that is left out, and why."""

    name: str
    reason: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A source folder after preflight: every header read and checked, no payload read.

    Attributes:
        root: The folder.
        files: Weight files that hold the tensors, sorted by path.
        tensors: Every tensor to account for, by name, sorted by name.
        config: The parsed config.json.
        sidecars: Files copied byte for byte, sorted by path.
        skipped_files: Files left out.
        dropped_tensors: Stored tensors left out (duplicates, unindexed copies).
        notices: ``(code, message)`` of things the user should know.
    """

    root: Path
    files: tuple[SourceFile, ...]
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    sidecars: tuple[Sidecar, ...] = ()
    skipped_files: tuple[Skipped, ...] = ()
    dropped_tensors: tuple[Skipped, ...] = ()
    notices: tuple[tuple[str, str], ...] = ()
