"""What the tests are built on; only `shell`, when it is called, imports mxconvert.

* `container`: write (also malformed) and read safetensors files byte by byte.
* `numbers`: encode and decode BF16, F16, F8_E4M3 and MXFP4, slowly and independently.
* `models`, `more_models`: seeded checkpoint folders in the shape of published models.
* `artifact`: read what ``mxconvert quantize`` wrote, with the plain safetensors library.
* `cli`: run ``python -m mxconvert`` in a process of its own.
* `shell`: run the same command line in this process.
* `runs`: stop and kill runs at named places, and compare what they left with a clean run.
* `seaweed`: the S3 server that tests talk to; fixtures ``s3`` and ``bucket``.
* `faults`: a proxy before that server that logs and disturbs; fixture ``proxy``.
* `large`: artifacts whose files go in several parts; fixture ``large``.
* `contract`: what holds for every conversion, and for every refusal.
"""

from tests.support.artifact import Artifact, Stored, read_artifact
from tests.support.cli import Result, Running, fail_cleanly, run_cli, snapshot, start_cli
from tests.support.container import Tensor, raw_safetensors, read_safetensors
from tests.support.contract import Conversion, converted, refused, refused_until, stopped
from tests.support.models import Model, bf16_model, mixtral_name, tensor
from tests.support.more_models import fp8_model, fused_model
from tests.support.numbers import decode, decode_mxfp4, encode
from tests.support.shell import shell

__all__ = [
    "Artifact",
    "Conversion",
    "Model",
    "Result",
    "Running",
    "Stored",
    "Tensor",
    "bf16_model",
    "converted",
    "decode",
    "decode_mxfp4",
    "encode",
    "fail_cleanly",
    "fp8_model",
    "fused_model",
    "mixtral_name",
    "raw_safetensors",
    "read_artifact",
    "read_safetensors",
    "refused",
    "refused_until",
    "run_cli",
    "shell",
    "snapshot",
    "start_cli",
    "stopped",
    "tensor",
]
