"""The command line's contract: commands, options, streams, statuses, JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mxconvert.cli.runtime import count, duration, parse_duration, parse_size, size
from mxconvert.errors import ExitStatus, MxConvertError, UsageError
from tests.support import Model, bf16_model, run_cli, shell
from tests.support.cli import ROOT
from tests.support.models import tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = ROOT / "docs"

# ------------------------------------------------------------------- commands and options

PLAN_OPTIONS = {
    "--scale-rule", "--scope", "--include", "--exclude", "--ignore", "--recipe",
    "--expert-weights", "--from-int4", "--layout", "--experts-per-file", "--max-file-size",
    "--activations", "--unindexed", "--base-model",
}  # fmt: skip
COMMON = {"--json", "--debug"}
WORKING = COMMON | {"--jobs", "-j", "--quiet", "-q"}
STORE = {"--store-option", "--retry-for"}
COMMANDS: dict[str, tuple[list[str], set[str]]] = {
    "inspect": (
        ["src"],
        COMMON | {"--scope", "--recipe", "--expert-weights", "--unindexed", "--tensors"},
    ),
    "plan": (["src"], PLAN_OPTIONS | COMMON | {"--strict", "--engine", "--force"}),
    "quantize": (
        ["src", "dst"],
        PLAN_OPTIONS
        | WORKING
        | {
            "--strict", "--engine", "--force", "--dry-run", "--max-memory", "--backend",
            "--device", "--only", "--overwrite", "--recheck", "--break-lock", "--no-statistics",
            "--base",
        },
    ),
    "dequantize": (
        ["src", "dst"],
        WORKING
        | {
            "--recipe", "--expert-weights", "--layout", "--experts-per-file", "--max-file-size",
            "--unindexed", "--base-model", "--dry-run", "--max-memory", "--backend", "--only",
            "--overwrite", "--recheck", "--break-lock", "--device",
        },
    ),
    "verify": (
        ["target"],
        WORKING
        | {
            "--level", "--source", "--sample", "--strict", "--ignore", "--expect-id", "--manifest",
            "--foreign", "--max-error", "--junit", "--remote", "--store-option", "--retry-for",
            "--limit-rate",
        },
    ),
    "report": (["target"], WORKING | {"--html", "--jsonl", "--sample", "--source", "--top"}),
    "diff": (["a", "b"], WORKING | {"--exit-code", "--no-read", "--top", "--values"}),
    "push": (
        ["folder", "url"],
        WORKING
        | STORE
        | {
            "--tag", "--no-latest", "--flat", "--no-reuse", "--part-size", "--checksum",
            "--dry-run", "--metrics-file", "--limit-rate", "--announce",
        },
    ),
    "pull": (
        ["url", "folder"],
        WORKING
        | STORE
        | {
            "--include", "--expect-id", "--sha256", "--overwrite", "--wait", "--break-lock",
            "--direct", "--rank", "--world-size", "--placement", "--experts", "--node", "--nodes",
            "--gpus-per-node", "--slice", "--dry-run", "--watch", "--poll", "--keep",
            "--on-update", "--listen",
            "--metrics-file", "--limit-rate",
        },
    ),
    "list": (["url"], COMMON | STORE | {"--jobs", "-j"}),
    "gc": (["url"], WORKING | STORE | {"--delete", "--older-than"}),
    "bench": (
        [],
        WORKING | {"--backend", "--checkpoint-size", "--folder", "--quick", "--source"},
    ),
    "doctor": (["place"], COMMON | STORE | {"--backend", "--checksum"}),
}  # fmt: skip


def commands() -> dict[str, Any]:
    import typer

    from mxconvert.cli.app import app

    return dict(typer.main.get_command(app).commands)


@pytest.mark.parametrize("name", COMMANDS)
def test_arguments_and_options_are_these(name: str) -> None:
    """Adding, renaming or dropping one is a decision, so it is written here as well."""
    arguments, options = COMMANDS[name]
    found = commands()[name].params
    assert [p.name for p in found if p.param_type_name == "argument"] == arguments
    assert {o for p in found if p.param_type_name == "option" for o in p.opts} == options
    assert not [o for p in found for o in p.secondary_opts]


def test_plan_and_quantize_take_the_same_plan_options() -> None:
    """What is planned is what is made."""

    def described(name: str) -> dict[str, tuple[Any, ...]]:
        return {
            p.opts[0]: (p.opts, p.default, p.multiple, p.help)
            for p in commands()[name].params
            if p.opts[0] in PLAN_OPTIONS
        }

    assert described("plan") == described("quantize")


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_is_complete_and_plain(name: str | None) -> None:
    """Every command and option has words; the statuses stand below."""
    result = shell(*([name] if name else []), "--help").ok()
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    if name is None:
        for status in ExitStatus:
            assert re.search(rf"\b{int(status)}\b", result.stdout), status
        assert all(command in result.stdout for command in COMMANDS)
        return
    for parameter in commands()[name].params:
        assert getattr(parameter, "help", None), parameter.name
        assert all(o in result.stdout for o in parameter.opts if o.startswith("--"))


def test_commands_are_these() -> None:
    """In the order of the help: a new one is a decision, so it is written here as well."""
    assert list(commands()) == list(COMMANDS)
    assert all(command.help for command in commands().values())


def test_version() -> None:
    """One line, for scripts."""
    from mxconvert import __version__

    assert shell("--version").ok().stdout == f"mxconvert {__version__}\n"


@pytest.mark.parametrize(
    "command",
    [[], ["quantize"], ["dequantize"], ["plan"], ["verify"], ["report"], ["diff"]],
)
def test_help_loads_nothing_heavy(command: list[str]) -> None:
    """`--help` answers at once: no kernels, no numpy, no torch, no store client."""
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['mxconvert', *{command!r}, '--help']\n"
        "try:\n    runpy.run_module('mxconvert', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'llvmlite', 'numpy', 's3fs', 'fsspec', 'botocore', 'awscrt',"
        " 'safetensors', 'xxhash', 'zstandard', 'triton', 'mxconvert_kernels'}\n"
        "found = heavy & {name.partition('.')[0] for name in sys.modules}\n"
        "assert not found, found\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_inspect_and_plan_load_no_kernels(shared_source: Path) -> None:
    """Reading headers needs neither llvmlite nor torch."""
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['mxconvert', 'plan', {str(shared_source)!r}]\n"
        "try:\n    runpy.run_module('mxconvert', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "found = {'torch', 'llvmlite', 'awscrt', 's3fs'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------------------- JSON


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_events_of_quantize(model: Model, tmp_path: Path) -> None:
    """One object per line with type and version; the last one sums up; stderr is empty."""
    source = model.adding({"stray": tensor("stray", (4,))}).write(tmp_path / "source")
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": model.weight_map})
    )
    result = run_cli("quantize", source, tmp_path / "out", "--json").ok()
    assert result.stderr == ""
    events = lines(result.stdout)
    assert all(event["schema_version"] == 1 for event in events)
    kinds = [event["type"] for event in events]
    assert set(kinds) == {"notice", "started", "progress", "file", "summary"}
    assert kinds.index("summary") == len(kinds) - 1
    assert kinds.index("started") < kinds.index("progress")
    started = next(event for event in events if event["type"] == "started")
    files = [event for event in events if event["type"] == "file"]
    assert started["total_files"] == len(files) == 9
    assert {event["code"] for event in events if event["type"] == "notice"} == {
        "index-total-size",
        "dropped-tensor",
    }
    summary = events[-1]
    report = json.loads(run_cli("report", tmp_path / "out", "--json").ok().stdout)
    for name, value in summary["error"].items():
        assert value == pytest.approx(report["total"][name], rel=1e-12)
    assert 0.1 < summary["error"]["relative_rmse"] < 0.13
    assert summary.keys() == {
        "error",
        "type", "schema_version", "artifact", "files_made", "files_kept", "files_left",
        "files_taken", "source_bytes", "output_bytes", "seconds", "jobs", "backend", "quantized",
        "device_reason", "devices",
        "kept", "dequantized", "dropped_tensors", "skipped_files", "total_size", "file_bytes",
    }  # fmt: skip
    assert summary["files_made"] == 9
    assert summary["files_left"] == summary["files_kept"] == 0
    assert re.fullmatch(r"[0-9a-f]{64}", summary["artifact"])
    sizes = [(tmp_path / "out" / event["path"]).stat().st_size for event in files]
    assert sizes == [event["size_bytes"] for event in files]
    assert summary["file_bytes"] == summary["output_bytes"] == sum(sizes)


FAILURES: dict[str, tuple[tuple[str, ...], int]] = {
    "no such source": (("quantize", "{tmp}/nowhere", "{tmp}/out"), 5),
    "plan of nothing": (("plan", "{tmp}/nowhere"), 5),
    "inspect of nothing": (("inspect", "{tmp}/nowhere"), 5),
    "verify of nothing": (("verify", "{tmp}/nowhere"), 2),
    "an unknown option": (("quantize", "{src}", "{tmp}/out", "--nope"), 2),
    "a missing argument": (("quantize", "{src}"), 2),
    "a bad number": (("quantize", "{src}", "{tmp}/out", "--jobs", "0"), 2),
    "a bad choice": (("quantize", "{src}", "{tmp}/out", "--scope", "all"), 2),
    "a bad backend": (("quantize", "{tmp}/nowhere", "{tmp}/out", "--backend", "cuda"), 2),
    "a bad device": (("quantize", "{tmp}/nowhere", "{tmp}/out", "--device", "gpu0"), 2),
    "an empty device": (("quantize", "{tmp}/nowhere", "{tmp}/out", "--device", "cuda:0,"), 2),
    "a GPU for the CPU's kernels": (
        ("quantize", "{tmp}/nowhere", "{tmp}/out", "--device", "cuda:0", "--backend", "llvm"),
        2,
    ),
    "the CPU for the GPU's kernels": (
        ("dequantize", "{tmp}/nowhere", "{tmp}/out", "--device", "cpu", "--backend", "triton"),
        2,
    ),
    "a bad size": (("quantize", "{tmp}/nowhere", "{tmp}/out", "--max-memory", "5XB"), 2),
    "a bad pattern": (("plan", "{src}", "--include", "re:("), 2),
    "the source as output": (("quantize", "{src}", "{src}"), 2),
    "an output without parent": (("quantize", "{src}", "{tmp}/a/b/c"), 7),
}


@pytest.mark.parametrize("what", FAILURES)
def test_an_error_is_one_record_under_json(what: str, shared_source: Path, tmp_path: Path) -> None:
    """For machines: one JSON object on stderr with code, status, message and next step."""
    args, status = FAILURES[what]
    filled = [arg.format(src=shared_source, tmp=tmp_path) for arg in args]
    result = shell(*filled, "--json")
    assert result.status == status
    assert result.stdout == ""
    [record] = lines(result.stderr)
    assert record.keys() == {"type", "schema_version", "code", "exit_status", "message", "hint"}
    assert record["type"] == "error"
    assert record["exit_status"] == status
    assert record["message"]
    assert record["hint"]
    plain = shell(*filled)
    assert plain.status == status
    assert plain.stdout == ""
    assert "rror: " in plain.stderr
    assert "Traceback" not in plain.stderr
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").rglob("*.safetensors"))


def test_one_document_for_the_others(shared_source: Path, tmp_path: Path) -> None:
    """inspect, plan and verify print exactly one JSON document."""
    assert shell("inspect", shared_source, "--json").ok().json()["type"] == "inspection"
    assert shell("plan", shared_source, "--json").ok().json()["type"] == "plan"
    shell("quantize", shared_source, tmp_path / "out").ok()
    assert shell("verify", tmp_path / "out", "--json").ok().json()["schema_version"] == 1


def test_notices_of_the_source_are_in_the_plan(model: Model, tmp_path: Path) -> None:
    """`plan --json` tells what `plan` warns of on stderr."""
    source = model.write(
        tmp_path / "source", index={"metadata": {"total_size": 1}, "weight_map": model.weight_map}
    )
    told = shell("plan", source, "--json").ok().json()["notices"]
    assert [notice["code"] for notice in told] == ["index-total-size"]
    assert "warning: " in shell("plan", source).ok().stderr


# ----------------------------------------------------------------------------- streams


def test_quiet_is_silent(shared_source: Path, tmp_path: Path) -> None:
    """A run without a warning prints nothing at all; with one, the warning."""
    result = run_cli("quantize", shared_source, tmp_path / "out", "--quiet").ok()
    assert (result.stdout, result.stderr) == ("", "")
    result = run_cli("verify", tmp_path / "out", "-q").ok()
    assert (result.stdout, result.stderr) == ("", "")
    warned = bf16_model(layers=1, experts=1).configured(torch_dtype=None).write(tmp_path / "w")
    result = shell("quantize", warned, tmp_path / "w-out", "-q").ok()
    assert result.stdout == ""
    assert result.stderr.startswith("warning: ")


def test_results_are_on_stdout_and_words_on_stderr(shared_source: Path, tmp_path: Path) -> None:
    """What a pipe gets is the result alone."""
    result = run_cli("quantize", shared_source, tmp_path / "out").ok()
    assert result.stderr == ""
    assert "artifact" in result.stdout
    result = run_cli("quantize", shared_source, tmp_path / "out").ok()
    assert result.stderr == f"note: {tmp_path / 'out'}: complete already\n"


@pytest.mark.parametrize(
    "env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"MXCONVERT_NO_PROGRESS": "1"}]
)
def test_no_escape_codes_without_a_terminal(
    env: dict[str, str], shared_source: Path, tmp_path: Path
) -> None:
    """Logs of CI stay readable."""
    result = run_cli("quantize", shared_source, tmp_path / "out", env=env).ok()
    assert "\x1b" not in result.stdout + result.stderr


def on_a_terminal(*args: object, env: dict[str, str]) -> str:
    """Run with stderr on a pseudo-terminal and return what it showed."""
    import pty

    leader, follower = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MXCONVERT_")}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "TERM": "xterm"} | env
    with subprocess.Popen(
        [sys.executable, "-m", "mxconvert", *map(str, args)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=follower,
        env=environment,
    ) as process:
        os.close(follower)
        shown = b"".join(iter(lambda: _read(leader), b""))
    os.close(leader)
    assert process.returncode == 0, shown
    return shown.decode()


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 4096)
    except OSError:  # the other end is closed
        return b""


def test_a_terminal_gets_a_progress_bar(shared_source: Path, tmp_path: Path) -> None:
    """And none where it is turned off; NO_COLOR takes its colours away."""
    colours = re.compile(r"\x1b\[[0-9;]*3[0-9](;|m)")
    shown = on_a_terminal("quantize", shared_source, tmp_path / "a", env={})
    assert "quantize" in shown
    assert colours.search(shown)
    plain = on_a_terminal("quantize", shared_source, tmp_path / "b", env={"NO_COLOR": "1"})
    assert "quantize" in plain
    assert not colours.search(plain)
    off = on_a_terminal(
        "quantize", shared_source, tmp_path / "c", env={"MXCONVERT_NO_PROGRESS": "1"}
    )
    assert off == ""


def test_debug_gives_the_traceback(tmp_path: Path) -> None:
    """And only then; the message comes all the same."""
    plain = run_cli("quantize", tmp_path / "nowhere", tmp_path / "out")
    assert "Traceback" not in plain.stderr
    debug = run_cli("quantize", tmp_path / "nowhere", tmp_path / "out", "--debug")
    assert debug.status == plain.status == 5
    assert "Traceback" in debug.stderr
    assert debug.stderr.endswith(plain.stderr)


def test_a_bug_is_an_error_without_a_traceback(
    shared_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 1, what happened, and how to see more."""
    import mxconvert.source

    def broken(*_args: object, **_keys: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(mxconvert.source, "open_checkpoint", broken)
    result = shell("plan", shared_source)
    assert result.status == 1
    assert "unexpected RuntimeError: boom" in result.stderr
    assert "--debug" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_closed_pipe_is_quiet(shared_source: Path) -> None:
    """`mxconvert plan SRC --json | head -1` ends without words."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    command = f"{sys.executable} -m mxconvert plan {shared_source} --json | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "{"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_any_name_can_be_printed(encoding: str, tmp_path: Path) -> None:
    """Tensor names and config values outside the terminal's encoding are escaped."""
    model = bf16_model(layers=1, experts=1).adding({"重み🙂.weight": tensor("x", (2, 2))})
    source = model.write(tmp_path / "source")
    config = model.config | {"architectures": ["\ud800Odd"]}
    (source / "config.json").write_text(json.dumps(config))
    env = {"PYTHONIOENCODING": encoding, "LC_ALL": "C"}
    for args in (("inspect", source), ("plan", source), ("inspect", source, "--tensors", "*")):
        run_cli(*args, env=env).ok()
        document = run_cli(*args, "--json", env=env).ok()
        assert json.loads(document.stdout)
    result = run_cli("quantize", source, tmp_path / "out", "--json", env=env).ok()
    assert lines(result.stdout)[-1]["type"] == "summary"


def test_an_option_that_is_not_utf8_is_a_usage_error(shared_source: Path, tmp_path: Path) -> None:
    """The manifest records options; what it cannot hold is refused before the work."""
    odd = os.fsdecode(b"org/\xff")
    for option in ("--base-model", "--exclude", "--recipe"):
        result = shell("quantize", shared_source, tmp_path / "out", option, odd)
        assert result.status == 2
        assert "UTF-8" in result.stderr
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------- places


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "hf", "memory", "https"])
def test_remote_places_are_refused_for_now(
    scheme: str, shared_source: Path, tmp_path: Path
) -> None:
    """A usage error that says so, before anything is made; never a local folder `s3:`."""
    url = f"{scheme}://bucket/key"
    for args in (
        ("quantize", url, tmp_path / "out"),
        ("quantize", shared_source, url),
        ("plan", url),
        ("inspect", url),
    ):
        result = shell(*args)
        assert result.status == 2
        assert url in result.stderr
        assert "not supported" in result.stderr
    assert not (tmp_path / "out").exists()
    assert not Path(f"{scheme}:").exists()


def test_file_urls_are_local(shared_source: Path, tmp_path: Path) -> None:
    """`file:///path` is a path, percent escapes included; another host is not."""
    target = tmp_path / "with space"
    url = f"file://{tmp_path}/with%20space"
    shell("quantize", f"file://{shared_source}", url).ok()
    assert (target / "mxconvert.manifest.json").exists()
    shell("verify", f"file://localhost{tmp_path}/with%20space").ok()
    assert shell("plan", "file://elsewhere/x").status == 2


# ------------------------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000", 1000), ("1000B", 1000), ("256MiB", 256 << 20), ("5GB", 5_000_000_000),
        ("5 GB", 5_000_000_000), ("1.5GiB", 3 << 29), ("2tib", 2 << 40), ("7kb", 7000),
        (" 3KiB ", 3072), ("0.5KiB", 512),
    ],
)  # fmt: skip
def test_sizes(text: str, expected: int) -> None:
    """Decimal and binary units, any case."""
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "GB", "5XB", "-5GB", "1e9", "5GBs", "0", "0GB", "five", "5,5GB", "\u0665", "inf", "5M"],
)
def test_what_is_no_size(text: str) -> None:
    """Refused with an example."""
    with pytest.raises(UsageError, match="is not a size") as refusal:
        parse_size(text)
    assert "256MiB" in str(refusal.value.hint)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30), ("5m", 300), ("5min", 300), ("1h30m", 5400), ("1h", 3600), ("90", 90),
        ("0.5s", 0.5), (" 1M 5S ", 65),
    ],
)  # fmt: skip
def test_time_spans(text: str, seconds: float) -> None:
    """Hours, minutes, seconds; a bare number is seconds."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "0", "0s", "-3s", "5d", "inf", "1e9", "5m1h", "\u0665s"])
def test_what_is_no_time_span(text: str) -> None:
    """Refused with an example."""
    with pytest.raises(UsageError, match="is not a time span") as refusal:
        parse_duration(text)
    assert "5m" in str(refusal.value.hint)


def test_figures_for_people() -> None:
    """Sizes, counts and times as they are printed."""
    assert [size(n) for n in (0, 999, 1000, 1_234_567, 5.56e12)] == [
        "0 B", "999 B", "1.00 kB", "1.23 MB", "5.56 TB",
    ]  # fmt: skip
    assert [count(n) for n in (12, 1500, 104.2e9, 2.78e12)] == [
        "12",
        "1.50 K",
        "104.20 B",
        "2.78 T",
    ]
    assert [duration(s) for s in (0.04, 42.13, 185, 7800)] == [
        "0.0 s", "42.1 s", "3 min 05 s", "2 h 10 min",
    ]  # fmt: skip


# ------------------------------------------------------------------------------- docs


def source_lines() -> Iterator[str]:
    for folder in (ROOT / "mxconvert", ROOT / "kernels" / "mxconvert_kernels"):
        for path in sorted(folder.rglob("*.py")):
            yield from path.read_text().splitlines()


def test_every_environment_variable_is_documented() -> None:
    """What the code reads from the environment stands in the reference."""
    found = {name for line in source_lines() for name in re.findall(r"\bMXCONVERT_[A-Z_]+", line)}
    assert {"MXCONVERT_NO_PROGRESS", "MXCONVERT_FAILPOINTS"} <= found
    text = "\n".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))
    assert not [name for name in found if name not in text]


def test_every_exit_status_is_documented() -> None:
    """Number by number, and different from each other."""
    text = (DOCS / "reference" / "exit-status.md").read_text()
    numbers = [int(status) for status in ExitStatus]
    assert len(set(numbers)) == len(numbers)
    for number in numbers:
        assert re.search(rf"\b{number}\b", text), number


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented(name: str) -> None:
    """Long options stand in the reference of the command line."""
    text = "\n".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))
    absent = [o for o in COMMANDS[name][1] if o.startswith("--") and f"{o}" not in text]
    assert not absent


def test_statuses_belong_to_error_classes() -> None:
    """Every expected failure has a documented status of its own kind."""

    def below(kind: type[MxConvertError]) -> Iterator[type[MxConvertError]]:
        for child in kind.__subclasses__():
            yield child
            yield from below(child)

    found = {kind.__name__: int(kind.exit_status) for kind in below(MxConvertError)}
    assert found["UsageError"] == 2
    assert found["PartialError"] == 3
    assert found["VerificationError"] == 4
    assert found["SourceError"] == 5
    assert found["LocalError"] == 7
    assert found["MissingExtraError"] == 8


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_full_disk_behind_stdout_is_no_bug(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The status is that of a local disk, and the message says what could not be written."""
    source = bf16_model().write(tmp_path / "source")
    command = [sys.executable, "-m", "mxconvert", "plan", str(source), *options]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 7
    assert "cannot write the output: No space left on device" in done.stderr
    assert "Exception ignored" not in done.stderr
