"""Which files of the source travel with the weights, and whether their names can."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxconvert.errors import SourceError, VerificationError, brief
from mxconvert.manifest import MANIFEST_NAME, TENSORS_NAME, path_fault, refuse_clashes
from mxconvert.safetensors_format import is_utf8
from mxconvert.writer import PARTIAL_SUFFIX
from mxconvert.writer.documents import CARD_NAME, CONFIG_NAME, INDEX_NAME

if TYPE_CHECKING:
    from mxconvert.model import Checkpoint, Plan, Sidecar

_LONGEST = 255 - len(PARTIAL_SUFFIX)  # of a name in common file systems, while it is written

DOCUMENT_NAMES = (CONFIG_NAME, CARD_NAME, INDEX_NAME, TENSORS_NAME, MANIFEST_NAME)
"""What every artifact holds beside weights and sidecars."""


def card_path(checkpoint: Checkpoint) -> str | None:
    """Return the path of the source's model card, however it is capitalised."""
    names = [sidecar.path for sidecar in checkpoint.sidecars]
    return next((name for name in names if name.casefold() == CARD_NAME.casefold()), None)


def copied_sidecars(checkpoint: Checkpoint) -> list[Sidecar]:
    """Return the sidecars that are copied: all but those that are written anew."""
    renewed = (CONFIG_NAME, card_path(checkpoint))
    return [sidecar for sidecar in checkpoint.sidecars if sidecar.path not in renewed]


def _fault(path: str) -> str | None:
    if not is_utf8(path):
        return "it is not UTF-8"
    if max(len(part.encode()) for part in path.split("/")) > _LONGEST:
        return f"it has more than {_LONGEST} bytes between slashes"
    return path_fault(path)


def check_names(checkpoint: Checkpoint, plan: Plan) -> None:
    """Refuse a source with files that an artifact cannot name, before any work.

    Raises:
        SourceError: A name that is unsafe somewhere, or two for one file.
    """
    copied = [sidecar.path for sidecar in copied_sidecars(checkpoint)]
    weights = [file.name for file in plan.files]
    for path in (*copied, *weights):
        fault = _fault(path)
        if fault is not None:
            raise SourceError(
                f"{brief(path)}: a name that cannot be part of an artifact: {fault}",
                hint="rename or remove the file",
                code="unsafe-name",
            )
    try:
        refuse_clashes([*DOCUMENT_NAMES, *weights, *copied], "the artifact")
    except VerificationError as error:
        raise SourceError(
            error.message, hint="rename or remove the file of the source", code="lookalike-names"
        ) from error
