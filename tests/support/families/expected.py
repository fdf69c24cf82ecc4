"""What a conversion must make of each recorded family."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.support.families import readings as read
from tests.support.families.configs import EXPERTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.families.readings import Array, Reading, Stored

_USUAL = read.own(*read.GATE_UP_DOWN)
_W123 = read.own(*read.W123)


class Expected(NamedTuple):
    """Where a family's routed experts are, and how they are read.

    Attributes:
        reading: How an expert's matrices are read.
        layers: Layers with experts.
        module: Module of a layer's experts in the output, without its number.
        count: Routed experts of a layer.
        also: Modules of other experts beside those of the layers.
        sources: Ends of the names of stored tensors that hold all experts of a layer.
    """

    reading: Reading = _USUAL
    layers: tuple[int, ...] = (1,)
    module: str = "model.layers.{}.mlp.experts"
    count: int = EXPERTS
    also: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    def experts(self) -> Iterator[tuple[str, int]]:
        """Yield module and number of every routed expert."""
        for module in (*map(self.module.format, self.layers), *self.also):
            for expert in range(self.count):
                yield module, expert

    def weights(self, stored: Stored) -> dict[str, Array]:
        """Return every routed expert's matrices by the name of their weight."""
        return {
            f"{module}.{expert}.{name}.weight": matrix
            for module, expert in self.experts()
            for name, matrix in self.reading(stored, module, expert).items()
        }


_BOTH = (0, 1)
_SPARSE = "model.layers.{}.block_sparse_moe.experts"
_FORWARD = "model.layers.{}.feed_forward.experts"
_VISION = "model.language_model.layers.{}.mlp.experts"
_GATE_UP = ("gate_up_proj", "down_proj")
_GRANITE = Expected(
    read.granite, _BOTH, _SPARSE, sources=("input_linear.weight", "output_linear.weight")
)
_LLAMA4 = Expected(read.columns, module=_FORWARD, sources=_GATE_UP)

EXPECTED: dict[str, Expected] = {
    "qwen2_moe": Expected(),
    "qwen3_moe": Expected(),
    "qwen3_next": Expected(),
    "qwen3_omni_moe": Expected(
        module="thinker.model.layers.{}.mlp.experts", also=("talker.model.layers.0.mlp.experts",)
    ),
    "deepseek_v2": Expected(),
    "deepseek_v3": Expected(),
    "deepseek_v32": Expected(),
    "kimi_k25": Expected(module="language_model.model.blocks.{}.mlp.experts"),
    "glm4_moe": Expected(),
    "glm4_moe_lite": Expected(),
    "glm4v_moe": Expected(module=_VISION),
    "glm_moe_dsa": Expected(),
    "olmoe": Expected(layers=_BOTH),
    "flex_olmo": Expected(layers=_BOTH),
    "ernie4_5_moe": Expected(),
    "ernie4_5_vl_moe": Expected(count=2 * EXPERTS),
    "hunyuan_v1_moe": Expected(layers=_BOTH),
    "dots1": Expected(),
    "longcat_flash": Expected(layers=_BOTH),
    "mimo_v2_flash": Expected(),
    "exaone_moe": Expected(),
    "cohere2_moe": Expected(),
    "solar_open": Expected(layers=_BOTH),
    "afmoe": Expected(),
    "bailing_hybrid": Expected(),
    "sarvam_moe": Expected(),
    "sarvam_mla": Expected(),
    "jamba": Expected(module=_FORWARD),
    "nemotron_h": Expected(read.own(*read.UP_DOWN), (3,), "backbone.layers.{}.mixer.experts"),
    "mixtral": Expected(_W123, _BOTH, _SPARSE),
    "minimax": Expected(_W123, _BOTH, _SPARSE),
    "minimax_m2": Expected(_W123, _BOTH, _SPARSE),
    "phimoe": Expected(_W123, _BOTH, _SPARSE),
    "kimi_linear": Expected(_W123, (1,), _SPARSE),
    "lfm2_moe": Expected(_W123, (1,), _FORWARD),
    "qwen3_5_moe": Expected(layers=_BOTH, module=_VISION),
    "qwen3_5_moe_text": Expected(layers=_BOTH),
    "qwen3_5_moe.fused": Expected(read.halves, _BOTH, _VISION, sources=_GATE_UP),
    "qwen3_5_moe_text.fused": Expected(read.halves, _BOTH, sources=_GATE_UP),
    "gemma4": Expected(
        read.halves, _BOTH, "model.language_model.layers.{}.experts", sources=_GATE_UP
    ),
    "gemma4_text": Expected(read.halves, _BOTH, "model.layers.{}.experts", sources=_GATE_UP),
    "qwen3_vl_moe.4x": Expected(read.columns, module=_VISION, sources=_GATE_UP),
    "qwen3_vl_moe.5x": Expected(read.halves, module=_VISION, sources=_GATE_UP),
    "llama4": _LLAMA4._replace(module="language_model." + _FORWARD),
    "llama4_text": _LLAMA4,
    "gpt_oss": Expected(
        read.alternating,
        _BOTH,
        sources=(*_GATE_UP, "gate_up_proj_bias", "down_proj_bias"),
    ),
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "dbrx": Expected(
        read.dbrx,
        _BOTH,
        "transformer.blocks.{}.ffn.experts",
        sources=("mlp.w1", "mlp.v1", "mlp.w2"),
    ),
}
"""By family, or by family and kind of header where those differ."""


def expected(family: str, kind: str) -> Expected:
    """Return what a conversion must make of a recorded header."""
    return EXPECTED.get(f"{family}.{kind}") or EXPECTED[family]
