"""How the work is done changes no byte: threads, memory, kernels, splits, pieces."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support import (
    Conversion,
    Model,
    Tensor,
    bf16_model,
    converted,
    encode,
    shell,
    snapshot,
    stopped,
)
from tests.support.models import shard_name, tensor

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
PIECE = 4 * MIB  # what one thread converts at a time
GATE = "model.layers.0.mlp.experts.1.gate_proj.weight"


def large_model() -> Model:
    """Weights and copied tensors of more than a piece, whose rows do not divide it."""
    shapes = {
        "model.embed_tokens.weight": (2100, 1056),
        "lm_head.weight": (2100, 1056),
        GATE: (2050, 1056),
        GATE.replace("gate", "up"): (2050, 1056),
        GATE.replace("gate", "down"): (1056, 2048),
        GATE.replace("experts.1", "experts.0"): (3, 32),
        GATE.replace("experts.1.gate", "experts.0.up"): (3, 32),
        GATE.replace("experts.1.gate", "experts.0.down"): (32, 32),
    }
    assert min(2 * a * b for a, b in list(shapes.values())[:5]) > PIECE
    tensors = {name: tensor(name, shape) for name, shape in shapes.items()}
    base = bf16_model(layers=1, experts=2)
    return Model(config=base.config, shards={"model.safetensors": tensors})


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Conversion]:
    root = tmp_path_factory.mktemp("large")
    source = large_model().write(root / "source")
    return source, converted(source, root / "out")


def least_memory(source: Path, target: Path) -> str:
    """Ask for the impossible and take the advice, with a margin for this process."""
    result = shell("quantize", source, target, "--max-memory", "1MiB")
    assert result.status == 2
    advice = re.search(r"--max-memory (\d+)MiB or more", result.stderr)
    assert advice, result.stderr
    return f"{int(advice[1]) + 3}MiB"


@pytest.mark.parametrize(
    "options",
    [
        ("--jobs", "1"),
        ("--jobs", "4"),
        ("--jobs", "4", "--backend", "numpy"),
        ("--jobs", "3", "--backend", "llvm"),
        ("--max-memory", "least"),
    ],
    ids=" ".join,
)
def test_neither_threads_nor_memory_nor_kernels_matter(
    options: tuple[str, ...], large: tuple[Path, Conversion], tmp_path: Path
) -> None:
    """Every file, and so the artifact's id, is the same; tensors larger than a piece too."""
    source, expected = large
    target = tmp_path / "out"
    if options[1] == "least":
        options = (options[0], least_memory(source, target))
    result = shell("quantize", source, target, "--json", *options).ok()
    assert snapshot(target) == expected.bytes
    assert f'"artifact": "{expected.id}"' in result.stdout


@pytest.mark.parametrize("rule", ["mse", "even", "floor", "rceil"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_backends_agree_on_every_rule_and_dtype(rule: str, dtype: str, tmp_path: Path) -> None:
    """LLVM and numpy write the same artifact."""
    source = bf16_model(layers=1, experts=2, dtype=dtype).write(tmp_path / "source")
    options = ("--scale-rule", rule, "--scope", "linear")
    made = [
        converted(source, tmp_path / backend, *options, "--backend", backend)
        for backend in ("llvm", "numpy")
    ]
    assert made[0].bytes == made[1].bytes


def test_neither_index_nor_split_nor_order_matters(model: Model, tmp_path: Path) -> None:
    """The source's files may be cut anyhow: the same weights, index, config and card."""
    expected = converted(model.write(tmp_path / "plain"), tmp_path / "plain-out").bytes
    documents = ("mxconvert.manifest.json",)  # names the source's files by a digest
    names = list(model.tensors)
    random.Random(3).shuffle(names)
    numbers = {name: number % 5 + 1 for number, name in enumerate(names)}
    forms = {
        "no index": model.write(tmp_path / "no-index", index=False),
        "unpadded": model.write(tmp_path / "unpadded", pad=1),
        "five shards": model.split(5).write(tmp_path / "five"),
        "shuffled": model.reshard(lambda n: shard_name(numbers[n], 5)).write(tmp_path / "mixed"),
        "one file": model.reshard(lambda _: "model.safetensors").write(
            tmp_path / "one", index=False
        ),
    }
    for form, source in forms.items():
        found = converted(source, tmp_path / f"out-{form}").bytes
        assert {k: v for k, v in found.items() if k not in documents} == {
            k: v for k, v in expected.items() if k not in documents
        }, form


def test_parts_made_apart_are_the_whole(model: Model, tmp_path: Path) -> None:
    """`--only` in several runs gives what one run gives."""
    source = model.write(tmp_path / "source")
    expected = converted(source, tmp_path / "whole").bytes
    target = tmp_path / "parts"
    for pattern in ("model-experts-0000[0-3]-*", "*dense*"):
        shell("quantize", source, target, "--only", pattern).ok()
        assert shell("verify", target).status == 4
        assert not (target / "mxconvert.manifest.json").exists()
    shell("quantize", source, target).ok()
    assert snapshot(target) == expected


def test_the_same_artifact_has_the_same_id_anywhere(model: Model, tmp_path: Path) -> None:
    """Neither place nor time nor the source's dates are in it; an option is."""
    one = converted(model.write(tmp_path / "a" / "b" / "source"), tmp_path / "one")
    two = converted(model.write(tmp_path / "c"), tmp_path / "elsewhere")
    assert one.bytes == two.bytes
    assert one.id == two.id
    other = converted(tmp_path / "c", tmp_path / "other", "--scale-rule", "even")
    assert other.id != one.id
    card = converted(tmp_path / "c", tmp_path / "card", "--base-model", "org/name")
    assert card.id != one.id
    assert card.weights == one.weights


# ------------------------------------------------------------------- across the pieces


def spoil(values: Tensor, *elements: int) -> Tensor:
    data = bytearray(values.data)
    for element in elements:
        data[2 * element : 2 * element + 2] = b"\x81\x7f"
    return values._replace(data=bytes(data))


@pytest.mark.parametrize("jobs", ["1", "4"])
def test_a_bad_value_is_counted_across_pieces(jobs: str, tmp_path: Path) -> None:
    """Place and count are those of the tensor, not of the piece that was looked at."""
    model = large_model()
    per_piece = PIECE // 2
    last = 2050 * 1056 - 1
    bad = {GATE: spoil(model.tensors[GATE], per_piece + 5, last)}
    source = model.adding(bad).write(tmp_path / "source")
    row, column = divmod(per_piece + 5, 1056)
    says = (GATE, "2 of 2164800", f"element {per_piece + 5}", f"row {row}, column {column}")
    stopped(source, tmp_path / "out", "--jobs", jobs, says=says)


@pytest.mark.parametrize("jobs", ["1", "4"])
def test_a_copied_bad_value_is_counted_across_pieces(jobs: str, tmp_path: Path) -> None:
    """One warning for each tensor, with the count of all its pieces."""
    model = large_model()
    name = "lm_head.weight"
    last = 2100 * 1056 - 1
    source = model.adding({name: spoil(model.tensors[name], 7, PIECE // 2 + 1, last)})
    done = converted(source.write(tmp_path / "source"), tmp_path / "out", "--jobs", jobs)
    [warning] = done.notices["non-finite-copied"]
    assert "3 of 2217600" in warning
    assert "element 7" in warning


def test_rows_at_a_piece_s_border_are_right(large: tuple[Path, Conversion]) -> None:
    """Decoded, every row has the error that its own values explain."""
    _, done = large
    truth = large_model().tensors[GATE]
    values = np.frombuffer(truth.data, "<u2").astype("<u4") << 16
    exact = values.view("<f4").astype(np.float64).reshape(truth.shape)
    error = np.abs(done.artifact.values(GATE) - exact)
    largest = np.abs(exact).reshape(len(exact), -1, 32).max(axis=2).repeat(32, axis=1)
    assert (error <= largest / 4).all()
    assert encode(exact, "BF16") == truth.data
