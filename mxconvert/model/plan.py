"""What will be written, fixed to the byte."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from mxconvert.model.names import BLOCK_SIZE, PACKED_SUFFIX, SCALE_SUFFIX

if TYPE_CHECKING:
    from mxconvert.model.options import Options
    from mxconvert.model.source import Skipped, TensorInfo


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
