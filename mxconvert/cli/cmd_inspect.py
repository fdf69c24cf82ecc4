"""``mxconvert inspect``: what is in this checkpoint; what would it become."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mxconvert.cli import options as o
from mxconvert.cli.runtime import count, print_json, size
from mxconvert.model import Scope

if TYPE_CHECKING:
    from mxconvert.inspect import Inspection, RoleFigures
    from mxconvert.model import Checkpoint


def inspect(
    src: o.Source,
    *,
    scope: o.ScopeOption = Scope.EXPERTS,
    recipe: o.RecipeOption = None,
    expert_weights: o.ExpertWeights = None,
    unindexed: o.UnindexedOption = None,
    tensors: Annotated[
        str | None,
        typer.Option("--tensors", metavar="GLOB", help="List the tensors whose names match."),
    ] = None,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Show what is in a checkpoint and what it would become.

    Reads headers only. Says also when a checkpoint cannot be converted, and why.
    """
    del debug
    from mxconvert.inspect import inspect_checkpoint
    from mxconvert.source import local_path, open_checkpoint

    checkpoint = open_checkpoint(local_path(src, "SRC"), unindexed=unindexed)
    if tensors is not None:
        _list_tensors(checkpoint, tensors, json=json)
        return
    options = o.collect(scope=scope, recipe=recipe, expert_weights=expert_weights)
    found = inspect_checkpoint(checkpoint, options)
    if json:
        print_json(found.to_json())
    else:
        _print(found)


def _list_tensors(checkpoint: Checkpoint, glob: str, *, json: bool) -> None:
    import fnmatch

    from mxconvert.cli.tables import Table

    found = [t for t in checkpoint.tensors.values() if fnmatch.fnmatchcase(t.name, glob)]
    if json:
        print_json(
            [
                {
                    "name": t.name,
                    "dtype": t.dtype,
                    "shape": list(t.shape),
                    "file": t.file,
                    "offset": t.offset,
                    "size": t.size,
                }
                for t in found
            ]
        )
        return
    table = Table("tensor", "dtype", "shape", "size", "file", right=(3,))
    for tensor in found:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        table.add(tensor.name, tensor.dtype, shape, size(tensor.size), tensor.file)
    table.print()


def _print(found: Inspection) -> None:
    from mxconvert.cli.tables import Table, print_pairs

    active = "unknown" if found.active_parameters is None else count(found.active_parameters)
    experts = (
        f"{found.num_experts} in each of {found.moe_layers} layers, "
        f"{found.experts_per_token or 'an unknown number'} used per token"
        if found.num_experts
        else "none"
    )
    after = size(found.plan.total_size) if found.plan else "cannot be converted"
    print_pairs(
        ("model", f"{', '.join(found.architectures) or 'unnamed'} ({found.model_type})"),
        ("recipe", found.recipe),
        ("parameters", f"{count(found.parameters)} total, {active} active per token"),
        ("experts", experts),
        ("stored", f"{found.tensors} tensors in {found.files} files, {size(found.size_bytes)}"),
        ("dtypes", ", ".join(f"{dtype} {n}" for dtype, n in found.dtypes.items())),
        ("in MXFP4", after),
    )
    print()
    table = Table("role", "tensors", "parameters", "dtype", "now", "becomes", right=(1, 2, 4))
    for role, figures in found.roles.items():
        table.add(
            role,
            str(figures.tensors),
            count(figures.parameters),
            "/".join(sorted(figures.dtypes)),
            size(figures.size_bytes),
            _becomes(figures),
        )
    table.print()
    for text in found.surprises:
        print(f"\nsurprise: {text}")
    if found.obstacle:
        print(f"\ncannot be converted: {found.obstacle}")


def _becomes(figures: RoleFigures) -> str:
    if figures.mxfp4_bytes is None:
        return "-"
    parts = [
        name if count == figures.tensors else f"{count} of {figures.tensors} in {name}"
        for count, name in ((figures.quantized, "MXFP4"), (figures.dequantized, "BF16"))
        if count
    ]
    return f"{', '.join(parts)}, {size(figures.mxfp4_bytes)}" if parts else "stays"
