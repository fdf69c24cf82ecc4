"""What docs/models.md says of engines and releases, against their code: some 15 minutes, 6 GB."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engines.environment import transformers_4_python

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("MXCONVERT_ENGINES", Path.home() / ".cache" / "mxconvert-engines"))

pytestmark = [pytest.mark.slow, pytest.mark.interop, pytest.mark.timeout(3 * 3600)]


def test_the_last_4x_writes_what_is_recorded() -> None:
    """Names on disk differ from 5.x, whose headers the interoperability tests compare."""
    python = transformers_4_python(CACHE / "transformers-4")
    subprocess.run([python, ROOT / "scripts" / "record_families.py"], check=True)


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
