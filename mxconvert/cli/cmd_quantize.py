"""``mxconvert quantize``: stream a checkpoint through the MXFP4 kernels."""

from __future__ import annotations

import gc
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mxconvert.cli import options as o
from mxconvert.cli import runtime
from mxconvert.cli.cmd_plan import load_plan, print_totals, show_plan
from mxconvert.cli.progress import emit, open_display
from mxconvert.events import Notice
from mxconvert.model import Options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxconvert.cli.progress import Display
    from mxconvert.model import Checkpoint, Plan, Skipped
    from mxconvert.pipeline import RunOptions, RunResult
    from mxconvert.statistics import Sums


@o.takes_plan_options
def quantize(
    src: o.Source,
    dst: Annotated[str, typer.Argument(metavar="DST", help="Output folder.")],
    *,
    options: Options,
    engine: o.EngineOption = None,
    force: o.Force = False,
    strict: o.Strict = False,
    dry_run: o.DryRun = False,
    jobs: o.Jobs = None,
    max_memory: o.MaxMemory = "512MiB",
    backend: o.Backend = "auto",
    device: o.Device = "auto",
    only: o.Only = None,
    overwrite: o.Overwrite = False,
    recheck: o.Recheck = False,
    no_statistics: Annotated[
        bool,
        typer.Option(
            "--no-statistics", help="Do not measure the quantization error for `mxconvert report`."
        ),
    ] = False,
    break_lock: o.BreakLock = False,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="ARTIFACT",
            help="Take files from this earlier artifact whose source tensors have not changed.",
        ),
    ] = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Convert a checkpoint to MXFP4.

    Routed experts become MXFP4, everything else keeps its bytes. A run that was stopped
    goes on where it stopped when the same command is given again. --json prints one
    event per line, the last one a summary.
    """
    del debug
    from mxconvert.destination import check_destination
    from mxconvert.source import local_path

    source, target = local_path(src, "SRC"), local_path(dst, "DST")
    memory, kernels = runtime.parse_size(max_memory), o.check_backend(backend)
    check_destination(source, target)
    goal = o.Goal(engine=engine, force=force, strict=strict)
    if dry_run:
        show_plan(*load_plan(src, options, goal, show_notices=not json), json=json)
        return
    from mxconvert.pipeline.devices.choice import check_choice, host_backend
    from mxconvert.quantize import compiling

    check_choice(kernels, device)
    with compiling(host_backend(kernels), options.scale_rule, sums=not no_statistics):
        from mxconvert.pipeline import RunOptions

        checkpoint, made = load_plan(src, options, goal, show_notices=False)

    run_options = RunOptions(
        jobs=jobs,
        max_memory=memory,
        backend=kernels,
        device=device,
        overwrite=overwrite,
        break_lock=break_lock,
        recheck=recheck,
        statistics=not no_statistics,
        only=tuple(only or ()),
        base=None if base is None else local_path(base, "--base"),
    )
    convert(checkpoint, made, dst, run_options, json=json, quiet=quiet)


def convert(
    checkpoint: Checkpoint, made: Plan, dst: str, options: RunOptions, *, json: bool, quiet: bool
) -> None:
    """Run a plan into the folder ``dst`` under a progress display, then say what it did."""
    from mxconvert.pipeline import quantize_checkpoint
    from mxconvert.source import local_path

    # The plan lives to the end; the collector need not walk its records again and again.
    gc.freeze()
    with open_display(json_lines=json, quiet=quiet) as display:
        _pass_on_notices(checkpoint, made, display)
        result = quantize_checkpoint(
            checkpoint,
            made,
            local_path(dst, "DST"),
            options,
            report=display,
            stop=runtime.state.stop,
        )
    if json:
        emit("summary", **_summary(checkpoint, made, result))
    elif not quiet:
        _print_summary(checkpoint, made, result, dst)


def _pass_on_notices(checkpoint: Checkpoint, made: Plan, display: Display) -> None:
    """Report what preflight and plan have to say."""
    for code, message in (*checkpoint.notices, *made.notices):
        display(Notice(severity="warning", code=code, message=message))


def _summary(checkpoint: Checkpoint, made: Plan, result: RunResult) -> dict[str, object]:
    """Return the fields of the summary line."""
    facts = asdict(result)
    del facts["sums"]
    facts["error"] = _error_figures(result.sums)
    return {
        **facts,
        "quantized": asdict(made.quantized),
        "kept": asdict(made.copied),
        "dequantized": asdict(made.dequantized),
        "dropped_tensors": [asdict(entry) for entry in _dropped(checkpoint, made)],
        "skipped_files": [asdict(entry) for entry in checkpoint.skipped_files],
        "total_size": made.total_size,
        "file_bytes": made.file_bytes,
    }


def _dropped(checkpoint: Checkpoint, made: Plan) -> tuple[Skipped, ...]:
    """Return the stored tensors that are in no output."""
    return (*checkpoint.dropped_tensors, *made.dropped)


def _error_figures(sums: Sums | None) -> dict[str, float] | None:
    """Return the figures of the weights that this run made; what is infinite is left out."""
    if sums is None or not sums.sum_x2:
        return None
    figures = {"relative_rmse": sums.relative_rmse, "sqnr_db": sums.sqnr_db, "cosine": sums.cosine}
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _device_lines(result: RunResult) -> Iterator[str]:
    """Yield what GPUs did, or why none was used if there is something to say about it."""
    for use in result.devices:
        done = f"{runtime.size(use.source_bytes)} of {runtime.size(result.source_bytes)}"
        memory = f"{runtime.size(use.memory)} of its memory" if use.memory else ""
        words = [use.description, done, memory, f"given up: {use.error}" if use.error else ""]
        yield f"{use.name}: " + ", ".join(filter(None, words))
    if not result.devices and result.device_reason != "no GPU here":
        yield f"none: {result.device_reason}"


def _print_summary(checkpoint: Checkpoint, made: Plan, result: RunResult, dst: str) -> None:
    """Print what a run did."""
    from mxconvert.cli.tables import print_pairs

    print_totals(made)
    dropped, skipped = _dropped(checkpoint, made), checkpoint.skipped_files
    reasons = "; ".join(sorted({entry.reason for entry in dropped}))
    pairs = [
        (
            "dropped",
            f"{len(dropped)} tensors, {runtime.size(sum(entry.size for entry in dropped))}"
            + (f" ({reasons})" if reasons else ""),
        ),
        ("skipped", ", ".join(f"{e.name} ({e.reason})" for e in skipped) or "no files"),
    ]
    if result.files_taken:
        pairs.append(("taken", f"{result.files_taken} files from the base"))
    if result.files_made:
        rate = result.source_bytes / result.seconds
        pairs.append(
            (
                "time",
                (
                    f"{runtime.duration(result.seconds)} for {result.files_made} files, "
                    f"{runtime.size(rate)}/s read, {result.jobs} jobs, backend {result.backend}"
                ),
            )
        )
        pairs += [("GPU", text) for text in _device_lines(result)]
    if result.sums is not None and result.sums.sum_x2:
        rmse, cosine = result.sums.relative_rmse, result.sums.cosine
        text = f"relative RMSE {rmse:.4f}, cosine {cosine:.5f}: mxconvert report {dst}"
        pairs.append(("error", text))
    if result.artifact is None:
        pairs.append(("left", f"{result.files_left} files: run again without --only to finish"))
    else:
        pairs += [("artifact", result.artifact), ("next", f"mxconvert verify {dst}")]
    print_pairs(*pairs)
