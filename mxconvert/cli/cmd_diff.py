"""``mxconvert diff``: how two artifacts or checkpoints differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mxconvert.cli import options as o
from mxconvert.cli import runtime
from mxconvert.cli.progress import open_display
from mxconvert.errors import ExitStatus, brief

_WIDEST = 70

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mxconvert.diff import Change, Comparison, Difference, Side


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Artifact or checkpoint folder.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    *,
    values: Annotated[
        bool,
        typer.Option("--values", help="Compare the decoded values of weights that differ."),
    ] = False,
    no_read: Annotated[
        bool,
        typer.Option("--no-read", help="Compare headers and recorded digests only."),
    ] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="End with status 4 if anything differs.")
    ] = False,
    top: Annotated[
        int, typer.Option("--top", metavar="N", min=1, help="Differing tensors to list.")
    ] = 20,
    jobs: o.Jobs = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Show how two folders differ: tensors, config, options, other files.

    Each is an artifact, another tool's output or a checkpoint. A weight that is packed in
    one and plain in the other is matched by its module. --json lists every difference.
    """
    del debug
    from mxconvert.diff import DiffOptions, compare_folders, diff_document
    from mxconvert.source import local_path

    options = DiffOptions(read=not no_read, values=values, jobs=jobs)
    with open_display(json_lines=False, quiet=quiet or json) as display:
        found = compare_folders(
            local_path(a, "A"), local_path(b, "B"), options, display, stop=runtime.state.stop
        )
    if json:
        runtime.print_json(diff_document(found))
    elif not quiet:
        _print(found, top)
    if exit_code and not found.same:
        raise typer.Exit(ExitStatus.VERIFY)


def _print(found: Comparison, top: int) -> None:
    from mxconvert.cli.tables import print_pairs

    counts = [f"{number} {status}" for status, number in sorted(found.counts.items())]
    pairs = [
        ("result", _result(found)),
        *((label, _side(side)) for label, side in (("A", found.a), ("B", found.b))),
        ("tensors", ", ".join(counts) or "none"),
    ]
    if found.moved:
        pairs.append(("placed", f"{found.moved} in a file of another name, which is no difference"))
    if found.values is not None and found.values.elements:
        sums = found.values
        text = (
            f"relative RMSE {sums.relative_rmse:.4f}, cosine {sums.cosine:.5f}, largest "
            f"difference {sums.max_abs_err:.3g}, of the weights that differ"
        )
        pairs.append(("values", text))
    if found.not_measured:
        pairs.append(("not measured", f"{found.not_measured} tensors of other dtypes or shapes"))
    print_pairs(*pairs)
    _print_roles(found)
    _print_tensors(found.tensors, top)
    for title, changes in (
        ("quantization_config", found.quantization),
        ("config.json", found.config),
        ("manifest", found.manifest),
        ("other files, SHA-256", found.files),
    ):
        _print_changes(title, changes, top)


def _result(found: Comparison) -> str:
    if not found.same:
        return "different"
    unread = sum(number for status, number in found.counts.items() if status.name == "UNREAD")
    return f"no difference found{f'; {unread} tensors were not compared' * bool(unread)}"


def _side(side: Side) -> str:
    artifact = "no manifest" if side.artifact is None else f"artifact {side.artifact[:16]}"
    size = runtime.size(side.size_bytes)
    return f"{side.tensors} tensors, {size}, {side.packed} weights packed, {artifact}"


def _print_roles(found: Comparison) -> None:
    from mxconvert.cli.tables import Table

    print()
    table = Table("role", "tensors A", "B", "size A", "B", "differ", right=(1, 2, 3, 4, 5))
    for role in found.roles:
        sizes = runtime.size(role.bytes_a), runtime.size(role.bytes_b)
        counts = str(role.tensors_a), str(role.tensors_b)
        table.add(role.role, *counts, *sizes, str(role.differing))
    table.print()


def _print_tensors(entries: Sequence[Difference], top: int) -> None:
    if not entries:
        return
    from mxconvert.cli.tables import Table

    print()
    measured = any(entry.values is not None for entry in entries)
    table = Table("tensor", "status", "A", "B", *["rel. RMSE"] * measured, right=(4,))
    if measured:
        entries = sorted(entries, key=lambda entry: -_error(entry))
    for entry in entries[:top]:
        error = "-" if entry.values is None else f"{entry.values.relative_rmse:.4f}"
        forms = entry.a or "-", entry.b or "-"
        table.add(_plain(entry.name), str(entry.status), *forms, *[error] * measured)
    table.print()
    if len(entries) > top:
        print(f"... and {len(entries) - top} more; all with --json")


def _error(entry: Difference) -> float:
    return -1.0 if entry.values is None else entry.values.relative_rmse


def _print_changes(title: str, changes: Sequence[Change], top: int) -> None:
    if not changes:
        return
    from mxconvert.cli.tables import Table

    print()
    table = Table(title, "A", "B")
    for change in changes[:top]:
        table.add(_plain(change.path), *map(_value, (change.a, change.b)))
    table.print()
    if len(changes) > top:
        print(f"... and {len(changes) - top} more; all with --json")


def _value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return f"{len(value)} members"
    text = value if isinstance(value, str) else brief(value)
    return _plain(text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}...")


def _plain(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode()
