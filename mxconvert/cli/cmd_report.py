"""``mxconvert report``: quantization error, as data and as a page."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mxconvert.cli import options as o
from mxconvert.cli import runtime
from mxconvert.cli.progress import open_display
from mxconvert.errors import LocalError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxconvert.report import Summary
    from mxconvert.statistics import Header, Record, Sums

_LAYERS_SHOWN = 12


def report(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Artifact folder, or a report file.")
    ],
    *,
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            metavar="SRC",
            help="Measure now, against the checkpoint it was made from.",
        ),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option("--sample", metavar="N/T", help="Measure the N-th of T parts of the weights."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write one self-contained web page as well."),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", metavar="N", min=1, help="Worst weights and experts to list.")
    ] = 20,
    jobs: o.Jobs = None,
    json: o.Json = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Every weight's record, one JSON object per line.")
    ] = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Show the quantization error of an artifact.

    Reads what quantize recorded beside the artifact. With --source it measures any tool's
    artifact instead: every weight is decoded and compared with the checkpoint.
    """
    del debug
    from mxconvert.report import render_page, report_document, summarize
    from mxconvert.source import local_path

    if json and jsonl:
        raise UsageError("--json and --jsonl both write to stdout", hint="pass one of them")
    if sample is not None and source is None:
        raise UsageError("--sample measures a part, and needs --source", hint="add --source SRC")
    path = local_path(target, "TARGET")
    origin = local_path(source, "--source") if source else None
    with _open(path, origin, sample=sample, jobs=jobs, quiet=quiet) as (header, records):
        drawn = _written(header, records) if jsonl else records
        summary = summarize(header, drawn, top)
    if html is not None:
        _write(html, render_page(summary, path.resolve().name, top))
    if json:
        runtime.print_json(report_document(summary, top))
    elif not jsonl and not quiet:
        _print(summary, top)


@contextmanager
def _open(
    target: Path, source: Path | None, *, sample: str | None, jobs: int | None, quiet: bool
) -> Iterator[tuple[Header, Iterator[Record]]]:
    """Give the records that are there, or those measured now."""
    from mxconvert.report import open_measuring, open_report

    if source is None:
        with open_report(target) as opened:
            yield opened
        return
    with open_display(json_lines=False, quiet=quiet) as display:
        measuring = open_measuring(
            target, source, sample=sample, jobs=jobs, reporter=display, stop=runtime.state.stop
        )
        yield measuring.header, measuring.records()


def _written(header: Header, records: Iterator[Record]) -> Iterator[Record]:
    """Write each record to stdout on its way."""
    import sys

    from mxconvert.statistics import encode_fragment, encode_lines

    def passing() -> Iterator[bytes]:
        for record in records:
            passed.append(record)
            yield encode_fragment([record])

    passed: list[Record] = []
    for data in encode_lines(passing(), header):
        sys.stdout.write(data.decode())
        yield from passed
        passed.clear()
    sys.stdout.flush()


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8", newline="\n")
    except OSError as error:
        raise LocalError(
            f"{path}: {error.strerror or error}", hint="choose another place for --html"
        ) from error


# ----------------------------------------------------------------------------- tables


def _print(summary: Summary, top: int) -> None:
    from mxconvert.cli.tables import Table, print_pairs
    from mxconvert.report import printable
    from mxconvert.report.text import amount, share

    sums, header = summary.total.sums, summary.header
    steps = [share(count / max(sums.blocks, 1)) for count in sums.exponents]
    pairs = [
        ("artifact", header.artifact or "no manifest"),
        ("weights", f"{summary.total.tensors} in {summary.files} files, {_elements(sums)}"),
        ("error", _error(summary)),
        ("to zero", f"{share(sums.flushed_share)} of the elements"),
        ("saturated", f"{share(sums.saturated_share)} of the elements"),
        ("scales", f"one below the floor rule {steps[0]}, floor {steps[1]}, one above {steps[2]}"),
        ("rule", f"{header.scale_rule or 'unknown'}, measured by {printable(header.tool)}"),
    ]
    if header.sample:
        pairs.append(("measured", f"part {header.sample} of the weights"))
    print_pairs(*pairs)
    for title, groups in (
        ("projection", summary.projections),
        ("role", summary.roles),
        ("layer", summary.layers),
    ):
        print()
        table = Table(title, "weights", *_FIGURES, right=tuple(range(1, 8)))
        worst = sorted(groups, key=lambda group: -group.sums.relative_rmse)[:_LAYERS_SHOWN]
        for group in (group for group in groups if group in worst):
            table.add(printable(group.name), str(group.tensors), *_figures(group.sums))
        table.print()
        if len(groups) > len(worst):
            print(f"... the worst {len(worst)} of {len(groups)}; all with --json or --html")
    print()
    table = Table("worst weights", *_FIGURES, right=tuple(range(1, 7)))
    for stats in summary.worst[:top]:
        table.add(printable(stats.name), *_figures(stats.sums))
    table.print()
    if summary.outlier_count:
        print(f"\n{summary.outlier_count} experts have a larger error than their layer's others:")
        table = Table("layer", "expert", "rel. RMSE", "layer's median", right=(0, 1, 2, 3))
        for entry in summary.outliers[:top]:
            numbers = f"{entry.relative_rmse:.4f}", f"{entry.median:.4f}"
            table.add(str(entry.layer), str(entry.expert), *numbers)
        table.print()
    if not summary.total.tensors:
        print(f"\nno weight is quantized ({amount(0)} elements)")


_FIGURES = ("rel. RMSE", "SQNR dB", "cosine", "max error", "to zero", "saturated")


def _figures(sums: Sums) -> tuple[str, ...]:
    from mxconvert.report.text import decibels, magnitude, ratio, share

    return (
        ratio(sums.relative_rmse),
        decibels(sums.sqnr_db),
        f"{sums.cosine:.5f}",
        magnitude(sums.max_abs_err),
        share(sums.flushed_share),
        share(sums.saturated_share),
    )


def _elements(sums: Sums) -> str:
    from mxconvert.report.text import amount

    return f"{amount(sums.elements)} elements in {amount(sums.blocks)} blocks"


def _error(summary: Summary) -> str:
    from mxconvert.report.text import decibels, ratio

    sums, spread = summary.total.sums, summary.spread
    return (
        f"relative RMSE {ratio(sums.relative_rmse)} (of weights {ratio(spread.minimum)} to "
        f"{ratio(spread.maximum)}), SQNR {decibels(sums.sqnr_db)} dB, cosine {sums.cosine:.5f}"
    )
