"""What ``--engine`` refuses and ``--force`` makes nevertheless, through the command line."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support import bf16_model, fail_cleanly, read_artifact, refused, shell
from tests.support.contract import ROOMY, USAGE_STATUS
from tests.support.families.fixtures import fixtures

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support import Model

CODE = "unread-by-engine"
FIXTURES = {fixture.family: fixture for fixture in fixtures() if fixture.kind == "5x"}
VLLM_ONLY = (
    "qwen3_vl_moe",
    "granitemoe",
    "granitemoeshared",
    "granitemoehybrid",
    "gemma4",
    "gemma4_text",
    "kimi_linear",
    "bailing_hybrid",
    "ernie4_5_vl_moe",
)
TRANSFORMERS_ONLY = ("minimax",)
NONE = ("gpt_oss", "dbrx")


def takers(family: str) -> set[str]:
    """Engines that are known, or not known not, to load our form of a family."""
    taken = {"vllm": (*TRANSFORMERS_ONLY, *NONE), "transformers": (*VLLM_ONLY, *NONE)}
    return {engine for engine, refused_by in taken.items() if family not in refused_by}


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each family. Read only."""
    root = tmp_path_factory.mktemp("engines")
    return {name: fixture.model().write(root / name) for name, fixture in FIXTURES.items()}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "transformers"])
@pytest.mark.parametrize("family", FIXTURES)
def test_an_engine_s_claim(family: str, engine: str, sources: dict[str, Path]) -> None:
    """`plan --engine` refuses exactly what that engine does not load."""
    result = shell("plan", sources[family], "--engine", engine, "--json")
    if engine in takers(family):
        assert [n for n in result.ok().json()["notices"] if n["code"] == CODE] == []
        return
    fail_cleanly(result, USAGE_STATUS, f"--engine {engine}: ", "--force", "known to load it: ")
    for taker in takers(family):
        assert taker in result.stderr.partition("known to load it: ")[2]


@pytest.mark.parametrize("family", NONE)
def test_what_no_engine_loads_is_refused_without_being_asked(
    family: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """Hours of work would make something that nothing can use."""
    says = ("no engine is known to load", "vllm ", "sglang ", "trtllm ", "transformers ")
    refused(sources[family], tmp_path / "out", status=USAGE_STATUS, says=says)


@pytest.mark.parametrize("options", [(), ("--engine", "vllm")], ids=["any", "vllm"])
def test_force_makes_it_nevertheless(
    options: tuple[str, ...], sources: dict[str, Path], tmp_path: Path
) -> None:
    """The reason becomes a notice, and the result is whole."""
    source, target = sources["gpt_oss"], tmp_path / "out"
    plan = shell("plan", source, *options, "--force", "--json").ok().json()
    [notice] = [n for n in plan["notices"] if n["code"] == CODE]
    assert "gpt-oss" in notice["message"]
    assert "own MXFP4 layout" in notice["message"]
    made = shell("quantize", source, target, *options, "--force", *ROOMY).ok()
    assert "own MXFP4 layout" in made.stderr
    shell("verify", target, "--source", source, "--level", "numeric").ok()
    assert len(read_artifact(target).quantized) == 2 * 4 * 3


def test_a_refused_engine_leaves_nothing(sources: dict[str, Path], tmp_path: Path) -> None:
    """SGLang would skip the experts without a word; the engines that take them are named."""
    refused(
        sources["qwen3_moe"],
        tmp_path / "out",
        "--engine",
        "sglang",
        status=USAGE_STATUS,
        says=("--engine sglang: ", "without an error", "known to load it: vllm, transformers"),
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_an_engine_that_takes_it_changes_no_byte(
    family: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """--engine and --force state a goal; the bytes are the same."""
    made = []
    for name, options in (("plain", ()), ("asked", ("--engine", "vllm", "--force"))):
        shell("quantize", sources[family], tmp_path / name, *options, *ROOMY).ok()
        made.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert made[0] == made[1]


def test_kimi_k3_is_sglang_s_and_kimi_linear_is_not(sources: dict[str, Path]) -> None:
    """Their experts have the same names, but SGLang renames packed weights for one only."""
    result = shell("plan", sources["kimi_linear"], "--engine", "sglang")
    fail_cleanly(result, USAGE_STATUS, "kimi-linear")
    plain = FIXTURES["kimi_linear"].model()
    folder = plain.configured(model_type="kimi_k3").write(sources["kimi_linear"].parent / "k3")
    shell("plan", folder, "--engine", "sglang").ok()


def test_sglang_has_no_scheme_for_packed_linears(model: Model, tmp_path: Path) -> None:
    """Of Kimi-K3 it takes the experts; a dense model is refused."""
    kept = model.without(lambda name: ".experts." in name or name.endswith("mlp.gate.weight"))
    config = {k: v for k, v in model.config.items() if "expert" not in k} | {"model_type": "llama"}
    source = replace(kept, config=config).write(tmp_path / "source")
    options = ("--recipe", "dense", "--scope", "linear")
    fail_cleanly(shell("plan", source, *options, "--engine", "sglang"), USAGE_STATUS, "Linear")
    shell("plan", source, *options, "--engine", "vllm").ok()


def test_of_a_generic_recipe_nothing_is_claimed(tmp_path: Path) -> None:
    """Nobody has tried an engine on it."""
    source = bf16_model().configured(model_type="nobody_knows").write(tmp_path / "source")
    template = "layers.{layer}.mlp.experts.{expert}.{projection}"
    options = ("--recipe", "generic", "--expert-weights", template, "--engine", "trtllm")
    result = shell("plan", source, *options)
    fail_cleanly(result, USAGE_STATUS, "--engine trtllm: ", "family that nobody described")
    assert "known to load it:" not in result.stderr


def test_an_unknown_engine_names_the_known(sources: dict[str, Path]) -> None:
    """A typing error is no engine that takes everything."""
    result = shell("plan", sources["mixtral"], "--engine", "ollama")
    assert result.status == USAGE_STATUS
    for engine in ("vllm", "sglang", "trtllm", "transformers"):
        assert engine in result.stderr
