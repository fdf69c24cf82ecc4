"""`quantize` and `dequantize`: from a checked source to a finished artifact, resuming."""

from __future__ import annotations

import contextlib
import fnmatch
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert import destination
from mxconvert.errors import (
    Interrupted,
    LocalError,
    MxConvertError,
    PartialError,
    SourceError,
    UsageError,
)
from mxconvert.events import Notice, Started
from mxconvert.lock import Lock
from mxconvert.pipeline.base import Taking, open_base
from mxconvert.pipeline.complete import find_artifact
from mxconvert.pipeline.engine import Engine
from mxconvert.pipeline.finish import finish_artifact
from mxconvert.pipeline.journal import Journal, command_of
from mxconvert.pipeline.names import DOCUMENT_NAMES, check_names, copied_sidecars
from mxconvert.pipeline.recheck import recheck_sources
from mxconvert.pipeline.resources import Resources, find_resources
from mxconvert.pipeline.slots import (
    DEFAULT_MAX_MEMORY,
)
from mxconvert.recipes import find_recipe
from mxconvert.source import SourceReader
from mxconvert.statistics import REPORT_NAME, Sums, TensorStats, encode_fragment
from mxconvert.stop import StopToken

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mxconvert.events import Reporter
    from mxconvert.model import Checkpoint, OutputFile, Plan
    from mxconvert.pipeline.devices import DeviceUse
    from mxconvert.pipeline.job import FileResult


_AGAIN = "the same command again"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to work; none of these changes a byte of the output.

    Attributes:
        jobs: Worker threads; ``None`` takes every processor of this process.
        max_memory: Bytes the process may have resident.
        backend: ``auto``, ``triton``, ``llvm`` or ``numpy``.
        device: ``auto``, ``cpu``, ``all``, or GPUs such as ``cuda:0,cuda:1``.
        overwrite: Replace what is in the output folder.
        break_lock: Take over the lock of another host.
        recheck: Before resuming, compare the source's content with what finished files
            were made from.
        only: Shell globs of output files to make; empty makes all and the artifact.
        statistics: Measure the quantization error of each weight while it is made.
        base: An artifact to take files from whose source tensors have not changed.
    """

    jobs: int | None = None
    max_memory: int = DEFAULT_MAX_MEMORY
    backend: str = "auto"
    device: str = "auto"
    overwrite: bool = False
    break_lock: bool = False
    recheck: bool = False
    only: tuple[str, ...] = ()
    statistics: bool = True
    base: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run did.

    ``artifact`` is the artifact's id, ``None`` if files are still to be made. ``files_taken``
    are those of the base. ``sums`` are the quantization errors of the weights that this run
    made, ``None`` if none were measured. ``backend`` is the host's kernels; ``devices`` is what
    each GPU did, ``device_reason`` why those were used.
    """

    artifact: str | None
    files_made: int
    files_kept: int
    files_left: int
    source_bytes: int
    output_bytes: int
    seconds: float
    jobs: int
    backend: str
    device_reason: str = ""
    devices: tuple[DeviceUse, ...] = ()
    files_taken: int = 0
    sums: Sums | None = None


def quantize_checkpoint(
    checkpoint: Checkpoint,
    plan: Plan,
    target: Path,
    options: RunOptions,
    *,
    report: Reporter,
    stop: StopToken | None = None,
) -> RunResult:
    """Make the artifact that ``plan`` describes in ``target``.

    A rerun goes on where an earlier one stopped and yields the same bytes.

    Raises:
        UsageError: The folder holds something else, or a run started differently.
        SourceError: The source is not what preflight saw, or a weight is not finite.
        LocalError: Disk, permission, lock.
        PartialError: Some files failed for reasons of their own; the others are kept.
        Interrupted: ``stop`` was set.
    """
    destination.check_destination(checkpoint.root, target)
    if options.base is not None:
        destination.check_base(options.base, target)
    check_names(checkpoint, plan)
    _check_only(plan, options.only)
    run = _Run(checkpoint, plan, target, options, report)
    if not run.journal.folder.exists():
        done = run.complete_already()
        if done is not None:
            return done
    destination.make_folder(target)
    lock = Lock(run.journal.folder)
    lock.acquire(report, break_lock=options.break_lock)
    try:
        # Another run may have ended here meanwhile, or been killed just before its end.
        return run.complete_already() or run(stop or StopToken())
    except MxConvertError as error:
        _say_how_to_resume(error, overwrite=options.overwrite)
        raise
    finally:
        if not run.journal.exists:
            with contextlib.suppress(LocalError):
                run.journal.remove()
        lock.release()
        run.journal.remove_folder()


def _say_how_to_resume(error: MxConvertError, *, overwrite: bool) -> None:
    if isinstance(error, Interrupted):
        error.message += "; finished files are kept"
        error.hint = f"run {_AGAIN} to resume"
    if overwrite and error.hint:  # which always starts over
        error.hint = error.hint.replace(_AGAIN, f"{_AGAIN} without --overwrite")


class _Run:
    """One run, holding the lock."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        target: Path,
        options: RunOptions,
        report: Reporter,
    ) -> None:
        self._checkpoint = checkpoint
        self._plan = plan
        self._target = target
        self._options = options
        self._report = report
        self._started = time.monotonic()
        self._resources: Resources | None = None
        self._lock = threading.Lock()
        self._sums: dict[str, Sums] = {}
        self._another = ""
        recipe = find_recipe(
            checkpoint.config,
            plan.recipe,
            expert_weights=plan.options.expert_weights,
            tensors=checkpoint.tensors,
        )
        if recipe is None:
            raise AssertionError(f"a plan with the unknown recipe {plan.recipe}")
        self._classify = recipe.classifier(checkpoint.config)
        self.journal = Journal(target)

    def __call__(self, stop: StopToken) -> RunResult:
        # What can be refused is refused before anything is removed.
        options = self._options
        self._resources = resources = find_resources(
            self._plan,
            jobs=options.jobs,
            max_memory=options.max_memory,
            backend=options.backend,
            device=options.device,
            report=self._report,
        )
        try:
            return self._run(resources, stop)
        finally:
            resources.close()

    def _run(self, resources: Resources, stop: StopToken) -> RunResult:
        plan, options = self._plan, self._options
        self._prepare()
        finished = [file for file in plan.files if self.journal.finished(file)]
        to_make = _to_make(plan, finished, options.only)
        taken = self._take(to_make, resources.budget.jobs, stop)
        names = {file.name for file in taken}
        to_make = [file for file in to_make if file.name not in names]
        destination.check_space(self._target, sum(file.size for file in to_make))
        with SourceReader(self._checkpoint.root, self._checkpoint.files) as reader:
            if options.recheck:
                recheck_sources(finished, self.journal, reader)
            self._report(_started(plan, finished, to_make))
            engine = Engine(
                to_make,
                self._target,
                budget=resources.budget,
                reader=reader,
                quantizer=resources.quantizer,
                record=self._record,
                report=self._report,
                measure=options.statistics and not plan.plain,
                devices=resources.devices,
            )
            failed = engine.run(stop)
        if failed:
            raise _summary(failed, len(plan.files))
        artifact = None
        if len(finished) + len(taken) + len(to_make) == len(plan.files):
            artifact = finish_artifact(
                self._checkpoint, plan, self.journal, self._target, self._report
            )
            self.journal.remove()
        return self.result(artifact, made=to_make, kept=len(finished), taken=len(taken))

    def _take(self, files: list[OutputFile], jobs: int, stop: StopToken) -> list[OutputFile]:
        """Take files from the base, if there is one."""
        if self._options.base is None or not files:
            return []
        base = open_base(self._options.base, self._plan, self._report)
        if base is None:
            return []
        with SourceReader(self._checkpoint.root, self._checkpoint.files) as reader:
            taking = Taking(base, self._target, reader, self._record, self._report)
            return taking.run(files, jobs, stop)

    def _prepare(self) -> None:
        if self._options.overwrite:
            to_make = _to_make(self._plan, [], self._options.only)
            needed = sum(file.size for file in to_make)
            destination.check_space(self._target, needed, destination.reclaimable(self._target))
            self.journal.discard()
            destination.clear(self._target, self._report)
        elif not self.journal.exists:
            destination.refuse_leftovers(self._target, self._another)
        self.journal.open(self._plan, self._checkpoint)
        self.journal.remove_partials()
        destination.remove_partials(self._target)
        destination.refuse_strangers(self._target, self._names())

    def _names(self) -> set[str]:
        """Return every file name that the artifact will have."""
        return {
            *(file.name for file in self._plan.files),
            *(sidecar.path for sidecar in copied_sidecars(self._checkpoint)),
            *DOCUMENT_NAMES,
            REPORT_NAME,
        }

    def _record(self, file: OutputFile, result: FileResult) -> None:
        """Keep what is known of a finished file, its record last."""
        if result.statistics is not None:
            records = list(result.statistics.records(file, self._classify))
            self.journal.record_statistics(file, encode_fragment(records))
            made = [record.sums for record in records if isinstance(record, TensorStats)]
            with self._lock:
                self._sums[file.name] = sum(made, start=Sums())
        self.journal.record(file, result)

    def complete_already(self) -> RunResult | None:
        """Return the result if the target holds the very artifact that is to be made."""
        if self._options.overwrite:
            return None
        found = find_artifact(
            self._checkpoint,
            self._plan,
            self._target,
            self._report,
            recheck=self._options.recheck,
        )
        if found is None or found.artifact is None:
            self._another = "; ".join(found.differences) if found else ""
            return None
        message = f"{self._target}: complete already"
        self._report(Notice(severity="info", code="complete", message=message))
        self.journal.remove()
        return self.result(found.artifact, made=(), kept=len(self._plan.files))

    def result(
        self, artifact: str | None, *, made: Sequence[OutputFile], kept: int, taken: int = 0
    ) -> RunResult:
        """Return what the run did."""
        used = self._resources
        return RunResult(
            artifact=artifact,
            files_made=len(made),
            files_kept=kept,
            files_left=len(self._plan.files) - len(made) - kept - taken,
            files_taken=taken,
            source_bytes=sum(file.source_size for file in made),
            output_bytes=sum(file.size for file in made),
            seconds=time.monotonic() - self._started,
            jobs=used.budget.jobs if used else 0,
            backend=used.quantizer.backend.name if used else "none",
            device_reason=used.choice.reason if used else "",
            devices=used.devices.uses() if used and used.devices else (),
            sums=self._total() if self._sums else None,
        )

    def _total(self) -> Sums:
        """Add up in the order of names, which threads do not change."""
        return sum((self._sums[name] for name in sorted(self._sums)), start=Sums())


def _check_only(plan: Plan, only: tuple[str, ...]) -> None:
    for pattern in only:
        if not any(fnmatch.fnmatchcase(file.name, pattern) for file in plan.files):
            raise UsageError(
                f"--only {pattern!r} matches none of the {len(plan.files)} output files",
                hint="`mxconvert plan SRC` lists them",
            )


def _to_make(plan: Plan, finished: list[OutputFile], only: tuple[str, ...]) -> list[OutputFile]:
    done = {file.name for file in finished}
    wanted = [file for file in plan.files if file.name not in done]
    if only:
        wanted = [f for f in wanted if any(fnmatch.fnmatchcase(f.name, p) for p in only)]
    return wanted


def _started(plan: Plan, finished: list[OutputFile], to_make: list[OutputFile]) -> Started:
    kept = sum(file.source_size for file in finished)
    return Started(
        what=command_of(plan),
        total_bytes=kept + sum(file.source_size for file in to_make),
        total_files=len(finished) + len(to_make),
        resumed_bytes=kept,
        resumed_files=len(finished),
    )


def _summary(failed: list[tuple[OutputFile, MxConvertError]], total: int) -> MxConvertError:
    """Return the error to end with: the source's own, or a partial failure."""
    failed = sorted(failed, key=lambda entry: entry[0].name)
    lines = [f"{file.name}: {error.message}" for file, error in failed]
    message = f"{len(failed)} of {total} output files could not be made:\n  " + "\n  ".join(lines)
    first = failed[0][1]
    if len(failed) == 1:
        message = first.message
    if all(isinstance(error, SourceError) for _, error in failed):
        return SourceError(message, hint=first.hint, code=first.code)
    return PartialError(
        message, hint="mend the cause and run the same command again: finished files are kept"
    )
