"""``mxconvert list``: the versions at a store; ``mxconvert gc``: what nobody needs there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mxconvert.cli import options as o
from mxconvert.cli import runtime
from mxconvert.cli import store_options as s
from mxconvert.cli.progress import emit, open_display
from mxconvert.errors import UsageError

if TYPE_CHECKING:
    from mxconvert.remote import Version
    from mxconvert.transfer.garbage import Leftover

StoreArgument = Annotated[str, typer.Argument(metavar="URL", help="The store, without a version.")]
_SHORT = 16


def list_(
    url: StoreArgument,
    *,
    jobs: s.StoreJobs = 16,
    retry_for: s.RetryFor = s.DEFAULT_RETRY_FOR_TEXT,
    store_option: s.StoreOptionList = None,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Show the versions at a store: id, files, size, rule, tags."""
    del debug
    from mxconvert.remote import list_versions

    stop = runtime.state.stop
    with (
        open_display(json_lines=False, quiet=json) as display,
        s.open_client(
            url,
            reporter=display,
            stop=stop,
            jobs=jobs,
            retry_for=retry_for,
            store_option=store_option,
        ) as (place, client),
    ):
        _refuse_version(url, place.artifact_version)
        found = list_versions(client, display)
    if json:
        document = {
            "schema_version": 1,
            "type": "list",
            "url": str(place),
            "versions": [_json(version) for version in found],
        }
        runtime.print_json(document)
        return
    if not found:
        print(f"no versions at {place}")
        return
    from mxconvert.cli.tables import Table

    table = Table("version", "files", "size", "rule", "tags", right=(1, 2))
    for version in found:
        table.add(*_row(version))
    table.print()


def _refuse_version(url: str, version: str | None) -> None:
    if version is not None:
        raise UsageError(
            f"URL {url}: names a version", hint=f"leave @{version} out; a final slash keeps it"
        )


def _row(version: Version) -> tuple[str, ...]:
    name = (version.id or "")[:_SHORT] if not version.folder else version.folder
    tags = ", ".join(version.tags)
    if version.manifest is None:
        return name, "", "", "damaged" if version.fault else "unfinished", tags
    totals, rule = version.manifest.totals, version.manifest.format.scale_rule
    return name, str(totals.files), runtime.size(totals.file_bytes), rule, tags


def _json(version: Version) -> dict[str, Any]:
    totals = version.manifest.totals if version.manifest else None
    return {
        "folder": version.folder,
        "id": version.id,
        "tags": list(version.tags),
        "files": totals.files if totals else None,
        "file_bytes": totals.file_bytes if totals else None,
        "scale_rule": version.manifest.format.scale_rule if version.manifest else None,
        "fault": version.fault,
    }


def gc(
    url: StoreArgument,
    *,
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove what is listed; without it nothing changes.")
    ] = False,
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than",
            metavar="DURATION",
            help="Leave younger leftovers alone: they may belong to a push under way.",
        ),
    ] = "24h",
    jobs: s.StoreJobs = 16,
    retry_for: s.RetryFor = s.DEFAULT_RETRY_FOR_TEXT,
    store_option: s.StoreOptionList = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """List what stopped pushes left at a store; remove it with --delete.

    Unfinished multipart uploads, objects of versions that never got their manifest, files
    that were being written, and probes. A version with a manifest is never touched.
    """
    del debug
    from mxconvert.transfer.garbage import find_leftovers, remove_leftovers

    grace, stop = runtime.parse_duration(older_than, "--older-than"), runtime.state.stop
    with (
        open_display(json_lines=json, quiet=quiet) as display,
        s.open_client(
            url,
            reporter=display,
            stop=stop,
            jobs=jobs,
            retry_for=retry_for,
            store_option=store_option,
        ) as (place, client),
    ):
        _refuse_version(url, place.artifact_version)
        found = find_leftovers(client, grace, display)
        if delete:
            found = remove_leftovers(client, found, display)
    _show_leftovers(found, json=json, delete=delete)


def _show_leftovers(found: list[Leftover], *, json: bool, delete: bool) -> None:
    total = sum(item.size for item in found)
    if json:
        items = [
            {"kind": item.kind, "key": item.key, "size": item.size, "upload": item.upload}
            for item in found
        ]
        emit("summary", deleted=delete, bytes=total, leftovers=items)
        return
    for item in found:
        age = "" if item.age is None else f", {runtime.duration(item.age)} old"
        print(f"{runtime.size(item.size):>10}  {item.key}  ({item.kind}{age})")
    what = "removed" if delete else "could be removed: pass --delete"
    print(f"{len(found)} leftovers, {runtime.size(total)}" + (f", {what}" if found else ""))
