"""Session fixtures: each folder is written, and each artifact made, once for a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.interop.families import CONFIGS, write
from tests.support import Artifact, read_artifact, run_cli

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def family_sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that transformers wrote, by family. Read only."""
    root = tmp_path_factory.mktemp("families")
    return {family: write(family, root / family) for family in CONFIGS}


@pytest.fixture(scope="session")
def family_artifacts(
    family_sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Artifact]:
    """What quantize makes of each family with the `even` rule. Read only."""
    root = tmp_path_factory.mktemp("artifacts")
    artifacts = {}
    for family, source in family_sources.items():
        run_cli("quantize", source, root / family, "--scale-rule", "even").ok()
        artifacts[family] = read_artifact(root / family)
    return artifacts
