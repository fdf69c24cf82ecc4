"""Runs over transposed and FP8 sources that are scarce of memory, killed, or disturbed."""

from __future__ import annotations

import math
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import Model, fail_cleanly, fp8_model, fused_model, run_cli, shell, snapshot
from tests.support.container import sparse_safetensors
from tests.support.models import json_bytes, tensor
from tests.support.runs import MANIFEST, Reference, arm, final_names, make_reference

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1024 * 1024
TOLERANCE = 1.1
KILLED = -9
PREFIX = "model.layers.0.mlp.experts."

# ------------------------------------------------------------------------------ memory


def sparse(
    root: Path, config: dict[str, Any], layout: dict[str, tuple[str, tuple[int, ...]]]
) -> Path:
    """Write a checkpoint of zeros that takes no disk."""
    sizes = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
    root.mkdir()
    tensors = {
        name: (dtype, shape, sizes[dtype] * math.prod(shape))
        for name, (dtype, shape) in layout.items()
    }
    sparse_safetensors(root / "model.safetensors", tensors)
    (root / "config.json").write_bytes(json_bytes(config))
    return root


def large_transposed(root: Path) -> Path:
    """Matrices of 4096 x 2048 stored input dimension first, gate and up alternating."""
    config = fused_model(transposed=True).config | {
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_local_experts": 3,
    }
    layout = {
        PREFIX + "gate_up_proj": ("BF16", (3, 2048, 8192)),
        PREFIX + "down_proj": ("BF16", (3, 4096, 2048)),
    }
    return sparse(root, config, layout)


def large_fp8(root: Path) -> Path:
    """Matrices of 4096 x 2048 in FP8, experts and others."""
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    for expert in range(3):
        for part, shape in (("gate", (4096, 2048)), ("up", (4096, 2048)), ("down", (2048, 4096))):
            name = f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"
            layout[name] = ("F8_E4M3", shape)
            layout[name + "_scale_inv"] = ("F32", (shape[0] // 128, shape[1] // 128))
    query = "model.layers.0.self_attn.q_proj.weight"
    layout |= {query: ("F8_E4M3", (4096, 2048)), query + "_scale_inv": ("F32", (32, 16))}
    config = fp8_model().config | {
        "hidden_size": 2048, "moe_intermediate_size": 4096, "n_routed_experts": 3,
    }  # fmt: skip
    return sparse(root, config, layout)


def least_memory(source: Path, target: Path) -> int:
    """Return the least budget in bytes that a refusal states."""
    result = run_cli("quantize", source, target, "--max-memory", "16MiB", "--force")
    fail_cleanly(result, 2, "--max-memory", "are too few")
    match = re.search(r"it needs at least (\d+)\n", result.stderr)
    assert match
    return int(match[1])


@pytest.mark.parametrize("make", [large_transposed, large_fp8])
def test_memory_stays_within_the_budget(make: Any, tmp_path: Path) -> None:
    """With the least that works and one job, and with room for many jobs: the same bytes."""
    source = make(tmp_path / "source")
    least = least_memory(source, tmp_path / "out") + 4 * MIB
    found = []
    for number, limit in enumerate((least, least + 64 * MIB, 512 * MIB)):
        target = tmp_path / f"out-{number}"
        options = ("--quiet", "--force", "--jobs", "16", "--max-memory", str(limit))
        result = run_cli("quantize", source, target, *options).ok()
        assert result.max_rss <= limit * TOLERANCE
        found.append(snapshot(target))
    assert found[0] == found[1] == found[2]


# -------------------------------------------------------------------------- interrupted


def wide() -> Model:
    """Transposed matrices of 1 MiB, which a small budget cuts."""
    shapes = {
        "gate_up_proj": (2, 256, 2 * 2112),
        "down_proj": (2, 2112, 256),
        "gate_up_proj_bias": (2, 2 * 2112),
        "down_proj_bias": (2, 256),
    }
    tensors = {PREFIX + name: tensor(name, shape) for name, shape in shapes.items()}
    config = fused_model(transposed=True).config | {
        "hidden_size": 256,
        "intermediate_size": 2112,
        "num_local_experts": 2,
    }
    return Model(config=config, shards={"model.safetensors": tensors})


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("fused")
    least = least_memory(wide().write(folder / "probe"), folder / "none")
    options = ("--force", "--jobs", "1", "--max-memory", str(least + 2 * MIB))
    return make_reference(wide(), folder, *options)


@pytest.mark.parametrize("point", [*(f"engine.convert:{n}" for n in (1, 2, 3, 5, 9, 12)),
                                   "writer.append:2", "engine.before-record:2"])  # fmt: skip
def test_a_kill_within_a_transposed_tensor(point: str, fused: Reference, tmp_path: Path) -> None:
    """Nothing unfinished has a final name; the next run makes the bytes of one left alone."""
    target = tmp_path / "target"
    arguments = ("quantize", fused.source, target, *fused.args)
    assert run_cli(*arguments, env=arm(f"{point}=kill")).status == KILLED
    fused.assert_nothing_unfinished(target)
    fused.rerun(target)


def test_the_small_budget_cuts(fused: Reference, tmp_path: Path) -> None:
    """What the test above is about: its matrices are larger than its pieces; ample memory,
    the same bytes."""
    ample = tmp_path / "ample"
    run_cli("quantize", fused.source, ample, "--force").ok()
    assert snapshot(ample) == fused.files


# ------------------------------------------------------------------------------ changed


def flip(path: Path, name: str, element: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Change one element of a BF16 tensor, keeping size, inode and modification time."""
    from mxconvert.source.shards import read_header

    info = path.stat()
    [stored] = [t for t in read_header(path.parent, path.name)[1] if t.name == name]
    place = 0
    for index, size in zip(element, shape, strict=True):
        place = place * size + index
    with path.open("r+b") as file:
        file.seek(stored.offset + 2 * place)
        (byte,) = file.read(1)
        file.seek(stored.offset + 2 * place)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "half done"])
@pytest.mark.parametrize(
    ("word", "element", "part"),
    [
        ("gate_up_proj", (0, 17, 2 * 100), "0.gate_proj.weight"),
        ("gate_up_proj", (0, 255, 2 * 2111 + 1), "0.up_proj.weight"),
        ("down_proj", (0, 5, 5), "0.down_proj.weight"),
        ("gate_up_proj_bias", (0, 9), "0.up_proj.bias"),
    ],
)
def test_recheck_notices_a_changed_slice(
    word: str,
    element: tuple[int, ...],
    part: str,
    fused: Reference,
    tmp_path: Path,
    *,
    complete: bool,
) -> None:
    """Of expert 0, whose file is finished; whether the artifact is or not."""
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(fused.source, source)
    arguments = ("quantize", source, target, *fused.args)
    if complete:
        run_cli(*arguments).ok()
        shell(*arguments, "--recheck").ok()
    else:
        killed = run_cli(*arguments, env=arm("writer.after-rename:1=kill"))
        assert killed.status == KILLED
        assert final_names(target) == {"model-experts-00000-00000.safetensors"}
    shape = wide().tensors[PREFIX + word].shape
    flip(source / "model.safetensors", PREFIX + word, element, shape)
    named = PREFIX + (word if complete else part)
    result = run_cli(*arguments, "--recheck")
    fail_cleanly(result, 5, "has changed", f"tensor '{named}'", "--overwrite")
    assert (target / MANIFEST).exists() == complete
    # A slice of expert 1 is no business of the file of expert 0.
    if not complete:
        flip(source / "model.safetensors", PREFIX + word, element, shape)
        flip(source / "model.safetensors", PREFIX + word, (1, *element[1:]), shape)
        run_cli(*arguments, "--recheck").ok()


def test_verify_finds_wrong_bytes_of_every_kind(tmp_path: Path) -> None:
    """Another source of the same shapes: each tensor that differs is named, once."""
    model, other = fp8_model(), fp8_model()
    expert, query = (
        "model.layers.1.mlp.experts.2.up_proj.weight",
        ("model.layers.0.self_attn.q_proj.weight"),
    )
    for name in (expert, query):
        stored = model.tensors[name]
        changed = bytearray(stored.data)
        changed[:64] = bytes(64)
        other = other.adding({name: stored._replace(data=bytes(changed))})
    grid = "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"
    stored = model.tensors[grid]
    other = other.adding({grid: stored._replace(data=stored.data[4:] + stored.data[:4])})
    target = tmp_path / "out"
    shell("quantize", model.write(tmp_path / "source"), target).ok()
    result = shell(
        "verify", target, "--level", "numeric", "--source", other.write(tmp_path / "s2"), "--json"
    )
    assert result.status != 0
    findings = result.json()["findings"]
    differing = {f["tensor"]: f for f in findings if f["code"] in {"codes-differ", "copy-differs"}}
    assert set(differing) == {
        expert + "_packed", query, grid.replace("_scale_inv", "_packed")
    }  # fmt: skip
    assert "row 0, block 0" in differing[expert + "_packed"]["message"]
    assert "row 0, column 0" in differing[query]["message"]
    digests = [f["tensor"] for f in findings if f["code"] == "source-tensor"]
    assert sorted(digests) == sorted(differing)


def test_verify_names_row_and_block_of_transposed_weights(fused: Reference, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(fused.source, source)
    name, shape = PREFIX + "gate_up_proj", (2, 256, 2 * 2112)
    for at in (100, 101, 102, 103):  # one of them changes a code or a scale
        flip_exponent(source / "model.safetensors", name, (1, at, 2 * 1500 + 1), shape)
    result = shell("verify", fused.target, "--level", "numeric", "--source", source, "--json")
    findings = result.json()["findings"]
    assert {f["tensor"] for f in findings} == {PREFIX + "1.up_proj.weight_packed"}
    [message] = [f["message"] for f in findings if f["code"] == "codes-differ"]
    assert "row 1500, block 3:" in message


def flip_exponent(path: Path, name: str, element: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Multiply or divide one element by 4."""
    from mxconvert.source.shards import read_header

    [stored] = [t for t in read_header(path.parent, path.name)[1] if t.name == name]
    place = 0
    for index, size in zip(element, shape, strict=True):
        place = place * size + index
    with path.open("r+b") as file:
        file.seek(stored.offset + 2 * place + 1)
        (byte,) = file.read(1)
        file.seek(stored.offset + 2 * place + 1)
        file.write(bytes([byte ^ 1]))
