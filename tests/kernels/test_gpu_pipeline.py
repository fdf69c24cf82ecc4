"""The pipeline with the GPU's own device code and launcher, in Triton's interpreter."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from mxconvert.pipeline.pieces import PIECE_SIZE
from tests.convert_base import SOURCES, Run
from tests.support import bf16_model, fp8_model, shell, snapshot
from tests.test_devices import Notices, close, devices_on

if TYPE_CHECKING:
    from pathlib import Path

    from mxconvert.pipeline.devices.protocol import Device

pytestmark = pytest.mark.interpreter


def _device() -> Device:
    from mxconvert.pipeline.devices.torch_device import TorchDevice

    return TorchDevice("interpreter")


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_through_the_launcher(source: str, tmp_path: Path) -> None:
    """Bytes, digests and statistics are the CPU's: batches, factors, matrices in place."""
    run = Run(SOURCES[source](), tmp_path)
    expected = run("cpu", PIECE_SIZE)
    before = dict(run.results)
    notices = Notices()
    size = run.piece_size(65536)
    devices = devices_on([_device], piece_size=size, report=notices)
    assert run("gpu", 65536, jobs=2, devices=devices) == expected
    assert notices.found == []
    (use,) = devices.uses()
    assert use.source_bytes > 0
    for name, result in run.results.items():
        assert (result.outputs, result.sources) == (before[name].outputs, before[name].sources)
        close(result.statistics, before[name].statistics)


def _summary(*arguments: Any) -> dict[str, Any]:
    result = shell(*arguments, "--json").ok()
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert found["type"] == "summary"
    return found


@pytest.mark.parametrize("rule", ["mse", "even", "floor", "rceil"])
def test_quantize_there_and_back(rule: str, tmp_path: Path) -> None:
    """As a user runs it: both commands, both ways to ask for GPUs, the same artifact."""
    source = bf16_model(layers=1, experts=2).write(tmp_path / "source")
    options = ("--scale-rule", rule)
    _summary("quantize", source, tmp_path / "cpu", *options, "--device", "cpu")
    found = _summary("quantize", source, tmp_path / "gpu", *options, "--backend", "triton")
    assert snapshot(tmp_path / "gpu") == snapshot(tmp_path / "cpu")
    (use,) = found["devices"]
    assert use["source_bytes"] > 0
    assert found["device_reason"] == "--backend triton"
    _summary("dequantize", tmp_path / "gpu", tmp_path / "back", "--device", "all")
    _summary("dequantize", tmp_path / "cpu", tmp_path / "back-cpu", "--backend", "numpy")
    assert snapshot(tmp_path / "back") == snapshot(tmp_path / "back-cpu")


def test_fp8_becomes_bf16(tmp_path: Path) -> None:
    source = fp8_model().write(tmp_path / "source")
    found = _summary("dequantize", source, tmp_path / "gpu", "--backend", "triton")
    _summary("dequantize", source, tmp_path / "cpu")
    assert snapshot(tmp_path / "gpu") == snapshot(tmp_path / "cpu")
    assert found["devices"][0]["source_bytes"] > 0
