"""Headers of weight files and the checks that need only one file."""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING

from mxconvert import safetensors_format as st
from mxconvert.errors import LocalError, SourceError
from mxconvert.model import SourceFile, TensorInfo

if TYPE_CHECKING:
    from pathlib import Path

_LFS_MAGIC = b"version https://git-lfs.github.com/spec/"
_LFS_LIMIT = 1024


def read_header(root: Path, name: str) -> tuple[SourceFile, list[TensorInfo]]:
    """Read and check one file's header.

    Returns:
        The file's identity and its tensors in order of offset.

    Raises:
        SourceError: Truncated, malformed, or a Git LFS pointer.
        LocalError: The file cannot be read.
    """
    try:
        fd = os.open(root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise LocalError.unreadable(root / name, error) from error
    try:
        info = os.fstat(fd)
        prefix = os.pread(fd, st.PREFIX_SIZE, 0)
        if info.st_size <= _LFS_LIMIT:
            refuse_lfs_pointer(os.pread(fd, _LFS_LIMIT, 0), name)
        length = st.header_length(prefix, name, info.st_size)
        raw = os.pread(fd, length, st.PREFIX_SIZE)
    finally:
        os.close(fd)
    tensors = st.parse_header(raw, name, info.st_size)
    source_file = SourceFile(
        path=name,
        size=info.st_size,
        header_sha256=hashlib.sha256(prefix + raw).hexdigest(),
        mtime_ns=info.st_mtime_ns,
        inode=info.st_ino,
    )
    return source_file, tensors


def refuse_lfs_pointer(head: bytes, name: str) -> None:
    """Refuse a Git LFS pointer that stands where a file should be.

    Raises:
        SourceError: With the real size and how to fetch the file.
    """
    if not head.startswith(_LFS_MAGIC):
        return
    size = re.search(rb"^size (\d+)$", head, re.MULTILINE)
    oid = re.search(rb"^oid (\S+)$", head, re.MULTILINE)
    real = f"{int(size.group(1))} bytes" if size else "of unknown size"
    raise SourceError(
        f"{name}: a Git LFS pointer, not the file itself; the real file is {real}"
        + (f" ({oid.group(1).decode(errors='replace')})" if oid else ""),
        hint="run `git lfs pull` in the checkout, or fetch the file from the hub",
        code="lfs-pointer",
    )
