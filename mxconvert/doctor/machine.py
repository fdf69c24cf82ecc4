"""What the machine offers, as far as Linux tells: processors, memory, control groups, GPUs.

Every function takes the folder in which /proc or /sys lies, so that tests can show it
another machine.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mxconvert.pipeline.slots import usable_cores

if TYPE_CHECKING:
    from collections.abc import Iterator

PROC = Path("/proc")
SYS = Path("/sys")

_SHOWN_FEATURES = (
    "avx2", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512vbmi", "f16c", "fma", "bmi2",
    "sha_ni", "vpclmulqdq", "amx_bf16", "asimd", "sve", "sve2", "bf16", "sha2", "crc32",
)  # fmt: skip
_GPU_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")  # display, 3D, accelerator
_UNLIMITED_V1 = 1 << 60  # version 1 writes a number near 2^63


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the control groups of this process allow; ``None``: no limit.

    Attributes:
        processors: Processor time per second.
        memory: Bytes.
    """

    processors: float | None
    memory: int | None


def read_text(path: Path) -> str:
    """Return a small file's text without blanks around it; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip("\n\0 ")
    return ""


# ------------------------------------------------------------------------- processors


def _cpu_field(proc: Path, *names: str) -> str:
    for line in read_text(proc / "cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in names:
            return value.strip()
    return ""


def cpu_model(proc: Path = PROC) -> str:
    """Return the processor's name."""
    return _cpu_field(proc, "model name", "Model", "cpu model") or platform.machine()


def cpu_features(proc: Path = PROC) -> tuple[str, ...]:
    """Return those of the processor's features that matter for the kernels and digests."""
    present = set(_cpu_field(proc, "flags", "Features").split())
    return tuple(name for name in _SHOWN_FEATURES if name in present)


def processors(proc: Path = PROC, sys: Path = SYS) -> float:
    """Return how much processor time this process gets per second: cores, or its quota."""
    quota = limits(proc, sys).processors
    return float(usable_cores()) if quota is None else min(float(usable_cores()), quota)


# ----------------------------------------------------------------------------- memory


def memory(proc: Path = PROC) -> dict[str, int]:
    """Return ``total`` and ``available`` bytes of memory, and ``swap``."""
    wanted = {"MemTotal": "total", "MemAvailable": "available", "SwapTotal": "swap"}
    found: dict[str, int] = {}
    for line in read_text(proc / "meminfo").splitlines():
        key, _, value = line.partition(":")
        if key in wanted:
            found[wanted[key]] = int(value.split()[0]) * 1024
    return found


def open_files() -> tuple[int, int]:
    """Return the soft and the hard limit of open files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


# --------------------------------------------------------------------- control groups


def limits(proc: Path = PROC, sys: Path = SYS) -> Limits:
    """Return the tightest limits of the control groups that this process is in.

    Both versions are read; in a container the path that /proc names often does not exist,
    and the container's own group is the root that it sees.
    """
    found = [*_all_limits(proc, sys / "fs" / "cgroup")]
    quotas = [limit.processors for limit in found if limit.processors is not None]
    sizes = [limit.memory for limit in found if limit.memory is not None]
    return Limits(processors=min(quotas, default=None), memory=min(sizes, default=None))


def _all_limits(proc: Path, root: Path) -> Iterator[Limits]:
    for line in read_text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for folder in _upwards(root, path):
                yield _version_2(folder)
        for name in controllers.split(","):
            if name in ("cpu", "memory"):
                for folder in _upwards(root / name, path):
                    yield _version_1(folder)


def _upwards(root: Path, path: str) -> Iterator[Path]:
    folder = root / path.strip("/")
    while folder != root and root in folder.parents:
        yield folder
        folder = folder.parent
    yield root


def _version_2(folder: Path) -> Limits:
    quota, _, period = read_text(folder / "cpu.max").partition(" ")
    size = read_text(folder / "memory.max")
    return Limits(
        processors=int(quota) / int(period) if quota.isdigit() and period.isdigit() else None,
        memory=int(size) if size.isdigit() else None,
    )


def _version_1(folder: Path) -> Limits:
    quota = read_text(folder / "cpu.cfs_quota_us")
    period = read_text(folder / "cpu.cfs_period_us")
    size = read_text(folder / "memory.limit_in_bytes")
    limited = size.isdigit() and int(size) < _UNLIMITED_V1
    return Limits(
        processors=int(quota) / int(period) if quota.isdigit() and period.isdigit() else None,
        memory=int(size) if limited else None,
    )


# ------------------------------------------------------------------------------- GPUs


def gpus(proc: Path = PROC, sys: Path = SYS) -> tuple[str, ...]:
    """Return the GPUs that the kernel shows, without asking a vendor's tool."""
    named = _nvidia_names(proc)
    found: list[str] = []
    for device in sorted((sys / "bus" / "pci" / "devices").glob("*")):
        vendor = read_text(device / "vendor")
        if vendor in _GPU_VENDORS and read_text(device / "class").startswith(_GPU_CLASSES):
            label = f"{_GPU_VENDORS[vendor]} {read_text(device / 'device')}"
            found.append(f"{named.pop(device.name.lower(), label)} at {device.name}")
    found += [f"{name} at {bus}" for bus, name in sorted(named.items())]
    return tuple(found)


def _nvidia_names(proc: Path) -> dict[str, str]:
    """Return the names that NVIDIA's driver gives, by bus address."""
    names: dict[str, str] = {}
    for folder in (proc / "driver" / "nvidia" / "gpus").glob("*"):
        for line in read_text(folder / "information").splitlines():
            key, _, value = line.partition(":")
            if key == "Model":
                names[folder.name.lower()] = value.strip()
    return names


def gpu_driver(proc: Path = PROC, sys: Path = SYS) -> str | None:
    """Return the GPU driver that is loaded, with its version."""
    nvidia = read_text(proc / "driver" / "nvidia" / "version").partition("\n")[0]
    if nvidia:
        words = nvidia.split()
        version = next((word for word in words if word.replace(".", "").isdigit()), "unknown")
        return f"nvidia {version}"
    if (sys / "module" / "amdgpu").is_dir():
        return f"amdgpu {read_text(sys / 'module' / 'amdgpu' / 'version')}".strip()
    return None


def load_average() -> float:
    """Return the load of the last minute; figures taken on a busy machine are low."""
    return os.getloadavg()[0]
