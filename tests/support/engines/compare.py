"""What vLLM made of the source against what it made of our folder. Needs torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.artifact import PACKED, read_artifact
from tests.support.numbers import decode_mxfp4

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.artifact import Artifact

Loaded = dict[str, Any]
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)$")
_LATER = {"up_proj": 1, "w3": 1, "v1": 1, "k_proj": 1, "v_proj": 2, "kv_a_proj_with_mqa": 1}
"""Places of projections in what vLLM joins them to; the others come first."""
_OWN_DEFAULT = re.compile(r"attn\.[kqv]_(scale|zero_point)$")
"""Of a quantized cache, which we do not declare: vLLM sets them itself."""
PLAIN = ("UnquantizedLinearMethod", "UnquantizedFusedMoEMethod", "UnquantizedEmbeddingMethod")


def compare(source: Loaded, ours: Loaded, folder: Path) -> dict[str, Any]:
    """Return counts of what is equal and lists of what is wrong.

    Args:
        source: What `vllm_load.load` made of the unquantized folder.
        ours: What it made of ours.
        folder: Ours, to be read independently.
    """
    artifact = read_artifact(folder)
    wrong: list[str] = []
    counts = {
        "packed": _packed_equal(ours, artifact, wrong),
        "decoded": _decoded_equal(source, ours, wrong),
        "plain": _plain_equal(source, ours, wrong),
        "modules": _methods_agree(source, ours, artifact, wrong),
    }
    _all_read(source, ours, wrong)
    _all_written(source, ours, wrong)
    return {
        "class": ours["class"],
        "equal": counts,
        "wrong": wrong,
        "unread_too_in_source": sorted(source["unread"])[:20],
        "untouched_too_in_source": sorted(source["untouched"])[:20],
    }


def _packed_equal(ours: Loaded, artifact: Artifact, wrong: list[str]) -> int:
    """Packed codes and scales against our tensors; parameters.

    Those of experts in vLLM's order; of others the rows, whose order `_decoded_equal` sees.
    """
    equal = 0
    for name, names in ours["sources"].items():
        if not name.endswith(("weight_packed", "weight_scale")):
            continue
        wanted = _stacked(sorted(set(names), key=_place), artifact)
        found = ours["parameters"][name].numpy().view(np.uint8)
        found = found.reshape(-1, found.shape[-1])
        if ".experts" not in name and wanted is not None:
            wanted, found = _rows(wanted), _rows(found)
        if wanted is None or not np.array_equal(found, wanted):
            wrong.append(f"{name}: not our bytes")
        else:
            equal += 1
    return equal


def _rows(matrix: Any) -> Any:
    """Return the rows in an order of their own: attentions join and rotate theirs."""
    return matrix[np.lexsort(matrix.T)]


def _place(name: str) -> tuple[int, int, str]:
    """Return where a tensor comes in the parameter that it is part of."""
    module, _, projection = name.rpartition(".")[0].rpartition(".")
    match = _EXPERT.match(module)
    return int(match[2]) if match else 0, _LATER.get(projection, 0), name


def _stacked(names: list[str], artifact: Artifact) -> Any:
    """Return our tensors below each other: experts in order, within each gate above up."""
    parts = [artifact.tensors[name].array for name in names]
    return np.concatenate(parts) if parts else None


def _decoded_equal(source: Loaded, ours: Loaded, wrong: list[str]) -> int:
    """Packed parameters, decoded, against what vLLM loaded from the source; parameters."""
    equal = 0
    for name, packed in ours["parameters"].items():
        if not name.endswith(PACKED):
            continue
        plain = name.removesuffix(PACKED)
        scales = ours["parameters"][f"{plain}_scale"].numpy().view(np.uint8)
        values = decode_mxfp4(packed.numpy(), scales)
        wanted = source["parameters"].get(plain)
        if wanted is None or not _same(values, wanted.double().numpy()):
            wrong.append(f"{name}: decoded, not what is loaded from the source")
        else:
            equal += 1
    return equal


def _same(one: Any, other: Any) -> bool:
    """Whether two arrays are equal, zeros in their sign too."""
    return np.array_equal(one, other) and np.array_equal(np.signbit(one), np.signbit(other))


def _plain_equal(source: Loaded, ours: Loaded, wrong: list[str]) -> int:
    """Parameters that both have, bit for bit; those of the source that ours lacks."""
    import torch

    equal = 0
    packed = {n.removesuffix(PACKED) for n in ours["parameters"] if n.endswith(PACKED)}
    for name, wanted in source["parameters"].items():
        found = ours["parameters"].get(name)
        if found is None:
            if name not in packed:
                wrong.append(f"{name}: missing")
        elif found.dtype != wanted.dtype or not torch.equal(_bytes(found), _bytes(wanted)):
            wrong.append(f"{name}: not as loaded from the source")
        else:
            equal += 1
    return equal


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _methods_agree(source: Loaded, ours: Loaded, artifact: Artifact, wrong: list[str]) -> int:
    """vLLM's scheme of each module against whether we packed what it is loaded from; modules."""
    packed, equal = _packed_modules(source, artifact), 0
    for module, method in ours["methods"].items():
        wanted = packed.get(module)
        if wanted is None:
            continue
        if (method not in PLAIN) != wanted:
            wrong.append(f"{module}: {method}, but we {'packed' if wanted else 'kept'} it")
        else:
            equal += 1
    return equal


def _packed_modules(source: Loaded, artifact: Artifact) -> dict[str, bool]:
    """Whether the weights that each module is loaded from are packed in our folder."""
    quantized = set(artifact.quantized)
    found: dict[str, bool] = {}
    for parameter, names in source["sources"].items():
        module, _, kind = parameter.rpartition(".")
        if not names or "weight" not in kind:
            continue
        stored = [name for name in names if name in quantized or name in artifact.tensors]
        # What is stored for all experts together has other names in our folder.
        found[module] = any(name in quantized for name in stored) if stored else True
    return found


def _all_read(source: Loaded, ours: Loaded, wrong: list[str]) -> None:
    """No tensor of ours may be left aside unless the source's is too."""
    idle = set(source["unread"])
    for name in ours["unread"]:
        plain = re.sub(r"_(packed|scale)$", "", name)
        if plain not in idle:
            wrong.append(f"{name}: not read")


def _all_written(source: Loaded, ours: Loaded, wrong: list[str]) -> None:
    """No parameter may keep its sentinel unless it does with the source too."""
    for name, count in ours["untouched"].items():
        total = ours["parameters"][name].numel()
        if (
            name in source["untouched"]
            or _OWN_DEFAULT.search(name)
            or (name.endswith(PACKED) and count < total)
        ):
            continue
        wrong.append(f"{name}: {count} of {total} elements not initialised")
