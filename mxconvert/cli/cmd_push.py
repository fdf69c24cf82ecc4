"""``mxconvert push``: publish an artifact."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mxconvert.cli import options as o
from mxconvert.cli import runtime
from mxconvert.cli import store_options as s
from mxconvert.cli.progress import emit
from mxconvert.cli.transfers import MetricsOption, time_line, transfer
from mxconvert.errors import UsageError
from mxconvert.store import Checksum

if TYPE_CHECKING:
    from pathlib import Path

    from mxconvert.cli.transfers import Transfer
    from mxconvert.transfer.push import PushOptions, PushResult


def push(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Artifact folder.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to, e.g. s3://bucket/model.")],
    *,
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="NAME", help="Move this tag to the artifact. Repeatable."),
    ] = None,
    no_latest: Annotated[
        bool, typer.Option("--no-latest", help="Do not move the tag `latest`.")
    ] = False,
    flat: Annotated[
        bool,
        typer.Option("--flat", help="Write to URL itself, not to a folder named by the id."),
    ] = False,
    no_reuse: Annotated[
        bool,
        typer.Option(
            "--no-reuse", help="Do not copy files that other versions at URL hold; send them."
        ),
    ] = False,
    part_size: Annotated[
        str | None,
        typer.Option("--part-size", metavar="SIZE", help="Bytes per part [default: 16MiB]."),
    ] = None,
    checksum: s.ChecksumOption = Checksum.AUTO,
    announce: Annotated[
        str | None,
        typer.Option(
            "--announce",
            metavar="NATS",
            help="Say on nats://HOST/SUBJECT which tags have moved, for `pull --watch`.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print files and parts; ask the store nothing.")
    ] = False,
    jobs: s.StoreJobs = 16,
    limit_rate: s.LimitRate = None,
    retry_for: s.RetryFor = s.DEFAULT_RETRY_FOR_TEXT,
    store_option: s.StoreOptionList = None,
    metrics_file: MetricsOption = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Publish an artifact at an object store.

    Every byte is compared with the manifest while it is sent. Readers see the whole
    version or none: the manifest is written last, then tags move. The same command goes
    on with a push that was stopped. --json prints one event per line, then a summary.
    """
    del debug
    from mxconvert.source import local_path
    from mxconvert.transfer.push import PushOptions, push_artifact
    from mxconvert.transfer.watch import nats

    subject = None if announce is None else nats.parse_subject(announce, "--announce")
    root = local_path(folder, "DIR")
    options = PushOptions(
        part_size=None if part_size is None else runtime.parse_size(part_size, "--part-size"),
        tags=tuple(tag or ()),
        latest=not no_latest,
        flat=flat,
        reuse=not no_reuse,
    )
    with transfer(
        "push",
        url,
        metrics_file=metrics_file,
        json=json,
        quiet=quiet,
        store_option=store_option,
        retry_for=retry_for,
        limit_rate=limit_rate,
        jobs=jobs,
        checksum=checksum,
    ) as run:
        if run.url.artifact_version is not None:
            raise UsageError(
                f"URL {url}: a push makes its version itself",
                hint=f"push to {run.url} and pass --tag {run.url.version}; a final slash makes "
                "@ part of the name",
            )
        if dry_run:
            _show_plan(root, run, options, json=json)
            return
        result = push_artifact(root, run.client, options, run.report)
        if subject is not None:
            nats.announce(subject, str(run.url), result.artifact, result.tags, run.report)
        figures = run.figures(result.sent_bytes)
    if json:
        emit("summary", **asdict(result), **figures)
    elif not quiet:
        _print_summary(result, figures)


def _show_plan(root: Path, run: Transfer, options: PushOptions, *, json: bool) -> None:
    from mxconvert.cli.tables import print_pairs
    from mxconvert.transfer.local import open_artifact
    from mxconvert.transfer.push import plan_push

    artifact = open_artifact(root)
    limits = run.client.parts.limits if run.client.parts else None
    planned = plan_push(artifact, limits, options.part_size, run.report)
    if json:
        emit("plan", artifact=artifact.id, files=[asdict(file) for file in planned])
        return
    for file in planned:
        parts = f"{file.parts} parts of {runtime.size(file.part_size)}" if file.parts > 1 else ""
        print(f"{runtime.size(file.size):>10}  {file.path}  {parts}".rstrip())
    print_pairs(
        ("artifact", artifact.id),
        ("files", f"{len(planned)}, {runtime.size(sum(file.size for file in planned))}"),
        ("parts", str(sum(file.parts for file in planned))),
    )


def _print_summary(result: PushResult, figures: dict[str, Any]) -> None:
    from mxconvert.cli.tables import print_pairs

    pairs = [
        ("files", f"{result.files}, {runtime.size(result.bytes)}"),
        ("sent", f"{result.sent_files} files, {runtime.size(result.sent_bytes)}"),
    ]
    if result.copied_files:
        size = runtime.size(result.copied_bytes)
        pairs.append(("copied", f"{result.copied_files} files, {size}, inside the store"))
    if result.present_files:
        size = runtime.size(result.present_bytes)
        pairs.append(("there", f"{result.present_files} files, {size}, nothing to do"))
    pairs += [
        time_line(figures, result.sent_bytes),
        ("artifact", result.artifact),
        ("at", result.url),
    ]
    if result.tags:
        pairs.append(("tags", ", ".join(result.tags)))
    print_pairs(*pairs)
