"""Is an artifact what its manifest, its own structure and its source say.

`verify_artifact` and, at a store, `verify_remote` collect everything that is wrong instead
of stopping at the first thing; `VerifyReport` says it as records, JSON and, through
`junit_xml`, to CI systems.
"""

from mxconvert.sample import Sample
from mxconvert.verify.artifact import verify_artifact
from mxconvert.verify.junit import junit_xml
from mxconvert.verify.options import DEFAULT_MAX_ERROR, VerifyOptions
from mxconvert.verify.remote import verify_remote
from mxconvert.verify.report import Check, ErrorSummary, Finding, Level, Note, VerifyReport

__all__ = [
    "DEFAULT_MAX_ERROR",
    "Check",
    "ErrorSummary",
    "Finding",
    "Level",
    "Note",
    "Sample",
    "VerifyOptions",
    "VerifyReport",
    "junit_xml",
    "verify_artifact",
    "verify_remote",
]
