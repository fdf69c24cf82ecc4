"""``mxconvert verify``: structure, digests, numbers; the exit status is for CI."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mxconvert.cli import options as o
from mxconvert.cli import runtime
from mxconvert.cli import store_options as so
from mxconvert.cli.progress import open_display
from mxconvert.errors import ExitStatus, LocalError, UsageError

if TYPE_CHECKING:
    from mxconvert.verify import Level, VerifyReport

_SHOWN = 50


def verify(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Artifact folder, or URL[@VERSION].")
    ],
    *,
    level: Annotated[
        str | None,
        typer.Option(
            "--level",
            metavar="structure|digest|numeric",
            help="Headers and config; every byte; numbers against --source. "
            "[digest, with --source numeric]",
        ),
    ] = None,
    remote: Annotated[
        bool,
        typer.Option("--remote", help="At a URL: read no weights, ask the store about them."),
    ] = False,
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="SRC", help="The checkpoint it was made from."),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample",
            metavar="N/T",
            help="Read the N-th of T parts of the chunks, or recompute it of the tensors; T runs "
            "cover all.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail on every file that the manifest does not list.")
    ] = False,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore",
            metavar="GLOB",
            help="Leave files aside; the report says so. Repeatable.",
        ),
    ] = None,
    expect_id: Annotated[
        str | None,
        typer.Option("--expect-id", metavar="ID", help="The artifact's id, or its first digits."),
    ] = None,
    manifest: Annotated[
        Path | None,
        typer.Option("--manifest", metavar="FILE", help="Check against this manifest."),
    ] = None,
    foreign: Annotated[
        bool,
        typer.Option("--foreign", help="Another tool's folder: no manifest, errors are measured."),
    ] = False,
    max_error: Annotated[
        float | None,
        typer.Option(
            "--max-error", help="At level numeric: largest relative RMSE, where measured [0.25]."
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "-j", "--jobs", min=1, help="Files at once [default: all processors; of a URL 16]."
        ),
    ] = None,
    store_option: so.StoreOptionList = None,
    retry_for: so.RetryFor = so.DEFAULT_RETRY_FOR_TEXT,
    limit_rate: so.LimitRate = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML as well.")
    ] = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Check an artifact; exit status 4 if anything is wrong.

    structure reads headers, config and index; digest (the default) reads every byte once;
    numeric (the default with --source) recomputes the quantized weights from --source by an
    independent path and compares bit for bit. URL[@VERSION] checks an artifact at a store:
    every byte, a part with --sample, or, with --remote, what the store and the headers say.
    --json prints one document.
    """
    del debug
    from mxconvert.source import local_path
    from mxconvert.store import DEFAULT_JOBS, is_url
    from mxconvert.verify import (
        DEFAULT_MAX_ERROR,
        Level,
        VerifyOptions,
        verify_artifact,
        verify_remote,
    )

    at_store = is_url(target)
    depth = _level(level, at_store=at_store, remote=remote, sample=sample, source=source)
    if max_error is not None and depth is not Level.NUMERIC:
        raise UsageError(
            "--max-error bounds what --level numeric measures",
            hint="pass --level numeric and --source SRC, or leave it out",
        )
    options = VerifyOptions(
        level=depth,
        source=local_path(source, "--source") if source else None,
        sample=sample,
        strict=strict,
        ignore=tuple(ignore or ()),
        expect_id=expect_id,
        manifest=manifest,
        foreign=foreign,
        max_error=DEFAULT_MAX_ERROR if max_error is None else max_error,
        jobs=jobs,
    )
    # One JSON document, not lines: progress stays off the streams with --json.
    with open_display(json_lines=False, quiet=quiet or json) as display:
        stop = runtime.state.stop
        if at_store:
            with so.open_client(
                target,
                store_option=store_option,
                retry_for=retry_for,
                limit_rate=limit_rate,
                jobs=jobs or DEFAULT_JOBS,
                reporter=display,
                stop=stop,
            ) as (url, client):
                report = verify_remote(client, url, options, display, stop=stop)
        else:
            _refuse_store_options(store_option, limit_rate)
            report = verify_artifact(local_path(target, "TARGET"), options, display, stop=stop)
    if junit is not None:
        _write_junit(junit, report)
    if json:
        runtime.print_json(report.to_json())
    else:
        _print(report, quiet=quiet)
    if not report.ok:
        raise typer.Exit(ExitStatus.VERIFY)


def _level(
    text: str | None, *, at_store: bool, remote: bool, sample: str | None, source: str | None
) -> Level:
    """Return the level that the options ask for together.

    Raises:
        UsageError: Options that contradict each other.
    """
    from mxconvert.verify import Level

    if text is not None and text not in list(Level):
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(Level)}", param_hint="--level")
    if text is None:
        text = Level.DIGEST if source is None else Level.NUMERIC
    level = Level(text)
    if remote and not at_store:
        raise UsageError(
            "--remote is for a URL", hint="for a folder, --level structure reads headers only"
        )
    if remote and sample is not None:
        raise UsageError(
            "--remote reads no weights, --sample a part of them",
            hint="--sample alone does all that --remote does",
        )
    if at_store and (level is Level.NUMERIC or source is not None):
        raise UsageError(
            "--level numeric and --source need a local folder, not a URL",
            hint="pull the artifact, then verify the folder",
        )
    if level is Level.NUMERIC and source is None:
        raise UsageError(
            "--level numeric needs the checkpoint to compare with", hint="pass --source SRC"
        )
    if level is not Level.NUMERIC and source is not None:
        raise UsageError(
            f"--level {level} compares with no source, --source is for --level numeric",
            hint="leave out one of them: numeric does all that the other levels do",
        )
    return Level.STRUCTURE if remote else level


def _refuse_store_options(store_option: list[str] | None, limit_rate: str | None) -> None:
    given = {"--store-option": store_option, "--limit-rate": limit_rate}
    for name, value in given.items():
        if value:
            raise UsageError(f"{name} is for a URL; TARGET is a local folder")


def _write_junit(path: Path, report: VerifyReport) -> None:
    from mxconvert.verify.junit import junit_xml

    try:
        path.write_text(junit_xml(report), encoding="utf-8")
    except OSError as error:
        raise LocalError(f"{path}: {error.strerror}") from error


def _print(report: VerifyReport, *, quiet: bool) -> None:
    import sys

    from mxconvert.cli.tables import print_pairs

    for finding in report.findings[:_SHOWN]:
        print(f"error: {finding.message}", file=sys.stderr)
    if len(report.findings) > _SHOWN:
        print(f"... and {len(report.findings) - _SHOWN} more; see --json", file=sys.stderr)
    for note in report.notes if not quiet else ():
        print(f"note: {note.message}", file=sys.stderr)
    if quiet and report.ok:
        return
    shown = {name.replace("_", " "): value for name, value in report.counts.items() if value}
    counts = ", ".join(f"{value} {name}" for name, value in shown.items())
    pairs = [
        ("result", "ok" if report.ok else f"FAILED, {len(report.findings)} findings"),
        ("artifact", report.artifact_id or "no manifest"),
        *([("found at", report.location)] if report.location else []),
        ("level", str(report.level)),
        ("checked", counts or "nothing"),
    ]
    if report.error is not None:
        error = report.error
        figures = f"relative RMSE mean {error.mean:.4f}, largest {error.maximum:.4f}"
        pairs.append(("error", f"{figures} ({error.worst_tensor})"))
    pairs += [("not checked", text) for text in report.not_checked]
    print_pairs(*pairs)
