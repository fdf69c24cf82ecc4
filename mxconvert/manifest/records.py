"""What a manifest and its tensor list say, as frozen records.

Sizes are bytes, ranges of bytes are end-exclusive, ranges of experts and layers are
inclusive pairs, digests are lowercase hexadecimal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mxconvert.digest import CHUNK_SIZE, ChunkDigest, FileDigest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mxconvert.model import FileRole

SCHEMA_VERSION = 1

OptionValue = str | int | bool | None | list[str]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """The program that made the artifact."""

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceIdentity:
    """The checkpoint an artifact was made from.

    Attributes:
        digest: SHA-256 over the canonical JSON of the sorted list of
            ``[path, size, header SHA-256]`` of its weight files.
        files: Number of weight files.
        tensors: Number of tensors accounted for.
        size_bytes: Sum of the weight files' sizes.
    """

    digest: str
    files: int
    tensors: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSpec:
    """How quantized weights are stored.

    ``nibble_order`` is ``even-low``: bits 0-3 of a byte hold the element of even index.
    """

    name: str = "mxfp4-pack-quantized"
    quant_method: str = "compressed-tensors"
    element: str = "e2m1"
    block_size: int = 32
    scale: str = "e8m0"
    scale_bias: int = 127
    nibble_order: str = "even-low"
    scale_rule: str = "mse"


PLAIN_FORMAT = FormatSpec(
    name="bfloat16",
    quant_method="none",
    element="bf16",
    block_size=1,
    scale="none",
    scale_bias=0,
    nibble_order="none",
    scale_rule="none",
)
"""Of an artifact that holds nothing quantized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the model is, as far as a reader of the manifest needs to know."""

    architectures: tuple[str, ...]
    model_type: str | None
    recipe: str
    num_experts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """Counts and bytes of the weights that were treated one way."""

    source_tensors: int
    source_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactTotals:
    """Sums over the artifact.

    ``tensors`` and ``tensor_bytes`` count what is stored; ``files`` and ``file_bytes``
    count every listed file, so not the manifest itself.
    """

    tensors: int
    tensor_bytes: int
    files: int
    file_bytes: int
    quantized: Treatment
    copied: Treatment


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of the artifact and its digests.

    Attributes:
        path: Relative POSIX path.
        size: Bytes.
        role: What it is for.
        experts: First and last routed expert held; ``None`` unless role is ``experts``.
        layers: First and last layer held; ``None`` when no layer is numbered.
        sha256: Of the whole file.
        crc64nvme: Of the whole file.
        chunks: Digests of each chunk of ``Manifest.chunk_size`` bytes, the last shorter.
    """

    path: str
    size: int
    role: FileRole
    sha256: str
    crc64nvme: str
    chunks: tuple[ChunkDigest, ...]
    experts: Span | None = None
    layers: Span | None = None

    def chunk_range(self, index: int, chunk_size: int) -> tuple[int, int]:
        """Return ``[begin, end)`` of a chunk."""
        begin = index * chunk_size
        return begin, min(begin + chunk_size, self.size)

    @classmethod
    def from_digest(
        cls,
        path: str,
        role: FileRole,
        digest: FileDigest,
        *,
        experts: Span | None = None,
        layers: Span | None = None,
    ) -> FileEntry:
        """Build the entry of a file whose bytes were digested while written."""
        return cls(
            path=path,
            size=digest.size_bytes,
            role=role,
            sha256=digest.sha256,
            crc64nvme=digest.crc64nvme,
            chunks=digest.chunks,
            experts=experts,
            layers=layers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that identifies an artifact.

    ``options`` holds every option that changed bytes, as JSON values; names a reader
    does not know are kept. ``extensions`` is room for later versions: never needed to
    tell whether the bytes are right.
    """

    generator: Generator
    source: SourceIdentity
    options: Mapping[str, OptionValue]
    format: FormatSpec
    model: ModelFacts
    totals: ArtifactTotals
    files: tuple[FileEntry, ...]
    chunk_size: int = CHUNK_SIZE
    extensions: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A source tensor, or a part of one, that an output tensor was made from.

    Attributes:
        name: Its name in the source.
        dtype: Its safetensors dtype there.
        shape: The whole tensor's shape there.
        xxh3_128: Over the selected elements' bytes, in the source's row-major order.
        selection: Per dimension ``(start, stop, step)``; ``None`` selects everything.
        axes: Order of the source's dimensions in the output; ``None`` keeps it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    xxh3_128: str
    selection: tuple[tuple[int, int, int], ...] | None = None
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One stored tensor, one line of the tensor list.

    Attributes:
        name: Its name.
        file: Path of the file that holds it.
        dtype: Safetensors dtype.
        shape: Dimensions, row-major.
        begin: First byte, counted from the file's start.
        end: Byte after the last.
        xxh3_128: Over its bytes.
        layer: The layer it belongs to, if numbered.
        experts: First and last routed expert it holds, ``None`` if none.
        sources: What it was made from: the weight first, then what scales it.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    xxh3_128: str
    layer: int | None
    experts: Span | None
    sources: tuple[SourceRecord, ...]
