"""Read an artifact folder as a consumer would: plain safetensors, json and numpy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.support.numbers import decode, decode_mxfp4

if TYPE_CHECKING:
    from numpy.typing import NDArray

PACKED, SCALE = "_packed", "_scale"


class Stored(NamedTuple):
    """One stored tensor and the file that holds it."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def array(self) -> NDArray[np.uint8]:
        """The bytes of a U8 tensor in its shape."""
        return np.frombuffer(self.data, np.uint8).reshape(self.shape)


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A folder in memory.

    Attributes:
        root: Where it was read from.
        config: config.json.
        index: model.safetensors.index.json.
        manifest: mxconvert.manifest.json.
        tensors: What is stored, by name; read from the files, not from the index.
    """

    root: Path
    config: dict[str, Any]
    index: dict[str, Any]
    manifest: dict[str, Any]
    tensors: dict[str, Stored]

    @property
    def quantized(self) -> list[str]:
        """Names of the source weights that are stored packed, sorted."""
        return sorted(name.removesuffix(PACKED) for name in self.tensors if name.endswith(PACKED))

    @property
    def kept(self) -> list[str]:
        """Names of the tensors that are stored under their source name, sorted."""
        made = {name + suffix for name in self.quantized for suffix in (PACKED, SCALE)}
        return sorted(set(self.tensors) - made)

    def packed(self, weight: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return packed codes and scales of a source weight."""
        return self.tensors[weight + PACKED].array, self.tensors[weight + SCALE].array

    def values(self, weight: str) -> NDArray[np.float64]:
        """Return a weight's values by source name, decoded by RefDec where packed."""
        if weight + PACKED in self.tensors:
            return decode_mxfp4(*self.packed(weight))
        stored = self.tensors[weight]
        return decode(stored.data, stored.dtype, stored.shape)


def read_tensors(path: Path) -> dict[str, Stored]:
    """Open one file with the safetensors library and return its tensors."""
    import safetensors  # here, so that scripts can use this package without the library

    return {
        name: Stored(path.name, entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for name, entry in safetensors.deserialize(path.read_bytes())
    }


def read_artifact(folder: Path | str) -> Artifact:
    """Read a whole artifact; a tensor stored twice is an error."""
    root = Path(folder)
    tensors: dict[str, Stored] = {}
    for path in sorted(root.rglob("*.safetensors")):
        file = path.relative_to(root).as_posix()
        found = {n: t._replace(file=file) for n, t in read_tensors(path).items()}
        double = tensors.keys() & found.keys()
        assert not double, f"{path.name} stores again: {sorted(double)[:3]}"
        tensors |= found
    return Artifact(
        root=root,
        config=json.loads((root / "config.json").read_text()),
        index=json.loads((root / "model.safetensors.index.json").read_text()),
        manifest=json.loads((root / "mxconvert.manifest.json").read_text()),
        tensors=tensors,
    )
