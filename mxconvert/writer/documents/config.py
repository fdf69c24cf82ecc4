"""``config.json``: the source's, with one quantization_config or none, and sane dtype fields."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from mxconvert.model import Action, Activations
from mxconvert.recipes import nests_quantization
from mxconvert.writer.documents.jsontext import encode_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mxconvert.model import Plan

CONFIG_NAME = "config.json"
QUANTIZATION_KEY = "quantization_config"
_STALE_KEYS = frozenset({QUANTIZATION_KEY, "compression_config", "expert_dtype"})
"""The last says how DeepSeek-V4 stores its experts."""
_DTYPE_KEYS = ("dtype", "torch_dtype")
_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_NOT_A_DTYPE_TO_COMPUTE_IN = ("uint8", "int8", "float8", "float4")
_DTYPE_SINCE = (4, 56)
"""The transformers version that renamed torch_dtype to dtype; older ones ignore dtype."""

Notice = tuple[str, str]

_ELEMENT: dict[str, Any] = {
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
}
_WEIGHTS: dict[str, Any] = {
    "num_bits": 4,
    **_ELEMENT,
    "dynamic": False,
    "scale_dtype": "torch.uint8",
    "zp_dtype": None,
    "observer": "minmax",
}
_MXFP8_ACTIVATIONS: dict[str, Any] = {
    "num_bits": 8,
    **_ELEMENT,
    "dynamic": True,
    "scale_dtype": "torch.uint8",
}


def config_json(config: Mapping[str, Any], plan: Plan) -> tuple[bytes, tuple[Notice, ...]]:
    """Return the artifact's config.json and notices ``(code, message)``.

    Keys keep their order and values. ``quantization_config`` stands where the source had
    one (see `nests_quantization`), unless nothing is quantized; every other copy goes. A
    dtype field that is null or names a storage type becomes what most unquantized weights
    are stored in; if ``dtype`` and ``torch_dtype`` contradict each other, ``dtype`` wins.

    Args:
        config: The source's config.json.
        plan: What is written; says what is ignored and which dtypes are kept.
    """
    notices: list[Notice] = []
    document = _without_stale(config)
    majority = _majority_dtype(plan)
    _settle_dtypes(document, _nested_dtype(document) or majority, "", notices)
    if not _names_dtype(document):
        _insert_dtype(document, majority)
    if not plan.plain:
        place = document["text_config"] if nests_quantization(config) else document
        place[QUANTIZATION_KEY] = quantization_config(plan)
    return encode_json(document), tuple(notices)


def quantization_config(plan: Plan) -> dict[str, Any]:
    """Return what compressed-tensors reads; loaders use its ``format`` and ``ignore``."""
    mxfp8 = plan.options.activations is Activations.MXFP8
    group = {
        "targets": ["Linear"],
        "weights": dict(_WEIGHTS),
        "input_activations": dict(_MXFP8_ACTIVATIONS) if mxfp8 else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {"group_0": group},
        "ignore": list(plan.ignore),
    }


def _without_stale(value: Any) -> Any:
    """Copy a config without quantization settings, at any depth."""
    if isinstance(value, dict):
        return {k: _without_stale(v) for k, v in value.items() if k not in _STALE_KEYS}
    if isinstance(value, list):
        return [_without_stale(item) for item in value]
    return value


def _majority_dtype(plan: Plan) -> str:
    """Return the float dtype that most bytes of unquantized weights are stored in."""
    sizes: Counter[str] = Counter()
    for file in plan.files:
        for item in file.items:
            for output in item.outputs:
                if item.action is not Action.QUANTIZE and output.dtype in _TORCH_NAMES:
                    sizes[output.dtype] += output.end - output.begin
    if not sizes:
        return _TORCH_NAMES["BF16"]
    return _TORCH_NAMES[max(sizes, key=lambda dtype: (sizes[dtype], dtype))]


def is_sane_dtype(value: object) -> bool:
    """Whether a dtype field's value is one to compute in."""
    return isinstance(value, str) and not value.removeprefix("torch.").startswith(
        _NOT_A_DTYPE_TO_COMPUTE_IN
    )


def _settle_dtypes(
    document: dict[str, Any], fallback: str, place: str, notices: list[Notice]
) -> None:
    """Make the dtype fields that are present agree, here and in nested configs."""
    present = [key for key in _DTYPE_KEYS if key in document]
    sane = [document[key] for key in present if is_sane_dtype(document[key])]
    winner = sane[0] if sane else fallback
    for key in present:
        found = document[key]
        if found == winner or _same_dtype(found, winner):
            continue
        document[key] = winner
        notices.append(
            ("config-dtype", f"config.json: {place}{key} is {found!r}, written as {winner!r}")
        )
    for key, value in document.items():
        if isinstance(value, dict) and key.endswith("_config"):
            _settle_dtypes(value, winner, f"{place}{key}.", notices)


def _nested_dtype(document: Mapping[str, Any]) -> str | None:
    text = document.get("text_config")
    values = [text.get(key) for key in _DTYPE_KEYS] if isinstance(text, dict) else []
    return next((value for value in values if is_sane_dtype(value)), None)


def _same_dtype(one: object, other: str) -> bool:
    return isinstance(one, str) and one.removeprefix("torch.") == other.removeprefix("torch.")


def _names_dtype(document: Mapping[str, Any]) -> bool:
    text = document.get("text_config")
    places = (document, text if isinstance(text, dict) else {})
    return any(key in place for place in places for key in _DTYPE_KEYS)


def _insert_dtype(document: dict[str, Any], dtype: str) -> None:
    version = str(document.get("transformers_version", "")).split(".")
    numbers = tuple(int(part) for part in version[:2] if part.isdecimal())
    old = len(numbers) == len(_DTYPE_SINCE) and numbers < _DTYPE_SINCE
    document["torch_dtype" if old else "dtype"] = dtype
