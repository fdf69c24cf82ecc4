"""The command line: typer and rich live here, and nowhere else."""

from mxconvert.cli.app import main

__all__ = ["main"]
