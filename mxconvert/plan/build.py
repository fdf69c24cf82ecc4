"""Put the plan together."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from mxconvert import safetensors_format as st
from mxconvert.errors import SourceError
from mxconvert.model import (
    Action,
    Checkpoint,
    Item,
    Options,
    OutputFile,
    OutputTensor,
    Plan,
    TensorInfo,
    Totals,
)
from mxconvert.patterns import WEIGHT_SUFFIX, module_name
from mxconvert.plan.ignore import ignore_entries
from mxconvert.plan.layout import Group, Piece, estimated_header, group_pieces
from mxconvert.plan.refuse import unknown_family
from mxconvert.plan.select import BLOCK_SIZE, Selection, select, tied_head
from mxconvert.recipes import Recipe, find_recipe, looks_like_moe
from mxconvert.recipes.families import DENSE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

HEADER_METADATA: Mapping[str, str] = {"format": "pt"}
"""What every output file's header says; some loaders refuse files without it."""

PACKED_SUFFIX = ".weight_packed"
SCALE_SUFFIX = ".weight_scale"
_RANK = 2

_Sketch = tuple[str, str, tuple[int, ...]]  # an output tensor before it has a place


def build_plan(checkpoint: Checkpoint, options: Options, *, strict: bool = False) -> Plan:
    """Decide everything that will be written.

    Args:
        checkpoint: A source after preflight; only records are used, nothing is read.
        options: Every option that changes output bytes.
        strict: Refuse what would otherwise be a warning.

    Raises:
        SourceError: The source is unsupported, see `mxconvert.plan.select`.
        UsageError: Options that do not fit the source.
    """
    recipe = resolve_recipe(checkpoint, options)
    chosen = select(checkpoint.tensors, checkpoint.config, recipe, options, strict=strict)
    sketches = {
        name: _outputs(tensor, quantize=name in chosen.quantize)
        for name, tensor in checkpoint.tensors.items()
    }
    _refuse_collisions(sketches)
    groups = group_pieces(_pieces(checkpoint.tensors, chosen, sketches), options)
    files = tuple(_file(group, checkpoint.tensors, chosen, sketches) for group in groups)
    routed = [s.expert for s in chosen.slots.values() if s.expert is not None]
    return Plan(
        options=replace(options, recipe=recipe.name),
        recipe=recipe.name,
        num_experts=max(routed, default=-1) + 1,
        files=files,
        ignore=_ignore(checkpoint, chosen),
        quantized=_totals(files, Action.QUANTIZE),
        copied=_totals(files, Action.COPY),
        notices=tuple(chosen.notices),
        weight_map={
            output.name: file.name
            for file in files
            for item in file.items
            for output in item.outputs
        },
    )


def resolve_recipe(checkpoint: Checkpoint, options: Options) -> Recipe:
    """Return the recipe to use.

    Raises:
        SourceError: A Mixture-of-Experts model of no known family.
        UsageError: ``--recipe`` names none.
    """
    recipe = find_recipe(checkpoint.config, options.recipe)
    if recipe is not None:
        return recipe
    if looks_like_moe(checkpoint.config, checkpoint.tensors):
        raise unknown_family(checkpoint.tensors, checkpoint.config)
    return DENSE


def _outputs(tensor: TensorInfo, *, quantize: bool) -> tuple[_Sketch, ...]:
    if not quantize:
        return ((tensor.name, tensor.dtype, tensor.shape),)
    rows, columns = tensor.shape
    module = tensor.name.removesuffix(WEIGHT_SUFFIX)
    return (
        (module + PACKED_SUFFIX, "U8", (rows, columns // 2)),
        (module + SCALE_SUFFIX, "U8", (rows, columns // BLOCK_SIZE)),
    )


def _refuse_collisions(sketches: Mapping[str, tuple[_Sketch, ...]]) -> None:
    owner: dict[str, str] = {}
    for source, outputs in sketches.items():
        for name, _, _ in outputs:
            other = owner.setdefault(name, source)
            if other != source:
                raise SourceError(f"{source!r} and {other!r} would both be stored as {name!r}")


def _pieces(
    tensors: Mapping[str, TensorInfo],
    chosen: Selection,
    sketches: Mapping[str, tuple[_Sketch, ...]],
) -> list[Piece]:
    pieces = []
    for name, tensor in tensors.items():
        slot = chosen.slots[name]
        outputs = sketches[name]
        pieces.append(
            Piece(
                key=name,
                source_file=tensor.file,
                layer=slot.layer,
                expert=slot.expert,
                size=sum(st.tensor_size(dtype, shape) for _, dtype, shape in outputs),
                header=estimated_header(output[0] for output in outputs),
                order=(-1 if slot.layer is None else slot.layer, name),
            )
        )
    return pieces


def _file(
    group: Group,
    tensors: Mapping[str, TensorInfo],
    chosen: Selection,
    sketches: Mapping[str, tuple[_Sketch, ...]],
) -> OutputFile:
    def order(piece: Piece) -> tuple[int, str]:
        name, dtype, _ = sketches[piece.key][0]
        return st.storage_order(dtype, name)

    items: list[Item] = []
    position = 0
    for piece in sorted(group.pieces, key=order):
        outputs = []
        for name, dtype, shape in sketches[piece.key]:
            end = position + st.tensor_size(dtype, shape)
            outputs.append(OutputTensor(name, dtype, shape, position, end))
            position = end
        action = Action.QUANTIZE if piece.key in chosen.quantize else Action.COPY
        items.append(Item(action, tensors[piece.key], tuple(outputs), piece.layer, piece.expert))
    header = file_header(items)
    layers = [piece.layer for piece in group.pieces if piece.layer is not None]
    return OutputFile(
        name=group.name,
        role=group.role,
        experts=group.experts,
        layers=(min(layers), max(layers)) if layers else None,
        items=tuple(items),
        header_size=len(header),
        header_sha256=hashlib.sha256(header).hexdigest(),
        size=len(header) + position,
    )


def file_header(items: Iterable[Item]) -> bytes:
    """Return the header of the file that holds ``items``, prefix included.

    Raises:
        SourceError: It would be larger than readers open.
    """
    header = st.build_header((o for item in items for o in item.outputs), HEADER_METADATA)
    if len(header) > st.HEADER_LIMIT:
        raise SourceError(
            f"an output file would need a header of {len(header)} bytes; readers open at most "
            f"{st.HEADER_LIMIT}",
            hint="use --layout experts or layers, which split such files",
            code="header-too-large",
        )
    return header


def _ignore(checkpoint: Checkpoint, chosen: Selection) -> tuple[str, ...]:
    linear = [
        name
        for name, tensor in checkpoint.tensors.items()
        if len(tensor.shape) == _RANK and name.endswith(WEIGHT_SUFFIX)
    ]
    tied = tied_head(checkpoint.config, checkpoint.tensors)
    return ignore_entries(
        kept=[module_name(name) for name in linear if name not in chosen.quantize],
        converted=[module_name(name) for name in linear if name in chosen.quantize],
        always=[tied] if tied else [],
    )


def _totals(files: Iterable[OutputFile], action: Action) -> Totals:
    tensors = source_bytes = output_bytes = 0
    for file in files:
        for item in file.items:
            if item.action is action:
                tensors += 1
                source_bytes += item.source.size
                output_bytes += item.outputs[-1].end - item.outputs[0].begin
    return Totals(tensors=tensors, source_bytes=source_bytes, output_bytes=output_bytes)


def plan_digest(plan: Plan, version: str) -> str:
    """Return the SHA-256 that binds a journal to a plan.

    It covers the options, the tool's version, every header byte and, through the
    items, which source tensor each output is made from.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps([version, asdict(plan.options)], sort_keys=True).encode())
    for file in plan.files:
        digest.update(f"\n{file.name} {file.size} {file.header_sha256}".encode())
        for item in file.items:
            source = item.source
            digest.update(f"\n{item.action} {source.name} {source.dtype} {source.shape}".encode())
    return digest.hexdigest()
