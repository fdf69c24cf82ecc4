"""What a recipe knows about a model family, as data.

A recipe maps tensor names to what they are: which are routed experts, of which layer,
which projection; which modules engines fuse and so must share one scheme; which
modules are Linear layers at all. It decides nothing about quantization.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from mxconvert.errors import SourceError, brief

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mxconvert.recipes.fused import Fused


class Role(StrEnum):
    """What a tensor is in the model."""

    EXPERT = "expert"
    SHARED_EXPERT = "shared expert"
    ROUTER = "router"
    ATTENTION = "attention"
    MLP = "dense MLP"
    EMBEDDING = "embedding"
    HEAD = "output head"
    NORM = "norm"
    VISION = "vision or audio"
    MTP = "multi-token prediction"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor belongs.

    ``expert`` and ``projection`` are set for routed experts only; ``projection`` is
    the name's own word (``gate_proj`` or ``w1``).
    """

    role: Role
    layer: int | None = None
    expert: int | None = None
    projection: str | None = None


# Order matters: the first pattern that is found in the name decides.
COMMON_ROLES: tuple[tuple[Role, str], ...] = (
    # Convolutions, and adapters between parts of a model.
    (Role.OTHER, (r"(^|\.|_)conv(\dd|\d)?(\.|$)"
                 r"|(^|\.)(indexer|altup|connector|img_projector|image_encoder)(\.|$)")),
    (Role.VISION, (r"(^|\.)(vision_tower|visual|vision_model|vision|audio_tower|audio|"
                  r"multi_modal_projector|mm_projector|resampler(_model)?|vit)(\.|_|$)")),
    # T5 calls its embedding shared and has another for relative positions.
    (Role.EMBEDDING, (r"(^|\.)(embed_\w+|\w*embeddings?|embed|wte|wpe|relative_attention_bias)"
                     r"(\.|$)|^shared\.")),
    # InternLM2 calls its head output, ChatGLM output_layer; BERT's layers have an output too.
    (Role.HEAD, (r"(^|\.)(\w+_head|score|classifier|qa_outputs|cls)(\.|$)"
                r"|^(\w+\.)?(output|output_layer|head)\.\w+$")),
    (Role.NORM, r"(?i)(^|\.|_)(\w*layer_?norm|\w*norm|ln_\w+)(\d*)(\.|$)"),
    (Role.SHARED_EXPERT, r"(^|\.)(shared_experts?|shared_mlp)(\.|$)"),
    (Role.ROUTER, (r"(^|\.)(mlp|block_sparse_moe|ffn|feed_forward|moe|mixer)\.(gate|router)(\.|$)"
                  r"|(^|\.)(shared_expert_gate|router|e_score_correction_bias)(\.|$)")),
    (Role.ATTENTION, (r"(?i)(^|\.)(self_?attn|self_?attention|attention|attn|linear_attn|"
                     r"encoder_attn|encdecattention)(\.|$)")),
    (Role.MLP, (r"(?i)(^|\.)(mlp|feed_forward|ffn|intermediate|output|densereludense)\.\w+"
               r"|(^|\.)(fc1|fc2|fc_in|fc_out)(\.|$)")),
)  # fmt: skip
_COMMON_ROLES = tuple((role, re.compile(pattern)) for role, pattern in COMMON_ROLES)
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d{1,5})\.")
_MTP_PREFIX = re.compile(r"(^|\.)mtp(_\w+)?\.")

LARGEST_SIZE = 2**31 - 1
"""Of a dimension that a config states."""

LARGEST_NUMBER = 99_999
"""Of layers and experts; tensor names with more digits are not taken for theirs."""

LINEAR_ROLES = frozenset({Role.EXPERT, Role.SHARED_EXPERT, Role.ATTENTION, Role.MLP})
"""Roles whose 2-D weights ``--scope linear`` quantizes; what is not recognised is kept."""

# Modules that engines merge into one matrix, so that they share one scheme (vLLM
# packed_modules_mapping of the families below).
COMMON_SIBLINGS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)

# One model spells them differently in different releases of transformers, so every
# family looks for every spelling.
NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_INNER_KEYS = (
    "moe_intermediate_size",
    "expert_intermediate_size",
    "expert_ffn_hidden_size",
    "intermediate_size",
    "ffn_hidden_size",
)
_HIDDEN_KEYS = ("hidden_size", "d_model")
EXPERTS_PER_TOKEN_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "moe_k",
    "moe_topk",
    "top_k_experts",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One model family.

    Attributes:
        name: What ``--recipe`` and the manifest call it.
        title: For people.
        model_types: Values of config.json's ``model_type`` (top level or text_config).
        expert: Regular expression of a routed expert's tensor, with the groups
            ``layer``, ``expert``, ``projection`` and ``kind`` (``weight`` or ``bias``);
            ``None`` for dense models.
        projections: The words ``projection`` may be; every expert has one weight each.
        fused: Tensors that hold all experts of a layer; split, their names match `expert`.
        mtp_after_last_layer: Layers numbered from ``num_hidden_layers`` on are
            multi-token-prediction layers.
        expert_sets: Sets of routed experts in a layer, each of the number that the config
            states: ERNIE 4.5 VL numbers those of text and of vision in a row.
        aliases: What an engine calls modules of this family alone: ends of names, and theirs.
        siblings: Groups of module names that share one scheme.
    """

    name: str
    title: str
    model_types: frozenset[str]
    expert: str | None = None
    projections: tuple[str, ...] = ()
    fused: tuple[Fused, ...] = ()
    mtp_after_last_layer: bool = False
    expert_sets: int = 1
    aliases: tuple[tuple[str, str], ...] = ()
    siblings: tuple[tuple[str, ...], ...] = COMMON_SIBLINGS

    def num_experts(self, config: Mapping[str, Any]) -> int | None:
        """Return the routed experts per layer that the config states."""
        stated = config_int(config, NUM_EXPERTS_KEYS)
        return stated * self.expert_sets if stated else stated

    def experts_per_token(self, config: Mapping[str, Any]) -> int | None:
        """Return the routed experts that a token uses, as the config states."""
        return config_int(config, EXPERTS_PER_TOKEN_KEYS)

    def called(self, module: str) -> tuple[str, ...]:
        """Return the names that an engine gives to a module of this family."""
        return tuple(
            re.sub(rf"{end}$", new, module)
            for end, new in self.aliases
            if re.search(rf"{end}$", module)
        )

    def classifier(self, config: Mapping[str, Any]) -> Classifier:
        """Return the name classifier for one checkpoint."""
        return Classifier(self, config)


class Classifier:
    """Maps the tensor names of one checkpoint to their slots."""

    def __init__(self, recipe: Recipe, config: Mapping[str, Any]) -> None:
        self._expert = re.compile(recipe.expert) if recipe.expert else None
        self._projections = frozenset(recipe.projections)
        num_layers = config_int(config, ("num_hidden_layers",))
        self._first_mtp_layer = num_layers if recipe.mtp_after_last_layer else None

    def __call__(self, name: str) -> Slot:
        """Return the slot of a tensor name."""
        match = self._expert.match(name) if self._expert else None
        if match and match["projection"] in self._projections:
            return Slot(Role.EXPERT, int(match["layer"]), int(match["expert"]), match["projection"])
        layer_match = _LAYER.search(name)
        layer = int(layer_match[1]) if layer_match else None
        return Slot(self._role(name), layer)

    def is_mtp(self, name: str, slot: Slot) -> bool:
        """Whether a tensor belongs to a multi-token-prediction layer."""
        if _MTP_PREFIX.search(name):
            return True
        first = self._first_mtp_layer
        return first is not None and slot.layer is not None and slot.layer >= first

    @staticmethod
    def _role(name: str) -> Role:
        for role, pattern in _COMMON_ROLES:
            if pattern.search(name):
                return role
        return Role.OTHER


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a config (``text_config`` where there is one)."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def nests_quantization(config: Mapping[str, Any]) -> bool:
    """Whether a config has its quantization settings in ``text_config`` only (Kimi-K3).

    vLLM looks at the top level and then in ``text_config``, transformers (5.24) at the top
    level only.
    """
    key = "quantization_config"
    inner = config.get("text_config")
    nested = isinstance(inner, dict) and isinstance(inner.get(key), dict)
    return nested and not isinstance(config.get(key), dict)


@dataclass(frozen=True, slots=True)
class MoESizes:
    """Sizes of a Mixture-of-Experts layer as a config states them; ``None`` if it does not."""

    experts: int | None
    hidden: int | None
    inner: int | None


def moe_sizes(config: Mapping[str, Any]) -> MoESizes:
    """Return experts per layer, hidden size and inner size of one expert."""
    return MoESizes(
        config_int(config, NUM_EXPERTS_KEYS),
        config_int(config, _HIDDEN_KEYS, LARGEST_SIZE),
        config_int(config, _INNER_KEYS, LARGEST_SIZE),
    )


def head_is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the model's output head may be its embedding, so that none need be stored.

    A config that does not say so may be of a family that ties by default (Gemma, T5).
    """
    stated = [part.get("tie_word_embeddings") for part in (text_config(config), config)]
    return True in stated or False not in stated


def config_int(
    config: Mapping[str, Any], keys: tuple[str, ...], largest: int = LARGEST_NUMBER
) -> int | None:
    """Return the first of ``keys`` that the config (or a part of it) holds.

    A list gives a number for each layer or modality: it counts if they agree.

    Raises:
        SourceError: The value is not a number that a model can have.
    """
    inner = config.get("ffn_config")
    for part in (text_config(config), config, inner if isinstance(inner, dict) else {}):
        for key in keys:
            stated = part.get(key)
            values = stated if isinstance(stated, list) else [] if stated is None else [stated]
            numbers = {_number(key, value, largest) for value in values}
            if len(numbers) == 1:
                return numbers.pop()
    return None


def _number(key: str, value: object, largest: int) -> int:
    if type(value) is not int or not 0 <= value <= largest:
        raise SourceError(
            f"config.json: {key} is {brief(value)}, expected a whole number of at most {largest}",
            hint="correct config.json",
        )
    return value
