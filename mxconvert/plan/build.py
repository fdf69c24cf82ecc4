"""Put the plan together."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from mxconvert import safetensors_format as st
from mxconvert.errors import SourceError, UsageError, brief
from mxconvert.model import (
    Action,
    Checkpoint,
    Item,
    Options,
    OutputFile,
    Plan,
    TensorInfo,
    Totals,
    output_size,
    quantized_names,
)
from mxconvert.patterns import WEIGHT_SUFFIX, module_name, names_asked_for, renamed
from mxconvert.plan.engines import check_engines
from mxconvert.plan.ignore import ignore_entries
from mxconvert.plan.int4 import int4_modules
from mxconvert.plan.layout import Group, Piece, estimated_header, group_pieces
from mxconvert.plan.logical import Logical, logical_tensors
from mxconvert.plan.refuse import unknown_family
from mxconvert.plan.select import Selection, select, tied_head
from mxconvert.recipes import (
    GENERIC,
    Recipe,
    find_recipe,
    looks_like_moe,
    nests_quantization,
    refuse_unmatched,
)
from mxconvert.recipes.families import DENSE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mxconvert.recipes.engines import Engine

HEADER_METADATA: Mapping[str, str] = {"format": "pt"}
"""What every output file's header says; some loaders refuse files without it."""

_RANK = 2


def build_plan(
    checkpoint: Checkpoint,
    options: Options,
    *,
    strict: bool = False,
    engine: Engine | None = None,
    force: bool = False,
) -> Plan:
    """Decide everything that will be written.

    Args:
        checkpoint: A source after preflight; only records are used, nothing is read.
        options: Every option that changes output bytes.
        strict: Refuse what would otherwise be a warning.
        engine: The engine that has to take the result; ``None``: any.
        force: Make what no engine, or not the one asked for, is known to take.

    Raises:
        SourceError: The source is unsupported, see `mxconvert.plan.select`.
        UsageError: Options that do not fit the source.
    """
    recipe = resolve_recipe(checkpoint, options)
    nested = nests_quantization(checkpoint.config)
    unread = check_engines(recipe.name, engine, force=force, nested=nested)
    if options.from_int4 and not int4_modules(checkpoint.tensors):
        raise UsageError(
            "--from-int4: no tensor of the source is INT4 of compressed-tensors",
            hint="leave it out",
        )
    logical = logical_tensors(checkpoint.tensors, checkpoint.config, recipe, int4=options.from_int4)
    tensors = logical.tensors
    chosen = select(
        tensors, checkpoint.config, recipe, options, strict=strict, packed=logical.packed
    )
    _refuse_collisions(tensors, chosen)
    groups = group_pieces(pieces_of(tensors, chosen), options)
    files = tuple(planned_file(group, tensors, chosen) for group in groups)
    routed = [s.expert for s in chosen.slots.values() if s.expert is not None]
    return Plan(
        options=replace(options, recipe=recipe.name),
        recipe=recipe.name,
        num_experts=max(routed, default=-1) + 1,
        files=files,
        ignore=_ignore(logical, checkpoint.config, chosen, recipe),
        quantized=totals_of(files, Action.QUANTIZE),
        copied=totals_of(files, Action.COPY, Action.DEQUANTIZE),
        notices=(*unread, *chosen.notices),
        dropped=tuple(logical.dropped),
        repacked=len(logical.packed),
    )


def resolve_recipe(checkpoint: Checkpoint, options: Options) -> Recipe:
    """Return the recipe to use.

    Raises:
        SourceError: A Mixture-of-Experts model of no known family.
        UsageError: ``--recipe`` names none, or templates that do not fit.
    """
    templates, names = options.expert_weights, checkpoint.tensors
    if templates and options.recipe != GENERIC:
        raise UsageError(
            f"--expert-weights is for --recipe {GENERIC} only",
            hint=f"add --recipe {GENERIC}, or leave it out: the other recipes know the names",
        )
    recipe = find_recipe(checkpoint.config, options.recipe, expert_weights=templates, tensors=names)
    if recipe is not None:
        refuse_unmatched(templates, names)
        return recipe
    if looks_like_moe(checkpoint.config, checkpoint.tensors):
        raise unknown_family(checkpoint.tensors, checkpoint.config)
    return DENSE


def _refuse_collisions(tensors: Mapping[str, TensorInfo], chosen: Selection) -> None:
    for name in chosen.quantize:
        for made in quantized_names(name):
            if made in tensors:
                raise SourceError(
                    f"{brief(name)} would be stored as {brief(made)}, which exists already",
                    hint="the source seems to be quantized in part; give the original checkpoint",
                )


def _action(tensor: TensorInfo, chosen: Selection) -> Action:
    if tensor.name in chosen.quantize:
        return Action.QUANTIZE
    return Action.COPY if tensor.scale is None else Action.DEQUANTIZE


def pieces_of(tensors: Mapping[str, TensorInfo], chosen: Selection) -> list[Piece]:
    """Return what is to be put into files."""
    pieces = []
    for name, tensor in tensors.items():
        slot, action = chosen.slots[name], _action(tensor, chosen)
        names = quantized_names(name) if action is Action.QUANTIZE else (name,)
        pieces.append(
            Piece(
                key=name,
                source_file=tensor.file,
                layer=slot.layer,
                expert=slot.expert,
                size=output_size(tensor, action),
                header=estimated_header(names),
            )
        )
    return pieces


def planned_file(group: Group, tensors: Mapping[str, TensorInfo], chosen: Selection) -> OutputFile:
    """Fix one file to the byte."""

    def order(piece: Piece) -> tuple[int, str]:
        tensor = tensors[piece.key]
        first = Item(_action(tensor, chosen), tensor, 0, None, None).outputs[0]
        return st.storage_order(first.dtype, first.name)

    items: list[Item] = []
    position = 0
    for piece in sorted(group.pieces, key=order):
        tensor = tensors[piece.key]
        action = _action(tensor, chosen)
        items.append(Item(action, tensor, position, piece.layer, piece.expert))
        position += piece.size
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


def _ignore(
    logical: Logical, config: Mapping[str, Any], chosen: Selection, recipe: Recipe
) -> tuple[str, ...]:
    linear = [
        name
        for name, tensor in logical.tensors.items()
        if len(tensor.shape) == _RANK and name.endswith(WEIGHT_SUFFIX)
    ]
    tied = tied_head(config, logical.tensors)
    kept = [name for name in linear if name not in chosen.quantize]
    called = [new for name in kept for new in recipe.called(module_name(name))]
    return ignore_entries(
        kept=[*_asked_for(kept), *called],
        converted=_asked_for((*(n for n in linear if n in chosen.quantize), *logical.packed)),
        always=[tied] if tied else [],
    )


def _asked_for(names: Iterable[str]) -> list[str]:
    modules = (module_name(name) for name in names)
    return [n for module in modules for n in (*names_asked_for(module), *renamed(module))]


def totals_of(files: Iterable[OutputFile], *actions: Action) -> Totals:
    """Add up the items of some actions."""
    tensors = source_bytes = output_bytes = 0
    for file in files:
        for item in file.items:
            if item.action in actions:
                tensors += 1
                source_bytes += item.source_size
                output_bytes += item.size
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
            if source.view is not None or source.scale is not None:
                digest.update(f" {source.view} {source.scale}".encode())
    if plan.plain:
        digest.update(b"\nplain")
    return digest.hexdigest()
