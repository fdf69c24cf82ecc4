"""The application: its commands, and the one place where errors become exit statuses."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer

from mxconvert import __version__
from mxconvert.cli import runtime
from mxconvert.cli.cmd_bench import bench
from mxconvert.cli.cmd_dequantize import dequantize
from mxconvert.cli.cmd_diff import diff
from mxconvert.cli.cmd_doctor import doctor
from mxconvert.cli.cmd_inspect import inspect
from mxconvert.cli.cmd_list import gc, list_
from mxconvert.cli.cmd_plan import plan
from mxconvert.cli.cmd_pull import pull
from mxconvert.cli.cmd_push import push
from mxconvert.cli.cmd_quantize import quantize
from mxconvert.cli.cmd_report import report
from mxconvert.cli.cmd_verify import verify
from mxconvert.errors import ExitStatus, LocalError, MxConvertError, UsageError

app = typer.Typer(
    name="mxconvert",
    help="Convert, verify and distribute the weights of Mixture-of-Experts models in MXFP4.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    epilog="Exit status: 0 ok, 1 other failure, 2 usage, 3 some files failed, 4 verification "
    "mismatch, 5 bad source, 6 object store, 7 local disk, permission or lock, 8 missing extra, "
    "130/143 interrupted.",
)
_COMMANDS = (
    inspect,
    plan,
    quantize,
    dequantize,
    verify,
    report,
    diff,
    push,
    pull,
    list_,
    gc,
    bench,
    doctor,
)
for command in _COMMANDS:
    app.command(command.__name__.rstrip("_"))(command)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"mxconvert {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def _give_up_output(error: OSError) -> NoReturn:
    """End after an error of a stream: whoever opens files says which one it was."""
    cause = LocalError(f"cannot write the output: {error.strerror}")
    runtime.print_error(cause)
    # Or the interpreter flushes once more at its end, and says so loudly.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(cause.exit_status)


def main() -> NoReturn:
    """Run the command line and exit with its status."""
    runtime.open_missing_streams()
    runtime.install_signal_handlers()
    runtime.tolerate_any_text()
    try:
        sys.exit(app(standalone_mode=False) or ExitStatus.OK)
    except MxConvertError as error:
        if runtime.state.debug:
            traceback.print_exc()
        runtime.print_error(error)
        sys.exit(error.exit_status)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(ExitStatus.FAILURE)
    except typer.Abort:
        sys.exit(ExitStatus.FAILURE)
    except Exception as error:  # a bug, or something nobody foresaw
        if hasattr(error, "format_message"):
            _refuse_arguments(error)
        if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
            _give_up_output(error)
        if runtime.state.debug:
            raise
        runtime.print_error(
            MxConvertError(
                f"unexpected {type(error).__name__}: {error}",
                hint="run again with --debug for the traceback",
                code="unexpected",
            )
        )
        sys.exit(ExitStatus.FAILURE)


def _refuse_arguments(error: Any) -> NoReturn:
    """End after an error of the argument parser (a ClickException of typer's own click)."""
    if "--json" in sys.argv:  # the option itself may not have been read yet
        runtime.state.json = True
        message = error.format_message()
        hint = "`mxconvert COMMAND --help` lists arguments and options"
        runtime.print_error(UsageError(message, hint=hint))
    else:
        error.show()
    sys.exit(error.exit_code)
