"""`--recheck`: is the source still what the finished files were made from?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxconvert.digest import xxh3_128
from mxconvert.errors import SourceError
from mxconvert.source.gather import tensor_pieces

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mxconvert.model import OutputFile, TensorInfo
    from mxconvert.pipeline.journal import Journal
    from mxconvert.source import SourceReader


def recheck_sources(finished: Iterable[OutputFile], journal: Journal, reader: SourceReader) -> None:
    """Read the source tensors of finished files again and compare their digests.

    Raises:
        SourceError: A tensor has changed since; names it.
    """
    for file in finished:
        expected = journal.load(file).sources
        tensors = (tensor for item in file.items for tensor in item.source_tensors)
        compare_sources(((tensor, file.name, expected[tensor.name]) for tensor in tensors), reader)


def compare_sources(expected: Iterable[tuple[TensorInfo, str, str]], reader: SourceReader) -> None:
    """Compare source tensors with what an output file was made from.

    Args:
        expected: Tensor, name of the output file, XXH3-128 of the tensor at that time.
        reader: Of the source.

    Raises:
        SourceError: A tensor has changed since; names it.
    """
    for tensor, made, digest in expected:
        found = _digest(tensor, reader)
        if found != digest:
            raise SourceError(
                f"{tensor.file}: tensor {tensor.name!r} has changed since {made} was made from "
                f"it: XXH3-128 was {digest}, is {found}",
                hint="pass --overwrite to start over from the changed source",
                code="source-changed",
            )


def _digest(tensor: TensorInfo, reader: SourceReader) -> str:
    digest = xxh3_128()
    for data in tensor_pieces(reader, tensor):
        digest.update(data)
    return digest.hexdigest()
