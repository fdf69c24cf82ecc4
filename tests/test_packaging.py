"""What a wheel holds, and what the base install must not need."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata

import pytest

from tests.support.cli import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = {"torch", "triton", "safetensors", "transformers", "boto3", "ray"}


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """File names in a wheel built from this checkout, without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    code = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_holds_two_packages_and_nothing_else(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names if ".dist-info/" not in name}
    assert tops == {"mxconvert", "mxconvert_kernels"}


def test_the_wheel_is_typed_licensed_and_carries_its_schemas(wheel_names: list[str]) -> None:
    assert {"mxconvert/py.typed", "mxconvert_kernels/py.typed"} <= set(wheel_names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)
    schemas = [p.name for p in (ROOT / "mxconvert" / "schemas").glob("*.json")]
    assert {f"mxconvert/schemas/{name}" for name in schemas} <= set(wheel_names)


def test_kernels_is_a_plain_folder() -> None:
    """A package of that name would shadow the one of the same name in the registry."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "kernels" / "mxconvert_kernels" / "__init__.py").exists()


def test_the_base_install_asks_for_nothing_heavy() -> None:
    """CI runners and inference nodes install it: no torch, no compiler, no GPU stack."""
    names = {re.split(r"[^\w-]", line)[0] for line in PYPROJECT["project"]["dependencies"]}
    assert not names & HEAVY


GPU_ONLY = (
    *(f"mxconvert_kernels.gpu.{name}" for name in ("backend", "device", "launch")),
    "mxconvert.pipeline.devices.torch_device",
)
"""Imported when a GPU is asked for, and then with a message that names the extra."""


def test_importing_everything_needs_only_the_base_install() -> None:
    """Every other module imports with the heavy libraries blocked."""
    code = f"""
import importlib, pkgutil, sys
for name in {sorted(HEAVY)!r}:
    sys.modules[name] = None
import mxconvert, mxconvert_kernels
for package in (mxconvert, mxconvert_kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__") and module.name not in {GPU_ONLY!r}:
            importlib.import_module(module.name)
"""
    path = f"{ROOT}:{ROOT / 'kernels'}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_version_is_stated_once_and_the_same() -> None:
    import mxconvert

    assert PYPROJECT["project"]["version"] == mxconvert.__version__
    try:
        installed = metadata.version("mxconvert")
    except metadata.PackageNotFoundError:
        pytest.skip("not installed; run from a checkout")
    assert installed == mxconvert.__version__


@pytest.mark.parametrize("script", ["scripts/demo", "scripts/test", ".ci/run", "scripts/lib.sh"])
def test_shell_scripts_parse_and_run_from_anywhere(script: str) -> None:
    path = ROOT / script
    subprocess.run(["bash", "-n", path], check=True)
    assert path.name == "lib.sh" or path.stat().st_mode & 0o111
