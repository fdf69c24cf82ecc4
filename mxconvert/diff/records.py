"""What a comparison found, as frozen records. A and B are the two folders."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mxconvert.statistics import Sums


class Status(StrEnum):
    """How a tensor of one folder relates to that of the same name in the other."""

    SAME = "same"
    BYTES = "bytes differ"
    FORM = "packed in one"
    SHAPE = "dtype or shape differ"
    ONLY_A = "only in A"
    ONLY_B = "only in B"
    UNREAD = "not compared"


DIFFERENT = (Status.ONLY_A, Status.ONLY_B, Status.SHAPE, Status.FORM, Status.BYTES)
"""The statuses that are differences, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor, or a weight with its scales, that differs.

    Attributes:
        name: Of the tensor; ``X.weight`` for a packed weight.
        status: How it differs.
        a: What it is in A, in words such as ``BF16 [64, 32]``; ``None`` if it is not there.
        b: The same in B.
        values: Sums with A's values as x and B's as q, if values were compared.
    """

    name: str
    status: Status
    a: str | None
    b: str | None
    values: Sums | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A member of a JSON document, or a file, that differs; ``None`` where it is absent."""

    path: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class RoleSizes:
    """Tensors and bytes of one role in both folders, and how many tensors differ."""

    role: str
    tensors_a: int
    bytes_a: int
    tensors_b: int
    bytes_b: int
    differing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the folders.

    Attributes:
        path: As given.
        artifact: Its id, ``None`` without a manifest.
        tensors: Stored tensors.
        size_bytes: Their bytes.
        packed: Weights that are packed.
    """

    path: str
    artifact: str | None
    tensors: int
    size_bytes: int
    packed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that was found.

    Attributes:
        a: The first folder.
        b: The second.
        counts: Tensors by status; a packed weight counts once.
        tensors: Those that differ, by status and name.
        moved: Tensors that are in a file of another name; no difference.
        roles: Sizes by role.
        quantization: Members of the configs' quantization_config that differ.
        config: Other members of config.json that differ.
        files: Other files that differ, by SHA-256.
        manifest: Members of the manifests that differ; empty unless both have one.
        values: Sums over all weights whose values were compared.
        not_measured: Weights that differ and whose values could not be compared.
        read: Whether bytes were read; else digests of the tensor lists decided.
    """

    a: Side
    b: Side
    counts: Mapping[Status, int]
    tensors: tuple[Difference, ...]
    moved: int
    roles: tuple[RoleSizes, ...]
    quantization: tuple[Change, ...]
    config: tuple[Change, ...]
    files: tuple[Change, ...]
    manifest: tuple[Change, ...]
    values: Sums | None
    not_measured: int
    read: bool

    @property
    def same(self) -> bool:
        """Whether no difference was found."""
        documents = (self.quantization, self.config, self.files, self.manifest)
        return not self.tensors and not any(documents)
