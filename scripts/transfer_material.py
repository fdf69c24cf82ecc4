"""The models that `bench_transfer` moves: what quantize writes, large and small."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mxconvert.bench.source import Dimensions, write_source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNITS = {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}
MODEL = Dimensions(layers=1, experts=1, hidden=2048, inner=768, vocab=1024)
SMALL = Dimensions(layers=1, experts=1, hidden=128, inner=64, vocab=64)
PIECE = 1 << 20
Digests = dict[str, str]
_PACKED = 17 / 64  # bytes of MXFP4 per byte of BF16


@dataclass
class Material:
    """A folder to move.

    Attributes:
        folder: Where it lies, on tmpfs.
        listing: A JSON file of its names and sizes.
        num_bytes: Their sum.
        digests: SHA-256 by name.
        small: Whether it only shows what a start costs.
        buckets: Where it lies at the server under way: as ours lays it out, and plainly.
    """

    folder: Path
    listing: Path
    num_bytes: int
    digests: dict[str, str]
    small: bool
    buckets: dict[bool, str] = field(default_factory=dict)

    def name_of(self, key: str) -> str | None:
        """Return the name of the file that a key holds, whatever folder the key begins with."""
        while key and key not in self.digests:
            key = key.partition("/")[2]
        return key or None


def parse_size(text: str) -> int:
    """Read ``2GiB``.

    Raises:
        ValueError: Not a size.
    """
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def sized(num_bytes: int, files: int) -> Dimensions:
    """Return a model whose quantized experts and kept weights make about ``num_bytes``."""
    without, one = (replace(MODEL, experts=count).num_bytes for count in (0, 1))
    room = num_bytes / files - without
    return replace(MODEL, layers=files, experts=max(1, round(room / ((one - without) * _PACKED))))


def make_materials(folder: Path, disk: Path, num_bytes: int, files: int) -> Iterator[Material]:
    """Yield the model and a small one; the source, four times as large, lies on the disk."""
    for name, dims in (("model", sized(num_bytes, files)), ("small", SMALL)):
        source, target = disk / "source", folder / name
        print(f"{name}: {dims}", file=sys.stderr, flush=True)
        write_source(source, dims)
        command = [sys.executable, "-m", "mxconvert", "quantize", str(source), str(target)]
        subprocess.run([*command, "--layout", "source", "--quiet"], check=True)
        shutil.rmtree(source)
        for path in target.glob(".*"):  # what the report reads is not part of the artifact
            path.unlink()
        paths = sorted(files_in(target))
        names = [str(path.relative_to(target)) for path in paths]
        sizes = dict(zip(names, (path.stat().st_size for path in paths), strict=True))
        listing = folder / f"{name}.json"
        listing.write_text(json.dumps(sizes))
        with ThreadPoolExecutor(2) as pool:
            digests = dict(zip(names, pool.map(sha256, paths), strict=True))
        yield Material(target, listing, sum(sizes.values()), digests, name == "small")


def files_in(folder: Path) -> list[Path]:
    """Return all files below a folder."""
    return [path for path in folder.rglob("*") if path.is_file()]


def sha256(path: Path) -> str:
    """Return a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
