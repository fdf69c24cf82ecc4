"""Small models that transformers itself writes; needs torch and transformers.

The 4.x releases take some configs in another form and lack some families.
"""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from tests.support.container import read_header
from tests.support.families.configs import CONFIGS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.families.configs import Config

CLASSES = {
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeForConditionalGeneration",
}
"""Classes with towers; every other family is an ``AutoModelForCausalLM``."""


def release() -> str:
    """Return the installed transformers' version."""
    import transformers

    return str(transformers.__version__)


def major() -> str:
    """Return ``4x`` or ``5x``, as fixtures are called."""
    return release().split(".", maxsplit=1)[0] + "x"


def _as_4x(config: Any) -> Any:
    """Return a config in the words of the 4.x releases."""
    if not isinstance(config, dict):
        return config
    old = {key: _as_4x(value) for key, value in config.items()}
    if "rope_parameters" in old:
        old["rope_scaling"] = {**old.pop("rope_parameters"), "rope_type": "default"}
    return old


def config_of(family: str) -> Config:
    """Return the family's config in the words of the installed release."""
    config = deepcopy(CONFIGS[family])
    if major() == "4x":
        config = _as_4x(config)
        if family == "dbrx":
            del config["ffn_config"]["hidden_size"], config["attn_config"]["rope_theta"]
    return config


def build(family: str, dtype: Any = None, **changes: Any) -> Any:
    """Return a seeded model; ``changes`` are to config values.

    Raises:
        LookupError: The installed release lacks the family.
    """
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.for_model(family, **{**config_of(family), **changes})
    except ValueError as error:
        if "Unrecognized model identifier" not in str(error):
            raise
        raise LookupError(family) from None
    torch.manual_seed(0)
    dtype = dtype or torch.bfloat16
    if family not in CLASSES:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = getattr(transformers, CLASSES[family])._from_config(config, dtype=dtype)
    if family == "qwen3_omni_moe":  # its talker is not initialised otherwise
        for parameter in model.talker.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def header_of(folder: Path) -> dict[str, Any]:
    """Return config.json and the header of every tensor of a folder that transformers wrote."""
    tensors: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, _ = read_header(path)
        tensors |= {
            name: [entry["dtype"], *entry["shape"]]
            for name, entry in header.items()
            if name != "__metadata__"
        }
    config = json.loads((folder / "config.json").read_text())
    return {
        "transformers": release(),
        "config": config,
        "tensors": dict(sorted(tensors.items())),
    }


def in_memory_header(model: Any, folder: Path) -> dict[str, Any]:
    """Return what is written if names are left as the modules have them (5.x only)."""
    model.save_pretrained(folder, save_original_format=False)
    return header_of(folder)
