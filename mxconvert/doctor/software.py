"""Versions of what is installed, found without importing it, and the extras."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from importlib import metadata

from mxconvert import __version__

_LIBRARIES = ("llvmlite", "numpy", "xxhash", "zstandard", "awscrt")
_GPU_LIBRARIES = ("torch", "triton")
_REQUIREMENT = re.compile(r"^([\w.-]+)(?:\[[\w,.-]*\])?(.*?)(?:;(.*))?$")
_EXTRA = re.compile(r"""extra\s*==\s*["']([\w.-]+)["']""")
_OURS = "mxconvert"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """An optional set of dependencies.

    Attributes:
        name: As in ``mxconvert[name]``.
        missing: Its packages that are not installed, sorted; versions are not compared.
    """

    name: str
    missing: tuple[str, ...]

    @property
    def command(self) -> str:
        """How to install it."""
        return f"pip install '{_OURS}[{self.name}]'"


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; it is not imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Return versions by name; ``None``: not installed."""
    return {
        "mxconvert": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        **{name: installed_version(name) for name in (*_LIBRARIES, *_GPU_LIBRARIES)},
    }


def extras() -> tuple[Extra, ...]:
    """Return the extras of the installed distribution, sorted; none in a bare checkout."""
    try:
        requirements = metadata.requires(_OURS) or []
    except metadata.PackageNotFoundError:
        requirements = []
    return parse_extras(requirements)


def parse_extras(requirements: list[str]) -> tuple[Extra, ...]:
    """Group requirements by extra and look which packages are missing."""
    missing: dict[str, set[str]] = {}
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        extra = _EXTRA.search(match[3] or "") if match else None
        if match is None or extra is None:
            continue
        names = missing.setdefault(extra[1], set())
        if match[1] != _OURS and installed_version(match[1]) is None:
            names.add(match[1])
    return tuple(
        Extra(name=name, missing=tuple(sorted(names))) for name, names in sorted(missing.items())
    )
