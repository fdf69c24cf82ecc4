"""Is this machine fit for the work: facts to read, and to paste into a report.

Nothing heavy is imported to find out what is installed, and no vendor's tool is run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mxconvert.doctor import environment, machine, software
from mxconvert.doctor.endpoint import EndpointReport, examine_endpoint
from mxconvert.doctor.folder import FolderReport, examine
from mxconvert.errors import MissingExtraError
from mxconvert.pipeline.devices.choice import explain_devices, host_backend
from mxconvert.pipeline.slots import usable_cores
from mxconvert.quantize import explain_backend, load_backend

if TYPE_CHECKING:
    from pathlib import Path

    from mxconvert.doctor.software import Extra

__all__ = ["Diagnosis", "EndpointReport", "FolderReport", "diagnose", "examine_endpoint"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found.

    Attributes:
        versions: By name; ``None``: not installed.
        machine: Facts, see ``docs/reference/doctor.md``.
        backend: The one asked for on CPUs; which it is, or why it cannot be used.
        gpu: Which GPUs a large run would use, or why none.
        backend_error: Set if what was asked for cannot be used.
        extras: Optional sets of packages.
        folder: The folder asked for, if any.
        environment: What may be shown of each variable.
        endpoint: The store asked for, if any.
    """

    versions: dict[str, str | None]
    machine: dict[str, Any]
    backend: str
    gpu: str
    backend_error: MissingExtraError | None
    extras: tuple[Extra, ...]
    folder: FolderReport | None
    environment: dict[str, str]
    endpoint: EndpointReport | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``doctor --json`` prints."""
        return {
            "type": "diagnosis",
            "schema_version": SCHEMA_VERSION,
            "versions": self.versions,
            "machine": self.machine,
            "backend": {
                "explanation": self.backend,
                "gpu": self.gpu,
                "usable": self.backend_error is None,
            },
            "extras": [
                {"name": e.name, "missing": list(e.missing), "command": e.command}
                for e in self.extras
            ],
            "folder": asdict(self.folder) if self.folder else None,
            "environment": self.environment,
            "store": _store_json(self.endpoint) if self.endpoint else None,
        }


def _store_json(found: EndpointReport) -> dict[str, Any]:
    return {
        "url": found.label,
        "abilities": found.abilities,
        "details": found.details,
        "consequences": found.consequences,
        "obstacle": found.obstacle.message if found.obstacle else None,
        "put_seconds": found.put_seconds,
        "get_seconds": found.get_seconds,
    }


def diagnose(folder: Path | None = None, backend: str = "auto") -> Diagnosis:
    """Gather the facts; what is wrong is reported, not raised.

    Args:
        folder: Examined by writing a few bytes into a temporary folder in it.
        backend: ``auto`` or a backend's name.
    """
    gpu, error = explain_devices(backend)
    host = host_backend(backend)
    try:
        load_backend(host)
    except MissingExtraError as failure:
        error = failure
    return Diagnosis(
        versions=software.versions(),
        machine=_machine(),
        backend=explain_backend(host),  # type: ignore[arg-type]  # load_backend took it
        gpu=gpu,
        backend_error=error,
        extras=software.extras(),
        folder=examine(folder) if folder is not None else None,
        environment=environment.variables(),
    )


def _machine() -> dict[str, Any]:
    limits = machine.limits()
    soft, hard = machine.open_files()
    return {
        "cpu": machine.cpu_model(),
        "cpu_features": list(machine.cpu_features()),
        "usable_cores": usable_cores(),
        "cpu_quota": limits.processors,
        "memory": machine.memory(),
        "memory_limit": limits.memory,
        "load": machine.load_average(),
        "open_files": {"soft": soft, "hard": hard},
        "gpus": list(machine.gpus()),
        "gpu_driver": machine.gpu_driver(),
    }
