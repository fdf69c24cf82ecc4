"""Addresses of Python buffers, read-only ones included, without copying and within a microsecond.

ctypes has `from_buffer` for writable objects only, and numpy's `ctypes.data` takes longer than a
small tensor's conversion. So this calls the C API's buffer functions, which are part of the stable
ABI. A held view also keeps its owner from freeing or resizing the memory while the GIL is released.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final, Self

from mxconvert_kernels.buffers import byte_length

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer

_SIMPLE: Final = 0
_WRITABLE: Final = 1


class _PyBuffer(ctypes.Structure):
    """Py_buffer, https://docs.python.org/3.11/c-api/buffer.html."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer: Final = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int
)(("PyObject_GetBuffer", ctypes.pythonapi))
_release: Final = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_PyBuffer))(
    ("PyBuffer_Release", ctypes.pythonapi)
)


class View:
    """Holds a buffer in place; use as a context manager.

    Args:
        buffer: Any C-contiguous buffer.
        name: What to call it in messages.
        writable: Whether it will be written.

    Raises:
        ValueError: The buffer is not C-contiguous, or is to be written and cannot be.
    """

    __slots__ = ("_view", "address", "nbytes")

    def __init__(self, buffer: Buffer, name: str, *, writable: bool = False) -> None:
        self._view = view = _PyBuffer()
        try:
            _get_buffer(buffer, view, _WRITABLE if writable else _SIMPLE)
        except (BufferError, ValueError):
            byte_length(buffer, name, writable=writable)  # raises with a message of ours
            raise
        self.address: int = view.buf or 0
        self.nbytes: int = view.len

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _release(self._view)
