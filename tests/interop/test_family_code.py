"""Families as transformers' own code has them: their headers, their forward pass, their loader.

`tests/test_families.py` compares what we write with readings of each family's experts; here
those readings are compared with the code they were taken from, and the recorded headers with
what the installed release writes.
"""

from __future__ import annotations

import functools
import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support import Tensor, decode, encode, raw_safetensors, read_artifact, run_cli
from tests.support.artifact import read_tensors
from tests.support.families.build import CLASSES, build, header_of, in_memory_header, major
from tests.support.families.configs import CONFIGS
from tests.support.families.expected import expected
from tests.support.families.fixtures import FOLDER, IN_MEMORY, dump
from tests.support.families.readings import alternating_biases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support import Artifact
    from tests.support.families.readings import Array

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]

FUSED = (
    "gemma4",
    "gemma4_text",
    "qwen3_vl_moe",
    "gpt_oss",
    "granitemoe",
    "granitemoeshared",
    "granitemoehybrid",
    "dbrx",
)
"""transformers 5.24 looks for the experts of these in fused tensors and finds none."""

FAILING = ("bailing_hybrid", "kimi_linear", "ernie4_5_vl_moe")
"""transformers 5.24 loads these, but raises once their experts are packed."""

OTHER = ("llama4", "llama4_text", "kimi_k25")
"""Loaded, and tested below: their stored names are not those of the result."""

SAME = tuple(family for family in CONFIGS if family not in (*FUSED, *FAILING, *OTHER))


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What transformers writes of a family, in BF16. Read only."""
    root = tmp_path_factory.mktemp("family-code")

    @functools.cache
    def write(family: str) -> Path:
        build(family).save_pretrained(root / family)
        return root / family

    return write


@pytest.fixture(scope="session")
def artifact_of(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Artifact]:
    """What quantize makes of it with the `even` rule. Read only."""
    root = tmp_path_factory.mktemp("family-artifacts")

    @functools.cache
    def convert(family: str) -> Artifact:
        options = ("--scale-rule", "even", "--force")
        run_cli("quantize", folder_of(family), root / family, *options).ok()
        return read_artifact(root / family)

    return convert


# ------------------------------------------------------------------------------- headers


@pytest.mark.parametrize("family", CONFIGS)
def test_the_recorded_header_is_what_the_release_writes(
    family: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """A release that drops a family, or writes it otherwise, is noticed here."""
    recorded = json.loads((FOLDER / f"{family}.{major()}.json").read_text())
    written = json.loads(dump(header_of(folder_of(family))))
    assert written["tensors"] == recorded["tensors"]
    assert written["config"] == recorded["config"]
    if family in IN_MEMORY:
        recorded = json.loads((FOLDER / f"{family}.fused.json").read_text())
        written = json.loads(dump(in_memory_header(build(family), tmp_path)))
        assert written["tensors"] == recorded["tensors"]


# --------------------------------------------------------------------------- forward pass

ROLES = {
    "gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "v1": "up",
    "down_proj": "down", "w2": "down",
}  # fmt: skip


def module_size(module: Any) -> int:
    """Return how many experts of a module do something."""
    return getattr(module, "num_routed_experts", None) or module.num_experts


def experts_of(model: Any) -> Iterator[tuple[Any, int]]:
    """Yield module and number of every routed expert, in the model's order."""
    for name, module in model.named_modules():
        if name.endswith("experts") and type(module).__name__.endswith("Experts"):
            for number in range(module_size(module)):
                yield module, number


def output(module: Any, number: int, inputs: Any) -> Any:
    """Run one expert, as the model's own code does."""
    import torch

    if type(module).__name__ == "Llama4TextExperts":  # takes as many inputs for each expert
        return module(inputs.repeat(module.num_experts, 1))[number : number + 1]
    used = torch.tensor([[number, (number + 1) % module_size(module)]])
    return module(inputs, used, torch.tensor([[1.0, 0.0]]))


def wanted(module: Any, parts: dict[str, Array], biases: dict[str, Array], inputs: Array) -> Array:
    """Compute the same from matrices ``[out, in]``."""
    import torch

    def run(role: str, values: Array) -> Array:
        return parts[role] @ values + biases.get(role, 0.0)

    def act(values: Array) -> Array:
        function = getattr(module, "act_fn", None) or module.mlp.activation_fn
        return np.asarray(function(torch.tensor(values)))

    up = run("up", inputs)
    if "gate" not in parts:
        return run("down", act(up))
    gate = run("gate", inputs)
    if biases:  # gpt-oss; the values are too small to be clamped
        return run("down", (up + 1) * gate / (1 + np.exp(-module.alpha * gate)))
    return run("down", act(gate) * up)


@pytest.mark.parametrize("family", CONFIGS)
def test_experts_compute_what_the_readings_say(family: str, tmp_path: Path) -> None:
    """Which rows are the gate's, and which way round a matrix lies, as the code has it."""
    import torch

    model = build(family, dtype=torch.float32).eval()
    for module in {module for module, _ in experts_of(model)}:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    stored = {
        n: t for path in tmp_path.glob("*.safetensors") for n, t in read_tensors(path).items()
    }

    @functools.cache
    def values(name: str) -> Array:
        return decode(stored[name].data, stored[name].dtype, stored[name].shape)

    family_is = expected(family, major())
    names, found = list(family_is.experts()), list(experts_of(model))
    assert len(names) == len(found)
    for (module, number), (experts, expert) in zip(found, names, strict=True):
        matrices = family_is.reading(values, experts, expert)
        parts = {ROLES[name]: matrix for name, matrix in matrices.items()}
        biases = {}
        if family == "gpt_oss":
            read = alternating_biases(values, experts, expert)
            biases = {ROLES[name]: vector for name, vector in read.items()}
        inputs = np.random.default_rng(expert).standard_normal(parts["up"].shape[1])
        with torch.no_grad():
            ours = output(module, number, torch.tensor(inputs[None], dtype=torch.float32))
        theirs = wanted(module, parts, biases, inputs)
        assert np.abs(theirs).max() > 1e-3
        np.testing.assert_allclose(ours.reshape(-1).numpy(), theirs, rtol=1e-3, atol=1e-5)


# -------------------------------------------------------------------------------- loading


def load(family: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the model, and what did not fit."""
    import torch
    import transformers

    name = CLASSES.get(family, "AutoModelForCausalLM")
    model, info = getattr(transformers, name).from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
    return model.eval(), {key: sorted(map(str, info[key])) for key in keys if info[key]}


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return getattr(model, "thinker", model)(3 + torch.arange(24).reshape(2, 12)).logits


def copy_with(source: Path, folder: Path, made: dict[str, Array]) -> Path:
    """Copy a folder with other values of some tensors."""
    shutil.copytree(source, folder)
    for path in folder.glob("*.safetensors"):
        tensors = {name: Tensor(*stored[1:]) for name, stored in read_tensors(path).items()}
        for name in tensors.keys() & made.keys():
            data = encode(made[name], tensors[name].dtype)
            tensors[name] = tensors[name]._replace(data=data)
        raw_safetensors(path, tensors)
    return folder


def check_logits(family: str, artifact: Artifact, source: Path, decoded: Path) -> None:
    """Same logits bit for bit as the decoded weights', and others than the original's."""
    import torch

    model, misfits = load(family, artifact.root)
    assert misfits == {}
    ours = logits(model)
    assert torch.equal(ours, logits(load(family, decoded)[0]))
    original = logits(load(family, source)[0])
    assert not torch.equal(ours, original)
    similar = torch.nn.functional.cosine_similarity(ours.float(), original.float(), dim=-1)
    assert similar.min() > 0.9


@pytest.mark.parametrize("family", SAME)
def test_logits_are_those_of_the_decoded_weights(
    family: str,
    folder_of: Callable[[str], Path],
    artifact_of: Callable[[str], Artifact],
    tmp_path: Path,
) -> None:
    artifact, source = artifact_of(family), folder_of(family)
    made = {name: artifact.values(name) for name in artifact.quantized}
    check_logits(family, artifact, source, copy_with(source, tmp_path / "decoded", made))


def test_logits_of_llama4(
    folder_of: Callable[[str], Path], artifact_of: Callable[[str], Artifact], tmp_path: Path
) -> None:
    """Stored fused, loaded one by one: compared with the decoded weights, fused again."""
    artifact, source = artifact_of("llama4_text"), folder_of("llama4_text")
    module = "model.layers.1.feed_forward.experts"
    gate, up, down = (
        np.stack([artifact.values(f"{module}.{e}.{part}_proj.weight").T for e in range(4)])
        for part in ("gate", "up", "down")
    )
    made = {
        f"{module}.gate_up_proj": np.concatenate([gate, up], axis=2),
        f"{module}.down_proj": down,
    }
    check_logits("llama4_text", artifact, source, copy_with(source, tmp_path / "decoded", made))


def test_logits_of_kimi_k25_as_published(tmp_path: Path) -> None:
    """Under the release's names, not those that transformers 5.24 writes."""
    source, decoded = tmp_path / "source", tmp_path / "decoded"
    build("kimi_k25").save_pretrained(source)
    for path in source.glob("*.safetensors"):
        stored = read_tensors(path).items()
        named = {n.replace("model.blocks", "model.layers"): Tensor(*t[1:]) for n, t in stored}
        raw_safetensors(path, named)
    run_cli("quantize", source, tmp_path / "out", "--scale-rule", "even").ok()
    artifact = read_artifact(tmp_path / "out")
    made = {name: artifact.values(name) for name in artifact.quantized}
    check_logits("kimi_k25", artifact, source, copy_with(source, decoded, made))


@pytest.mark.parametrize("family", FUSED)
def test_transformers_does_not_find_split_experts(
    family: str, artifact_of: Callable[[str], Artifact]
) -> None:
    """It says so, and goes on with random ones: which is why we refuse that engine."""
    _, misfits = load(family, artifact_of(family).root)
    assert any("experts" in name for name in misfits["missing_keys"])
    assert any("experts" in name for name in misfits["unexpected_keys"])


@pytest.mark.parametrize("family", FAILING)
def test_transformers_cannot_convert_these_once_packed(
    family: str, artifact_of: Callable[[str], Artifact], folder_of: Callable[[str], Path]
) -> None:
    assert load(family, folder_of(family))[1] == {}
    with pytest.raises(RuntimeError, match="conversion"):
        load(family, artifact_of(family).root)
