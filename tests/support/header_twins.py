"""Two more published models by rule: WizardLM-2-8x22B and a Qwen3.5 of 25B parameters.

As `tests.support.kimi_k3` does: names equal the published index (by digest), and the bytes of
shapes that follow from the config add up to its ``metadata.total_size``. Weights are holes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.container import sparse_safetensors
from tests.support.kimi_k3 import Spec, Specs
from tests.support.models import INDEX, json_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

DATA = Path(__file__).parent / "data"


class Twin(NamedTuple):
    """A published model.

    Attributes:
        name: What it is called here, and its config in the data folder.
        specs: Its tensors, by the config.
        tensors: How many the published index lists.
        names_sha256: SHA-256 of their names, sorted, each followed by a newline.
        total_size: ``metadata.total_size`` of the published index.
        experts: Routed expert weights.
        expert_bytes: Their bytes in MXFP4: 17 for each 32 elements.
    """

    name: str
    specs: Callable[[Mapping[str, Any]], Specs]
    tensors: int
    names_sha256: str
    total_size: int
    experts: int
    expert_bytes: int

    @property
    def config(self) -> dict[str, Any]:
        """The published config.json."""
        document: dict[str, Any] = json.loads((DATA / f"{self.name}_config.json").read_text())
        return document

    def write(self, folder: Path) -> Path:
        """Write it as one sparse file with the published config."""
        folder.mkdir(parents=True)
        specs = self.specs(self.config)
        file = "model-00001-of-00001.safetensors"
        sparse_safetensors(folder / file, {n: (*s, s.size) for n, s in specs.items()})
        index = {
            "metadata": {"total_size": sum(spec.size for spec in specs.values())},
            "weight_map": dict.fromkeys(sorted(specs), file),
        }
        (folder / INDEX).write_bytes(json_bytes(index))
        (folder / "config.json").write_bytes(json_bytes(self.config))
        return folder


def digest(names: Iterable[str]) -> str:
    """Return the SHA-256 of names, sorted, each followed by a newline."""
    return hashlib.sha256("".join(f"{name}\n" for name in sorted(names)).encode()).hexdigest()


def _named(dtype: str, prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> Specs:
    return {f"{prefix}{name}.weight": Spec(dtype, shape) for name, shape in shapes.items()}


def _mlp(hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def _mixtral(config: Mapping[str, Any]) -> Specs:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    narrow = config["num_key_value_heads"] * head
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "block_sparse_moe.gate": (config["num_local_experts"], hidden),
    }
    for expert in range(config["num_local_experts"]):
        for name, shape in zip(("w1", "w3", "w2"), _mlp(hidden, inner).values(), strict=True):
            layer[f"block_sparse_moe.experts.{expert}.{name}"] = shape
    top = {
        "lm_head": (config["vocab_size"], hidden),
        "model.embed_tokens": (config["vocab_size"], hidden),
        "model.norm": (hidden,),
    }
    specs = _named("BF16", "", top)
    for number in range(config["num_hidden_layers"]):
        specs |= _named("BF16", f"model.layers.{number}.", layer)
    return specs


def _full_attention(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    wide = config["num_attention_heads"] * head
    narrow = config["num_key_value_heads"] * head
    return {
        "self_attn.q_proj": (2 * wide, hidden),  # with the output's gate
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, wide),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
    }


def _linear_attention(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return {
        "linear_attn.conv1d": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.in_proj_a": (heads, hidden),
        "linear_attn.in_proj_b": (heads, hidden),
        "linear_attn.in_proj_qkv": (2 * keys + values, hidden),
        "linear_attn.in_proj_z": (values, hidden),
        "linear_attn.norm": (config["linear_value_head_dim"],),
        "linear_attn.out_proj": (hidden, values),
    }


def _qwen_layer(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    shared = _mlp(hidden, config["shared_expert_intermediate_size"])
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate": (config["num_experts"], hidden),
        "mlp.shared_expert_gate": (1, hidden),
    }
    layer |= {f"mlp.shared_expert.{name}": shape for name, shape in shared.items()}
    for expert in range(config["num_experts"]):
        for name, shape in _mlp(hidden, inner).items():
            layer[f"mlp.experts.{expert}.{name}"] = shape
    return layer


def _qwen3_5(config: Mapping[str, Any]) -> Specs:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    prefix, heads = "model.language_model.", config["linear_num_value_heads"]
    top = {f"{prefix}embed_tokens": (vocab, hidden), f"{prefix}norm": (hidden,)}
    specs = _named("F16", "", {"lm_head": (vocab, hidden), **top})
    for number, kind in enumerate(config["layer_types"]):
        layer = f"{prefix}layers.{number}."
        full = kind == "full_attention"
        specs |= _named("F16", layer, _qwen_layer(config))
        attention = _full_attention if full else _linear_attention
        specs |= _named("F16", layer, attention(config))
        if not full:
            specs[f"{layer}linear_attn.A_log"] = Spec("F16", (heads,))
            specs[f"{layer}linear_attn.dt_bias"] = Spec("F16", (heads,))
    return specs


WIZARDLM = Twin(
    name="wizardlm_2_8x22b",
    specs=_mixtral,
    tensors=1739,
    names_sha256="0bc52a712239eec2d7b40804c2f69a58a15c89e4a68c1e1e2ee7ef2a2b4bd236",
    total_size=281_241_268_224,
    experts=56 * 8 * 3,
    expert_bytes=71_873_593_344,
)
QWEN3_5 = Twin(
    name="qwen3_5_25b",
    specs=_qwen3_5,
    tensors=22_213,
    names_sha256="37add9e99ad613981324cfcf8a17772a93d70e19c379344b2bfddc9b9ba434fd",
    total_size=50_182_743_296,
    experts=40 * 180 * 3,
    expert_bytes=12_032_409_600,
)
TWINS = (WIZARDLM, QWEN3_5)
