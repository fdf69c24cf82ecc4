"""Write the header fixtures of `tests/test_families.py` with the installed transformers.

    python scripts/make_family_fixtures.py [--out FOLDER] [FAMILY ...]

Each is what ``save_pretrained`` wrote for a small seeded model: the names, dtypes and shapes
on disk, and config.json. Run it once with transformers 4.x and once with 5.x.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.families.build import build, header_of, in_memory_header, major
from tests.support.families.configs import CONFIGS
from tests.support.families.fixtures import FOLDER, IN_MEMORY, dump


def main() -> None:
    """Write one file for each family that the installed release has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("families", nargs="*", default=list(CONFIGS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for family in options.families:
        try:
            model = build(family)
        except LookupError:
            print(f"{family}: not in this release")
            continue
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            (options.out / f"{family}.{major()}.json").write_text(dump(header_of(Path(folder))))
        if major() != "4x" and family in IN_MEMORY:
            with tempfile.TemporaryDirectory() as folder:
                header = in_memory_header(model, Path(folder))
            (options.out / f"{family}.fused.json").write_text(dump(header))


if __name__ == "__main__":
    main()
