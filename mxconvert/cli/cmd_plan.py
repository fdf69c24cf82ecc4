"""``mxconvert plan``: the output, file by file, before any work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxconvert.cli import options as o
from mxconvert.cli.runtime import print_json, size
from mxconvert.model import Options

if TYPE_CHECKING:
    from mxconvert.model import Checkpoint, Plan

_SHOWN = 8


@o.takes_plan_options
def plan(
    src: o.Source,
    *,
    options: Options,
    engine: o.EngineOption = None,
    force: o.Force = False,
    strict: o.Strict = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Show the output, file by file, before any work.

    Reads headers only. --json prints one document: the future index under "index", and
    the files with their sizes.
    """
    del debug
    goal = o.Goal(engine=engine, force=force, strict=strict)
    checkpoint, made = load_plan(src, options, goal, show_notices=not json)
    show_plan(checkpoint, made, json=json)


def load_plan(
    src: str, options: Options, goal: o.Goal | None, *, show_notices: bool
) -> tuple[Checkpoint, Plan]:
    """Read the source's headers and plan the output, without quantization if there is no goal."""
    from mxconvert.plan import build_plain_plan, build_plan
    from mxconvert.source import local_path, open_checkpoint

    checkpoint = open_checkpoint(local_path(src, "SRC"), unindexed=options.unindexed)
    if goal is None:
        made = build_plain_plan(checkpoint, options)
    else:
        made = build_plan(
            checkpoint, options, strict=goal.strict, engine=goal.engine, force=goal.force
        )
    if show_notices:
        from mxconvert.cli.tables import print_notices

        print_notices([*checkpoint.notices, *made.notices])
    return checkpoint, made


def show_plan(checkpoint: Checkpoint, made: Plan, *, json: bool) -> None:
    """Print a plan as a table or as one JSON document."""
    if json:
        from mxconvert.plan import plan_document

        print_json(plan_document(made, checkpoint.notices))
        return
    from mxconvert.cli.tables import Table

    table = Table("file", "size", "tensors", "experts", "layers", right=(1, 2))
    for file in made.files:
        table.add(
            file.name,
            size(file.size),
            str(file.num_tensors),
            _span(file.experts),
            _span(file.layers),
        )
    table.print()
    print_totals(made)


def _span(span: tuple[int, int] | None) -> str:
    if span is None:
        return "-"
    return str(span[0]) if span[0] == span[1] else f"{span[0]}-{span[1]}"


def _some(entries: tuple[str, ...]) -> str:
    more = f" and {len(entries) - _SHOWN} more, see --json" if len(entries) > _SHOWN else ""
    return ", ".join(entries[:_SHOWN]) + more


def print_totals(made: Plan) -> None:
    """Print what is quantized and what is kept."""
    from mxconvert.cli.tables import print_pairs

    quantized, copied, widened = made.quantized, made.copied, made.dequantized
    tensors, stored = copied.tensors - widened.tensors, copied.source_bytes - widened.source_bytes
    as_bf16 = (
        f"{widened.tensors} {'' if made.plain else 'FP8 '}weights, {size(widened.source_bytes)} -> "
        f"{size(widened.output_bytes)}"
    )
    kept = ("kept", f"{tensors} tensors, {size(stored)}, byte for byte")
    written = ("written", f"{len(made.files)} weight files, {size(made.file_bytes)}")
    if made.plain:
        print_pairs(("dequantized", f"{as_bf16} (recipe {made.recipe})"), kept, written)
        return
    print_pairs(
        (
            "quantized",
            (
                f"{quantized.tensors} weights, {size(quantized.source_bytes)} -> "
                f"{size(quantized.output_bytes)} ({made.options.scale_rule}, recipe {made.recipe})"
            ),
        ),
        kept,
        *([("as BF16", f"{as_bf16}, since one scheme is declared")] if widened.tensors else []),
        written,
        ("ignore", _some(made.ignore)),
    )
