"""`verify_artifact`: the levels one after the other, everything collected."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mxconvert.errors import LocalError, UsageError
from mxconvert.events import ignore
from mxconvert.folder import Folder, scan_folder
from mxconvert.manifest import RECORD_NAME
from mxconvert.stop import StopToken
from mxconvert.verify.identity import find_manifest
from mxconvert.verify.listing import records_of
from mxconvert.verify.part import find_part
from mxconvert.verify.payload import Payload
from mxconvert.verify.report import Collector, Level, VerifyReport
from mxconvert.verify.run import Run, build_report, stoppable
from mxconvert.verify.source import SourceRun
from mxconvert.workers import default_jobs, map_bounded

if TYPE_CHECKING:
    from pathlib import Path

    from mxconvert.events import Reporter
    from mxconvert.verify.options import VerifyOptions


def verify_artifact(
    root: Path,
    options: VerifyOptions,
    reporter: Reporter = ignore,
    *,
    stop: StopToken | None = None,
) -> VerifyReport:
    """Check an artifact's folder and collect everything that is wrong with it.

    Args:
        root: The folder.
        options: How deep to look, and at what.
        reporter: Told about progress, from several threads.
        stop: Set from a signal handler to end early.

    Raises:
        Interrupted: ``stop`` was set.
        UsageError: Options that make no sense, or no such folder.
        LocalError: The folder, ``options.manifest`` or the source cannot be read.
        VerificationError: ``options.manifest`` is not a manifest.
        SourceError: ``options.source`` is damaged or changes during the run.
    """
    options.check()
    folder = _scan(root)
    collector = Collector()
    stop = stop or StopToken()
    with stop.watched():
        artifact_id = _check_local(folder, options, collector, stoppable(reporter, stop))
    return build_report(str(root), options, collector, artifact_id)


def _scan(root: Path) -> Folder:
    if not root.is_dir():
        what = "not a folder" if root.exists() else "no such folder"
        raise UsageError(f"{root}: {what}", hint="give the folder that holds the artifact")
    try:
        return scan_folder(root)
    except OSError as error:
        raise LocalError(f"{root}: {error.strerror}") from error


def _check_local(
    folder: Folder, options: VerifyOptions, collector: Collector, reporter: Reporter
) -> str | None:
    """Check everything; return the id of the manifest that was checked against."""
    run = Run(folder, options, collector, reporter, map)
    source = SourceRun(folder, options, collector, reporter)
    if options.foreign:
        tensors = run.foreign()
        if options.level is Level.NUMERIC:
            source.against_names(tensors)
        return None
    identity = find_manifest(folder, options, collector)
    if identity is None:
        run.without_manifest()
        return None
    manifest, part_list = identity.manifest, None
    if RECORD_NAME in folder.files:
        part = find_part(folder, identity, collector)
        if part is None:
            collector.skip("nothing but the manifest and the record was checked")
            return identity.id
        manifest, part_list = part
    usable, listed = run.artifact(manifest, part_list)
    if options.level is Level.STRUCTURE:
        collector.skip("only headers were read: no digest was compared")
    else:
        map_files = partial(map_bounded, jobs=options.jobs or default_jobs())
        Payload(folder, options, collector, reporter, map_files).check(manifest, usable, listed)
    if options.level is not Level.NUMERIC:
        collector.skip("the numbers were not compared with a source")
    elif listed is not None:
        source.against_manifest(manifest, lambda: records_of(listed, usable))
    return identity.id
