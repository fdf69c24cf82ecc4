"""Options of the commands that talk to a store, and how they become a client."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from mxconvert.cli.runtime import parse_duration, parse_size
from mxconvert.store import (
    DEFAULT_JOBS,
    Checksum,
    Client,
    ClientOptions,
    StoreOptions,
    open_store,
    parse_store_options,
    parse_url,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxconvert.events import Reporter
    from mxconvert.stop import StopToken
    from mxconvert.store import StoreURL

DEFAULT_RETRY_FOR_TEXT = "5m"
"""`DEFAULT_RETRY_FOR` as it is typed."""

StoreOptionList = Annotated[
    list[str] | None,
    typer.Option(
        "--store-option",
        metavar="KEY=VALUE",
        help="How the store is reached, e.g. endpoint=https://... Repeatable.",
    ),
]
RetryFor = Annotated[
    str,
    typer.Option(
        "--retry-for", metavar="DURATION", help="Give up after this long without progress."
    ),
]
LimitRate = Annotated[
    str | None,
    typer.Option("--limit-rate", metavar="SIZE", help="Most bytes per second, e.g. 200MB."),
]
StoreJobs = Annotated[
    int, typer.Option("-j", "--jobs", min=1, help="Most requests to the store at once.")
]
ChecksumOption = Annotated[
    Checksum,
    typer.Option("--checksum", help="Whether CRC64-NVME travels with uploads."),
]


@contextlib.contextmanager
def open_client(
    url_text: str,
    *,
    store_option: list[str] | None = None,
    retry_for: str = DEFAULT_RETRY_FOR_TEXT,
    limit_rate: str | None = None,
    jobs: int = DEFAULT_JOBS,
    checksum: Checksum = Checksum.AUTO,
    reporter: Reporter,
    stop: StopToken,
) -> Iterator[tuple[StoreURL, Client]]:
    """Open the store at a URL with what the command line says; close it at the end.

    The options are as typer gives them. Nothing is requested yet.

    Raises:
        UsageError: Not a URL, or an option that the store does not take.
        MissingExtraError: The scheme needs a package that is not installed.
    """
    url = parse_url(url_text)
    options = StoreOptions(
        values=parse_store_options(store_option or ()), checksum=checksum, connections=jobs
    )
    limits = ClientOptions(
        jobs=jobs,
        limit_rate=None if limit_rate is None else parse_size(limit_rate, "--limit-rate"),
        retry_for=parse_duration(retry_for, "--retry-for"),
    )
    store = open_store(url, options)
    try:
        yield url, Client(store, limits, reporter, stop)
    finally:
        store.close()
