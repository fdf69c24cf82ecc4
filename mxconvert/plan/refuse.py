"""Sources that must not be converted as if they were understood."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from mxconvert.errors import SourceError, brief
from mxconvert.model import PACKED_SUFFIX, Options, Scope, TensorInfo
from mxconvert.patterns import WEIGHT_SUFFIX, module_name
from mxconvert.plan.scales import is_scale_name
from mxconvert.recipes import GENERIC, Recipe, Role, Slot, model_type, recipe_names, text_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

_SHOWN = 4
_MIN_RANK = 2
_EXPERT_WORD = re.compile(r"(^|\.)experts(\.|$)")
# Parts of a tensor name that only quantized checkpoints have.
_PACKED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|weight_packed|weight_scale|weight_scale_inv|weight_scale_2"
    r"|weight_shape|weight_zero_point|SCB|absmax|quant_map)$|_(blocks|scales)$"
)
_SCHEME_WORDS = ("format", "quant_algo", "fmt", "bits")
_QUANTIZED_DTYPES = frozenset(
    {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "I8", "U8"}
)
_SCALE_DTYPE = "F8_E8M0"


def refuse_quantized(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], mxfp4: AbstractSet[str]
) -> None:
    """Refuse a source that is quantized already.

    Raises:
        SourceError: Naming the scheme found and what is supported.
    """
    scheme = _declared_scheme(config)
    packed = [
        name for name in tensors if _PACKED.search(name) and name.rpartition(".")[0] not in mxfp4
    ]
    codes = [tensor.name for tensor in tensors.values() if _lacks_its_other_half(tensor)]
    understood = not scheme or mxfp4 or any(t.scale is not None for t in tensors.values())
    if understood and not packed and not codes:
        return
    evidence = f"config.json declares {scheme}" if scheme else "config.json declares no scheme"
    if packed or codes:
        names = packed or codes
        dtypes = sorted({tensors[name].dtype for name in names})
        evidence += f"; {len(names)} tensors such as {names[0]} hold {', '.join(dtypes)}"
    raise SourceError(
        f"the source is quantized already: {evidence}",
        hint="--from-int4 converts it nevertheless: what INT4 has rounded is rounded again"
        if any(name.endswith(PACKED_SUFFIX) and tensors[name].dtype == "I32" for name in packed)
        else "BF16, F16, F32, FP8 with scales and MXFP4 can be read; give such a checkpoint",
        code="already-quantized",
    )


def _lacks_its_other_half(tensor: TensorInfo) -> bool:
    """Whether a tensor holds codes without scales, or powers of two that scale nothing."""
    if tensor.dtype == _SCALE_DTYPE and is_scale_name(tensor.name):
        return True
    is_weight = tensor.name.endswith(WEIGHT_SUFFIX) and len(tensor.shape) >= _MIN_RANK
    return is_weight and tensor.dtype in _QUANTIZED_DTYPES and tensor.scale is None


def _declared_scheme(config: Mapping[str, Any]) -> str | None:
    for part in (config, text_config(config)):
        for key in ("quantization_config", "compression_config"):
            declared = part.get(key)
            if isinstance(declared, dict):
                method = declared.get("quant_method", "of no quant_method")
                details = (declared.get(word) for word in _SCHEME_WORDS)
                shown = ", ".join(brief(value).strip("'") for value in details if value)
                return f"{key} {brief(method)}" + (f" ({shown})" if shown else "")
            if declared is not None:
                return f"{key} {brief(declared)}"
    return None


def refuse_unrecognised(
    tensors: Mapping[str, TensorInfo],
    slots: Mapping[str, Slot],
    config: Mapping[str, Any],
    recipe: Recipe,
    options: Options,
    *,
    mtp: set[str],
) -> None:
    """Refuse expert weights that the recipe does not place, but for MTP layers: they are kept.

    Raises:
        SourceError: With counts and bytes of what would stay unquantized.
    """
    if recipe.expert is None:
        return
    placed = [tensors[n] for n, slot in slots.items() if slot.role is Role.EXPERT]
    odd = [t for t in placed if t.name.endswith(WEIGHT_SUFFIX) and len(t.shape) != _MIN_RANK]
    stray = odd + [
        tensor
        for name, tensor in tensors.items()
        if name not in mtp
        and slots[name].role in (Role.OTHER, Role.MLP, Role.ROUTER)
        and len(tensor.shape) >= _MIN_RANK
        and _EXPERT_WORD.search(name)
    ]
    if stray:
        raise _unrecognised(stray, f"recipe {recipe.name} does not read their layout", config)
    if not placed and options.scope is Scope.EXPERTS and recipe.num_experts(config):
        raise _unrecognised(
            tensors.values(),
            f"config.json states {recipe.num_experts(config)} experts, but no tensor has the "
            f"name that recipe {recipe.name} expects of one",
            config,
        )


def refuse_transposed(tensors: Mapping[str, TensorInfo], candidates: Iterable[str]) -> None:
    """Refuse weights stored ``[in, out]`` (GPT-2's Conv1D): blocks would run the wrong way.

    A bias has one value for each output, so it tells the two apart where they differ.

    Args:
        tensors: All tensors by name.
        candidates: Names of matrices to look at. Square ones do not tell, so they should
            be all that are of one make.

    Raises:
        SourceError: Naming the first.
    """
    for name in sorted(candidates):
        outputs, inputs = tensors[name].shape
        bias = tensors.get(f"{module_name(name)}.bias")
        if bias is not None and outputs != inputs and bias.shape == (inputs,):
            raise SourceError(
                f"{name} has shape [{outputs}, {inputs}] and {inputs} biases: it is stored input "
                "dimension first (Conv1D, as in GPT-2); loaders know MXFP4 in Linear layers only",
                hint="models with such layers cannot be converted",
                code="transposed-weight",
            )


def unknown_family(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> SourceError:
    """Return the error for a Mixture-of-Experts model of no known family."""
    return _unrecognised(
        tensors.values(), f"model_type {brief(model_type(config))} is of no known family", config
    )


def _unrecognised(left: Iterable[TensorInfo], why: str, config: Mapping[str, Any]) -> SourceError:
    left = list(left)
    size = sum(tensor.size for tensor in left)
    largest = sorted(left, key=lambda t: (-t.size, t.name))[:_SHOWN]
    shown = ", ".join(f"{t.name} {t.dtype}{list(t.shape)}" for t in largest)
    return SourceError(
        f"unrecognised expert layout: {why}; {len(left)} tensors of {size} bytes would stay "
        f"unquantized, the largest: {shown}",
        hint=f"model_type is {brief(model_type(config))}; if the names are those of another "
        f"family, pass --recipe {'|'.join(recipe_names())}; with {GENERIC}, say what they are "
        "called: --expert-weights 'layers.{layer}.moe.experts.{expert}.{projection}'",
        code="unrecognised-layout",
    )


def check_completeness(
    slots: Mapping[str, Slot],
    mtp: set[str],
    config: Mapping[str, Any],
    recipe: Recipe,
) -> list[str]:
    """Return one message per MoE layer in which experts or projections are absent."""
    if recipe.expert is None:
        return []
    found: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, slot in slots.items():
        is_weight = name.endswith((WEIGHT_SUFFIX, PACKED_SUFFIX))
        if slot.role is Role.EXPERT and name not in mtp and is_weight:
            found[slot.layer or 0][slot.expert or 0].add(slot.projection or "")
    stated = recipe.num_experts(config)
    messages = []
    for layer, experts in sorted(found.items()):
        count = stated if stated is not None else max(experts) + 1
        absent = [e for e in range(count) if set(recipe.projections) - experts.get(e, set())]
        if absent:
            messages.append(
                f"layer {layer}: {len(absent)} of {count} experts lack weights "
                f"(first: expert {absent[0]}, "
                f"{', '.join(sorted(set(recipe.projections) - experts.get(absent[0], set())))})"
            )
        if max(experts) >= count:
            messages.append(f"layer {layer}: has expert {max(experts)}, config.json states {count}")
    return messages
