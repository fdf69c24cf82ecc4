"""Which GPUs a run uses, and what it says if it can use none."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mxconvert.errors import MissingExtraError, UsageError
from mxconvert.pipeline.devices import choice as choosing
from mxconvert.pipeline.devices.choice import WORTHWHILE, choose, parse_device
from mxconvert.pipeline.slots import DEVICE_PIECE_SIZE, SLOTS_PER_DEVICE, Needs, plan_budget
from tests.support import bf16_model, fail_cleanly, shell

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with two GPUs and both packages, as far as `choose` looks."""
    state = SimpleNamespace(gpus=2, missing="", files=("/dev/null",))
    torch = SimpleNamespace(
        __version__="2.11", cuda=SimpleNamespace(device_count=lambda: state.gpus)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(choosing, "_missing", lambda: state.missing)
    monkeypatch.setattr(choosing, "_DEVICE_FILES", state.files)
    return state


def test_large_runs_use_every_gpu_and_the_cpu(machine: Any) -> None:
    found = choose("auto", "auto", WORTHWHILE)
    assert found.devices == ("cuda:0", "cuda:1")
    assert (found.required, found.helped, found.reason) == (False, True, "GPUs found")


def test_small_runs_do_not_wait_for_a_gpu(machine: Any) -> None:
    """And say so; asked for, they do."""
    found = choose("auto", "auto", WORTHWHILE - 1)
    assert found.devices == ()
    assert "32 GiB" in found.reason
    assert choose("auto", "all", 1).devices == ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("backend", "device", "devices", "helped"),
    [
        ("auto", "all", ("cuda:0", "cuda:1"), True),
        ("auto", "cuda:1", ("cuda:1",), True),
        ("auto", "cuda:1,cuda:0,cuda:1", ("cuda:1", "cuda:0"), True),
        ("triton", "auto", ("cuda:0", "cuda:1"), False),
        ("triton", "cuda:0", ("cuda:0",), False),
        ("auto", "cpu", (), True),
        ("llvm", "auto", (), True),
        ("numpy", "cpu", (), True),
    ],
)
def test_what_is_asked_for_is_used(
    machine: Any, backend: str, device: str, devices: tuple[str, ...], *, helped: bool
) -> None:
    found = choose(backend, device, 1)
    assert (found.devices, found.helped, found.required) == (devices, helped, bool(devices))


@pytest.mark.parametrize("text", ["", "gpu", "cuda", "cuda:", "cuda:x", "0", "cpu,cuda:0", "all,"])
def test_other_names_are_a_mistake(text: str) -> None:
    with pytest.raises(UsageError, match="--device") as error:
        parse_device(text)
    assert error.value.exit_status == 2


def test_what_is_missing_is_named(machine: Any) -> None:
    """Asked for: status 8 with the command to install it, or what is there instead."""
    with pytest.raises(MissingExtraError, match=r"cuda:4 here; found cuda:0, cuda:1"):
        choose("auto", "cuda:1,cuda:4", 1)
    machine.gpus = 0
    with pytest.raises(MissingExtraError, match=r"torch 2\.11 finds no GPU"):
        choose("triton", "auto", 1)
    machine.missing = "triton is"
    with pytest.raises(MissingExtraError, match="triton is not installed") as error:
        choose("auto", "all", 1)
    assert error.value.hint == "pip install 'mxconvert[gpu]'"
    assert error.value.exit_status == 8


def test_auto_goes_on_without_and_says_why(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.gpus = 0
    assert "finds no GPU" in choose("auto", "auto", WORTHWHILE).reason
    machine.missing = "torch and triton are"
    found = choose("auto", "auto", WORTHWHILE)
    assert found.reason == "torch and triton are not installed: pip install 'mxconvert[gpu]'"
    monkeypatch.setattr(choosing, "_DEVICE_FILES", ("/dev/none-of-these",))
    monkeypatch.setitem(sys.modules, "torch", None)  # is not even looked for then
    assert choose("auto", "auto", WORTHWHILE).reason == "no GPU here"


@pytest.mark.parametrize("command", ["quantize", "dequantize"])
def test_a_missing_extra_ends_with_8_and_touches_nothing(
    command: str, tmp_path: Path, machine: Any
) -> None:
    machine.missing = "triton is"
    source = bf16_model(layers=1, experts=2).write(tmp_path / "source")
    target = tmp_path / "out"
    shell(command, source, target).ok()
    before = sorted(path.name for path in target.iterdir())
    (source / "tokenizer_config.json").write_text('{"another": 1}')
    result = shell(command, source, target, "--backend", "triton", "--overwrite")
    fail_cleanly(result, 8, "--backend triton", "pip install 'mxconvert[gpu]'")
    result = shell(command, source, tmp_path / "new", "--device", "all")
    fail_cleanly(result, 8, "--device all", "pip install 'mxconvert[gpu]'")
    assert not (tmp_path / "new").exists()
    assert sorted(path.name for path in target.iterdir()) == before


@pytest.mark.parametrize("devices", [1, 8])
def test_memory_for_devices_is_in_the_budget(devices: int) -> None:
    """Room for each ring and large pieces where there is memory; never more than there is."""
    ample = plan_budget(4, 4096 * MIB, 100 * MIB, Needs(), devices=devices)
    plain = plan_budget(4, 4096 * MIB, 100 * MIB, Needs())
    assert ample.piece_size == DEVICE_PIECE_SIZE
    assert (ample.jobs, ample.slots) == (4, plain.slots + devices * SLOTS_PER_DEVICE)
    scarce = plan_budget(4, 160 * MIB, 100 * MIB, Needs(), devices=devices)
    assert scarce.slots * scarce.piece_size < 60 * MIB
