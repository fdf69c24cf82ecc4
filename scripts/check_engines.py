"""Let engines load what we write: vLLM's own loader on a CPU, and SGLang's rules for names.

    python scripts/check_engines.py --venv FOLDER [--sglang FOLDER] [--json FILE] [FAMILY ...]

For each family that transformers can write: a small checkpoint, converted, goes through vLLM's own
model class and weight loader, and so does the source. Packed parameters are compared with our
bytes and, decoded, with what vLLM makes of the source; all others, the scheme of each Linear
and each layer of experts, tensors left aside and parameters left as they were likewise. With
``--serve`` vLLM and transformers continue prompts with our decoded weights.

Needs transformers (``pip install '.[interop]'``), 4 GB for vLLM's environment, which is made at
the first run, and a few seconds for a family. The results are in docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mxconvert.manifest import MANIFEST_NAME
from tests.support.artifact import read_artifact
from tests.support.cli import run_cli
from tests.support.engines.environment import (
    TORCH,
    VLLM,
    run_worker,
    sglang_wheel,
    vllm_python,
)
from tests.support.engines.greedy import PROMPTS, greedy
from tests.support.engines.sglang import SGLang
from tests.support.engines.sources import write_source, write_twin
from tests.support.engines.table import exit_status, faults, table
from tests.support.engines.worker import TOKENS
from tests.support.families.configs import CONFIGS
from tests.support.kimi_k3 import official_specs, read_config, twin_shards


def main() -> None:
    """Run from the command line; status 1 if anything differs from what is claimed."""
    options = parse()
    python = vllm_python(options.venv) if options.venv else None
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        made = {family: make(family, options.scope, work) for family in options.families}
        made = {family: found for family, found in made.items() if found}
        results: dict[str, Any] = {
            "missing": [family for family in options.families if family not in made],
            "families": {family: {"recipe": recipe_of(made[family]["ours"])} for family in made},
        }
        if python:
            load(python, made, work, results)
            serve(python, options.serve, made, work, results)
        if options.sglang:
            name(SGLang(sglang_wheel(options.sglang)), made, results)
    results |= {
        "vllm": VLLM if python else None,
        "torch": TORCH,
        "scope": options.scope,
        "date": datetime.now(UTC).date().isoformat(),
    }
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    for fault in faults(results):
        print(f"fault: {fault}", file=sys.stderr)
    sys.exit(exit_status(results))


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--venv", type=Path, help="vLLM's environment, made if it is not there")
    parser.add_argument("--sglang", type=Path, help="SGLang's wheel, unpacked there")
    parser.add_argument("--work", type=Path, help="keep the checkpoints here")
    parser.add_argument("--scope", default="experts", choices=("experts", "linear"))
    parser.add_argument("--serve", nargs="*", default=[], metavar="FAMILY")
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("families", nargs="*", default=list(CONFIGS), metavar="FAMILY")
    return parser.parse_args()


def make(family: str, scope: str, work: Path) -> dict[str, Path]:
    """Write and convert a family's checkpoint; return ``source`` and ``ours``, or nothing."""
    folder = work / family
    source, ours = folder / "source", folder / f"ours-{scope}"
    try:
        if not source.exists():
            source.mkdir(parents=True)
            write_source(family, source)
    except LookupError:
        print(f"{family}: not in this transformers", file=sys.stderr)
        return {}
    if not ours.exists():
        run_cli("quantize", source, ours, "--scope", scope, "--force").ok()
    return {"source": source, "ours": ours}


def recipe_of(artifact: Path) -> str:
    """Return the family that an artifact was made as."""
    recipe: str = json.loads((artifact / MANIFEST_NAME).read_text())["model"]["recipe"]
    return recipe


def load(python: Path, made: dict[str, dict[str, Path]], work: Path, results: Any) -> None:
    """Load every family with vLLM."""
    jobs = [
        {"label": family, **{key: str(path) for key, path in folders.items()}}
        for family, folders in made.items()
    ]
    for family, found in worker(python, jobs, work).items():
        results["families"][family]["vllm"] = found


def serve(
    python: Path, families: list[str], made: dict[str, dict[str, Path]], work: Path, results: Any
) -> None:
    """Serve the decoded twins of some families."""
    jobs = []
    for family in families:
        twin = work / family / "twin"
        if not twin.exists():
            write_twin(made[family]["source"], read_artifact(made[family]["ours"]), twin)
        jobs.append({"label": family, "twin": str(twin), "prompts": PROMPTS})
    for family, found in (worker(python, jobs, work) if jobs else {}).items():
        wanted = greedy(work / family / "twin", PROMPTS, TOKENS)
        results["families"][family]["served"] = {
            **found,
            "transformers": wanted,
            "equal": found.get("tokens") == wanted,
        }


def worker(python: Path, jobs: list[dict[str, Any]], work: Path) -> dict[str, Any]:
    """Run jobs in vLLM's environment and return their results by label."""
    todo, done = work / "jobs.json", work / "results.json"
    todo.write_text(json.dumps(jobs))
    run_worker(python, work / "worker.log", todo, done)
    found: dict[str, Any] = json.loads(done.read_text())
    return found


def name(engine: SGLang, made: dict[str, dict[str, Path]], results: Any) -> None:
    """Look up every family's tensors by SGLang's rules."""
    results["sglang"] = engine.version
    config = read_config()
    published = [
        name for _, specs in islice(twin_shards(config), 3) for name in official_specs(specs)
    ]
    results["families"]["kimi_k3"] = {
        "sglang": engine.verdict(config["architectures"][0], published)
    }
    for family, folders in made.items():
        artifact = read_artifact(folders["ours"])
        [architecture] = artifact.config["architectures"]
        results["families"][family]["sglang"] = {
            **engine.verdict(architecture, list(artifact.tensors)),
            "not_ignored": engine.wrongly_matched(
                [
                    name.removesuffix(".weight")
                    for name in artifact.kept
                    if name.endswith(".weight") and len(artifact.tensors[name].shape) == 2
                ],
                artifact.config["quantization_config"]["ignore"],
            ),
        }


if __name__ == "__main__":
    main()
