"""Writing an artifact's files, so that nothing unfinished carries a final name."""

from mxconvert.writer.atomic import (
    PARTIAL_SUFFIX,
    copy_file,
    remove_quietly,
    sync_folder,
    take_file,
    write_file,
    write_statistics,
)
from mxconvert.writer.weights import WeightFileWriter

__all__ = [
    "PARTIAL_SUFFIX",
    "WeightFileWriter",
    "copy_file",
    "remove_quietly",
    "sync_folder",
    "take_file",
    "write_file",
    "write_statistics",
]
