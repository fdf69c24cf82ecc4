"""Seeded checkpoint folders in the shape of published models.

A `Model` is a plain value: change its dictionaries, then `Model.write` it. Each tensor's
values depend on its name and the seed alone, so resharding or adding layers moves nothing.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.container import PT, Tensor, raw_safetensors
from tests.support.numbers import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Shards = dict[str, dict[str, Tensor]]
INDEX = "model.safetensors.index.json"
SIGMA = 0.02


def tensor(
    name: str,
    shape: tuple[int, ...],
    dtype: str = "BF16",
    *,
    seed: int = 0,
    sigma: float = SIGMA,
) -> Tensor:
    """Return a tensor of N(0, sigma) values that depend on ``name`` and ``seed`` only."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return Tensor(dtype, shape, encode(rng.standard_normal(shape) * sigma, dtype))


def shard_name(number: int, count: int) -> str:
    """Return the usual file name of shard ``number`` (from 1) of ``count``."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def json_bytes(document: Any) -> bytes:
    """Return JSON as transformers writes it to config files."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True, kw_only=True)
class Model:
    """A checkpoint folder before it is written.

    Attributes:
        config: Written as config.json.
        shards: File name -> tensors in storage order.
        sidecars: Other files by path relative to the folder.
    """

    config: dict[str, Any]
    shards: Shards
    sidecars: dict[str, bytes] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name (the last copy, if a name is stored twice)."""
        return {name: value for shard in self.shards.values() for name, value in shard.items()}

    @property
    def weight_map(self) -> dict[str, str]:
        """The index's map: tensor name -> file name, sorted by name."""
        pairs = {name: file for file, shard in self.shards.items() for name in shard}
        return dict(sorted(pairs.items()))

    def rename(self, new_name: Callable[[str], str]) -> Model:
        """Return a copy with every tensor renamed; bytes and places stay."""
        shards = {
            file: {new_name(name): value for name, value in shard.items()}
            for file, shard in self.shards.items()
        }
        return replace(self, shards=shards)

    def reshard(self, file_of: Callable[[str], str]) -> Model:
        """Return a copy with each tensor in the file that ``file_of(name)`` says."""
        shards: Shards = {}
        for name, value in self.tensors.items():
            shards.setdefault(file_of(name), {})[name] = value
        return replace(self, shards=shards)

    def split(self, count: int) -> Model:
        """Return a copy dealt over ``count`` shards with the usual names."""
        names = {name: number % count + 1 for number, name in enumerate(self.tensors)}
        return self.reshard(lambda name: shard_name(names[name], count))

    def adding(self, extra: Mapping[str, Tensor]) -> Model:
        """Return a copy with more tensors (or other values) in the last shard."""
        last = list(self.shards)[-1]
        shards = {
            file: {name: value for name, value in shard.items() if name not in extra}
            for file, shard in self.shards.items()
        }
        shards[last] |= extra
        return replace(self, shards=shards)

    def without(self, unwanted: Callable[[str], bool]) -> Model:
        """Return a copy without the tensors whose names are unwanted."""
        shards = {
            file: {name: value for name, value in shard.items() if not unwanted(name)}
            for file, shard in self.shards.items()
        }
        return replace(self, shards={file: shard for file, shard in shards.items() if shard})

    def configured(self, **keys: Any) -> Model:
        """Return a copy with config keys set."""
        return replace(self, config=self.config | keys)

    def index(self) -> dict[str, Any]:
        """Return the index document that matches the shards."""
        total = sum(len(value.data) for value in self.tensors.values())
        return {"metadata": {"total_size": total}, "weight_map": self.weight_map}

    def write(
        self,
        folder: Path | str,
        *,
        index: bool | Mapping[str, Any] = True,
        metadata: Any = PT,
        pad: int = 8,
    ) -> Path:
        """Write the folder and return its path.

        Args:
            folder: Created with its parents.
            index: ``False``: none; a mapping: that document instead of the right one.
            metadata: ``__metadata__`` of every shard (see `raw_safetensors`).
            pad: Header padding of every shard.
        """
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        for file, shard in self.shards.items():
            raw_safetensors(root / file, shard, metadata=metadata, pad=pad)
        if index is not False:
            document = self.index() if index is True else index
            (root / INDEX).write_bytes(json_bytes(document))
        for path, data in {"config.json": json_bytes(self.config), **self.sidecars}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        return root


def qwen3_moe_config(
    *,
    layers: int,
    experts: int,
    hidden: int,
    inner: int,
    vocab: int,
    heads: int = 4,
    top_k: int = 2,
) -> dict[str, Any]:
    """Return a Qwen3-MoE config.json with the keys that transformers writes."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": SIGMA,
        "intermediate_size": inner * 4,
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
        "num_attention_heads": heads,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads // 2,
        "output_router_logits": False,
        "pad_token_id": None,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab,
    }


def qwen3_moe_shapes(config: Mapping[str, Any], *, qk_norm: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a Qwen3-MoE checkpoint, in model order."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        parts = _qwen3_moe_layer(config, qk_norm=qk_norm)
        shapes |= {f"model.layers.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _qwen3_moe_layer(config: Mapping[str, Any], *, qk_norm: bool) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    head = config["head_dim"]
    query, keyval = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    parts: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (keyval, hidden),
        "self_attn.v_proj": (keyval, hidden),
        "self_attn.o_proj": (hidden, query),
    }
    if qk_norm:
        parts |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    parts["mlp.gate"] = (config["num_experts"], hidden)
    for expert in range(config["num_experts"]):
        parts[f"mlp.experts.{expert}.gate_proj"] = (inner, hidden)
        parts[f"mlp.experts.{expert}.up_proj"] = (inner, hidden)
        parts[f"mlp.experts.{expert}.down_proj"] = (hidden, inner)
    return parts | {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}


def sidecars(name: str = "tiny-qwen3-moe") -> dict[str, bytes]:
    """Return the small files that stand beside the weights of a published model."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "hello": 1}, "unk_token": "<unk>"},
    }
    front = "---\nlicense: apache-2.0\nlibrary_name: transformers\n---\n"
    card = f"{front}\n# {name}\n\nRandom weights.\n"
    return {
        "generation_config.json": json_bytes({"bos_token_id": 1, "eos_token_id": 2}),
        "tokenizer.json": json_bytes(tokenizer),
        "tokenizer_config.json": json_bytes({"tokenizer_class": "PreTrainedTokenizerFast"}),
        "chat_template.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}\n",
        "README.md": card.encode(),
    }


def bf16_model(
    *,
    layers: int = 2,
    experts: int = 8,
    hidden: int = 64,
    inner: int = 96,
    vocab: int = 128,
    dtype: str = "BF16",
    qk_norm: bool = False,
    seed: int = 0,
) -> Model:
    """F-BF16: a Qwen3-MoE of 65 tensors in two shards (embeddings and layer 0; the rest).

    Args:
        layers: Number of hidden layers, all of them MoE.
        experts: Routed experts per layer.
        hidden: Hidden size (the K of gate and up).
        inner: Expert inner size (the K of down).
        vocab: Vocabulary size.
        dtype: Stored dtype of every tensor.
        qk_norm: Add the q_norm and k_norm that true Qwen3 layers have.
        seed: Other values, same shapes.
    """
    config = qwen3_moe_config(
        layers=layers, experts=experts, hidden=hidden, inner=inner, vocab=vocab
    )
    first = ("model.embed_tokens.", "model.layers.0.")
    shards: Shards = {shard_name(1, 2): {}, shard_name(2, 2): {}}
    for name, shape in qwen3_moe_shapes(config, qk_norm=qk_norm).items():
        file = shard_name(1 if name.startswith(first) else 2, 2)
        shards[file][name] = tensor(name, shape, dtype, seed=seed)
    return Model(config=config, shards=shards, sidecars=sidecars())


_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def mixtral_name(name: str) -> str:
    """Map a Qwen3-MoE tensor name to Mixtral's (for `Model.rename`)."""
    name = name.replace(".mlp.", ".block_sparse_moe.")
    if ".experts." in name:
        for ours, theirs in _MIXTRAL.items():
            name = name.replace(ours, theirs)
    return name
