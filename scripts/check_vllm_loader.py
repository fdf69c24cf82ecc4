"""Let vLLM load through ``--load-format mxconvert``, and from folders with a part of a model.

    python scripts/check_vllm_loader.py PYTHON [--json FILE]

PYTHON is that of an environment with vLLM (``check_engines.py`` makes one) and mxconvert's base
packages. For a small Qwen3-MoE:

* the parameters that vLLM's default loader and ours make of the packed artifact, up to where a
  GPU's kernels would take over, and those of ours when the weights lie elsewhere than config.json;
* the tokens that vLLM continues prompts with, from the decoded artifact, by both loaders;
* whether vLLM starts from a folder that holds only some experts, and what becomes of the others.
"""

# ruff: noqa: PLC0415  (this runs in two environments)

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

HELD = {0, 2}


def main() -> None:
    """Run from the command line; status 1 if anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("python", help="of the environment with vLLM; or a step, inside of it")
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.python in STEPS:
        STEPS[options.python](*options.rest)
        return
    with tempfile.TemporaryDirectory() as work:
        results = check(options.python, Path(work))
    print(json.dumps(results, indent=1))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(not all(value for name, value in results.items() if name.startswith("same")))


def check(python: str, work: Path) -> dict[str, Any]:
    """Make the folders and compare what vLLM does with them."""
    from mxconvert.bench.source import Dimensions, write_source
    from tests.support.cli import run_cli

    dims = Dimensions(layers=2, experts=4, hidden=256, inner=128, vocab=512)
    write_source(work / "source", dims)
    run_cli("quantize", work / "source", work / "packed").ok()
    run_cli("dequantize", work / "packed", work / "plain").ok()
    run_cli("pull", work / "packed", work / "part", "--experts", "0,2").ok()
    bare = work / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((work / "packed" / "config.json").read_bytes())
    url = json.dumps({"url": str(work / "packed")})

    def load(name: str, folder: Path, *rest: str) -> Path:
        step(python, "load", folder, work / f"{name}.pt", *rest)
        return work / f"{name}.pt"

    default = load("default", work / "packed", "safetensors", "{}")
    ours = load("ours", work / "packed", "mxconvert", "{}")
    elsewhere = load("elsewhere", bare, "mxconvert", url)
    part = load("part", work / "part", "safetensors", "{}")
    ours_part = load("ours-part", work / "part", "mxconvert", "{}")
    tokens = []
    for load_format in ("safetensors", "mxconvert"):
        step(python, "serve", work / "plain", work / "tokens.json", load_format)
        tokens.append(json.loads((work / "tokens.json").read_text()))
    step(python, "compare", work / "compared.json", default, ours, elsewhere, part, ours_part)
    return {
        **json.loads((work / "compared.json").read_text()),
        "same tokens": tokens[0] == tokens[1],
        "tokens": [" ".join(map(str, some)) for some in tokens[1]],
    }


def step(python: str, *arguments: object) -> None:
    """Do one step in vLLM's environment."""
    from tests.support.engines.environment import SETTINGS

    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    subprocess.run(
        [python, __file__, *map(str, arguments)],
        check=True,
        env={**os.environ, **SETTINGS, "PYTHONPATH": path},
    )


# ------------------------------------------------------------------- in vLLM's environment


def load_step(folder: str, saved: str, load_format: str, extra: str) -> None:
    """Load a folder and save its parameters."""
    import torch

    from mxconvert.integrations.vllm import register
    from tests.support.engines.vllm_load import load

    register()
    with tempfile.TemporaryDirectory() as scratch:
        found = load(Path(folder), Path(scratch), load_format, **json.loads(extra))
    torch.save({"parameters": found["parameters"], "untouched": found["untouched"]}, saved)


def serve_step(folder: str, saved: str, load_format: str) -> None:
    """Let vLLM continue prompts."""
    from vllm import LLM, SamplingParams

    from mxconvert.integrations.vllm import register

    register()
    model = LLM(
        folder, load_format=load_format, skip_tokenizer_init=True, enforce_eager=True,
        dtype="bfloat16", max_model_len=64,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": [3 * n + 1, 7 * n + 2, 5]} for n in range(4)]
    done = model.generate(prompts, SamplingParams(temperature=0, max_tokens=12, detokenize=False))
    Path(saved).write_text(json.dumps([list(each.outputs[0].token_ids) for each in done]))


def compare_step(saved: str, *paths: str) -> None:
    """Compare saved parameters."""
    import torch

    default, ours, elsewhere, part, ours_part = (torch.load(path) for path in paths)

    def same(one: Any, other: Any) -> bool:
        a, b = one["parameters"], other["parameters"]
        return a.keys() == b.keys() and all(_bits(a[n]).equal(_bits(b[n])) for n in a)

    lost, experts_only = [], True
    for name, whole in default["parameters"].items():
        found = part["parameters"][name]
        if "experts" not in name:
            lost += [] if _bits(found).equal(_bits(whole)) else [name]
            continue
        for expert in range(len(whole)):
            is_same = bool(_bits(found[expert]).equal(_bits(whole[expert])))
            experts_only &= is_same or expert not in HELD
    result = {
        "same parameters": same(default, ours),
        "same from elsewhere": same(default, elsewhere),
        "same part by both": same(part, ours_part),
        "same held experts": experts_only and not lost,
        "untouched in a part": part["untouched"],
        "untouched in all": default["untouched"],
        "count": len(default["parameters"]),
    }
    Path(saved).write_text(json.dumps(result))


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().view(torch.uint8)


STEPS = {"load": load_step, "serve": serve_step, "compare": compare_step}

if __name__ == "__main__":
    main()
