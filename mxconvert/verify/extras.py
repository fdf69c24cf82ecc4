"""Files that the manifest does not list: which of them fail.

What a loader might read fails, since it changes what is served: weights, code,
configuration, tokenizer files, templates. The rest is reported.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.manifest import MANIFEST_NAME, WORK_FOLDER
from mxconvert.manifest.loadable import may_be_loaded
from mxconvert.statistics import REPORT_NAME
from mxconvert.verify.report import Check, Collector

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from mxconvert.verify.place import Place

_PARTIAL = ".partial"
_UNFINISHED_HINT = "run quantize again to resume it, or remove what it left"


def ignored(path: str, patterns: Sequence[str]) -> bool:
    """Whether a path, or a folder above it, matches a glob."""
    parts = path.split("/")
    prefixes = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    return any(
        fnmatch.fnmatchcase(prefix, pattern.rstrip("/"))
        for prefix in prefixes
        for pattern in patterns
    )


def check_extras(
    place: Place,
    listed: Collection[str],
    patterns: Sequence[str],
    collector: Collector,
    *,
    strict: bool,
) -> None:
    """Report what is in the folder and not in the manifest.

    Args:
        place: What is there.
        listed: Paths that belong there, besides the manifest and a report of errors.
        patterns: Globs of paths to leave aside; each path left aside is noted.
        collector: Receives findings and notes.
        strict: Whether harmless extras fail as well.
    """
    expected = {*listed, MANIFEST_NAME, REPORT_NAME}
    extras = [
        *(_extra_file(path) for path in place.files if path not in expected),
        *(
            _Extra(path, f"{kind}, not in the manifest", "special-file", fails=True)
            for path, kind in place.special.items()
            if path not in expected
        ),
        *(_Extra(path, "an empty folder") for path in place.empty),
        *(
            _Extra(path, f"cannot be listed: {why}", "unreadable", fails=True)
            for path, why in place.unreadable.items()
        ),
        *map(_hidden_folder, place.hidden),
    ]
    for extra in sorted(extras):
        collector.count("extra_files")
        message = f"{extra.path}: {extra.what}"
        if ignored(extra.path, patterns):
            collector.note("ignored", f"{extra.path}: left aside, as asked", extra.path)
        elif extra.fails or strict:
            collector.fail(Check.FILES, extra.code, message, path=extra.path)
        else:
            collector.note(extra.code, message, extra.path)


@dataclass(frozen=True, slots=True, order=True)
class _Extra:
    path: str
    what: str
    code: str = "extra-file"
    fails: bool = False


def _extra_file(path: str) -> _Extra:
    name = path.rsplit("/", 1)[-1]
    if name.endswith(_PARTIAL):
        what = f"left by an unfinished run; {_UNFINISHED_HINT}"
        return _Extra(path, what, "unfinished", fails=True)
    if not name.startswith(".") and may_be_loaded(name):
        return _Extra(path, "not in the manifest, and a loader may read it", fails=True)
    return _Extra(path, "not in the manifest")


def _hidden_folder(path: str) -> _Extra:
    if path != WORK_FOLDER:
        return _Extra(path, "a hidden folder, not looked into")
    what = f"the journal of an unfinished run; {_UNFINISHED_HINT}"
    return _Extra(path, what, "unfinished", fails=True)
