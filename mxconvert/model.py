"""The records that travel between stages. Frozen, slotted, standard library only.

Offsets are in bytes, ranges are end-exclusive, shapes are row-major ``(out, in)``
for weights, names are those on disk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


BLOCK_SIZE = 32
"""Elements that share one scale."""
REPORT_NAME = ".mxconvert-report.jsonl.zst"
"""The file of quantization errors; it lies beside an artifact and is no part of it."""
PACKED_SUFFIX = ".weight_packed"
SCALE_SUFFIX = ".weight_scale"
CODES_DTYPE = "F4"
"""What codes are called once they are a matrix of elements beside their scales."""


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
        scale: What its elements are multiplied by; ``None`` unless they are scaled FP8, or
            MXFP4 on its way to BF16.
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
    """The scales of an FP8 or MXFP4 weight: one for each block of rows and columns.

    Attributes:
        tensor: The stored scales, ``[ceil(N / rows), ceil(K / columns)]`` elements.
        rows: Rows of the weight that share a scale.
        columns: Columns that do.
    """

    tensor: TensorInfo
    rows: int
    columns: int


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


class ScaleRule(StrEnum):
    """How a block's scale exponent is chosen, see ``docs/explanation/numerics.md``."""

    MSE = "mse"
    EVEN = "even"
    FLOOR = "floor"
    RCEIL = "rceil"


class Unindexed(StrEnum):
    """What happens to stored tensors that the index does not list."""

    INCLUDE = "include"
    SKIP = "skip"


class Scope(StrEnum):
    """Which weights are quantized by default."""

    EXPERTS = "experts"
    LINEAR = "linear"


class Layout(StrEnum):
    """How output tensors are grouped into files."""

    EXPERTS = "experts"
    LAYERS = "layers"
    SOURCE = "source"


class Activations(StrEnum):
    """What the written config says about activations."""

    NONE = "none"
    MXFP8 = "mxfp8"


class Action(StrEnum):
    """What happens to a source tensor."""

    COPY = "copy"
    QUANTIZE = "quantize"
    DEQUANTIZE = "dequantize"


class FileRole(StrEnum):
    """What a file of the artifact is for.

    A rank fetches ``dense`` and every non-weight file, and of ``experts`` files only
    those whose range holds its experts. ``mixed`` holds both (layouts other than
    ``experts``), so every rank needs it.
    """

    DENSE = "dense"
    EXPERTS = "experts"
    MIXED = "mixed"
    INDEX = "index"
    CONFIG = "config"
    TENSORS = "tensors"
    SIDECAR = "sidecar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every option that changes output bytes. All of them are in the manifest."""

    scale_rule: ScaleRule = ScaleRule.MSE
    scope: Scope = Scope.EXPERTS
    layout: Layout = Layout.EXPERTS
    activations: Activations = Activations.NONE
    recipe: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    experts_per_file: int | None = None
    max_file_size: int | None = None
    unindexed: Unindexed | None = None
    base_model: str | None = None


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor to be stored; ``begin`` and ``end`` count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Item:
    """One source tensor and the output tensors made from it, adjacent in the file.

    ``COPY`` makes one output with the same bytes; ``QUANTIZE`` makes the packed codes
    (U8 ``[N, K/2]``, low nibble = even element) and then the scales (U8 ``[N, K/32]``);
    ``DEQUANTIZE`` makes BF16 of scaled FP8 or MXFP4.

    Attributes:
        action: What happens to the source tensor.
        source: The tensor it is made from.
        begin: Where the first output begins, counted from the end of the header.
        layer: Layer number, or ``None``.
        expert: Routed expert number, or ``None``.
    """

    action: Action
    source: TensorInfo
    begin: int
    layer: int | None
    expert: int | None

    @property
    def outputs(self) -> tuple[OutputTensor, ...]:
        """The output tensors; derived, since half a million names take memory."""
        source, begin = self.source, self.begin
        if self.action is Action.COPY:
            end = begin + source.size
            return (OutputTensor(source.name, source.dtype, source.shape, begin, end),)
        if self.action is Action.DEQUANTIZE:
            end = begin + output_size(source, self.action)
            return (OutputTensor(source.name, "BF16", source.shape, begin, end),)
        rows, columns = source.shape
        packed, scale = quantized_names(source.name)
        middle = begin + rows * columns // 2
        end = middle + rows * columns // BLOCK_SIZE
        return (
            OutputTensor(packed, "U8", (rows, columns // 2), begin, middle),
            OutputTensor(scale, "U8", (rows, columns // BLOCK_SIZE), middle, end),
        )

    @property
    def num_outputs(self) -> int:
        """How many output tensors there are."""
        return 2 if self.action is Action.QUANTIZE else 1

    @property
    def size(self) -> int:
        """Bytes of the output tensors together."""
        return output_size(self.source, self.action)

    @property
    def source_tensors(self) -> tuple[TensorInfo, ...]:
        """What is read for it: the tensor, and its scales if it has any."""
        scale = self.source.scale
        return (self.source, scale.tensor) if scale else (self.source,)

    @property
    def source_size(self) -> int:
        """Bytes that are read for it."""
        return sum(tensor.size for tensor in self.source_tensors)


def quantized_names(name: str) -> tuple[str, str]:
    """Return the names of the codes and scales made from ``X.weight``."""
    module = name.removesuffix(".weight")
    return module + PACKED_SUFFIX, module + SCALE_SUFFIX


def output_size(source: TensorInfo, action: Action) -> int:
    """Return the bytes that a source tensor becomes."""
    if action is Action.COPY:
        return source.size
    if action is Action.DEQUANTIZE:
        return 2 * math.prod(source.shape)
    rows, columns = source.shape
    return rows * columns // 2 + rows * columns // BLOCK_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """One weight file of the artifact, fixed to the byte.

    Attributes:
        name: File name in the artifact.
        role: ``dense``, ``experts`` or ``mixed``.
        experts: First and last expert held, inclusive; ``None`` unless role is experts.
        layers: First and last layer held, inclusive; ``None`` when none is numbered.
        items: In the order in which their bytes stand in the file.
        header_size: Bytes before the first tensor, the 8-byte length included.
        header_sha256: SHA-256 of those bytes.
        size: Bytes of the whole file.
    """

    name: str
    role: FileRole
    experts: tuple[int, int] | None
    layers: tuple[int, int] | None
    items: tuple[Item, ...]
    header_size: int
    header_sha256: str
    size: int

    @property
    def num_tensors(self) -> int:
        """How many tensors it will hold."""
        return sum(item.num_outputs for item in self.items)

    @property
    def source_size(self) -> int:
        """Bytes of source tensors that this file is made from."""
        return sum(item.source_size for item in self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts and bytes of one kind of treatment."""

    tensors: int = 0
    source_bytes: int = 0
    output_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that will be written, decided before any payload is read.

    Attributes:
        options: As given, with ``recipe`` resolved.
        recipe: Name of the model family's recipe.
        num_experts: Routed experts per layer (0 for a dense model).
        files: Weight files, in the order in which they are made.
        ignore: Entries of the written config's ``ignore`` list.
        quantized: Totals of what becomes MXFP4.
        copied: Totals of what keeps its values.
        notices: ``(code, message)`` of decisions the user should know.
        dropped: Stored tensors that the output has no use for, and why.
        repacked: Weights that were MXFP4 before and keep their values.
        plain: Whether nothing of the output is quantized.
    """

    options: Options
    recipe: str
    num_experts: int
    files: tuple[OutputFile, ...]
    ignore: tuple[str, ...]
    quantized: Totals
    copied: Totals
    notices: tuple[tuple[str, str], ...] = ()
    dropped: tuple[Skipped, ...] = ()
    repacked: int = 0
    plain: bool = False

    @property
    def dequantized(self) -> Totals:
        """Those of `copied` that are FP8 or MXFP4 in the source and become BF16."""
        items = [
            item for file in self.files for item in file.items if item.action is Action.DEQUANTIZE
        ]
        return Totals(
            tensors=len(items),
            source_bytes=sum(item.source_size for item in items),
            output_bytes=sum(item.size for item in items),
        )

    @property
    def weight_map(self) -> dict[str, str]:
        """Output tensor name -> file name, sorted by name."""
        pairs = [
            (output.name, file.name)
            for file in self.files
            for item in file.items
            for output in item.outputs
        ]
        return dict(sorted(pairs))

    @property
    def num_tensors(self) -> int:
        """How many tensors will be stored."""
        return sum(file.num_tensors for file in self.files)

    @property
    def index(self) -> dict[str, Any]:
        """The content of ``model.safetensors.index.json``."""
        return {
            "metadata": {"total_size": self.total_size},
            "weight_map": self.weight_map,
        }

    @property
    def total_size(self) -> int:
        """Sum of stored tensor bytes: the index's ``metadata.total_size``."""
        return self.quantized.output_bytes + self.copied.output_bytes

    @property
    def file_bytes(self) -> int:
        """Sum of weight file sizes, headers included."""
        return sum(file.size for file in self.files)
