"""Sources of every layout, and an engine that converts them, for tests of the pipeline."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mxconvert.events import Event, ignore
from mxconvert.model import Action, Options
from mxconvert.pipeline.engine import Engine
from mxconvert.pipeline.pieces import (
    kinds_of,
    largest_granule,
)
from mxconvert.pipeline.slots import SLOTS_PER_DEVICE, Budget
from mxconvert.plan import build_plan
from mxconvert.quantize import Quantizer, load_backend
from mxconvert.source import SourceReader, open_checkpoint
from mxconvert.stop import StopToken
from tests.support import Model, Tensor, bf16_model, decode, encode, fp8_model, fused_model
from tests.support.fp8 import bf16_of, dequantized
from tests.support.models import tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from mxconvert.model import Checkpoint, Plan
    from mxconvert.pipeline.devices import Devices
    from mxconvert.pipeline.job import FileResult

MIB = 1024 * 1024
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"

# ------------------------------------------------------------------------------- sources


def fused(kind: str, *, transposed: bool) -> Model:
    return fused_model(transposed=transposed).configured(model_type=kind)


def llama4() -> Model:
    """Transposed, gate before up, not alternating."""
    prefix = "language_model.model.layers.0.feed_forward.experts."
    model = fused_model(transposed=False)
    changed = {}
    for name, stored in model.tensors.items():
        values = decode(stored.data, stored.dtype, stored.shape).swapaxes(1, 2)
        last = name.rsplit(".", maxsplit=1)[-1]
        changed[prefix + last] = Tensor("BF16", values.shape, encode(values, "BF16"))
    config = dict(model.config)
    config["text_config"] = {**config, "model_type": "llama4_text"}
    return replace(
        model, config=config | {"model_type": "llama4"}, shards={"model.safetensors": changed}
    )


def wide(*, hidden: int = 256, inner: int = 2112, experts: int = 2) -> Model:
    """Transposed and alternating, of matrices that are cut."""
    prefix = "model.layers.0.mlp.experts."
    shapes = {
        "gate_up_proj": (experts, hidden, 2 * inner),
        "down_proj": (experts, inner, hidden),
        "gate_up_proj_bias": (experts, 2 * inner),
        "down_proj_bias": (experts, hidden),
    }
    tensors = {prefix + name: tensor(name, shape) for name, shape in shapes.items()}
    config = fused_model(transposed=True).config | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_local_experts": experts,
    }
    return Model(config=config, shards={"model.safetensors": tensors})


def other_scales(dtype: str, scale: Callable[[int, int], tuple[int, ...]]) -> Model:
    """F-FP8 with scales of another kind."""
    model = fp8_model()
    changed = {}
    for name, stored in model.tensors.items():
        if stored.dtype != "F8_E4M3":
            continue
        shape = scale(*stored.shape)
        exponents = -12 + np.arange(math.prod(shape)) % 5
        values = np.ldexp(1.0, exponents).reshape(shape)
        if dtype != "F8_E8M0":
            values *= 1.3125
        changed[f"{name}_scale_inv"] = Tensor(dtype, shape, encode(values, dtype))
    return model.adding(changed)


SOURCES: dict[str, Callable[[], Model]] = {
    "plain": lambda: bf16_model(layers=1, experts=2),
    "fused": lambda: fused("qwen3_5_moe_text", transposed=False),
    "fused, transposed": llama4,
    "fused, transposed, alternating": lambda: fused("gpt_oss", transposed=True),
    "fused, transposed, large": wide,
    "FP8 by blocks": fp8_model,
    "FP8 by rows": lambda: other_scales("F32", lambda rows, _: (rows, 1)),
    "FP8 by tensor": lambda: other_scales("BF16", lambda *_: ()),
    "FP8 by blocks, E8M0": lambda: other_scales(
        "F8_E8M0", lambda rows, columns: (-(-rows // 128), -(-columns // 128))
    ),
}


def changed(model: Model, name: str, at: tuple[int, ...], value: float | bytes) -> Model:
    """Return a model with one element of a tensor changed."""
    stored = model.tensors[name]
    index = int(np.ravel_multi_index(at, stored.shape))
    raw = value if isinstance(value, bytes) else encode([value], stored.dtype)
    data = stored.data[: index * len(raw)] + raw + stored.data[(index + 1) * len(raw) :]
    return model.adding({name: stored._replace(data=data)})


def matrices(model: Model, name: str) -> NDArray[np.float64] | None:
    """Return the values of a weight of the output, from its definition; ``None`` if not known."""
    stored = model.tensors
    if name in stored:
        if stored[name].dtype == "F8_E4M3":
            return dequantized(stored, name)
        return decode(stored[name].data, *stored[name][:2])
    prefix, _, rest = name.partition(".experts.")
    expert, projection, kind = rest.split(".")
    word = "down_proj" if projection == DOWN else "gate_up_proj"
    source = stored[f"{prefix}.experts.{word}" + ("_bias" if kind == "bias" else "")]
    values = decode(source.data, *source[:2])[int(expert)]
    if word == "down_proj":
        return values.T if model.config["model_type"] != "qwen3_5_moe_text" else values
    family = model.config["model_type"]
    if family == "gpt_oss":
        return values[..., 0::2].T if projection == GATE else values[..., 1::2].T
    if family == "llama4":
        values = values.T
    half = len(values) // 2
    return values[:half] if projection == GATE else values[half:]


# -------------------------------------------------------------------------------- engine


class Run:
    """One source, converted as often as wanted."""

    def __init__(self, model: Model, folder: Path, **options: Any) -> None:
        self.model = model
        self.checkpoint: Checkpoint = open_checkpoint(model.write(folder / "source"))
        self.plan: Plan = build_plan(self.checkpoint, Options(**options), force=True)
        self.folder = folder
        self.results: dict[str, FileResult] = {}

    def piece_size(self, wanted: int) -> int:
        """Return the least size of pieces from what is wanted on that this model allows."""
        least = largest_granule(kinds_of(self.plan.files))
        return max(wanted, -(-least // 4096) * 4096)

    def __call__(
        self,
        name: str,
        piece_size: int,
        *,
        jobs: int = 1,
        held: int = MIB,
        report: Callable[[Event], None] = ignore,
        backend: str = "auto",
        devices: Devices | None = None,
    ) -> dict[str, bytes]:
        """Return the files by name."""
        target = self.folder / name
        target.mkdir()
        slots = 2 * jobs + 1 + (2 * SLOTS_PER_DEVICE if devices else 0)
        budget = Budget(jobs, slots, self.piece_size(piece_size), 2, held)
        with SourceReader(self.checkpoint.root, self.checkpoint.files) as reader:
            engine = Engine(
                self.plan.files,
                target,
                budget=budget,
                reader=reader,
                quantizer=Quantizer(load_backend(backend), "mse"),
                record=lambda file, result: self.results.update({file.name: result}),
                report=report,
                measure=True,
                devices=devices,
            )
            failed = engine.run(StopToken())
        for _, error in failed:
            raise error
        return {path.name: path.read_bytes() for path in target.iterdir()}


def expected_tensors(run: Run) -> dict[str, bytes]:
    """Return every output tensor, made in one go from its definition."""
    quantizer = Quantizer(load_backend("numpy"), "mse")
    expected: dict[str, bytes] = {}
    for file in run.plan.files:
        for item in file.items:
            values = matrices(run.model, item.source.name)
            assert values is not None
            if item.action is Action.QUANTIZE:
                assert values.shape == item.source.shape
                raw = memoryview(bytearray(np.ascontiguousarray(values, "<f4").tobytes()))
                made = bytearray(values.size // 2), bytearray(values.size // 32)
                assert not quantizer.quantize(raw, "F32", *map(memoryview, made))
                pair = zip(item.outputs, made, strict=True)
                expected |= {output.name: bytes(data) for output, data in pair}
            elif item.action is Action.DEQUANTIZE:
                expected[item.source.name] = bf16_of(values)
            else:
                expected[item.source.name] = encode(values, item.source.dtype)
    return expected


def stored_tensors(run: Run, files: dict[str, bytes]) -> dict[str, bytes]:
    return {
        output.name: files[file.name][file.header_size :][output.begin : output.end]
        for file in run.plan.files
        for item in file.items
        for output in item.outputs
    }
