"""What lies in a source folder, sorted into weights, sidecars and things left out.

Nothing outside the folder is ever opened: a link must lead to a file inside it, or
into the ``blobs`` folder of the Hugging Face cache that the folder is a snapshot of.
"""

from __future__ import annotations

import re
import stat
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mxconvert.errors import LocalError, SourceError
from mxconvert.model import Skipped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CONFIG_NAME = "config.json"
CARD_NAME = "README.md"
INDEX_SUFFIX = ".safetensors.index.json"
WEIGHT_SUFFIX = ".safetensors"

_OTHER_WEIGHTS = re.compile(
    r"""(?ix)
    .*\.(pt|pth|ckpt|h5|msgpack|onnx|onnx_data|gguf|ggml|ot|npz|tflite|mlmodel|safetensors\.tmp)$
    | (pytorch_model|model|adapter_model|consolidated|tf_model|diffusion_pytorch_model).*\.bin$
    | .*\.(bin|pt|h5|flax|msgpack)\.index\.json$
    """
)
_TRAINING_STATE = re.compile(
    r"(?i)(optimizer|scheduler|scaler|training_args|random_states|rng_state).*\.(bin|pt|pth|pkl)$"
    r"|trainer_state\.json$"
)
QUANTIZATION_FILES = frozenset(
    {
        "hf_quant_config.json",  # ModelOpt
        "quantization_config.json",  # AutoRound, beside the one in config.json
        "quantize_config.json",  # GPTQ
        "quant_config.json",  # AWQ
    }
)
"""Files that declare a quantization as config.json does; loaders look for some of them."""

_REPLACED = dict.fromkeys(QUANTIZATION_FILES, "quantization config of another scheme") | {
    "mxconvert.manifest.json": "manifest of an earlier artifact",
    "mxconvert.tensors.jsonl.zst": "tensor list of an earlier artifact",
}


@dataclass(slots=True)
class Listing:
    """Relative POSIX paths of a folder's files by what becomes of them."""

    root: Path
    weights: list[str] = field(default_factory=list)
    indexes: list[str] = field(default_factory=list)
    sidecars: list[str] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def path(self, name: str) -> Path:
        """Return the absolute path of a listed file."""
        return self.root / name


def list_folder(root: Path) -> Listing:
    """List a checkpoint folder.

    Raises:
        SourceError: Not a folder, a link that leads outside, a special file in a
            weight's place, or two names that differ only in case or Unicode form.
        LocalError: The folder cannot be read.
    """
    if not root.exists():
        raise SourceError(f"{root}: no such folder", hint="check the path of the checkpoint")
    if not root.is_dir():
        raise SourceError(
            f"{root}: is a file, expected a checkpoint folder",
            hint="give the folder that holds config.json and the weights",
        )
    listing = Listing(root.resolve())
    try:
        for name, path in _walk(listing):
            _file_away(name, path, listing)
    except PermissionError as error:
        raise LocalError.unreadable(error.filename, error) from error
    refuse_lookalikes([*listing.weights, *listing.sidecars], "files")
    return listing


def _walk(listing: Listing) -> Iterator[tuple[str, Path]]:
    folders = [listing.root]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            name = path.relative_to(listing.root).as_posix()
            if path.name.startswith(".") or path.name == "__pycache__":
                listing.skipped.append(Skipped(name, "hidden or cache", _size(path)))
            elif path.is_dir() and not path.is_symlink():
                folders.append(path)
            else:
                yield name, path


def _size(path: Path) -> int:
    return path.lstat().st_size if path.is_file() else 0


def _file_away(name: str, path: Path, listing: Listing) -> None:
    top = PurePosixPath(name).name
    reason = _reason_to_skip(name, top)
    if path.is_symlink() and not _stays_inside(path, listing.root):
        raise SourceError(
            f"{path}: a link that leads outside the checkpoint folder, to {path.readlink()}",
            hint="replace the link by the file",
            code="link-outside",
        )
    if not path.exists():
        raise SourceError(f"{path}: a dangling link to {path.readlink()}", hint="fetch the file")
    if not stat.S_ISREG(path.stat().st_mode):
        if top.endswith(WEIGHT_SUFFIX):
            raise SourceError(f"{path}: not a regular file", hint="replace it by the file")
        reason = "not a regular file"
    if reason is not None:
        listing.skipped.append(Skipped(name, reason, _size(path)))
    elif top.endswith(INDEX_SUFFIX):
        listing.indexes.append(name)
    elif top.endswith(WEIGHT_SUFFIX):
        listing.weights.append(name)
    else:
        listing.sidecars.append(name)


def _reason_to_skip(name: str, top: str) -> str | None:
    if top in _REPLACED:
        return _REPLACED[top]
    if top.endswith((WEIGHT_SUFFIX, INDEX_SUFFIX)):
        return None
    if _TRAINING_STATE.match(top):
        return "training state"
    if _OTHER_WEIGHTS.match(top):
        return "weights in another format"
    if name.startswith("original/"):
        return "second copy of the weights"
    return None


def _stays_inside(path: Path, root: Path) -> bool:
    target = path.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    return any(target.is_relative_to(folder) for folder in allowed)


def refuse_lookalikes(names: Iterable[str], what: str, *, fold_case: bool = True) -> None:
    """Refuse names that differ only in Unicode form or case.

    Raises:
        SourceError: Showing both names.
    """
    seen: dict[str, str] = {}
    for name in names:
        key = unicodedata.normalize("NFC", name)
        key = key.casefold() if fold_case else key
        other = seen.setdefault(key, name)
        if other != name:
            raise SourceError(
                f"two {what} differ only in case or Unicode form: {other!a} and {name!a}",
                hint="rename or remove one of them",
                code="lookalike-names",
            )
