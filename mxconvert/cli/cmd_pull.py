"""``mxconvert pull``: fetch an artifact."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mxconvert.cli import options as o
from mxconvert.cli import runtime
from mxconvert.cli import store_options as s
from mxconvert.cli.progress import emit
from mxconvert.cli.transfers import MetricsOption, time_line, transfer
from mxconvert.placement import Placement

if TYPE_CHECKING:
    from pathlib import Path

    from mxconvert.cli.transfers import Transfer
    from mxconvert.transfer.pull import PullOptions, PullResult
    from mxconvert.transfer.watch import WatchOptions


def pull(
    url: Annotated[
        str, typer.Argument(metavar="URL[@VERSION]", help="Where from; a tag or an id.")
    ],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder to fetch into.")],
    *,
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include",
            metavar="GLOB",
            help="Fetch only these files now; a later pull fetches the rest. Repeatable.",
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", help="Fetch the experts of this rank only.")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option("--world-size", help="Ranks of the expert-parallel group.")
    ] = None,
    placement: Annotated[
        Placement | None,
        typer.Option("--placement", help="How experts go to ranks [default: linear]."),
    ] = None,
    experts: Annotated[
        str | None, typer.Option("--experts", metavar="0-15,40", help="Fetch these experts only.")
    ] = None,
    node: Annotated[
        int | None, typer.Option("--node", help="Fetch for all ranks of this node.")
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Nodes of the group.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", help="Ranks of each node.")
    ] = None,
    dense_slice: Annotated[
        str | None,
        typer.Option(
            "--slice",
            metavar="I/N",
            help="Of the files without experts, fetch every N-th from number I on.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be fetched, and stop.")
    ] = False,
    expect_id: Annotated[
        str | None,
        typer.Option("--expect-id", metavar="ID", help="The artifact's id, or its first digits."),
    ] = None,
    sha256: Annotated[
        bool,
        typer.Option("--sha256", help="Compare SHA-256 too; with --expect-id proves the origin."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the model files that are in DIR.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for another pull into DIR instead of failing.")
    ] = False,
    break_lock: Annotated[
        bool, typer.Option("--break-lock", help="Take over the lock of a run on another host.")
    ] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Follow the tag: each version in DIR/<id>, DIR/current a link to it."
        ),
    ] = False,
    poll: Annotated[
        str | None,
        typer.Option(
            "--poll",
            metavar="DURATION",
            help="How often --watch looks [default: 30s, with --listen 10m].",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="NATS",
            help="Look at once when `push --announce` says so on nats://HOST/SUBJECT.",
        ),
    ] = None,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Versions that --watch keeps.")] = 2,
    on_update: Annotated[
        str | None,
        typer.Option(
            "--on-update", metavar="CMD", help="Command that --watch runs after each switch."
        ),
    ] = None,
    direct: Annotated[
        bool,
        typer.Option("--direct", help="Write past the page cache; loaders then read the disk."),
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
    """Fetch an artifact from an object store into a folder that loaders take.

    Each chunk is compared with the manifest as it lands. A file gets its name when it is
    whole, the manifest comes last. The same command goes on with a pull that was stopped.
    With --rank, --node or --experts the folder holds what those ranks need, and loads as a
    model does; a later pull adds to it. With --watch it follows a tag.
    --json prints one event per line, then a summary.
    """
    del debug
    from mxconvert.cli.previews import print_preview
    from mxconvert.remote import check_id
    from mxconvert.selection import Request
    from mxconvert.source import local_path
    from mxconvert.transfer.pull import PullOptions, preview_pull, pull_artifact
    from mxconvert.transfer.watch import WatchOptions, check_watching

    target = local_path(folder, "DIR")
    request = Request(
        rank=rank,
        world_size=world_size,
        placement=placement,
        experts=experts,
        node=node,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        dense_slice=dense_slice,
    )
    request.check()
    if expect_id is not None:
        check_id(expect_id)
    with transfer(
        "pull",
        url,
        metrics_file=metrics_file,
        json=json,
        quiet=quiet,
        store_option=store_option,
        retry_for=retry_for,
        limit_rate=limit_rate,
        jobs=jobs,
    ) as run:
        options = PullOptions(
            version=run.url.artifact_version,
            expect_id=expect_id,
            include=tuple(include or ()),
            sha256=sha256,
            overwrite=overwrite,
            wait=wait,
            break_lock=break_lock,
            direct=direct,
            request=request,
        )
        if watch:
            watching = WatchOptions(
                tag=check_watching(
                    run.url.artifact_version,
                    (
                        ("--include", bool(include)),
                        ("--dry-run", dry_run),
                        ("--overwrite", overwrite),
                        ("--expect-id", expect_id is not None),
                        ("--wait", wait),
                    ),
                ),
                poll=runtime.parse_duration(poll or ("30s" if listen is None else "10m"), "--poll"),
                keep=keep,
                on_update=tuple(shlex.split(on_update or "")),
            )
            follow(run, target, options, watching, listen)
            return
        if dry_run:
            preview = preview_pull(run.client, options)
            print_preview(preview, json=json)
            return
        result = pull_artifact(run.client, target, options, run.report)
        figures = run.figures(result.fetched_bytes)
    if json:
        emit("summary", **asdict(result), **figures)
    elif not quiet:
        _print_summary(result, figures, folder)


def follow(
    run: Transfer,
    target: Path,
    options: PullOptions,
    watching: WatchOptions,
    listen: str | None,
) -> None:
    """Follow a tag until a signal comes."""
    from mxconvert.store import Client
    from mxconvert.transfer.watch import Watcher, nats

    subject = None if listen is None else nats.parse_subject(listen, "--listen")
    first = run.client

    def connect() -> Client:
        made = Client(first.store, first.options, run.report, runtime.state.stop)
        made.counters = first.counters
        return made

    listener = None
    if subject is not None:
        listener = nats.Listener(subject, first.check, run.report)
    watcher = Watcher(
        connect,
        target,
        options,
        watching,
        report=run.report,
        stop=runtime.state.stop,
        wait=listener.wait if listener else None,
    )
    try:
        with runtime.state.stop.watched():
            watcher()
    finally:
        if listener:
            listener.close()


def _print_summary(result: PullResult, figures: dict[str, Any], folder: str) -> None:
    from mxconvert.cli.tables import print_pairs

    pairs = [("files", f"{result.files}, {runtime.size(result.bytes)}")]
    if result.selection is not None:
        pairs.append(("part", result.selection))
    if result.was_complete:
        pairs.append(("there", "everything, nothing to do"))
    else:
        size = runtime.size(result.fetched_bytes)
        pairs.append(("fetched", f"{result.fetched_files} files, {size}"))
        if result.resumed_bytes:
            pairs.append(("there", f"{runtime.size(result.resumed_bytes)} of an earlier run"))
        if result.refetched_chunks:
            pairs.append(("arrived wrong", f"{result.refetched_chunks} chunks, fetched again"))
        pairs.append(time_line(figures, result.fetched_bytes))
    pairs.append(("artifact", result.artifact))
    if result.left_files:
        pairs.append(("left", f"{result.left_files} files: pull without --include to finish"))
    else:
        pairs.append(("next", f"mxconvert verify {folder}"))
    print_pairs(*pairs)
