"""The environment variables that matter, without giving away a secret.

Values are shown of our own variables only, and of those only where the name does not sound
like a secret. Of all others it is said whether they are set.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

OURS = ("MXCONVERT_FAILPOINTS", "MXCONVERT_NO_PROGRESS")
"""Read by this package; a test holds the list to the code."""

OTHERS = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION",
    "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "HF_TOKEN", "HF_HOME",
    "HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "NO_COLOR", "COLUMNS",
    "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "LD_LIBRARY_PATH", "PYTHONPATH",
)  # fmt: skip
"""Read by libraries that we use, or known to change what happens."""

_PREFIX = "MXCONVERT_"
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
SET, UNSET = "set", "unset"


def variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what may be shown of each variable, by name: a value in quotes, or set, or unset."""
    environ = os.environ if environ is None else environ
    ours = sorted({*OURS, *(name for name in environ if name.startswith(_PREFIX))})
    secrets = sorted(name for name in environ if name.startswith("AWS_") and name not in OTHERS)
    return {name: _shown(name, environ.get(name)) for name in (*ours, *OTHERS, *secrets)}


def _shown(name: str, value: str | None) -> str:
    if value is None:
        return UNSET
    return repr(value) if name.startswith(_PREFIX) and not _SECRET.search(name) else SET
