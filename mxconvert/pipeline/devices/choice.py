"""Which GPUs a run uses, and why: ``--backend`` and ``--device``."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mxconvert.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mxconvert.pipeline.devices.protocol import Device

WORTHWHILE = 32 * 1024**3
"""Source bytes from which on ``auto`` uses GPUs: torch, the driver and Triton take seconds to
start, in which a few cores convert as much."""

INSTALL = "pip install 'mxconvert[gpu]'"
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd")
INTERPRETER = "interpreter"
"""Triton's interpreter on the CPU, in the place of a GPU."""

_NAMED = re.compile(r"cuda:\d{1,3}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a run uses.

    Attributes:
        devices: Names of GPUs; empty: none.
        reason: Why, in a few words.
        required: Whether to fail rather than do without.
        helped: Whether the CPU makes what the GPUs have no room for.
        backend: The kernels of the host.
    """

    devices: tuple[str, ...]
    reason: str
    required: bool = False
    helped: bool = True
    backend: str = "auto"

    def makers(self) -> tuple[Callable[[], Device], ...]:
        """Return what makes each device; none is touched before."""
        return tuple(_Maker(name) for name in self.devices)


class _Maker:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self) -> Device:
        from mxconvert.pipeline.devices.torch_device import TorchDevice  # noqa: PLC0415

        return TorchDevice(self._name)


def parse_device(text: str) -> tuple[str, ...]:
    """Return the parts of ``--device``.

    Raises:
        UsageError: It is none of what it may be.
    """
    if text in ("auto", "cpu", "all"):
        return (text,)
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if not _NAMED.fullmatch(name):
            raise UsageError(
                f"--device {text!r}: expected cpu, all, or GPUs such as cuda:0,cuda:1; "
                f"found {name!r}",
                hint="`mxconvert doctor --backend triton` lists the GPUs",
                code="bad-device",
            )
    return names


def host_backend(backend: str) -> str:
    """Return the kernels of the host that go with ``--backend``."""
    return "auto" if backend == "triton" else backend


def check_choice(backend: str, device: str) -> None:
    """Refuse what cannot be meant, and what is not installed, before anything is read.

    Raises:
        UsageError: ``--device`` is none of what it may be, or contradicts ``--backend``.
        MissingExtraError: GPUs are asked for, and torch or Triton is not installed.
    """
    wanted = parse_device(device)
    on_host = backend in ("llvm", "numpy")
    if (on_host and wanted not in (("auto",), ("cpu",))) or (
        backend == "triton" and wanted == ("cpu",)
    ):
        raise UsageError(
            f"--backend {backend}, for {'CPUs' if on_host else 'GPUs'}, and --device {device} "
            "exclude each other",
            hint="leave one of them away",
            code="bad-device",
        )
    if backend == "triton" or wanted[0] not in ("auto", "cpu"):
        _check_installed(_option(backend, device))


def _option(backend: str, device: str) -> str:
    """Return what asks for GPUs."""
    return "--backend triton" if backend == "triton" else f"--device {device}"


def _check_installed(option: str) -> None:
    if missing := _missing():
        raise MissingExtraError(
            f"{option}: {missing} not installed", hint=INSTALL, code="missing-extra"
        )


def choose(backend: str, device: str, num_bytes: int) -> Choice:
    """Return what a run uses.

    Args:
        backend: ``auto``, ``triton``, ``llvm`` or ``numpy``.
        device: ``auto``, ``cpu``, ``all``, or names separated by commas.
        num_bytes: Source bytes that are converted.

    Raises:
        UsageError: As `check_choice`.
        MissingExtraError: What was asked for is not here.
    """
    check_choice(backend, device)
    wanted = parse_device(device)
    if backend in ("llvm", "numpy"):
        return Choice(devices=(), reason=f"--backend {backend}", backend=backend)
    if wanted == ("cpu",):
        return Choice(devices=(), reason="--device cpu")
    if backend == "auto" and wanted == ("auto",):
        return _automatic(num_bytes)
    named = () if wanted in (("auto",), ("all",)) else wanted
    option = _option(backend, device)
    return Choice(
        devices=_present(option, named),
        reason=option,
        required=True,
        helped=backend == "auto",
    )


def explain_devices(backend: str) -> tuple[str, MissingExtraError | None]:
    """Return which GPUs a large run would use, or why none, and the error if they are asked for.

    Args:
        backend: ``auto``, ``triton``, ``llvm`` or ``numpy``.
    """
    try:
        found = choose(backend, "auto", WORTHWHILE)
    except MissingExtraError as error:
        return error.message, error
    if not found.devices:
        return f"none: {found.reason}", None
    words = [f"{name} ({_describe(name)})" for name in found.devices]
    return ", ".join(words), None


def _describe(name: str) -> str:
    from mxconvert.pipeline.devices.torch_device import TorchDevice  # noqa: PLC0415

    try:
        return TorchDevice(name).open()
    except (ImportError, OSError, RuntimeError) as error:
        return "cannot be used: " + " ".join(str(error).split())


def _automatic(num_bytes: int) -> Choice:
    """Use the GPUs if there are any and the work is worth their start; import nothing else."""
    if not any(Path(path).exists() for path in _DEVICE_FILES):
        return Choice(devices=(), reason="no GPU here")
    if missing := _missing():
        return Choice(devices=(), reason=f"{missing} not installed: {INSTALL}")
    if num_bytes < WORTHWHILE:
        limit = WORTHWHILE // 1024**3
        return Choice(
            devices=(), reason=f"less than {limit} GiB: not worth the start of a GPU; see --device"
        )
    try:
        return Choice(devices=_present("--device all", ()), reason="GPUs found")
    except MissingExtraError as error:
        return Choice(devices=(), reason=error.message)


def _missing() -> str:
    absent = [name for name in ("torch", "triton") if find_spec(name) is None]
    return f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'}" if absent else ""


def _present(option: str, named: tuple[str, ...]) -> tuple[str, ...]:
    """Return the GPUs to use.

    Raises:
        MissingExtraError: torch, Triton or a GPU is missing.
    """
    _check_installed(option)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return (INTERPRETER,)
    present = _found(option)
    if absent := [name for name in named if name not in present]:
        raise MissingExtraError(
            f"{option}: no {', '.join(absent)} here; found {', '.join(present)}",
            hint="`mxconvert doctor --backend triton` lists the GPUs",
            code="no-gpu",
        )
    return named or present


def _found(option: str) -> tuple[str, ...]:
    try:
        import torch  # noqa: PLC0415

        present = tuple(f"cuda:{n}" for n in range(torch.cuda.device_count()))
    except (ImportError, OSError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise MissingExtraError(
            f"{option}: torch cannot be used: {text}", hint=INSTALL, code="missing-extra"
        ) from error
    if not present:
        raise MissingExtraError(
            f"{option}: torch {torch.__version__} finds no GPU",
            hint="leave it away to run on the CPU, or install a torch for your GPU",
            code="no-gpu",
        )
    return present
