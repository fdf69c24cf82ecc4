"""Small checkpoints that transformers writes, with weights that MXFP4 holds exactly.

The source is thus at the same time the decoded twin of our folder: what an engine loads
from it, and what it decodes from ours, must be equal element by element.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.container import Tensor, raw_safetensors, read_safetensors
from tests.support.engines.sizes import CHANGES, FLAT, NOT_STORED, PUBLISHED, STORED, TRANSPOSED
from tests.support.families.build import build
from tests.support.families.configs import CONFIGS
from tests.support.numbers import BLOCK, E2M1, encode

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.support.artifact import Artifact

_LEAST_EXPONENT, _MOST_EXPONENT = -9, -4


def write_source(family: str, folder: Path) -> None:
    """Write a family's folder as ``save_pretrained`` does, then give it its values.

    Raises:
        LookupError: The installed transformers lacks the family.
    """
    changes = merged(CONFIGS[family], CHANGES.get(family, {}))
    build(family, **changes).save_pretrained(folder)
    path = folder / "config.json"
    config = merged(json.loads(path.read_text()), PUBLISHED.get(family, {}))
    beside = config["text_config"] if family in FLAT else {}
    path.write_text(json.dumps({**beside, **config}, indent=2))
    for path in folder.glob("*.safetensors"):
        raw_safetensors(path, as_released(family, read_safetensors(path)))


def as_released(family: str, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names and in the shapes of the releases, with values of ours."""
    left_out = re.compile(NOT_STORED.get(family, "$.")).search
    made = {}
    for stored_name, value in stored.items():
        name = stored_name
        for old, new in STORED.get(family, {}).items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        if left_out(name):
            continue
        shape = value.shape
        if family in TRANSPOSED and ".experts." in name:
            shape = (*shape[:-2], shape[-1], shape[-2])
        made[name] = exact(name, value._replace(shape=shape))
    return made


def merged(base: Any, changes: Any) -> Any:
    """Return a config with changes at any depth; ``None`` removes a key."""
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    both = base | {key: merged(base.get(key), value) for key, value in changes.items()}
    return {key: value for key, value in both.items() if changes.get(key, value) is not None}


def write_twin(source: Path, artifact: Artifact, folder: Path) -> None:
    """Copy a source; each weight that we packed is replaced by what our numbers say."""
    shutil.copytree(source, folder)
    for path in folder.glob("*.safetensors"):
        tensors = read_safetensors(path)
        for name in tensors.keys() & set(artifact.quantized):
            tensors[name] = tensors[name]._replace(data=encode(artifact.values(name), "BF16"))
        raw_safetensors(path, tensors)


def exact(name: str, stored: Tensor) -> Tensor:
    """Return seeded values; those of matrices lie on MXFP4's grid, whichever way it runs."""
    if stored.dtype not in ("BF16", "F32"):
        return stored
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if len(stored.shape) < 2 or stored.shape[-1] % BLOCK:
        values = rng.standard_normal(stored.shape) * 0.02
    else:
        # What holds all experts may lie either way round; other matrices are [out, in].
        joined = len(stored.shape) > 2 or ".experts.mlp." in name
        values = _on_grid(rng, stored.shape, BLOCK if joined else 1)
    return Tensor(stored.dtype, stored.shape, encode(values, stored.dtype))


def _on_grid(rng: np.random.Generator, shape: tuple[int, ...], height: int) -> NDArray[np.float64]:
    """Tiles of ``height`` by 32 elements with an exponent each; the largest code is in each."""
    signs = rng.choice([-1.0, 1.0], shape)
    codes = E2M1[rng.integers(0, len(E2M1), shape)]
    rows, columns = np.ogrid[: shape[-2], : shape[-1]]
    codes[..., (rows - columns) % BLOCK == 0] = E2M1[-1]
    tiles = (*shape[:-2], -(-shape[-2] // height), -(-shape[-1] // BLOCK))
    exponents = rng.integers(_LEAST_EXPONENT, _MOST_EXPONENT + 1, tiles)
    steps = np.repeat(np.repeat(np.exp2(exponents), height, axis=-2), BLOCK, axis=-1)
    values = signs * codes * steps[..., : shape[-2], : shape[-1]]
    return np.asarray(values + 0.0)  # no negative zero, of which we keep no sign
