"""`--recheck`: is the source still what the finished files were made from?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxconvert.digest import xxh3_128
from mxconvert.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mxconvert.model import OutputFile, TensorInfo
    from mxconvert.pipeline.journal import Journal
    from mxconvert.source import SourceReader

_PIECE = 4 * 1024 * 1024


def recheck_sources(finished: Iterable[OutputFile], journal: Journal, reader: SourceReader) -> None:
    """Read the source tensors of finished files again and compare their digests.

    Raises:
        SourceError: A tensor has changed since; names it.
    """
    buffer = memoryview(bytearray(_PIECE))
    for file in finished:
        expected = journal.load(file).sources
        for item in file.items:
            found = _digest(item.source, reader, buffer)
            if found != expected[item.source.name]:
                raise SourceError(
                    f"{item.source.file}: tensor {item.source.name!r} has changed since "
                    f"{file.name} was made from it: XXH3-128 was {expected[item.source.name]}, "
                    f"is {found}",
                    hint="pass --overwrite to start over from the changed source",
                    code="source-changed",
                )


def _digest(tensor: TensorInfo, reader: SourceReader, buffer: memoryview) -> str:
    digest = xxh3_128()
    for begin in range(0, tensor.size, _PIECE):
        data = buffer[: min(_PIECE, tensor.size - begin)]
        reader.read_into(tensor.file, tensor.offset + begin, data)
        digest.update(data)
    return digest.hexdigest()
