"""The demo's folder is a real Qwen3-MoE folder: transformers would write the same one."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.artifact import read_tensors
from tests.support.cli import ROOT

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

FIXTURE = ROOT / "tests" / "support" / "data" / "qwen3_moe_headers.json"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_model", ROOT / "scripts" / "demo_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def describe(folder: Path) -> dict[str, Any]:
    """Return what must agree: the config, and each tensor's dtype and shape by name."""
    tensors = {n: t for path in folder.glob("*.safetensors") for n, t in read_tensors(path).items()}
    return {
        "config": json.loads((folder / "config.json").read_text()),
        "tensors": {n: [t.dtype, list(t.shape)] for n, t in sorted(tensors.items())},
    }


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    load_script().write_demo_model(folder)
    return folder


def test_the_demo_folder_equals_the_recorded_one(demo: Path) -> None:
    """Names, shapes, dtypes and config, as recorded from transformers."""
    assert describe(demo) == json.loads(FIXTURE.read_text())


def test_the_demo_index_lists_every_tensor_once(demo: Path) -> None:
    index = json.loads((demo / "model.safetensors.index.json").read_text())
    for path in demo.glob("*.safetensors"):
        here = {name for name, file in index["weight_map"].items() if file == path.name}
        assert here == set(read_tensors(path))


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
def test_the_record_is_what_transformers_writes(demo: Path, tmp_path) -> None:
    """Regenerate the record from the demo's own config. Replace it with what this writes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(demo)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    written = describe(tmp_path)
    recorded = json.loads(FIXTURE.read_text())
    for document in (written, recorded):
        document["config"].pop("transformers_version")
    assert written == recorded, json.dumps(written)


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
def test_transformers_loads_the_demo_without_a_missing_key(demo: Path) -> None:
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(demo, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
