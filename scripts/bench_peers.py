"""Whole conversions: ours beside auto-round's and llm-compressor's, on the same checkpoint.

    python scripts/bench_peers.py [--cache DIR] [--folder DIR]... [--runs 5] [--json FILE]

Makes a virtual environment for each peer below ``--cache`` (about 3 GB together, kept for the
next time), writes a Qwen3-MoE of 1.78 GB in BF16 into each ``--folder``, and converts it with
each tool as a process of its own, experts only: auto-round with ``--model_free``, which does
no tuning, llm-compressor with ``model_free_ptq``. Each peer runs once; ours runs ``--runs``
times before each of them and after the last, the median of all counts.

The load before each tool's run stands beside it: other programs slow down all of them, and
those with more threads than processors most. Peak memory is that of the process tree
(sampled, see `mxconvert.bench.process`). The error is the relative RMSE of the weights,
decoded from each output by ``mxconvert verify --foreign``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import venv
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxconvert import __version__
from mxconvert.bench.process import Usage, run_process
from mxconvert.bench.source import Dimensions, write_source
from mxconvert.bench.workspace import workspace
from mxconvert.doctor.folder import file_system
from mxconvert.doctor.machine import cpu_model, load_average, processors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MODEL = Dimensions(layers=8, experts=64, hidden=1024, inner=512, vocab=24576)
TORCH = "torch==2.13.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mxconvert-peers"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
KEPT = ["re:.*self_attn.*", "re:.*mlp.gate$", "re:.*embed_tokens$", "lm_head"]
PTQ = f"""
import sys
from llmcompressor import model_free_ptq
model_free_ptq(model_stub=sys.argv[1], save_directory=sys.argv[2], scheme="MXFP4A16",
               ignore={KEPT!r}, device="cpu")
"""


# --------------------------------------------------------------------------- the tools


@dataclass(frozen=True)
class Tool:
    """A converter: how to install it and how to call it.

    Attributes:
        name: As in the table.
        packages: What to install, its own package first; none: this project.
    """

    name: str
    packages: tuple[str, ...] = ()

    def python(self, cache: Path) -> Path:
        """Return the interpreter of its environment."""
        return cache / self.name / "bin" / "python" if self.packages else Path(sys.executable)

    def install(self, cache: Path) -> None:
        """Make its environment, unless it is there; torch comes first and stays pinned."""
        python = self.python(cache)
        ready = cache / self.name / ".ready"
        if not self.packages or ready.exists():
            return
        shutil.rmtree(cache / self.name, ignore_errors=True)
        venv.create(cache / self.name, with_pip=True)
        pins = cache / self.name / "constraints.txt"
        pins.write_text(TORCH + "\n")
        for packages in ([TORCH], ["-c", str(pins), *self.packages]):
            command = [str(python), "-m", "pip", "install", "--quiet", *packages]
            subprocess.run(command, check=True)
        ready.touch()

    def version(self, cache: Path) -> str:
        """Return its version."""
        if not self.packages:
            return __version__
        code = f"from importlib.metadata import version; print(version({self.packages[0]!r}))"
        command = [str(self.python(cache)), "-c", code]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def command(self, cache: Path, source: Path, target: Path) -> list[str]:
        """Return the command that converts ``source`` into ``target``."""
        python = str(self.python(cache))
        paths = [str(source), str(target)]
        if self.name == "auto-round":
            options = ["--model_free", "--scheme", "MXFP4", "--format", "llm_compressor"]
            kept = ["--device_map", "cpu", "--ignore_layers", "self_attn,mlp.gate,lm_head"]
            folders = ["--model", paths[0], "--output_dir", paths[1]]
            return [python, "-m", "auto_round", *folders, *options, *kept]
        if self.name == "llm-compressor":
            return [python, "-c", PTQ, *paths]
        return [python, "-m", "mxconvert", "quantize", *paths, "--quiet"]


OURS = Tool("mxconvert")
PEERS = {
    "auto-round": Tool("auto-round", ("auto-round", "compressed-tensors")),
    "llm-compressor": Tool("llm-compressor", ("llmcompressor",)),
}


# ------------------------------------------------------------------------- one figure


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one tool took in one folder; ``error`` is the mean relative RMSE of its weights."""

    tool: str
    version: str
    file_system: str
    runs: int
    wall_s: float
    cpu_s: float
    peak_mb: float
    error: float
    largest_error: float
    tensors: int
    load_before: float


def measure(tool: Tool, runs: int, cache: Path, source: Path, work: Path) -> Row:
    """Run a tool and measure what it made."""
    target, usages, load = work / "target", list[Usage](), load_average()
    for _ in range(runs):
        shutil.rmtree(target, ignore_errors=True)
        usages.append(convert(tool, cache, source, target, work))
    error = measure_error(find_output(target), source)
    shutil.rmtree(target)
    return Row(
        tool=tool.name,
        version=tool.version(cache),
        file_system=file_system(work),
        runs=runs,
        wall_s=statistics.median(usage.wall_s for usage in usages),
        cpu_s=statistics.median(usage.cpu_s for usage in usages),
        peak_mb=max(usage.tree_peak_bytes for usage in usages) / 10**6,
        error=error["relative_rmse_mean"],
        largest_error=error["relative_rmse_max"],
        tensors=error["tensors"],
        load_before=load,
    )


def convert(tool: Tool, cache: Path, source: Path, target: Path, work: Path) -> Usage:
    """Run one conversion; stop with the tool's last words if it fails."""
    print(f"{tool.name}: {work} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryFile() as log:
        command = tool.command(cache, source, target)
        env = dict(os.environ) | OFFLINE
        if tool.packages:
            env.pop("PYTHONPATH", None)
        usage = run_process(command, env=env, cwd=None if tool is OURS else work, log=log)
        if usage.status:
            log.seek(0)
            words = log.read().decode("utf-8", "replace")[-2000:]
            sys.exit(f"error: {tool.name} ended with status {usage.status}\n{words}")
    return usage


def find_output(target: Path) -> Path:
    """Return the folder with the weights; some tools make one of their own in the target."""
    return min(path.parent for path in target.rglob("config.json"))


def measure_error(folder: Path, source: Path) -> Mapping[str, Any]:
    """Decode the weights of any compressed-tensors folder and compare them with the source."""
    command = [sys.executable, "-m", "mxconvert", "verify", str(folder), "--foreign"]
    command += ["--level", "numeric", "--source", str(source), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout or "{}")
    if not report.get("error"):
        sys.exit(f"error: {folder} cannot be measured\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    error: Mapping[str, Any] = report["error"]
    return error


# ------------------------------------------------------------------------- everything


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each folder and tool; ours comes first, last and between."""
    wanted = [PEERS[name] for name in args.peers]
    for peer in wanted:
        print(f"{peer.name}: installing below {args.cache}", file=sys.stderr)
        peer.install(args.cache)
    for folder in args.folder or [Path("/dev/shm"), Path(tempfile.gettempdir())]:  # noqa: S108
        with workspace(folder) as work:
            source = work / "source"
            write_source(source, replace(MODEL, layers=args.layers))
            os.sync()
            for tool in wanted:
                yield measure(OURS, args.runs, args.cache, source, work)
                yield measure(tool, 1, args.cache, source, work)
            yield measure(OURS, args.runs, args.cache, source, work)


def table(found: list[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table.

    Factors compare with the median of our rows on the same kind of disk.
    """
    yield "| tool | on | wall s | times ours | CPU s | peak MB | relative RMSE | load before |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    for row in found:
        beside = [r for r in found if (r.tool, r.file_system) == (OURS.name, row.file_system)]
        ours = statistics.median(r.wall_s for r in beside)
        cells = (
            f"{row.tool} {row.version}",
            row.file_system,
            f"{row.wall_s:.2f}",
            f"{row.wall_s / ours:.1f}",
            f"{row.cpu_s:.1f}",
            f"{row.peak_mb:.0f}",
            f"{row.error:.5f}",
            f"{row.load_before:.1f}",
        )
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"default {CACHE}")
    parser.add_argument("--folder", type=Path, action="append", help="default: memory, and /tmp")
    parser.add_argument("--runs", type=int, default=5, help="of ours")
    parser.add_argument("--layers", type=int, default=MODEL.layers, help="fewer for a trial")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # clean up
    size = replace(MODEL, layers=args.layers).num_bytes
    facts = {"cpu": cpu_model(), "processors": processors(), "source_bytes": size, "torch": TORCH}
    found: list[Row] = []
    for row in rows(args):  # each may take minutes: what is there is kept
        found.append(row)
        if args.json:
            document = facts | {"rows": [asdict(row) for row in found]}
            args.json.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{cpu_model()}, {processors():.0f} processors, {size:,} bytes of BF16")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
