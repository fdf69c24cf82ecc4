"""The command line within this process: the same `main`, without a start-up for each run.

For tests of many variants; what depends on streams, signals or memory uses `cli`.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from unittest import mock

from tests.support.cli import Result


def shell(*args: object) -> Result:
    """Run ``mxconvert ARGS`` here and return status and streams (no memory figures)."""
    from mxconvert.cli import main, runtime  # here: scripts use this package without mxconvert

    out, err = io.StringIO(), io.StringIO()
    begin = time.monotonic()
    status: object = None
    with (
        mock.patch.object(sys, "argv", ["mxconvert", *map(str, args)]),
        mock.patch.object(runtime, "install_signal_handlers"),
        mock.patch.object(runtime, "state", runtime.State()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            status = end.code
    assert isinstance(status, int), status
    return Result(
        status=int(status),
        stdout=out.getvalue(),
        stderr=err.getvalue(),
        seconds=time.monotonic() - begin,
        max_rss=0,
        max_anon=0,
    )
