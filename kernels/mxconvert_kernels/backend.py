"""Chooses the implementation of the kernels."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from mxconvert_kernels.reference import ReferenceBackend

if TYPE_CHECKING:
    from mxconvert_kernels.spec import Backend

BackendName: TypeAlias = Literal["auto", "llvm", "numpy", "reference", "triton"]

_lock: Final = threading.Lock()
_backends: Final[dict[str, Backend]] = {}
_failures: Final[dict[str, Exception]] = {}


class BackendUnavailableError(RuntimeError):
    """The requested backend cannot run here; the message says why."""


def get_backend(name: BackendName = "auto") -> Backend:
    """The backend of that name, made once per process.

    Args:
        name: `auto` is `llvm` where it works and `numpy` elsewhere.

    Raises:
        BackendUnavailableError: The backend cannot run on this machine.
        ValueError: There is no backend of that name.
    """
    if name == "auto":
        try:
            return get_backend("llvm")
        except BackendUnavailableError:
            return get_backend("numpy")
    backend = _backends.get(name)
    if backend is None:
        with _lock:
            backend = _backends.get(name) or _make_once(name)
    return backend


def explain_backend(name: BackendName = "auto") -> str:
    """One line that says which backend `name` gives, and why.

    Raises:
        ValueError: There is no backend of that name.
    """
    try:
        backend = get_backend(name)
    except BackendUnavailableError as error:
        return str(error)
    if name == "auto" and backend.name != "llvm":
        return f"{backend.name}: {_in_one_line(_failures['llvm'])}"
    return f"{backend.name}: {_describe(backend)}"


def _make_once(name: str) -> Backend:
    """Make a backend; a failure is remembered and raised again without another attempt."""
    if name not in _failures:
        try:
            _backends[name] = _make(name)
        except (ImportError, OSError, RuntimeError) as error:
            _failures[name] = error
        else:
            return _backends[name]
    cause = _failures[name]
    raise BackendUnavailableError(_in_one_line(cause)) from cause


def _make(name: str) -> Backend:
    # Imported here because loading LLVM or numpy takes longer than most commands do.
    if name == "reference":
        return ReferenceBackend()
    if name == "numpy":
        from mxconvert_kernels.numpy_backend import NumpyBackend  # noqa: PLC0415

        return NumpyBackend()
    if name == "llvm":
        try:
            from mxconvert_kernels.llvm.backend import LlvmBackend  # noqa: PLC0415
        except (ImportError, OSError) as error:
            raise ImportError(f"llvmlite cannot be imported ({error})") from error
        return LlvmBackend()
    if name == "triton":
        try:
            from mxconvert_kernels.gpu.backend import TritonBackend  # noqa: PLC0415
        except (ImportError, OSError) as error:
            raise ImportError(f"torch and triton cannot be imported ({error})") from error
        return TritonBackend()
    raise ValueError(f"backend: expected auto, llvm, numpy, reference or triton, found {name!r}")


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _describe(backend: Backend) -> str:
    """What a working backend consists of."""
    name = backend.name
    if name == "triton":
        from mxconvert_kernels.gpu.backend import TritonBackend  # noqa: PLC0415

        return backend.describe() if isinstance(backend, TritonBackend) else name
    if name == "llvm":
        from mxconvert_kernels.llvm.jit import describe_host  # noqa: PLC0415

        return describe_host()
    if name == "numpy":
        from numpy import __version__  # noqa: PLC0415

        return f"numpy {__version__}, vectorised, one thread per call"
    return "the oracle in plain Python integers, slow"
