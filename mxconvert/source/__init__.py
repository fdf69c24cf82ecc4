"""Reading a source checkpoint: a Hugging Face folder of safetensors files.

`open_checkpoint` is the preflight: it reads every header and nothing else, checks all
of them against each other and against the index, and returns a `Checkpoint`.
`SourceReader` then serves byte ranges into the caller's buffers.
"""

from mxconvert.source.checkpoint import open_checkpoint
from mxconvert.source.listing import QUANTIZATION_FILES
from mxconvert.source.location import local_path
from mxconvert.source.reader import SourceReader
from mxconvert.source.shards import read_header

__all__ = ["QUANTIZATION_FILES", "SourceReader", "local_path", "open_checkpoint", "read_header"]
