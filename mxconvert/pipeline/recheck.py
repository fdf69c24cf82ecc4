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
    for file in finished:
        expected = journal.load(file).sources
        compare_sources(
            ((item.source, file.name, expected[item.source.name]) for item in file.items), reader
        )


def compare_sources(expected: Iterable[tuple[TensorInfo, str, str]], reader: SourceReader) -> None:
    """Compare source tensors with what an output file was made from.

    Args:
        expected: Tensor, name of the output file, XXH3-128 of the tensor at that time.
        reader: Of the source.

    Raises:
        SourceError: A tensor has changed since; names it.
    """
    buffer = memoryview(bytearray(_PIECE))
    for tensor, made, digest in expected:
        found = _digest(tensor, reader, buffer)
        if found != digest:
            raise SourceError(
                f"{tensor.file}: tensor {tensor.name!r} has changed since {made} was made from "
                f"it: XXH3-128 was {digest}, is {found}",
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
