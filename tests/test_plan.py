"""The plan: a pure function that fixes every output file to the byte."""

from __future__ import annotations

import hashlib
import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import TensorSpec, serialize

from mxconvert import safetensors_format
from mxconvert.errors import SourceError, UsageError
from mxconvert.model import (
    Action,
    Checkpoint,
    FileRole,
    Layout,
    Options,
    Plan,
    Scope,
    SourceFile,
    TensorInfo,
)
from mxconvert.plan import build_plan, plan_digest
from mxconvert.plan.build import file_header
from mxconvert.plan.ignore import ignore_entries
from mxconvert.plan.layout import (
    DENSE_CAP,
    EXPERTS_CAP,
    HEADER_CAP,
    estimated_header,
    experts_per_file,
)
from mxconvert.source import open_checkpoint
from tests.support import Model, bf16_model, converted, shell
from tests.support.artifact import read_tensors
from tests.support.cli import ROOT
from tests.support.container import read_header
from tests.support.kimi_k3 import EXPERT_BYTES
from tests.support.matching import matches
from tests.support.models import qwen3_moe_config, qwen3_moe_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping

GIB, MIB = 1 << 30, 1 << 20
LAYOUTS = list(Layout)


def checkpoint_of(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], *, files: int = 1
) -> Checkpoint:
    """A checkpoint that exists as records only; tensors are dealt over ``files`` files."""
    tensors, ends = {}, [0] * files
    for number, (name, shape) in enumerate(shapes.items()):
        file = number % files
        size = 2 * int(np.prod(shape, dtype=np.int64))
        tensors[name] = TensorInfo(name, "BF16", shape, f"{file}.safetensors", ends[file], size)
        ends[file] += size
    sources = tuple(
        SourceFile(path=f"{n}.safetensors", size=end, header_sha256="0", mtime_ns=0, inode=0)
        for n, end in enumerate(ends)
    )
    return Checkpoint(root=Path("/nowhere"), files=sources, tensors=tensors, config=config)


def moe(
    *, experts: int, layers: int = 1, hidden: int = 32, inner: int = 32, files: int = 1
) -> Checkpoint:
    config = qwen3_moe_config(
        layers=layers, experts=experts, hidden=hidden, inner=inner, vocab=4, heads=2
    )
    return checkpoint_of(qwen3_moe_shapes(config, qk_norm=True), config, files=files)


def expert_files(plan: Plan) -> list[str]:
    return [file.name for file in plan.files if file.role is FileRole.EXPERTS]


# ------------------------------------------------------------------------------- purity


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_depends_on_names_shapes_and_options_alone(
    layout: Layout, model: Model, tmp_path
) -> None:
    """Another order, folder, inode or time changes nothing; another option does."""
    options = Options(layout=layout)
    one = open_checkpoint(model.write(tmp_path / "one"))
    two = open_checkpoint(model.write(tmp_path / "elsewhere" / "two"))
    shuffled = list(two.tensors.items())
    random.Random(1).shuffle(shuffled)
    two = replace(two, tensors=dict(shuffled), root=Path("/another"))
    plans = build_plan(one, options), build_plan(two, options)
    assert plans[0] == plans[1]
    assert plan_digest(plans[0], "1") == plan_digest(plans[1], "1")
    others = [
        plan_digest(plans[0], "2"),
        plan_digest(build_plan(one, replace(options, scale_rule="even")), "1"),
        plan_digest(build_plan(one, replace(options, scope=Scope.LINEAR)), "1"),
        plan_digest(build_plan(one, replace(options, base_model="org/name")), "1"),
    ]
    assert len({plan_digest(plans[0], "1"), *others}) == 5


def test_a_plan_reads_nothing() -> None:
    """A checkpoint whose folder does not exist can be planned."""
    plan = build_plan(moe(experts=8), Options())
    assert plan.quantized.tensors == 24
    assert sum(file.source_size for file in plan.files) == (
        plan.quantized.source_bytes + plan.copied.source_bytes
    )


def check_layout(checkpoint: Checkpoint, plan: Plan) -> None:
    """Each source tensor once; offsets without holes; names as the index has them."""
    seen = [item.source.name for file in plan.files for item in file.items]
    assert sorted(seen) == sorted(checkpoint.tensors)
    assert len({file.name for file in plan.files}) == len(plan.files)
    stored = {}
    for file in plan.files:
        end = 0
        for item in file.items:
            for output in item.outputs:
                assert output.begin == end
                assert output.name not in stored
                size = safetensors_format.tensor_size(output.dtype, output.shape)
                end = output.begin + size
                assert output.end == end
                stored[output.name] = file.name
        assert file.size == file.header_size + end
    assert plan.index["weight_map"] == dict(sorted(stored.items()))
    assert plan.total_size == plan.file_bytes - sum(file.header_size for file in plan.files)


# --------------------------------------------------------------------- experts per file


@pytest.mark.parametrize(
    ("experts", "per_file"),
    [
        (1, 1), (2, 1), (8, 1), (16, 1), (60, 15), (62, 31), (64, 1), (72, 9), (96, 3),
        (128, 2), (160, 5), (192, 3), (256, 4), (384, 6), (512, 8), (896, 14), (1024, 16),
    ],
)  # fmt: skip
def test_experts_per_file_without_a_cap(experts: int, per_file: int) -> None:
    """E / gcd(E, 64): every rank of a power-of-two degree that divides E owns whole files."""
    assert experts_per_file(experts, lambda _: 1, EXPERTS_CAP) == per_file
    for degree in (1, 2, 4, 8, 16, 32, 64):
        if experts % degree == 0:
            assert experts // degree % per_file == 0


@pytest.mark.parametrize(
    ("experts", "bytes_per_expert", "per_file"),
    [
        (896, EXPERT_BYTES // 896, 2),  # Kimi-K3: 448 files of 3.0 GiB
        (896, EXPERTS_CAP // 14, 14),
        (896, EXPERTS_CAP // 14 + 1, 7),
        (896, EXPERTS_CAP // 7 + 1, 2),
        (896, EXPERTS_CAP // 2 + 1, 1),
        (896, 2 * EXPERTS_CAP, 1),
        (384, EXPERTS_CAP // 4, 3),
        (384, EXPERTS_CAP // 6, 6),
        (60, EXPERTS_CAP // 10, 5),
    ],
)
def test_experts_per_file_within_the_cap(
    experts: int, bytes_per_expert: int, per_file: int
) -> None:
    """The largest divisor whose file stays within 5 GiB, at least one."""
    found = experts_per_file(experts, lambda r: r * bytes_per_expert, EXPERTS_CAP)
    assert found == per_file


def test_kimi_k3_makes_448_files_of_3_gib() -> None:
    """The reference model's numbers, from its published bytes."""
    size = EXPERT_BYTES // 896
    per_file = experts_per_file(896, lambda r: r * size, EXPERTS_CAP)
    assert 896 // per_file == 448
    assert 2.9 < per_file * size / GIB < 3.1


def test_the_rule_is_what_plans_follow() -> None:
    """E = 96: three experts a file; a cap below three leaves one; names are ranges."""
    checkpoint = moe(experts=96)
    plan = build_plan(checkpoint, Options())
    names = expert_files(plan)
    assert len(names) == 32
    assert names[0] == "model-experts-00000-00002.safetensors"
    assert names[-1] == "model-experts-00093-00095.safetensors"
    assert [file.experts for file in plan.files if file.experts][1] == (3, 5)
    largest = max(file.size for file in plan.files if file.experts)
    smaller = build_plan(checkpoint, Options(max_file_size=largest - 500))
    assert len(expert_files(smaller)) == 96
    check_layout(checkpoint, plan)
    check_layout(checkpoint, smaller)


def test_experts_per_file_by_hand() -> None:
    """Ranges of the given width, a shorter one last; bounds are checked."""
    checkpoint = moe(experts=16)
    plan = build_plan(checkpoint, Options(experts_per_file=5))
    spans = [file.experts for file in plan.files if file.experts]
    assert spans == [(0, 4), (5, 9), (10, 14), (15, 15)]
    check_layout(checkpoint, plan)
    assert len(expert_files(build_plan(checkpoint, Options(experts_per_file=16)))) == 1
    for wrong in (17, 0, -1):
        with pytest.raises(UsageError, match="expected 1 to 16"):
            build_plan(checkpoint, Options(experts_per_file=wrong))
    for layout in (Layout.LAYERS, Layout.SOURCE):
        with pytest.raises(UsageError, match="--layout experts"):
            build_plan(checkpoint, Options(experts_per_file=2, layout=layout))


def test_an_expert_above_the_cap_is_split_by_layers() -> None:
    """Whole layers in each part, every part within the cap, all parts of one range."""
    checkpoint = moe(experts=2, layers=10)
    whole = build_plan(checkpoint, Options())
    [first, _] = [file for file in whole.files if file.experts]
    plan = build_plan(checkpoint, Options(max_file_size=first.size // 3))
    parts = [file for file in plan.files if file.experts == (0, 0)]
    assert [file.name for file in parts] == [
        f"model-experts-00000-00000-part-{n:05d}-of-{len(parts):05d}.safetensors"
        for n in range(1, len(parts) + 1)
    ]
    assert len(parts) in (4, 5)
    assert all(file.size <= first.size // 3 for file in parts)
    layers = [file.layers for file in parts]
    assert [layer for low, high in layers for layer in range(low, high + 1)] == list(range(10))
    check_layout(checkpoint, plan)


# ------------------------------------------------------------------------ other layouts


def test_layers_layout() -> None:
    """One file for each layer, what has no layer in dense files, roles that say so."""
    checkpoint = moe(experts=4, layers=3)
    plan = build_plan(checkpoint, Options(layout=Layout.LAYERS))
    assert [(file.name, file.role, file.layers) for file in plan.files] == [
        ("model-dense-00001-of-00001.safetensors", FileRole.DENSE, None),
        *((f"model-layer-{n:05d}.safetensors", FileRole.MIXED, (n, n)) for n in range(3)),
    ]
    check_layout(checkpoint, plan)
    capped = build_plan(checkpoint, Options(layout=Layout.LAYERS, max_file_size=8000))
    assert all(file.size <= 8000 for file in capped.files)
    assert "model-layer-00000-part-00001-of-00003.safetensors" in {f.name for f in capped.files}
    check_layout(checkpoint, capped)


def test_source_layout() -> None:
    """The source's own files with what became of their tensors; a size cap contradicts it."""
    checkpoint = moe(experts=4, layers=3, files=3)
    plan = build_plan(checkpoint, Options(layout=Layout.SOURCE))
    assert [file.name for file in plan.files] == [f"{n}.safetensors" for n in range(3)]
    for file in plan.files:
        assert {item.source.file for item in file.items} == {file.name}
    check_layout(checkpoint, plan)
    with pytest.raises(UsageError, match="--max-file-size"):
        build_plan(checkpoint, Options(layout=Layout.SOURCE, max_file_size=GIB))


def test_dense_files_stay_below_5_gb() -> None:
    """The customary shard size, whatever the model's."""
    config = qwen3_moe_config(layers=1, experts=2, hidden=32, inner=32, vocab=4, heads=2)
    shapes = qwen3_moe_shapes(config, qk_norm=False)
    shapes |= {f"extra.{n}.weight": (1 << 15, 1 << 14) for n in range(12)}  # 1 GiB each
    plan = build_plan(checkpoint_of(shapes, config), Options())
    dense = [file for file in plan.files if file.role is FileRole.DENSE]
    assert [file.name for file in dense] == [
        f"model-dense-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)
    ]
    assert all(file.size <= DENSE_CAP for file in dense)


@settings(max_examples=40)
@given(
    experts=st.integers(1, 24),
    layers=st.integers(1, 4),
    files=st.integers(1, 3),
    cap=st.none() | st.integers(1, 60_000),
    layout=st.sampled_from([Layout.EXPERTS, Layout.LAYERS]),
    scope=st.sampled_from(list(Scope)),
)
def test_any_plan_is_whole_and_within_its_cap(
    *, experts: int, layers: int, files: int, cap: int | None, layout: Layout, scope: Scope
) -> None:
    """No tensor lost or doubled, no hole, and no file above the cap that could be split."""
    checkpoint = moe(experts=experts, layers=layers, files=files)
    plan = build_plan(checkpoint, Options(layout=layout, max_file_size=cap, scope=scope))
    check_layout(checkpoint, plan)
    for file in plan.files:
        if cap is not None and len(file.items) > 1:
            assert file.size <= cap


# -------------------------------------------------------------------- against real files

LIBRARY_DTYPE = {"BF16": "bfloat16", "U8": "uint8"}


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_what_was_planned_and_what_the_library_writes(
    layout: Layout, scope: Scope, model: Model, tmp_path
) -> None:
    """Sizes and headers as planned, and equal to the safetensors library's own bytes."""
    source = model.write(tmp_path / "source")
    plan = build_plan(open_checkpoint(source), Options(layout=layout, scope=scope))
    done = converted(source, tmp_path / "out", "--layout", layout, "--scope", scope)
    assert done.weights.keys() == {file.name for file in plan.files}
    assert done.artifact.index == plan.index
    for file in plan.files:
        path = tmp_path / "out" / file.name
        raw = path.read_bytes()
        assert len(raw) == file.size
        assert hashlib.sha256(raw[: file.header_size]).hexdigest() == file.header_sha256
        assert file.header_size % 8 == 0
        stored = read_tensors(path)
        alive = {name: np.frombuffer(tensor.data, np.uint8) for name, tensor in stored.items()}
        specs = {
            name: TensorSpec(
                dtype=LIBRARY_DTYPE[tensor.dtype],
                shape=list(tensor.shape),
                data_ptr=alive[name].ctypes.data,
                data_len=len(tensor.data),
            )
            for name, tensor in sorted(stored.items(), reverse=True)
        }
        assert serialize(specs, {"format": "pt"}) == raw


# --------------------------------------------------------------------------- ignore list

WORDS = st.sampled_from(
    ["model", "layers", "mlp", "experts", "gate", "up_proj", "w1", "q", "xlayers", "a+b", "(", "ü"]
)
MODULES = st.lists(WORDS | st.integers(0, 12).map(str) | st.sampled_from(["²", "٣", ""]),
                   min_size=1, max_size=6).map(".".join)  # fmt: skip


@settings(max_examples=300)
@given(kept=st.sets(MODULES, max_size=12), others=st.sets(MODULES, max_size=12))
def test_the_ignore_list_separates_any_names(kept: set[str], others: set[str]) -> None:
    """By the format's rule, every kept module is matched and no converted one."""
    packed = others - kept
    entries = ignore_entries(kept, packed)
    assert list(entries) == sorted(set(entries))
    for module in kept:
        assert any(matches(entry, module) for entry in entries)
    for module in packed:
        assert not any(matches(entry, module) for entry in entries)


def test_the_ignore_list_is_short() -> None:
    """Layers and experts are generalised, so that its length does not follow the model's."""
    layers, experts = range(40), range(64)
    kept = {f"model.layers.{n}.self_attn.{p}" for n in layers for p in ("q_proj", "o_proj")}
    kept |= {f"model.layers.{n}.mlp.gate" for n in layers} | {"lm_head"}
    kept |= {f"model.layers.0.mlp.{p}" for p in ("gate_proj", "up_proj")}
    packed = {f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in layers for e in experts}
    assert ignore_entries(kept, packed) == (
        "lm_head",
        r"re:.*layers\.\d+\.mlp\.gate$",
        r"re:.*layers\.\d+\.mlp\.gate_proj$",
        r"re:.*layers\.\d+\.mlp\.up_proj$",
        r"re:.*layers\.\d+\.self_attn\.o_proj$",
        r"re:.*layers\.\d+\.self_attn\.q_proj$",
    )


def test_the_ignore_list_keeps_layer_numbers_where_it_must() -> None:
    """Experts of one layer kept, of another packed: the layer's number stays in the pattern."""
    kept = {f"model.layers.3.mlp.experts.{e}.up_proj" for e in range(8)}
    packed = {f"model.layers.4.mlp.experts.{e}.up_proj" for e in range(8)}
    assert ignore_entries(kept, packed) == (r"re:.*layers\.3\.mlp\.experts\.\d+\.up_proj$",)


# ------------------------------------------------------------------------- the document


def test_the_json_document(model: Model, tmp_path) -> None:
    """The future index, the files with their sizes, and totals that add up."""
    source = model.configured(tie_word_embeddings=True)
    source = source.without(lambda name: name == "lm_head.weight").write(tmp_path / "source")
    plan = (
        shell("plan", source, "--json", "--ignore", "*.1.*v_proj", "--scope", "linear").ok().json()
    )
    assert plan.keys() == {
        "schema_version", "type", "recipe", "options", "num_experts", "totals", "ignore", "files",
        "index", "dropped", "notices",
    }  # fmt: skip
    assert (plan["schema_version"], plan["type"], plan["recipe"]) == (1, "plan", "qwen-moe")
    assert plan["num_experts"] == 8
    assert plan["index"].keys() == {"metadata", "weight_map"}
    files = {file["name"]: file for file in plan["files"]}
    assert set(plan["index"]["weight_map"].values()) == files.keys()
    assert plan["totals"]["file_bytes"] == sum(file["size"] for file in plan["files"])
    assert plan["totals"]["files"] == len(files)
    total = sum(plan["totals"][part]["output_bytes"] for part in ("quantized", "copied"))
    assert plan["index"]["metadata"]["total_size"] == total
    assert total == sum(file["size"] - file["header_size"] for file in plan["files"])
    assert sum(file["tensors"] for file in plan["files"]) == len(plan["index"]["weight_map"])
    assert [notice["code"] for notice in plan["notices"]] == ["extended-exclude"]
    assert "lm_head" in plan["ignore"]
    assert plan["options"]["exclude"] == ["*.1.*v_proj"]
    assert (
        shell("quantize", source, tmp_path / "out", "--dry-run", "--json").ok().json()["type"]
        == "plan"
    )
    assert not (tmp_path / "out").exists()


def test_the_table_names_every_file(model: Model, tmp_path) -> None:
    """Without --json, a line for each file and the sums below."""
    source = model.write(tmp_path / "source")
    text = shell("plan", source).ok().stdout
    for word in ("model-dense-00001-of-00001.safetensors", "model-experts-00007-00007.safetensors"):
        assert re.search(rf"^{re.escape(word)} ", text, re.MULTILINE)
    assert "48 weights" in text
    assert "17 tensors" in text


# ------------------------------------------------------------------------------ headers


MILLION = """
import sys
from mxconvert.model import Layout, Options
from mxconvert.plan.layout import Piece, estimated_header, group_pieces

name = "model.layers.60.mlp.experts.383.down_proj.weight"
header = estimated_header([name + "_packed", name + "_scale"])
count, options = int(sys.argv[1]), eval(sys.argv[2])
pieces = [
    Piece(
        key=str(n),
        source_file="model.safetensors",
        layer=n % 61,
        expert=None if n % 2 else n // 61 % 384,
        size=17,
        header=header,
    )
    for n in range(count)
]
groups = group_pieces(pieces, options)
print(sum(len(group.pieces) for group in groups), len(groups))
print(max(sum(p.header for p in group.pieces) for group in groups))
"""


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (1_200_000, "Options(experts_per_file=384)"),
        (150_000, "Options()"),
        (150_000, "Options(layout=Layout.LAYERS)"),
        (150_000, "Options(max_file_size=1 << 40)"),
    ],
)
def test_headers_of_a_million_tensors_stay_loadable(count: int, options: str) -> None:
    """Files are split long before readers refuse their headers, whatever the byte cap.

    In a process of its own, so that its memory is not counted against later conversions.
    """
    done = subprocess.run(
        [sys.executable, "-c", MILLION, str(count), options],
        capture_output=True,
        check=True,
        text=True,
        cwd=ROOT,
    )
    tensors, groups, largest = map(int, done.stdout.split())
    assert tensors == count
    assert largest <= HEADER_CAP < 10_000_000 < safetensors_format.HEADER_LIMIT
    if count > 1_000_000:
        assert groups > count * 200 // safetensors_format.HEADER_LIMIT


def test_the_estimate_bounds_the_real_header(model: Model, tmp_path) -> None:
    """What splitting relies on is never less than what is written."""
    plan = build_plan(open_checkpoint(model.write(tmp_path / "source")), Options())
    for file in plan.files:
        names = [output.name for item in file.items for output in item.outputs]
        assert file.header_size <= estimated_header(names) + 64


def test_a_header_beyond_the_limit_is_refused_before_writing(
    model: Model, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a layout cannot split, nothing is written that readers would refuse."""
    source = model.write(tmp_path / "source")
    header, base = read_header(source / "model-00002-of-00002.safetensors")
    assert len(header) > 30
    monkeypatch.setattr(safetensors_format, "HEADER_LIMIT", base)
    plan = build_plan(open_checkpoint(source), Options())
    assert max(file.header_size for file in plan.files) < base
    with pytest.raises(SourceError, match=str(base)) as refusal:
        build_plan(open_checkpoint(source), Options(layout=Layout.SOURCE))
    assert "--layout experts" in str(refusal.value.hint)
    with pytest.raises(SourceError, match="header of"):
        file_header(item for file in plan.files for item in file.items)


def test_names_that_json_escapes_count_in_full(tmp_path) -> None:
    """Quotes and control characters take more bytes than they have; plans stay exact."""
    model = bf16_model(layers=1, experts=1)
    extra = {f'"\\\x01{n}': t for n, t in list(model.tensors.items())[:3]}
    source = model.adding(extra).write(tmp_path / "source")
    done = converted(source, tmp_path / "out")
    assert extra.keys() <= done.artifact.tensors.keys()
    assert json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())


# ------------------------------------------------- names and layouts of dense families


def planned(shapes: Mapping[str, tuple[int, ...]], **config: Any) -> Plan:
    return build_plan(checkpoint_of(shapes, config), Options(scope=Scope.LINEAR))


def quantized(plan: Plan) -> set[str]:
    items = (item for file in plan.files for item in file.items)
    return {item.source.name for item in items if item.action is Action.QUANTIZE}


@pytest.mark.parametrize(
    "kept",
    [
        "shared.weight",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "encoder.relative_attention_bias.weight",
        "model.tok_embeddings.weight",
        "output.weight",
        "model.output.weight",
        "transformer.output_layer.weight",
        "v_head.summary.weight",
    ],
)
def test_embeddings_and_heads_by_any_name_are_kept(kept: str) -> None:
    """T5, MPNet, InternLM2, ChatGLM and reward models have names of their own for them."""
    linear = "encoder.layer.0.output.dense.weight"
    plan = planned({kept: (64, 64), linear: (64, 64)})
    assert quantized(plan) == {linear}
    assert any(matches(entry, kept.removesuffix(".weight")) for entry in plan.ignore)


def test_weights_stored_input_first_are_refused() -> None:
    """GPT-2's Conv1D is no Linear layer: loaders would drop what we make of it."""
    shapes = {
        "h.0.attn.c_attn.weight": (64, 192),
        "h.0.attn.c_attn.bias": (192,),
        "h.0.attn.c_proj.weight": (64, 64),
        "h.0.attn.c_proj.bias": (64,),
    }
    with pytest.raises(SourceError, match="c_attn") as caught:
        planned(shapes, model_type="gpt2")
    assert caught.value.code == "transposed-weight"


def test_weights_with_biases_are_not_taken_for_transposed() -> None:
    plan = planned({"layers.0.fc1.weight": (192, 64), "layers.0.fc1.bias": (192,)})
    assert quantized(plan) == {"layers.0.fc1.weight"}


@pytest.mark.parametrize(("stated", "ignored"), [({}, True), (True, True), (False, False)])
def test_head_that_is_not_stored_is_ignored_unless_it_is_said_to_be_untied(
    stated: Any, ignored: bool
) -> None:
    """Gemma and T5 tie by default, and their configs need not say so."""
    config = {} if stated == {} else {"tie_word_embeddings": stated}
    plan = planned({"model.layers.0.mlp.up_proj.weight": (64, 64)}, **config)
    assert ("lm_head" in plan.ignore) == ignored


def test_what_is_not_recognised_is_kept_and_named() -> None:
    """A matrix that nobody knows is not quantized on a guess, and can be included."""
    tensors = {
        "model.layers.0.mlp.up_proj.weight": (64, 64),
        "model.layers.0.mlp_res_proj.weight": (64, 64),
        "model.layers.0.self_attn.q_conv1d.weight": (64, 4),
        "connector.weight": (64, 64),
    }
    plan = planned(tensors)
    assert quantized(plan) == {"model.layers.0.mlp.up_proj.weight"}
    (message,) = [text for code, text in plan.notices if code == "unknown-kept"]
    assert "connector.weight" in message
    assert "mlp_res_proj" in message
    assert "conv1d" not in message  # its shape rules it out anyway
    assert not [code for code, _ in plan.notices if code == "ragged-input-dimension"]


def test_kept_experts_are_ignored_under_the_names_that_engines_ask_for() -> None:
    """vLLM asks about gate_proj, up_proj and down_proj of w1, w3 and w2."""
    tensors = {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{w}.weight": (64, 64)
        for layer in range(2)
        for expert in range(2)
        for w in ("w1", "w2", "w3")
    }
    config = {"model_type": "mixtral", "num_local_experts": 2}
    plan = build_plan(checkpoint_of(tensors, config), Options(exclude=("*layers.1.*",)))
    ignored = [re.compile(entry.removeprefix("re:")) for entry in plan.ignore]
    for word in ("w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"):
        kept = f"model.layers.1.block_sparse_moe.experts.0.{word}"
        assert any(regex.match(kept) for regex in ignored)
        assert not any(regex.match(kept.replace("layers.1", "layers.0")) for regex in ignored)
