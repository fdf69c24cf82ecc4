"""From a line of a tensor list back to what it was made from: a tensor of the source, or a part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mxconvert.errors import SourceError
from mxconvert.fp8 import FP8_DTYPES
from mxconvert.model import BLOCK_SIZE, CODES_DTYPE, PACKED_SUFFIX, BlockScale
from mxconvert.plan.int4 import WORD_DTYPE, int4_weight
from mxconvert.plan.scales import block_scale
from mxconvert.recipes import find_recipe
from mxconvert.safetensors_format import num_elements
from mxconvert.views import view_of, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mxconvert.manifest import Manifest, SourceRecord, TensorRecord
    from mxconvert.model import Checkpoint, TensorInfo
    from mxconvert.recipes import Recipe

    Selected = tuple[tuple[int, int, int], ...]

_MATRIX = 2
_CODES = frozenset({"U8", "I8"})
_QUANTIZABLE = frozenset({"BF16", "F16", "F32"}) | FP8_DTYPES


def recipe_of(checkpoint: Checkpoint, manifest: Manifest | None) -> Recipe | None:
    """Return the recipe that an artifact was made with; without a manifest that of the family.

    Args:
        checkpoint: The artifact's headers, or its source's.
        manifest: The artifact's.
    """
    if manifest is None:
        return find_recipe(checkpoint.config)
    stated = manifest.options.get("expert_weights")
    templates = [str(text) for text in stated] if isinstance(stated, list) else []
    return find_recipe(
        checkpoint.config,
        manifest.model.recipe,
        expert_weights=templates,
        tensors=checkpoint.tensors,
    )


class UnknownOriginError(Exception):
    """A source lacks what a tensor was made from, or has it in another form.

    Attributes:
        expected: dtype and shape that the tensor list states, if it is these that differ.
        found: Those of the source.
        absent: Whether the source has no tensor of the name.
    """

    def __init__(
        self, what: str, expected: object = None, found: object = None, *, absent: bool = False
    ) -> None:
        super().__init__(what)
        self.expected = expected
        self.found = found
        self.absent = absent


def is_repacked(codes: TensorRecord) -> bool:
    """Whether the codes of a weight were codes in the source already."""
    dtypes = {source.dtype for source in codes.sources}
    return bool(dtypes) and not dtypes & _QUANTIZABLE


def is_decoded(record: TensorRecord) -> bool:
    """Whether a tensor is the BF16 of what was a pair of codes and scales."""
    pair = len(record.sources) == _MATRIX and record.sources[0].dtype in _CODES
    return pair and record.dtype == "BF16" and len(record.shape) == _MATRIX


@dataclass(frozen=True, slots=True)
class Origins:
    """Finds the origins of stored tensors in a source.

    Attributes:
        tensors: The source's tensors.
        config: Its config.json: it states the size of the blocks that share an FP8 scale.
    """

    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]

    def weight(self, codes: TensorRecord) -> TensorInfo:
        """Return the matrix that codes and scales were made from.

        Raises:
            UnknownOriginError: The source has it not, or in another form.
        """
        *rows, half = codes.shape
        shape = (*rows, half * 2)
        if len(shape) != _MATRIX or shape[-1] % BLOCK_SIZE:
            raise UnknownOriginError("its shape is not that of a packed weight")
        return self._tensor(codes, shape)

    def copied(self, record: TensorRecord) -> TensorInfo:
        """Return what a tensor was copied or, with a scale, dequantized from.

        Raises:
            UnknownOriginError: The source has it not, or in another form.
        """
        if is_decoded(record):
            return self._codes(record)
        return self._tensor(record, record.shape)

    def part(self, record: SourceRecord) -> TensorInfo:
        """Return the bytes of a source that a record covers, as a tensor of any shape.

        Raises:
            UnknownOriginError: The source has it not, or in another form.
        """
        selection = record.selection or whole(record.shape)
        lengths = [len(range(*some)) for some in selection]
        while len(lengths) > _MATRIX and lengths[0] == 1:
            del lengths[0]
        return self._part(replace(record, axes=None), tuple(lengths))

    def _codes(self, record: TensorRecord) -> TensorInfo:
        """Return the codes of what was MXFP4 as a matrix of their elements."""
        rows, columns = record.shape
        part, scale = self._part(record.sources[0], (rows, columns // 2)), record.sources[1]
        stored = BlockScale(self.part(scale), 1, BLOCK_SIZE)
        if stored.tensor.size * BLOCK_SIZE != rows * columns or columns % BLOCK_SIZE:
            raise UnknownOriginError(f"its size does not follow from {scale.name!r}")
        return replace(part, dtype=CODES_DTYPE, shape=record.shape, scale=stored)

    def _tensor(self, record: TensorRecord, shape: tuple[int, ...]) -> TensorInfo:
        if len(record.sources) not in (1, _MATRIX):
            raise UnknownOriginError(f"it is made from {len(record.sources)} tensors")
        if self._is_int4(record):
            return self._integers(record, shape)
        tensor = self._part(record.sources[0], shape)
        if len(record.sources) == 1:
            return tensor
        if tensor.dtype not in FP8_DTYPES or len(shape) != _MATRIX:
            raise UnknownOriginError(f"{tensor.dtype}{list(shape)} has no scales")
        try:
            scale = block_scale(tensor, self.part(record.sources[1]), self.config)
        except SourceError as error:
            raise UnknownOriginError(error.message) from error
        return replace(tensor, scale=scale)

    def _is_int4(self, record: TensorRecord) -> bool:
        first = record.sources[0]
        return len(record.sources) == _MATRIX and first.dtype == WORD_DTYPE

    def _integers(self, record: TensorRecord, shape: tuple[int, ...]) -> TensorInfo:
        """Return packed integers as a matrix of their elements."""
        for source in record.sources:
            self._part(source, source.shape)
        module = record.sources[0].name.removesuffix(PACKED_SUFFIX)
        try:
            weight = int4_weight(module, self.tensors)
        except (KeyError, SourceError) as error:
            raise UnknownOriginError(f"{module} is no INT4 weight: {error}") from error
        if weight.shape != shape:
            raise UnknownOriginError(f"its size does not follow from {record.sources[0].name!r}")
        return weight

    def _part(self, record: SourceRecord, shape: tuple[int, ...]) -> TensorInfo:
        source = self.tensors.get(record.name)
        if source is None:
            raise UnknownOriginError(f"the source lacks {record.name!r}", absent=True)
        expected, found = (record.dtype, list(record.shape)), (source.dtype, list(source.shape))
        if expected != found:
            what = f"dtype and shape of source tensor {record.name!r}"
            raise UnknownOriginError(what, expected, found)
        if record.selection is None and record.axes is None:
            if shape != source.shape:
                raise UnknownOriginError(f"its size does not follow from {record.name!r}")
            return source
        selection = record.selection or whole(source.shape)
        try:
            return view_of(source, record.name, selection, shape=shape, axes=record.axes)
        except ValueError as error:
            raise UnknownOriginError(str(error)) from error


class Coverage:
    """Which elements of a source went into outputs."""

    def __init__(self) -> None:
        self._whole: set[str] = set()
        self._parts: dict[str, set[Selected]] = {}

    def add(self, record: TensorRecord) -> None:
        """Take what a tensor was made from; several may be made from the same."""
        for source in record.sources:
            if source.selection is None:
                self._whole.add(source.name)
            else:
                self._parts.setdefault(source.name, set()).add(source.selection)

    def left(self, tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
        """Return the tensors of which elements went nowhere, and how many did."""
        found = {}
        for name, tensor in tensors.items():
            parts = self._parts.get(name, set())
            total = num_elements(tensor.shape)
            used = sum(num_elements(len(range(*some)) for some in part) for part in parts)
            if name not in self._whole and (used < total or not parts):
                found[name] = total - used
        return found
