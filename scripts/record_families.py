"""Record what the installed transformers writes for each family, or compare with what is recorded.

    python scripts/record_families.py [--write] [FAMILY ...]

A header of config.json and all tensors' names, dtypes and shapes, in tests/support/data/families,
one for the 4.x releases and one for 5.x. Status 1 if one differs, or if the release lacks a
family that is recorded. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.families.build import build, header_of, major, release
from tests.support.families.configs import CONFIGS
from tests.support.families.fixtures import FOLDER, dump


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="record instead of comparing")
    parser.add_argument("families", nargs="*", default=list(CONFIGS), metavar="FAMILY")
    options = parser.parse_args()
    verdicts = {family: check(family, write=options.write) for family in options.families}
    for family, verdict in verdicts.items():
        print(f"{family}: {verdict}")
    good = sum(verdict in ("same", "recorded") for verdict in verdicts.values())
    print(f"transformers {release()}: {good} families as recorded")
    sys.exit(not all(map(is_good, verdicts.values())))


def is_good(verdict: str) -> bool:
    """Whether a verdict is no reason to fail."""
    return verdict in ("same", "recorded", "not in this release, nor recorded")


def check(family: str, *, write: bool) -> str:
    """Write a family's header, or compare it; return what came of it."""
    path = FOLDER / f"{family}.{major()}.json"
    try:
        model = build(family)
    except LookupError:
        return (
            "LOST: recorded, not in this release"
            if path.exists()
            else ("not in this release, nor recorded")
        )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        written = dump(header_of(Path(folder)))
    if write:
        path.write_text(written)
        return "recorded"
    if not path.exists():
        return "NEW: not recorded"
    ours, theirs = json.loads(path.read_text()), json.loads(written)
    parts = [key for key in ("tensors", "config") if ours[key] != theirs[key]]
    return f"DIFFERS: {', '.join(parts)}" if parts else "same"


if __name__ == "__main__":
    main()
