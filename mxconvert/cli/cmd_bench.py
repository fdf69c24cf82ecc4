"""``mxconvert bench``: how fast this machine converts, and what holds it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mxconvert.cli import options as o
from mxconvert.cli import runtime
from mxconvert.cli.progress import open_display
from mxconvert.cli.runtime import duration, parse_size, size
from mxconvert.errors import UsageError

if TYPE_CHECKING:
    from mxconvert.bench import BenchReport

_GB = 10**9


def bench(
    *,
    folder: Annotated[
        str,
        typer.Option("--folder", metavar="DIR", help="Measure the disk that DIR is on."),
    ] = ".",
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="SRC", help="The checkpoint to tell the time for."),
    ] = None,
    checkpoint_size: Annotated[
        str | None,
        typer.Option(
            "--checkpoint-size", metavar="SIZE", help="Or its size in BF16 [default: 1TB]."
        ),
    ] = None,
    jobs: o.Jobs = None,
    backend: o.HostBackend = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="5 seconds instead of 20, and less precise.")
    ] = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Measure this machine and tell how long a checkpoint takes at least.

    Writes into a folder of its own below --folder and removes it again; --source is only
    read. Other programs that run at the same time make the figures lower.
    """
    del debug
    from mxconvert.bench import BenchOptions, run_bench
    from mxconvert.bench.run import FULL, QUICK
    from mxconvert.source import local_path

    if source is not None and checkpoint_size is not None:
        raise UsageError(
            "--source and --checkpoint-size contradict each other", hint="leave one of them out"
        )
    options = BenchOptions(
        folder=local_path(folder, "--folder"),
        source=local_path(source, "--source") if source is not None else None,
        checkpoint_bytes=parse_size(checkpoint_size or "1TB"),
        jobs=jobs,
        backend=o.check_backend(backend, host_only=True),
        effort=QUICK if quick else FULL,
    )
    with open_display(json_lines=False, quiet=quiet or json) as display:
        report = run_bench(options, report=display, stop=runtime.state.stop)
    if json:
        runtime.print_json(report.to_json())
    else:
        _print(report)


def _print(report: BenchReport) -> None:
    from mxconvert.cli.tables import Table, print_pairs

    print_pairs(
        *((name.replace("_", " "), f"{value}") for name, value in report.machine.items()),
    )
    print()
    table = Table("measured", "", "threads", "GB/s", right=(2, 3))
    for row in report.measurements:
        table.add(row.group, row.name, str(row.threads), f"{row.bytes_per_second / _GB:.2f}")
    table.print()
    print()
    stages = Table("stage", "CPU seconds per GB of source", right=(1,))
    for name, seconds in report.cpu_seconds_per_gb.items():
        stages.add(name, f"{seconds:.3f}")
    stages.print()
    print()
    bounds = Table("bound", "at least", right=(1,))
    for bound in report.bounds:
        bounds.add(bound.name, duration(bound.seconds))
    bounds.print()
    print()
    print(verdict(report))


def verdict(report: BenchReport) -> str:
    """Return the sentence that the command ends with."""
    work, bound = report.workload, report.bounds[0]
    assumed = " (98 % of it experts)" if work.assumed else ""
    return (
        f"{size(work.source_bytes)}{assumed} here: at least {duration(bound.seconds)}, bound by "
        f"{bound.name}; {duration(report.measured_seconds)} at the speed measured end to end"
    )
