"""Options and fixtures for all tests.

Plain ``pytest`` runs the fast tier. ``--slow`` adds tests that take minutes, ``--interop``
those that need torch and the libraries that read our output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support import Model, bf16_model

if TYPE_CHECKING:
    from pathlib import Path

settings.register_profile("mxconvert", derandomize=True, deadline=None)
settings.load_profile("mxconvert")

TIERS = ("slow", "interop")


def pytest_addoption(parser: pytest.Parser) -> None:
    for tier in TIERS:
        parser.addoption(f"--{tier}", action="store_true", help=f"also run tests marked {tier}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for tier in TIERS:
            if item.get_closest_marker(tier) and not config.getoption(f"--{tier}"):
                item.add_marker(pytest.mark.skip(reason=f"needs --{tier}"))


@pytest.fixture
def model() -> Model:
    """F-BF16, not yet written; change it, then `Model.write` it."""
    return bf16_model()


@pytest.fixture(scope="session")
def shared_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """F-BF16 on disk, once for all tests of a worker: read it, never change it."""
    return bf16_model().write(tmp_path_factory.mktemp("shared") / "F-BF16")
