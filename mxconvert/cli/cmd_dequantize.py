"""``mxconvert dequantize``: make a plain BF16 checkpoint of a quantized one."""

from __future__ import annotations

from typing import Annotated

import typer

from mxconvert.cli import options as o
from mxconvert.cli import runtime
from mxconvert.cli.cmd_plan import load_plan, show_plan
from mxconvert.cli.cmd_quantize import convert
from mxconvert.model import Layout


def dequantize(
    src: o.Source,
    dst: Annotated[str, typer.Argument(metavar="DST", help="Output folder.")],
    *,
    recipe: o.RecipeOption = None,
    expert_weights: o.ExpertWeights = None,
    layout: o.LayoutOption = Layout.EXPERTS,
    experts_per_file: o.ExpertsPerFile = None,
    max_file_size: o.MaxFileSize = None,
    unindexed: o.UnindexedOption = None,
    base_model: o.BaseModel = None,
    dry_run: o.DryRun = False,
    jobs: o.Jobs = None,
    max_memory: o.MaxMemory = "512MiB",
    backend: o.Backend = "auto",
    device: o.Device = "auto",
    only: o.Only = None,
    overwrite: o.Overwrite = False,
    recheck: o.Recheck = False,
    break_lock: o.BreakLock = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Convert a quantized checkpoint to plain BF16.

    MXFP4 and scaled FP8 become BF16, everything else keeps its bytes; MXFP4 is exact in
    BF16. Runs, resumes and reports as quantize does.
    """
    del debug
    from mxconvert.destination import check_destination
    from mxconvert.pipeline.devices.choice import check_choice
    from mxconvert.source import local_path

    source, target = local_path(src, "SRC"), local_path(dst, "DST")
    memory, kernels = runtime.parse_size(max_memory), o.check_backend(backend)
    check_destination(source, target)
    check_choice(kernels, device)
    options = o.collect(
        recipe=recipe,
        expert_weights=expert_weights,
        layout=layout,
        experts_per_file=experts_per_file,
        max_file_size=max_file_size,
        unindexed=unindexed,
        base_model=base_model,
    )
    checkpoint, made = load_plan(src, options, None, show_notices=dry_run and not json)
    if dry_run:
        show_plan(checkpoint, made, json=json)
        return
    from mxconvert.pipeline import RunOptions

    run_options = RunOptions(
        jobs=jobs,
        max_memory=memory,
        backend=kernels,
        device=device,
        overwrite=overwrite,
        break_lock=break_lock,
        recheck=recheck,
        statistics=False,
        only=tuple(only or ()),
    )
    convert(checkpoint, made, dst, run_options, json=json, quiet=quiet)
