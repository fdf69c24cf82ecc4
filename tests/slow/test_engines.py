"""What docs/models.md says of engines, against their own code: hours, 4 GB of packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("MXCONVERT_ENGINES", Path.home() / ".cache" / "mxconvert-engines"))

pytestmark = [pytest.mark.slow, pytest.mark.interop, pytest.mark.timeout(3 * 3600)]


@pytest.mark.parametrize("scope", ["experts", "linear"])
def test_engines_load_what_is_claimed(scope: str) -> None:
    """vLLM's loader and SGLang's rules for every family; the script fails if one differs."""
    subprocess.run(
        [
            sys.executable,
            ROOT / "scripts" / "check_engines.py",
            *("--venv", CACHE / "vllm", "--sglang", CACHE / "sglang", "--scope", scope),
        ],
        check=True,
    )
