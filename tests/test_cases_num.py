"""Numbers through the whole pipeline: hand-made blocks in, exact codes and scales out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support import (
    Model,
    Tensor,
    bf16_model,
    converted,
    decode,
    decode_mxfp4,
    encode,
    shell,
    snapshot,
    stopped,
)
from tests.support.numbers import E2M1, unpack_codes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

RULES = ("mse", "even", "floor", "rceil")
BLOCK = 32
NAME = "model.layers.0.mlp.experts.0.gate_proj.weight"


class Blocks:
    """Converts single blocks: each becomes a row of one expert's weight."""

    def __init__(self, tmp_path: Path) -> None:
        self._root = tmp_path
        self._count = 0

    def __call__(
        self, blocks: Sequence[Sequence[float]], *options: object, dtype: str = "BF16"
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return codes ``[n, 32]`` and scales ``[n]``; short blocks are filled with zeros."""
        values = np.zeros((len(blocks), BLOCK))
        for row, block in zip(values, blocks, strict=True):
            row[: len(block)] = block
        self._count += 1
        source = self._root / f"source-{self._count}"
        weight = Tensor(dtype, values.shape, encode(values, dtype))
        assert np.array_equal(decode(weight.data, dtype, values.shape), values), "not exact"
        bf16_model(layers=1, experts=1).adding({NAME: weight}).write(source)
        done = converted(source, self._root / f"out-{self._count}", *options)
        packed, scales = done.artifact.packed(NAME)
        return unpack_codes(packed), scales[:, 0]


@pytest.fixture
def blocks(tmp_path: Path) -> Blocks:
    return Blocks(tmp_path)


# ---------------------------------------------------------------------------- elements


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", ["llvm", "numpy"])
def test_ties_and_neighbours(rule: str, backend: str, blocks: Blocks) -> None:
    """Round to nearest, ties to the even code, saturate at 6: both signs, every rule."""
    magnitudes = [
        0.25, 0.251953125, 0.74609375, 0.75, 0.75390625, 1.25,
        1.75, 2.5, 3.5, 4.96875, 5.0, 5.03125,
    ]  # fmt: skip
    expected = [0, 1, 1, 2, 2, 2, 4, 4, 6, 6, 6, 7]
    block = [6.0, *magnitudes, *(-m for m in magnitudes)]
    codes, scales = blocks([block], "--scale-rule", rule, "--backend", backend)
    assert scales.tolist() == [127]
    # A small negative that rounds to zero keeps its sign: code 8.
    negative = [code + 8 for code in expected]
    assert codes[0].tolist() == [7, *expected, *negative] + [0] * 7


@pytest.mark.parametrize("rule", RULES)
def test_quantizing_what_was_decoded_changes_nothing(rule: str, blocks: Blocks) -> None:
    """Every code but -0 and every scale a finite BF16 block can have return as they were."""
    codes = np.tile(np.array([*range(8), 0, *range(9, 16)], np.uint8), 2)
    scales = np.arange(253)
    values = np.where(codes & 8, -E2M1[codes & 7], E2M1[codes & 7])
    wide = np.ldexp(values[None, :], (scales - 127)[:, None])
    made, found = blocks(wide.tolist(), "--scale-rule", rule)
    assert found.tolist() == scales.tolist()
    assert (made == codes).all()


def test_minus_zero_becomes_plus_zero(blocks: Blocks) -> None:
    """-0.0 has code 0, so that a decoded artifact quantizes to the same bytes."""
    codes, scales = blocks([[6.0, -0.0, -0.125]])
    assert codes[0, :3].tolist() == [7, 0, 8]
    assert scales.tolist() == [127]


# ------------------------------------------------------------------------------ scales

AMAX = [6.0, 6.5, 6.96875, 7.0, 7.5, 8.0]
TOP_OF_BINADE = {
    "floor": ([127] * 5 + [128], [6, 6, 6, 6, 6, 8]),
    "even": ([127, 127, 127, 128, 128, 128], [6, 6, 6, 8, 8, 8]),
    "rceil": ([127, 128, 128, 128, 128, 128], [6, 6, 6, 8, 8, 8]),
    # Least error, ties to the smaller exponent: 6.5 is 0.5 from 6 either way.
    "mse": ([127, 127, 127, 127, 128, 128], [6, 6, 6, 6, 8, 8]),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", ["llvm", "numpy"])
def test_scale_rules_near_the_top_of_a_binade(rule: str, backend: str, blocks: Blocks) -> None:
    """Each documented rule chooses its own exponent, on every path alike."""
    expected, decoded = TOP_OF_BINADE[rule]
    codes, scales = blocks([[amax] for amax in AMAX], "--scale-rule", rule, "--backend", backend)
    assert scales.tolist() == expected
    values = E2M1[codes[:, 0]] * np.ldexp(1.0, scales.astype(int) - 127)
    assert values.tolist() == decoded


def least_error(block: NDArray[np.float64]) -> int:
    """Return the scale byte of least squared error over e-1, e, e+1, ties to the smallest."""
    amax = float(np.abs(block).max())
    if amax == 0:
        return 0
    floor = math.frexp(amax)[1] - 1 - 2
    best = None
    for exponent in (floor - 1, floor, floor + 1):
        byte = min(max(exponent + 127, 0), 254)
        scaled = np.abs(block) * 2.0 ** (127 - byte)
        distance = np.abs(scaled[:, None] - E2M1).min(axis=1) * 2.0 ** (byte - 127)
        key = (float((distance**2).sum()), byte)
        best = key if best is None or key < best else best
    assert best is not None
    return best[1]


def test_the_default_rule_has_the_least_error(blocks: Blocks) -> None:
    """Against a search in exact arithmetic over the three candidates."""
    rng = np.random.default_rng(7)
    raw = rng.standard_normal((64, BLOCK)) * np.exp2(rng.integers(-12, 12, (64, 1)))
    values = decode(encode(raw, "BF16"), "BF16", raw.shape)
    _, scales = blocks(values.tolist())
    assert scales.tolist() == [least_error(block) for block in values]


# ------------------------------------------------------------------------------- zeros


@pytest.mark.parametrize("rule", RULES)
def test_zero_blocks(rule: str, blocks: Blocks) -> None:
    """A zero block has scale 0 and codes 0, alone or among others, signs or not."""
    codes, scales = blocks([[1.0, -1.0], [], [-0.0] * 32, [3.0]], "--scale-rule", rule)
    assert scales[1:3].tolist() == [0, 0]
    assert not codes[1:3].any()
    assert scales[0] > 100
    assert scales[3] > 100


@pytest.mark.parametrize("backend", ["llvm", "numpy"])
def test_a_dead_expert(backend: str, model: Model, tmp_path: Path) -> None:
    """An expert of zeros decodes to exactly zero; its neighbours are as before."""
    dead = {
        name: value._replace(data=bytes(len(value.data)))
        for name, value in model.tensors.items()
        if ".0.mlp.experts.5." in name
    }
    assert len(dead) == 3
    plain = converted(model.write(tmp_path / "plain"), tmp_path / "plain-out").artifact
    source = model.adding(dead).write(tmp_path / "source")
    artifact = converted(source, tmp_path / "out", "--backend", backend).artifact
    for name in artifact.quantized:
        packed, scales = artifact.packed(name)
        if name in dead:
            assert not packed.any()
            assert not scales.any()
        else:
            assert packed.tobytes() == plain.packed(name)[0].tobytes()
    assert set(artifact.tensors) == set(plain.tensors)


# ------------------------------------------------------------------------- not a number


def with_bytes(value: Tensor, at: int, bits: bytes) -> Tensor:
    begin = at * len(bits)
    return value._replace(data=value.data[:begin] + bits + value.data[begin + len(bits) :])


BAD = "model.layers.1.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize("backend", ["llvm", "numpy"])
@pytest.mark.parametrize(
    "bits", [b"\xa5\x7f", b"\x81\xff", b"\x80\x7f", b"\x80\xff"], ids=["nan", "-nan", "inf", "-inf"]
)
def test_a_weight_that_is_not_finite_stops_its_file(
    bits: bytes, backend: str, model: Model, tmp_path: Path
) -> None:
    """Tensor, count and first place are named; no file holds it; mended, a rerun is clean."""
    clean = converted(model.write(tmp_path / "clean"), tmp_path / "clean-out")
    bad = with_bytes(with_bytes(model.tensors[BAD], 64 * 7 + 40, bits), 6000, bits)
    source = model.adding({BAD: bad}).write(tmp_path / "source")
    target = tmp_path / "out"
    options = ("--backend", backend)
    says = (BAD, "2 of 6144", f"element {64 * 7 + 40}", "row 7, column 40", "block 15", "--exclude")
    stopped(source, target, *options, says=says)
    assert "model-experts-00005-00005.safetensors" not in snapshot(target)
    # What was finished is bound to the source that was; --overwrite starts over.
    model.write(source)
    assert shell("quantize", source, target, *options).status == 2
    shell("quantize", source, target, *options, "--overwrite").ok()
    done = {n: s for n, s in snapshot(target).items() if n.endswith(".safetensors")}
    assert done == clean.weights
    shell("verify", target).ok()


def test_the_advice_about_a_bad_weight_works(model: Model, tmp_path: Path) -> None:
    """What the message tells to do leads to an artifact that says what was left out."""
    source = model.adding({BAD: with_bytes(model.tensors[BAD], 9, b"\xc0\x7f")}).write(
        tmp_path / "source"
    )
    result = stopped(source, tmp_path / "out", says=("--exclude", "--overwrite"))
    module = BAD.removesuffix(".weight")
    assert module in result.stderr.split("hint:")[1]
    done = converted(source, tmp_path / "out", "--exclude", module, "--overwrite")
    assert BAD in done.artifact.kept
    assert done.artifact.manifest["options"]["exclude"] == [module]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_nan_in_a_tensor_that_is_copied_is_kept(dtype: str, tmp_path: Path) -> None:
    """Copied bytes stay as they are, payload included, with a warning."""
    bits = {
        "BF16": b"\xa5\x7f", "F16": b"\x01\x7e", "F32": b"\x01\x00\xa0\x7f",
        "F64": b"\1\0\0\0\0\0\xf8\x7f",
    }[dtype]  # fmt: skip
    norm = Tensor(dtype, (64,), bits * 2 + bytes(len(bits) * 62))
    source = bf16_model(layers=1, experts=1).adding({"model.extra_norm.weight": norm})
    done = converted(source.write(tmp_path / "source"), tmp_path / "out")
    assert done.artifact.tensors["model.extra_norm.weight"].data == norm.data
    if dtype != "F64":  # not a weight dtype that kernels read
        [warning] = done.notices["non-finite-copied"]
        assert "model.extra_norm.weight: 2 of 64" in warning
        assert "element 0" in warning


# --------------------------------------------------------------------- extreme exponents


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", ["llvm", "numpy"])
def test_values_down_to_the_smallest_subnormal(rule: str, backend: str, blocks: Blocks) -> None:
    """Scale byte 0 is the least; nothing wraps to 255, flushes early or becomes infinite."""
    amax = [1.5 * 2.0**-125, 2.0**-126, 2.0**-127, 2.0**-128, 2.0**-129, 2.0**-133]
    codes, scales = blocks([[a] for a in amax], "--scale-rule", rule, "--backend", backend)
    assert scales.tolist() == [0] * 6
    assert codes[:, 0].tolist() == [7, 4, 2, 1, 0, 0]
    assert not codes[:, 1:].any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_no_value_decodes_to_infinity(rule: str, dtype: str, blocks: Blocks) -> None:
    """Near the largest float the next smaller exponent saturates instead."""
    largest = decode(b"\x7f\x7f", "BF16", (1,))[0]
    tops = [[largest, -largest, 1.0], [1.75 * 2.0**127], [1.5 * 2.0**127, 2.0**127]]
    codes, scales = blocks(tops, "--scale-rule", rule, dtype=dtype)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    values = decode_mxfp4(packed, scales[:, None])
    assert np.isfinite(values).all()
    assert np.abs(values).max() < 2.0**128
    back = decode(encode(values, "BF16"), "BF16", values.shape)
    assert np.array_equal(back, values)


# ----------------------------------------------------------------------------- packing


def test_packing_order_and_bias(blocks: Blocks) -> None:
    """Low nibble is the even element, bias is 127: every code in one known row."""
    row = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0.5, -0.5, -1, -1.5, -2, -3, -4, -6] * 2
    codes, scales = blocks([row])
    assert scales.tolist() == [127]
    packed = codes[0, ::2] | codes[0, 1::2] << 4
    assert packed.tobytes().hex(" ") == "10 32 54 76 91 ba dc fe 10 32 54 76 91 ba dc fe"


# ---------------------------------------------------------------------- source dtypes


@pytest.mark.parametrize(("rule", "byte"), [("floor", 127), ("even", 127), ("rceil", 128)])
def test_f32_is_not_squeezed_through_bf16(rule: str, byte: int, blocks: Blocks) -> None:
    """6.998 would round to 7.0 in BF16 and take another exponent."""
    _, scales = blocks([[6.998046875]], "--scale-rule", rule, dtype="F32")
    assert scales.tolist() == [byte]


@pytest.mark.parametrize("rule", RULES)
def test_f16_subnormals_have_their_exact_values(rule: str, blocks: Blocks) -> None:
    """An F16 block gives the bytes of the same numbers in F32."""
    rows = [[2.0**-20, -(2.0**-24), 3 * 2.0**-23], [65504.0, -1.0], [2.0**-14, 2.0**-24]]
    half = blocks(rows, "--scale-rule", rule, dtype="F16")
    single = blocks(rows, "--scale-rule", rule, dtype="F32")
    for one, other in zip(half, single, strict=True):
        assert np.array_equal(one, other)
    if rule == "floor":
        assert half[1].tolist() == [127 - 22, 127 + 13, 127 - 16]


def test_blocks_run_along_the_input_dimension(tmp_path: Path) -> None:
    """Rows do not share scales: one large row leaves its neighbours exact."""
    values = np.zeros((4, 64))
    values[0] = 1024.0
    values[1, :32], values[1, 32:] = 0.5, 6.0
    values[2:] = 2.0**-10
    weight = Tensor("BF16", values.shape, encode(values, "BF16"))
    source = bf16_model(layers=1, experts=1).adding({NAME: weight}).write(tmp_path / "source")
    artifact = converted(source, tmp_path / "out").artifact
    assert np.array_equal(artifact.values(NAME), values)
    assert artifact.packed(NAME)[1].shape == (4, 2)


@pytest.mark.parametrize("rule", RULES)
def test_the_error_of_normal_weights_is_what_it_should_be(rule: str, tmp_path: Path) -> None:
    """Relative RMSE of N(0, s) weights in MXFP4 lies where the literature has it."""
    model = bf16_model(layers=1, experts=2)
    source = model.write(tmp_path / "source")
    artifact = converted(source, tmp_path / "out", "--scale-rule", rule).artifact
    for name in artifact.quantized:
        truth = decode(model.tensors[name].data, "BF16", model.tensors[name].shape)
        error = artifact.values(name) - truth
        relative = np.sqrt((error**2).mean() / (truth**2).mean())
        assert 0.08 < relative < 0.16
