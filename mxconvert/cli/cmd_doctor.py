"""``mxconvert doctor``: is this machine fit for the work; text to paste into a report."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mxconvert.cli import options as o
from mxconvert.cli import runtime
from mxconvert.cli import store_options as s
from mxconvert.cli.runtime import print_json, size
from mxconvert.errors import LocalError, StoreError, StoreFault
from mxconvert.events import ignore
from mxconvert.store import Checksum

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxconvert.doctor import Diagnosis, EndpointReport, FolderReport


def doctor(
    place: Annotated[
        str | None,
        typer.Argument(metavar="[DIR|URL]", help="Examine this folder's disk, or this store, too."),
    ] = None,
    *,
    backend: o.Backend = "auto",
    checksum: s.ChecksumOption = Checksum.AUTO,
    retry_for: s.RetryFor = "10s",
    store_option: s.StoreOptionList = None,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Show versions, processors, limits, GPUs, and what is missing.

    With a URL, small objects are put, read back and removed to find out what the store can
    do. Exit status 8 if --backend cannot be used, 7 if DIR cannot be written, 6 if the store
    cannot be used. Credentials are shown as set or unset, never their values.
    """
    del debug
    from mxconvert.doctor import diagnose
    from mxconvert.source import local_path
    from mxconvert.store import is_url

    remote = place is not None and is_url(place)
    path = local_path(place, "DIR") if place is not None and not remote else None
    found = diagnose(path, o.check_backend(backend))
    if place is not None and remote:
        store = {"checksum": checksum, "retry_for": retry_for, "store_option": store_option}
        found = replace(found, endpoint=_examine(place, store))
    if json:
        print_json(found.to_json())
    else:
        _print(found)
    if found.backend_error is not None:
        raise found.backend_error
    if found.folder is not None and not found.folder.writable:
        raise LocalError(
            f"{found.folder.path}: cannot be written: {found.folder.obstacle}",
            hint="make it writable or choose another folder",
        )
    if found.endpoint is not None:
        _judge(found.endpoint)


def _examine(url: str, store: dict[str, Any]) -> EndpointReport:
    from mxconvert.doctor import examine_endpoint

    stop = runtime.state.stop
    with (
        stop.watched(),
        s.open_client(url, reporter=ignore, stop=stop, **store) as (_, client),
    ):
        return examine_endpoint(client)


def _judge(found: EndpointReport) -> None:
    if found.obstacle is not None:
        raise found.obstacle
    if not found.abilities.get("get"):
        raise StoreError(
            StoreFault.CORRUPT,
            f"{found.label}: returns other bytes than it was given",
            hint=found.details.get("get"),
        )


def _print(found: Diagnosis) -> None:
    _section("versions", ((k, v or "not installed") for k, v in found.versions.items()))
    _section("machine", _machine(found.machine))
    _section("backend", [("kernels", found.backend), ("GPU", found.gpu)])
    _section("extras", _extras(found))
    if found.folder is not None:
        _section("folder", _folder(found.folder))
    if found.endpoint is not None:
        _section("store", _store(found.endpoint))
    _section("environment", _environment(found.environment))


def _section(title: str, pairs: Any) -> None:
    """Write a title and lines of names and texts."""
    lines = list(pairs)
    width = max((len(name) for name, _ in lines), default=0)
    print(title)
    for name, text in lines:
        print(f"  {name:<{width}}  {text}")


def _machine(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    memory, files, quota = facts["memory"], facts["open_files"], facts["cpu_quota"]
    yield "cpu", facts["cpu"]
    yield "features", " ".join(facts["cpu_features"]) or "none of those that matter"
    yield "cores", str(facts["usable_cores"])
    yield "cpu quota", "none" if quota is None else f"{quota:.2f} cores"
    yield "load", f"{facts['load']:.2f}"
    yield "memory", f"{size(memory.get('total', 0))}, {size(memory.get('available', 0))} available"
    yield "swap", size(memory.get("swap", 0))
    limit = facts["memory_limit"]
    yield "memory limit", "none" if limit is None else size(limit)
    yield "open files", f"{files['soft']} (hard limit {files['hard']})"
    yield "GPUs", "; ".join(facts["gpus"]) or "none"
    yield "GPU driver", facts["gpu_driver"] or "none"


def _extras(found: Diagnosis) -> Iterator[tuple[str, str]]:
    for extra in found.extras:
        if extra.missing:
            yield extra.name, f"missing {', '.join(extra.missing)}: {extra.command}"
        else:
            yield extra.name, "installed"
    if not found.extras:
        yield "unknown", "not installed as a package"


def _folder(folder: FolderReport) -> Iterator[tuple[str, str]]:
    yield "path", folder.path
    yield "file system", folder.file_system + (", read-only" if folder.read_only else "")
    yield "free", size(folder.free)
    yield "writable", "yes" if folder.writable else f"no: {folder.obstacle}"
    yield "hard links", _word(folder.hard_links)
    yield "fsync", _word(folder.fsync)


def _store(found: EndpointReport) -> Iterator[tuple[str, str]]:
    yield "url", found.label
    for name, works in found.abilities.items():
        detail = found.details.get(name)
        yield name, _word(works) + (f" ({detail})" if detail else "")
    if found.put_seconds is not None and found.get_seconds is not None:
        put, get = found.put_seconds * 1000, found.get_seconds * 1000
        yield "time for 1 MB", f"{put:.0f} ms to put, {get:.0f} ms to get"
    for text in found.consequences:
        yield "so", text


def _environment(variables: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what is set, then the names of what is not on one line."""
    yield from ((name, text) for name, text in variables.items() if text != "unset")
    yield "unset", ", ".join(name for name, text in variables.items() if text == "unset")


def _word(works: bool | None) -> str:
    return "not tried" if works is None else "work" if works else "do not work"
