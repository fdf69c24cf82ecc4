"""Found on the path of vLLM's processes: lets modules import what has no build for this CPU.

What prepares images and sound, and a GPU's kernels. Nothing that loads weights calls them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from typing import Any
from unittest import mock

PACKAGES = ("torchvision", "torchaudio", "vllm.model_executor.kernels.linear.cute_dsl")


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes a module of mocks for each of `PACKAGES` and all below them."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        """Return a spec for the packages, ``None`` for all others."""
        if not any(f"{name}.".startswith(f"{package}.") for package in PACKAGES):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        """Return a module whose every attribute is a mock."""
        module = mock.MagicMock(name=spec.name, __path__=[], __spec__=spec, __version__="0.28.0")
        module.__name__ = spec.name
        return module

    def exec_module(self, _module: Any) -> None:
        """Nothing to run."""


sys.meta_path.insert(0, StandIns())
