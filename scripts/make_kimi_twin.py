"""Write the BF16 twin of Kimi-K3 as sparse files: 5.56 TB that take a few MB of disk.

Its headers are real, its weights are zeros, so planning and memory can be tried at true
scale on a small machine. Names and shapes come from `tests/support/kimi_k3.py`.

    python scripts/make_kimi_twin.py FOLDER [--index model.safetensors.index.json[.gz]]

With ``--index`` the names are first compared with a published index.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.kimi_k3 import (
    CONFIG,
    official_specs,
    read_config,
    twin_shards,
    write_twin,
)


def read_index(path: Path) -> dict[str, str]:
    """Return the weight map of an index, gzipped or not."""
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    weight_map: dict[str, str] = json.loads(text)["weight_map"]
    return weight_map


def ruled_map(config_path: Path) -> dict[str, str]:
    """Return the weight map that the rule gives for the published model."""
    config = read_config(config_path)
    return {name: file for file, specs in twin_shards(config) for name in official_specs(specs)}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the model")
    parser.add_argument("--index", type=Path, help="published index to compare names with")
    args = parser.parse_args()
    if args.index and read_index(args.index) != ruled_map(args.config):
        sys.exit(f"error: {args.index} does not list what the rule gives")
    total = write_twin(args.folder, read_config(args.config))
    print(f"wrote {args.folder}: {total:,} bytes of tensors")


if __name__ == "__main__":
    main()
