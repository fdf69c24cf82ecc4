"""Which manifest an artifact is checked against, and whether it is the expected one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.errors import LocalError, VerificationError
from mxconvert.manifest import MANIFEST_NAME, Manifest, artifact_id, parse_manifest
from mxconvert.verify.report import Check, Collector

if TYPE_CHECKING:
    from mxconvert.verify.options import VerifyOptions
    from mxconvert.verify.place import Place


@dataclass(frozen=True, slots=True)
class Identity:
    """A manifest and the id that its bytes give."""

    manifest: Manifest
    id: str


@dataclass(frozen=True, slots=True)
class Named:
    """An id, or its first digits, that something else than the manifest promises."""

    id: str
    by: str


def find_manifest(
    place: Place, options: VerifyOptions, collector: Collector, named: Named | None = None
) -> Identity | None:
    """Return the manifest to check against, ``None`` if there is none to trust.

    Findings about a missing, malformed or unexpected manifest go to ``collector``.

    Raises:
        LocalError: ``options.manifest`` cannot be read.
        VerificationError: ``options.manifest`` is not a manifest.
    """
    collector.look(MANIFEST_NAME, Check.MANIFEST)
    own = _own(place, collector)
    if own is not None and named is not None and not own.id.startswith(named.id):
        _ids_differ(collector, named.id, own.id, where=f" from {named.by}")
    if options.manifest is None:
        if own is not None and options.expect_id and not own.id.startswith(options.expect_id):
            _ids_differ(collector, options.expect_id, own.id)
        return own
    try:
        data = options.manifest.read_bytes()
    except OSError as error:
        raise LocalError(f"{options.manifest}: {error.strerror}") from error
    given = Identity(parse_manifest(data, str(options.manifest)), artifact_id(data))
    if options.expect_id and not given.id.startswith(options.expect_id):
        _ids_differ(collector, options.expect_id, given.id, where=f" (of {options.manifest})")
    if own is not None and own.id != given.id:
        _ids_differ(collector, given.id, own.id, differing=_differing(given.manifest, own.manifest))
    return given


def _own(place: Place, collector: Collector) -> Identity | None:
    def fail(code: str, message: str) -> None:
        collector.fail(Check.MANIFEST, code, message, path=MANIFEST_NAME)

    if MANIFEST_NAME in place.special:
        fail("special-file", f"{MANIFEST_NAME}: {place.special[MANIFEST_NAME]}, not a regular file")
        return None
    if MANIFEST_NAME not in place.files:
        fail(
            "no-manifest",
            f"no {MANIFEST_NAME}: this is not a finished artifact, and nothing says what its "
            "bytes should be",
        )
        return None
    try:
        data = place.read(MANIFEST_NAME)
        return Identity(parse_manifest(data, MANIFEST_NAME), artifact_id(data))
    except VerificationError as error:
        fail(error.code, error.message)
    except OSError as error:
        fail("unreadable", f"{MANIFEST_NAME}: cannot be read: {error.strerror}")
    return None


def _ids_differ(
    collector: Collector, expected: str, found: str, where: str = "", differing: str = ""
) -> None:
    """Record the finding; without a path it sorts before all others."""
    message = f"the artifact ids differ{where}{differing}"
    collector.fail(Check.MANIFEST, "other-artifact", message, expected=expected, found=found)


def _differing(expected: Manifest, found: Manifest) -> str:
    """Count the files that two manifests disagree about."""
    one = {entry.path: (entry.size, entry.sha256) for entry in expected.files}
    other = {entry.path: (entry.size, entry.sha256) for entry in found.files}
    paths = one.keys() | other.keys()
    differing = sum(one.get(path) != other.get(path) for path in paths)
    return f"; {differing} of {len(paths)} files differ"
