"""The process in vLLM's environment: loads folders, each in a child, and compares.

    python -m tests.support.engines.worker JOBS.json RESULTS.json

A job has a ``label`` and either ``source`` and ``ours``, to be loaded and compared, or ``twin``
and ``prompts``, to be served. Its result is what `compare` returns or the ``tokens``; or the
``error`` of the ``stage`` (``source``, ``ours``, ``twin``) that failed.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

TIMEOUT_S = 240
TOKENS = 16


def main(jobs_path: str, results_path: str) -> None:
    """Do every job; results are written after each, so that none is lost."""
    import vllm.model_executor.model_loader  # noqa: F401  (once, before the children)

    results: dict[str, Any] = {}
    for job in json.loads(Path(jobs_path).read_text()):
        results[job["label"]] = done = serve(job) if "twin" in job else run(job)
        sys.stderr.write(f"{job['label']}: {done.get('error', 'done')}\n")
        Path(results_path).write_text(json.dumps(results))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Load both folders of a job and compare what came of them.

    All in children: once torch has started its threads, no child of this process would run.
    """
    with tempfile.TemporaryDirectory() as scratch:
        saved = {stage: f"{scratch}/{stage}.pt" for stage in ("source", "ours")}
        for stage, path in saved.items():
            failed = in_child(_load, job[stage], path)
            if failed:
                return {"stage": stage, **failed}
        result = f"{scratch}/result.json"
        failed = in_child(_compare, saved["source"], saved["ours"], job["ours"], result)
        return failed or json.loads(Path(result).read_text())


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Let vLLM continue a job's prompts."""
    with tempfile.TemporaryDirectory() as scratch:
        result = f"{scratch}/result.json"
        failed = in_child(_serve, job["twin"], json.dumps(job["prompts"]), result)
        if failed:
            return {"stage": "twin", **failed}
        return {"tokens": json.loads(Path(result).read_text())}


def in_child(function: Any, *args: str) -> dict[str, str]:
    """Run a function in a forked process; return its exception, an empty dict if none."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_guarded, args=(sender, function, args))
    child.start()
    sender.close()
    try:
        if not receiver.poll(TIMEOUT_S):
            return {"error": f"no end after {TIMEOUT_S} s", "where": ""}
        return dict(receiver.recv())
    except EOFError:
        child.join()
        return {"error": f"the process died with {child.exitcode}", "where": ""}
    finally:
        child.kill()
        child.join()


def _guarded(sender: Any, function: Any, args: tuple[str, ...]) -> None:
    try:
        function(*args)
        sender.send({})
    except BaseException as error:  # noqa: BLE001  (whatever an engine raises is the finding)
        frames = traceback.extract_tb(error.__traceback__)
        inside = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "vllm" in f.filename]
        words = f"{type(error).__name__}: {error}".strip().splitlines()
        sender.send({"error": " ".join(words)[:400], "where": " ".join(inside[-3:])})


def _load(folder: str, saved: str) -> None:
    import torch

    from tests.support.engines.vllm_load import load

    with tempfile.TemporaryDirectory() as scratch:
        torch.save(load(Path(folder), Path(scratch)), saved)


def _compare(source: str, ours: str, folder: str, result: str) -> None:
    import torch

    from tests.support.engines.compare import compare

    loaded = [torch.load(path, weights_only=False) for path in (source, ours)]
    Path(result).write_text(json.dumps(compare(*loaded, Path(folder))))


def _serve(twin: str, prompts: str, result: str) -> None:
    from tests.support.engines.vllm_load import serve

    Path(result).write_text(json.dumps(serve(Path(twin), json.loads(prompts), TOKENS)))


if __name__ == "__main__":
    main(*sys.argv[1:])
