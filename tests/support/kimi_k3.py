"""Kimi-K3 by rule: every tensor's name, dtype, shape and shard, from its config.

The published index holds names and one total. The names here equal it (`NAMES_SHA256`),
the shapes follow the config and the usual forms of its layers, and their bytes add up to
the index's ``metadata.total_size`` exactly. Two shapes are inferred from that total alone:
the short convolutions are F32, and A_log with o_norm take 1,024 bytes in each KDA layer
(written here as F32 [128] each). Nothing here reads mxconvert.

The BF16 twin is the same model before quantization: each ``weight_packed`` and
``weight_scale`` pair is one BF16 ``weight``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.container import sparse_safetensors
from tests.support.models import INDEX, json_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CONFIG = Path(__file__).parent / "data" / "kimi_k3_config.json"
TOTAL_SIZE = 1_560_860_324_864
"""``metadata.total_size`` of the published index."""

EXPERT_BYTES = 1_446_456_066_048
"""Bytes of the routed experts in MXFP4."""

OFFICIAL_TENSORS = 497_220
TWIN_TENSORS = 249_924
EXPERT_WEIGHTS = 247_296
SHARDS = 96
NAMES_SHA256 = "6de6475ef6fac789044688d2b1f127d50cfc3adb17983756c2393c495a535ec4"
"""SHA-256 of the published names, sorted, each followed by a newline."""

_ELEMENT_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}
_MODEL = "language_model.model."


class Spec(NamedTuple):
    """What is known of a tensor without its values."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * _ELEMENT_BYTES[self.dtype]


Specs = dict[str, Spec]


def read_config(path: Path = CONFIG) -> dict[str, Any]:
    """Return the published config.json."""
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def _bf16(*shape: int) -> Spec:
    return Spec("BF16", shape)


def _delta_attention(text: Mapping[str, Any]) -> Specs:
    """Kimi Delta Attention, layers of ``kda_layers``."""
    linear, hidden = text["linear_attn_config"], text["hidden_size"]
    heads, head = linear["num_heads"], linear["head_dim"]
    inner, kernel = heads * head, linear["short_conv_kernel_size"]
    specs = {f"{name}_proj.weight": _bf16(inner, hidden) for name in "qkv"}
    specs |= {f"{name}_conv1d.weight": Spec("F32", (inner, 1, kernel)) for name in "qkv"}
    return specs | {
        "A_log": Spec("F32", (head,)),
        "dt_bias": Spec("F32", (inner,)),
        "f_a_proj.weight": _bf16(head, hidden),
        "f_b_proj.weight": _bf16(inner, head),
        "b_proj.weight": _bf16(heads, hidden),
        "g_proj.weight": _bf16(inner, hidden),
        "o_norm.weight": Spec("F32", (head,)),
        "o_proj.weight": _bf16(hidden, inner),
    }


def _latent_attention(text: Mapping[str, Any]) -> Specs:
    """Multi-head latent attention, layers of ``full_attn_layers``."""
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    q_rank, kv_rank, rope = text["q_lora_rank"], text["kv_lora_rank"], text["qk_rope_head_dim"]
    nope, value = text["qk_nope_head_dim"], text["v_head_dim"]
    return {
        "q_a_proj.weight": _bf16(q_rank, hidden),
        "q_a_layernorm.weight": _bf16(q_rank),
        "q_b_proj.weight": _bf16(heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa.weight": _bf16(kv_rank + rope, hidden),
        "kv_a_layernorm.weight": _bf16(kv_rank),
        "kv_b_proj.weight": _bf16(heads * (nope + value), kv_rank),
        "g_proj.weight": _bf16(heads * value, hidden),
        "o_proj.weight": _bf16(hidden, heads * value),
    }


def _mlp(hidden: int, inner: int) -> Specs:
    return {
        "gate_proj.weight": _bf16(inner, hidden),
        "up_proj.weight": _bf16(inner, hidden),
        "down_proj.weight": _bf16(hidden, inner),
    }


def _moe(text: Mapping[str, Any]) -> Specs:
    """The router, the projections around the routed experts, and the shared experts."""
    hidden, latent = text["hidden_size"], text["routed_expert_hidden_size"]
    shared = _mlp(hidden, text["num_shared_experts"] * text["moe_intermediate_size"])
    return {
        "gate.weight": _bf16(text["num_experts"], hidden),
        "gate.e_score_correction_bias": Spec("F32", (text["num_experts"],)),
        "routed_expert_down_proj.weight": _bf16(latent, hidden),
        "routed_expert_norm.weight": _bf16(latent),
        "routed_expert_up_proj.weight": _bf16(hidden, latent),
        **{f"shared_experts.{name}": spec for name, spec in shared.items()},
    }


def _experts(text: Mapping[str, Any]) -> Specs:
    """The routed experts of one layer, in BF16."""
    inner, latent = text["moe_intermediate_size"], text["routed_expert_hidden_size"]
    shapes = {"w1": (inner, latent), "w2": (latent, inner), "w3": (inner, latent)}
    return {
        f"experts.{expert}.{name}.weight": _bf16(*shape)
        for expert in range(text["num_experts"])
        for name, shape in shapes.items()
    }


def _prefixed(prefix: str, specs: Specs) -> Specs:
    return {prefix + name: spec for name, spec in specs.items()}


def _layer(text: Mapping[str, Any], layer: int) -> Specs:
    hidden = text["hidden_size"]
    full = layer + 1 in text["linear_attn_config"]["full_attn_layers"]  # counted from 1 there
    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "mlp_res_norm",
        "self_attention_res_norm",
    )
    specs = {f"{name}.weight": _bf16(hidden) for name in norms}
    specs |= {
        f"{name}.weight": _bf16(1, hidden) for name in ("mlp_res_proj", "self_attention_res_proj")
    }
    specs |= _prefixed("self_attn.", _latent_attention(text) if full else _delta_attention(text))
    if layer < text["first_k_dense_replace"]:
        return specs | _prefixed("mlp.", _mlp(hidden, text["intermediate_size"]))
    return specs | _prefixed("block_sparse_moe.", _moe(text) | _experts(text))


def _top(text: Mapping[str, Any]) -> Specs:
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    return {
        "language_model.lm_head.weight": _bf16(vocab, hidden),
        f"{_MODEL}embed_tokens.weight": _bf16(vocab, hidden),
        f"{_MODEL}norm.weight": _bf16(hidden),
        f"{_MODEL}output_attn_res_norm.weight": _bf16(hidden),
        f"{_MODEL}output_attn_res_proj.weight": _bf16(1, hidden),
    }


def _projector(vision: Mapping[str, Any]) -> Specs:
    rows, columns = vision["merge_kernel_size"]
    inner, hidden = vision["mm_hidden_size"] * rows * columns, vision["text_hidden_size"]
    return {
        "mm_projector.proj.0.weight": _bf16(inner, inner),
        "mm_projector.proj.2.weight": _bf16(hidden, inner),
        "mm_projector.post_norm.weight": _bf16(hidden),
    }


def _vision(vision: Mapping[str, Any]) -> Specs:
    hidden, qkv = vision["vt_hidden_size"], vision["qkv_hidden_size"]
    inner, patch = vision["vt_intermediate_size"], vision["patch_size"]
    block = {
        "mlp.fc0.weight": _bf16(inner, hidden),
        "mlp.fc1.weight": _bf16(hidden, inner),
        "norm0.weight": _bf16(hidden),
        "norm1.weight": _bf16(hidden),
        "wo.weight": _bf16(hidden, qkv),
        "wqkv.weight": _bf16(3 * qkv, hidden),
    }
    grid = (vision["init_pos_emb_height"], vision["init_pos_emb_width"], hidden)
    specs = {
        "vision_tower.encoder.final_layernorm.weight": _bf16(hidden),
        "vision_tower.patch_embed.pos_emb.weight": _bf16(*grid),
        "vision_tower.patch_embed.proj.weight": _bf16(hidden, 3, patch, patch),
    }
    for number in range(vision["vt_num_hidden_layers"]):
        specs |= _prefixed(f"vision_tower.encoder.blocks.{number}.", block)
    return specs


def twin_shards(config: Mapping[str, Any]) -> Iterator[tuple[str, Specs]]:
    """Yield file name and tensors of each shard of the BF16 twin: one per layer, three more."""
    text, vision = config["text_config"], config["vision_config"]
    parts = [
        _prefixed(f"{_MODEL}layers.{layer}.", _layer(text, layer))
        for layer in range(text["num_hidden_layers"])
    ]
    parts += [_top(text), _projector(vision), _vision(vision)]
    for number, specs in enumerate(parts, start=1):
        yield f"model-{number:05d}-of-{len(parts):06d}.safetensors", specs


def official_specs(twin: Specs) -> Specs:
    """Return what is published in place of a twin's tensors: experts in MXFP4."""
    specs: Specs = {}
    for name, spec in twin.items():
        if ".block_sparse_moe.experts." in name:
            rows, columns = spec.shape
            specs[name + "_packed"] = Spec("U8", (rows, columns // 2))
            specs[name + "_scale"] = Spec("U8", (rows, columns // 32))
        else:
            specs[name] = spec
    return specs


def twin_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the model before quantization."""
    text = {
        key: value for key, value in config["text_config"].items() if key != "quantization_config"
    }
    return {**config, "text_config": text}


def write_twin(folder: Path, config: Mapping[str, Any]) -> int:
    """Write the twin as sparse files and return the bytes that its tensors claim."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    for file, specs in twin_shards(config):
        stored = dict(sorted(specs.items(), key=lambda pair: (pair[1].dtype != "F32", pair[0])))
        sparse_safetensors(folder / file, {n: (*spec, spec.size) for n, spec in stored.items()})
        weight_map |= dict.fromkeys(stored, file)
        total += sum(spec.size for spec in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_bytes(json_bytes(index))
    (folder / "config.json").write_bytes(json_bytes(twin_config(config)))
    return total
