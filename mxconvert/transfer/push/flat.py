"""A push to the URL itself, where something else may lie."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from mxconvert.errors import UsageError
from mxconvert.remote import read_manifest
from mxconvert.transfer.crew import Crew
from mxconvert.transfer.push.existing import is_there

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mxconvert.manifest import FileEntry
    from mxconvert.store import Client
    from mxconvert.transfer.crew import Task
    from mxconvert.transfer.local import LocalArtifact


def refuse_occupied(client: Client, artifact: LocalArtifact) -> None:
    """Refuse to write over another artifact, or over files that mxconvert has not written.

    Raises:
        UsageError: Naming one of them.
    """
    there = read_manifest(client, "")
    if there is not None and there.id != artifact.id:
        raise UsageError(
            f"{client.store.label}: holds another artifact: {there.id}, to be pushed is "
            f"{artifact.id}",
            hint="push without --flat, or choose another URL",
            code="occupied",
        )
    if there is None:
        look = functools.partial(_refuse_stranger, client, artifact.manifest.chunk_size)
        tasks = (functools.partial(look, entry) for entry in artifact.manifest.files)
        Crew(client.options.jobs, client).run(tasks)


def _refuse_stranger(client: Client, chunk_size: int, entry: FileEntry) -> Iterable[Task]:
    info = client.find(entry.path)
    if info is None or info.sha256 is not None or is_there(client, info, entry, chunk_size):
        return ()
    raise UsageError(
        f"{client.store.url(entry.path)}: is there already, and not by mxconvert",
        hint="remove it, choose another URL, or push without --flat",
        code="occupied",
    )
