"""The recorded headers: what each release of transformers writes for each family."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.support.container import Tensor
from tests.support.models import Model, tensor
from tests.support.numbers import encode

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parents[1] / "data" / "families"
IN_MEMORY = ("qwen3_5_moe", "qwen3_5_moe_text")
"""Families that publish the names that transformers 5.x has in memory."""

_VERSION_KEYS = ("transformers_version",)


class Fixture(NamedTuple):
    """One recorded header."""

    family: str
    kind: str
    transformers: str
    config: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]

    @property
    def label(self) -> str:
        """For the names of tests."""
        return f"{self.family}.{self.kind}"

    def model(self) -> Model:
        """Return a model of this header, its values seeded by name."""
        stored = {name: _filled(name, *spec) for name, spec in self.tensors.items()}
        return Model(config=dict(self.config), shards={"model.safetensors": stored})


def _filled(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    if dtype in ("BF16", "F16", "F32"):
        return tensor(name, shape, dtype)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return Tensor(dtype, shape, encode(rng.integers(0, 9, shape), dtype))


def dump(header: dict[str, Any]) -> str:
    """Return a header as JSON, a tensor on a line."""
    rows = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in header["tensors"].items()
    )
    config = {key: value for key, value in header["config"].items() if key not in _VERSION_KEYS}
    return (
        f'{{"transformers": {json.dumps(header["transformers"])},\n'
        f' "config": {json.dumps(config, sort_keys=True)},\n "tensors": {{\n{rows}\n }}}}\n'
    )


def parse(text: str, family: str, kind: str) -> Fixture:
    """Return the fixture that `dump` wrote."""
    document = json.loads(text)
    tensors = {name: (dtype, tuple(shape)) for name, (dtype, *shape) in document["tensors"].items()}
    return Fixture(family, kind, document["transformers"], document["config"], tensors)


def fixtures() -> Iterator[Fixture]:
    """Yield every recorded header, sorted by file name."""
    for path in sorted(FOLDER.glob("*.json")):
        family, kind = path.stem.rsplit(".", maxsplit=1)
        yield parse(path.read_text(), family, kind)
