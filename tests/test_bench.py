"""bench: its arithmetic, that it leaves nothing behind, and that it does what it says."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mxconvert.bench import BenchOptions, run_bench, workspace
from mxconvert.bench.bounds import Rates, Workload, find_bounds
from mxconvert.bench.process import run_process
from mxconvert.bench.run import QUICK, Effort
from mxconvert.bench.source import Dimensions, write_source
from mxconvert.bench.stages import INPUT_STAGES, OUTPUT_STAGES
from mxconvert.errors import Interrupted, LocalError
from mxconvert.model import Options
from mxconvert.plan import build_plan
from mxconvert.source import open_checkpoint
from tests.support.cli import ROOT, fail_cleanly, run_cli, snapshot, start_cli
from tests.support.contract import converted
from tests.support.runs import arm
from tests.support.shell import shell

if TYPE_CHECKING:
    from types import ModuleType

MIB = 1 << 20
GB, TB = 10**9, 10**12
TINY_MODEL = Dimensions(layers=2, experts=4, hidden=128, inner=64, vocab=32)
TINY = Effort(
    row_s=0.0, disk_s=0.5, disk_bytes=8 * MIB, source_bytes=8 * MIB,
    dims=Dimensions(experts=4, hidden=512, inner=256, vocab=64),
)  # fmt: skip


# -------------------------------------------------------------------- from rates to time


def rates(**changed: Any) -> Rates:
    """Return a machine: 1 GB/s both ways, 2 processors, each stage 0.01 CPU seconds per GB."""
    cpu = dict.fromkeys((*INPUT_STAGES, *OUTPUT_STAGES, "kernel"), 0.01 / GB)
    given: dict[str, Any] = {
        "disk_read": 1.0 * GB, "disk_write": 1.0 * GB, "one_disk": False,
        "cpu_seconds": cpu, "processors": 2.0, "lanes": 1,
    }  # fmt: skip
    return Rates(**(given | changed))


WORK = Workload(
    source_bytes=1000 * GB, quantized_bytes=960 * GB, output_bytes=295 * GB, assumed=False
)


def test_each_resource_bounds_the_time_as_the_reference_says() -> None:
    """docs/reference/bench.md states the arithmetic; this is the example worked by hand."""
    seconds = {bound.name: bound.seconds for bound in find_bounds(WORK, rates())}
    assert seconds == pytest.approx(
        {
            "disk read": 1000.0,
            "disk write": 295.0,
            # two input stages, the kernel, four output stages, at 0.01 s per GB, on 2
            "processors": (2 * 1000 + 960 + 4 * 295) * 0.01 / 2,
            "SHA-256 of files in order": 2.95,
        }
    )


def test_reading_and_writing_one_disk_adds_up() -> None:
    first = find_bounds(WORK, rates(one_disk=True))[0]
    assert (first.name, first.seconds) == ("disk read and write", pytest.approx(1295.0))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"disk_write": 0.1 * GB}, "disk write"),
        ({"processors": 0.01}, "processors"),
        ({"disk_read": 0.1 * GB}, "disk read"),
    ],
)
def test_the_slowest_resource_is_named_first(changed: dict[str, Any], name: str) -> None:
    assert find_bounds(WORK, rates(**changed))[0].name == name


def test_more_files_at_a_time_share_the_work_that_has_an_order() -> None:
    one, four = (
        {b.name: b.seconds for b in find_bounds(WORK, rates(lanes=lanes))} for lanes in (1, 4)
    )
    name = "SHA-256 of files in order"
    assert one[name] == pytest.approx(4 * four[name])


def test_a_size_alone_is_taken_for_a_model_like_kimi_k3() -> None:
    """5.56 TB of BF16 were published as 1.56 TB of MXFP4."""
    work = Workload.of_size(5_560_000_000_000)
    assert work.assumed
    assert work.output_bytes == pytest.approx(1_560_860_324_864, rel=0.01)


def test_a_checkpoint_is_planned_rather_than_assumed(shared_source: Path) -> None:
    plan = build_plan(open_checkpoint(shared_source), Options())
    work = Workload.of_plan(plan)
    assert not work.assumed
    assert work.source_bytes == plan.quantized.source_bytes + plan.copied.source_bytes
    assert work.output_bytes == plan.file_bytes


# ----------------------------------------------------------------- the generated source


def test_the_generated_checkpoint_is_a_model_that_converts(tmp_path: Path) -> None:
    """What bench measures is a real conversion: experts are found, verify passes."""
    size = write_source(tmp_path / "source", TINY_MODEL)
    made = converted(tmp_path / "source", tmp_path / "target")
    assert len(made.artifact.quantized) == 2 * 4 * 3
    assert size == TINY_MODEL.num_bytes
    stored = sum(path.stat().st_size for path in (tmp_path / "source").glob("*.safetensors"))
    assert size < stored < size * 1.05


def test_the_generated_checkpoint_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_source(tmp_path / name, TINY_MODEL)
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")


@pytest.mark.parametrize("wanted", [10 * MIB, 100 * MIB])
def test_a_model_of_a_wanted_size_is_not_larger(wanted: int) -> None:
    dims = Dimensions(experts=4, hidden=512, inner=256, vocab=64)
    model = dims.sized(wanted)
    assert model.num_bytes <= wanted
    assert Dimensions(**{**as_dict(model), "layers": model.layers + 1}).num_bytes > wanted


def as_dict(dims: Dimensions) -> dict[str, int]:
    return {name: getattr(dims, name) for name in ("layers", "experts", "hidden", "inner", "vocab")}


# ------------------------------------------------------------------------ the workspace


@pytest.mark.parametrize("error", [RuntimeError("bug"), Interrupted(signal.SIGINT), OSError(5)])
def test_nothing_is_left_whatever_ends_the_work(tmp_path: Path, error: Exception) -> None:
    def work() -> None:
        with workspace.workspace(tmp_path) as made:
            (made / "sub").mkdir()
            (made / "sub" / "file").write_bytes(b"x")
            raise error

    with pytest.raises((type(error), LocalError)):
        work()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_goes_with_the_next_run(tmp_path: Path) -> None:
    """SIGKILL gives no time to clean up; a gigabyte must not lie there for good."""
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from mxconvert.bench.workspace import workspace\n"
        "with workspace(Path(sys.argv[1])) as work:\n"
        "    (work / 'big').write_bytes(b'x'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=False, env=environment())
    assert len(list(tmp_path.iterdir())) == 1
    with workspace.workspace(tmp_path) as work:
        assert list(tmp_path.iterdir()) == [work]


def environment() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}


def test_a_run_beside_it_and_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    stranger = tmp_path / f"{workspace.PREFIX}notes"
    stranger.mkdir()
    (stranger / "notes.txt").write_text("mine")
    with workspace.workspace(tmp_path) as first, workspace.workspace(tmp_path) as second:
        assert first.exists()
        assert first != second
    assert list(tmp_path.iterdir()) == [stranger]
    assert (stranger / "notes.txt").read_text() == "mine"


def test_too_little_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"bench needs \d+ bytes for a short time, \d+ are free"):
        workspace.check_space(tmp_path, 1 << 60)
    fail_cleanly(shell("bench", "--folder", tmp_path / "none"), 7, "is not a folder", "hint: ")
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------- a whole run


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``--quick`` take a fraction of a second."""
    monkeypatch.setattr("mxconvert.bench.run.QUICK", TINY)


@pytest.mark.usefixtures("tiny")
def test_bench_measures_everything_and_leaves_both_folders_as_they_were(
    tmp_path: Path, shared_source: Path
) -> None:
    before = snapshot(shared_source)
    result = shell(
        "bench", "--quick", "--folder", tmp_path, "--source", shared_source, "--jobs", 2, "--json"
    ).ok()
    found = result.json()
    assert (found["type"], found["schema_version"]) == ("bench", 1)
    rows = {(row["group"], row["name"], row["threads"]) for row in found["measurements"]}
    kernels = {
        ("kernel", f"BF16, {r}", n) for r in ("mse", "even", "floor", "rceil") for n in (1, 2)
    }
    digests = {("digest", name, 1) for name in ("XXH3-128", "CRC64-NVME", "SHA-256")}
    assert rows >= kernels | digests | {
        ("memory", "memcpy", 2),
        ("disk", "write, fsync", 1),
        ("disk", "read, cold", 1),
        ("pipeline", "read, cached", 2),
        ("pipeline", "write, digests, fsync", 1),
        ("whole", "quantize, cold", 2),
    }
    assert set(found["cpu_seconds_per_gb"]) == {*INPUT_STAGES, "kernel", *OUTPUT_STAGES}
    seconds = [bound["seconds"] for bound in found["bounds"]]
    assert seconds == sorted(seconds, reverse=True)
    assert found["workload"]["source_bytes"] == sum(
        tensor.size for tensor in open_checkpoint(shared_source).tensors.values()
    )
    assert snapshot(shared_source) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("tiny")
def test_bench_says_how_much_it_writes_and_ends_with_the_bound(tmp_path: Path) -> None:
    result = shell("bench", "--quick", "--folder", tmp_path, "--checkpoint-size", "5.56TB").ok()
    assert f"writes up to {TINY.space // MIB} MiB below {tmp_path}" in result.stderr
    last = result.stdout.splitlines()[-1]
    assert last.startswith("5.56 TB (98 % of it experts) here: at least ")
    assert ", bound by " in last


def test_bench_stays_within_the_space_it_announces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is seen when it is largest: just before it is removed."""
    peaks: list[int] = []

    def used() -> int:
        return sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())

    def watch(*_args: object) -> None:
        peaks.append(used())

    monkeypatch.setattr(Path, "unlink", watched(Path.unlink, watch))
    monkeypatch.setattr("shutil.rmtree", watched(__import__("shutil").rmtree, watch))
    run_bench(BenchOptions(folder=tmp_path, effort=TINY))
    assert 0 < max(peaks) <= TINY.space


def watched(call: Any, watch: Any) -> Any:
    def wrapper(*args: Any, **options: Any) -> Any:
        watch()
        return call(*args, **options)

    return wrapper


def test_a_signal_ends_bench_and_leaves_nothing(tmp_path: Path) -> None:
    with start_cli("bench", "--folder", tmp_path) as running:
        while not list(tmp_path.iterdir()) and running.process.poll() is None:
            time.sleep(0.01)
        running.process.send_signal(signal.SIGINT)
        result = running.wait()
    fail_cleanly(result, 130, "interrupted; nothing is left in the folder")
    assert list(tmp_path.iterdir()) == []


def test_a_signal_during_its_conversion_leaves_nothing_either(tmp_path: Path) -> None:
    """There the engine's threads look for it."""
    options = ("bench", "--quick", "--folder", tmp_path)
    result = run_cli(*options, env=arm("engine.convert:2=term"))
    fail_cleanly(result, 143, "interrupted; nothing is left in the folder")
    assert list(tmp_path.iterdir()) == []


def test_contradictory_options_are_refused(tmp_path: Path, shared_source: Path) -> None:
    options = ("--folder", tmp_path, "--source", shared_source, "--checkpoint-size", "1TB")
    fail_cleanly(shell("bench", *options), 2, "contradict")
    fail_cleanly(shell("bench", "--folder", tmp_path, "--backend", "cuda"), 2, "--backend")


def test_a_source_that_cannot_be_converted_is_refused_first(tmp_path: Path) -> None:
    """Twenty seconds of measuring must not end with an error that was known at the start."""
    (tmp_path / "empty").mkdir()
    fail_cleanly(shell("bench", "--folder", tmp_path, "--source", tmp_path / "empty"), 5)


def test_quick_takes_less_space_than_the_full_run() -> None:
    from mxconvert.bench.run import FULL

    assert QUICK.space < FULL.space < 3 << 30


# ---------------------------------------------------------------------------- processes


def test_usage_counts_the_children_too() -> None:
    """Peers work in processes that they start; their memory and time are the peer's."""
    child = "x = bytearray(64 << 20); import time; time.sleep(0.3)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    usage = run_process([sys.executable, "-c", parent])
    assert usage.status == 0
    assert usage.peak_bytes > 64 * MIB
    assert usage.tree_peak_bytes > usage.peak_bytes


def test_memory_of_the_measuring_process_is_not_counted() -> None:
    """A child begins as a copy of its parent, and the kernel's ru_maxrss remembers that."""
    ballast = bytearray(b"x") * (256 * MIB)
    usage = run_process([sys.executable, "-c", "import time; time.sleep(0.2)"])
    assert usage.tree_peak_bytes < len(ballast)


def test_the_status_of_a_process_is_passed_on() -> None:
    assert run_process([sys.executable, "-c", "raise SystemExit(3)"]).status == 3


# ------------------------------------------------------------------------------ scripts


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def peers() -> ModuleType:
    return load("bench_peers")


@pytest.mark.parametrize("name", ["bench_quantize", "bench_peers"])
def test_benchmark_scripts_start(name: str) -> None:
    command = [sys.executable, ROOT / "scripts" / f"{name}.py", "--help"]
    subprocess.run(command, check=True, capture_output=True, env=environment())


def test_a_peer_never_chooses_its_own_torch(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch comes first, pinned, and every later install is held to that pin."""
    commands: list[list[str]] = []
    monkeypatch.setattr(peers.venv, "create", lambda path, **_: path.mkdir(parents=True))
    monkeypatch.setattr(peers.subprocess, "run", lambda command, **_: commands.append(command))
    for peer in peers.PEERS.values():
        commands.clear()
        peer.install(tmp_path)
        first, second = commands
        assert first[-1] == peers.TORCH
        pins = Path(second[second.index("-c") + 1])
        assert pins.read_text().split() == [peers.TORCH]
        peer.install(tmp_path)
        assert len(commands) == 2, "installed twice"


def test_the_table_compares_with_ours_on_the_same_disk(peers: ModuleType) -> None:
    def row(tool: str, disk: str, wall: float) -> Any:
        return peers.Row(
            tool=tool, version="1", file_system=disk, runs=1, wall_s=wall, cpu_s=1.0, peak_mb=9.0,
            error=0.11, largest_error=0.12, tensors=3, load_before=0.0,
        )  # fmt: skip

    rows = [row("mxconvert", "tmpfs", wall) for wall in (1.0, 2.0, 7.0)]
    rows += [row("peer", "tmpfs", 90.0)]
    rows += [row("mxconvert", "ext4", 10.0), row("peer", "ext4", 100.0)]
    factors = [line.split("|")[4].strip() for line in [*peers.table(rows)][2:]]
    assert factors == ["0.5", "1.0", "3.5", "45.0", "1.0", "10.0"]
