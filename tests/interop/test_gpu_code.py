"""The GPU's kernels compiled for every target, on a machine that has none of them.

Instructions for each element are what bounds these kernels beside memory, so they are counted and
may only fall. The limits hold for Triton 3.6 and 3.9. Whether a GPU computes the right bits, only
one can say; see docs/explanation.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mxconvert_kernels import FloatType, ScaleRule
from mxconvert_kernels.gpu.kinds import KINDS, RULES, Layout, Variant

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]

triton = pytest.importorskip("triton")

BF16, F16, F32, E4M3, E5M2 = FloatType
MSE, EVEN, FLOOR, RCEIL = ScaleRule
PORTABLE, BF16X2, E2M1X2 = Variant
WARPS = 4
ISSUED = re.compile(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)[^;]*;")


class Target(NamedTuple):
    backend: str
    arch: int | str
    threads: int
    blocks: int


SM80, SM90, SM100 = (Target("cuda", arch, 32, 128) for arch in (80, 90, 100))
GFX942, GFX950 = (Target("hip", arch, 64, 256) for arch in ("gfx942", "gfx950"))
ALL = (SM80, SM90, SM100, GFX942, GFX950)


class Code(NamedTuple):
    """What a target executes for a whole program."""

    instructions: list[str]
    spilled: int
    elements: float
    """For each thread."""

    @property
    def per_element(self) -> float:
        return len(self.instructions) / self.elements

    def all_of(self, *words: str) -> list[str]:
        return [name for name in self.instructions if name.startswith(words)]


def compiled(
    kernel: Any, target: Target, arguments: dict[str, str], tmp_path: Path, **flags
) -> Code:
    """Compile a kernel ahead of time, its pointers aligned to 16 bytes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {**flags, "BLOCKS": target.blocks}
    source = ASTSource(
        fn=kernel,
        signature={**arguments, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs={
            (number,): [["tt.divisibility", 16]]
            for number, kind in enumerate(arguments.values())
            if kind.startswith("*")
        },
    )
    made = triton.compile(
        source,
        target=GPUTarget(target.backend, target.arch, target.threads),
        options={"num_warps": WARPS, "enable_fp_fusion": True},
    )
    elements = target.blocks * 32 / (WARPS * target.threads)
    if target.backend == "hip":
        text = made.asm["amdgcn"]
        lines = re.findall(r"^\t((?:[vs]|global|ds|buffer|flat)_\w+)", text, re.MULTILINE)
        spilled = int(re.search(r"vgpr_spill_count:\s*(\d+)", text)[1])
        return Code(lines, spilled, elements)
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([tool, binary], check=True, capture_output=True, text=True).stdout
    names = [name for name in ISSUED.findall(text) if name != "NOP"]
    return Code(names, len([n for n in names if n.startswith(("STL", "LDL"))]), elements)


def quantize(
    target: Target,
    tmp_path: Path,
    dtype: FloatType = BF16,
    rule: ScaleRule = EVEN,
    variant: Variant = PORTABLE,
    *,
    layout: Layout = Layout.FLAT,
    find: bool = False,
    total: bool = False,
) -> Code:
    from mxconvert_kernels.gpu import device

    scaled = dtype in (E4M3, E5M2)
    word = "*i16" if scaled and layout is not Layout.COLUMNS else "*u8" if scaled else "*i32"
    if layout is Layout.COLUMNS and dtype in (BF16, F16):
        word = "*i16"
    pointers = {
        "source": word, "factors": "*fp32" if scaled else "*u8", "packed": "*u8", "scales": "*u8",
        "found": "*i64", "sums": "*fp64",
    }  # fmt: skip
    numbers = ("blocks", "rows", "per_row", "row_pitch", "column_pitch")
    return compiled(
        device.quantize,
        target,
        {**pointers, **dict.fromkeys(numbers, "i32")},
        tmp_path,
        KIND=KINDS[dtype],
        RULE=RULES[rule],
        LAYOUT=int(layout),
        VARIANT=int(variant),
        SCALED=scaled,
        FIND=find,
        SUM=total,
    )


def test_this_process_compiles() -> None:
    """The interpreter's process is another one."""
    assert os.environ.get("TRITON_INTERPRET") != "1"


@pytest.mark.parametrize(
    ("target", "variant", "most"),
    [
        (SM80, PORTABLE, 16.0), (SM90, PORTABLE, 16.0), (SM100, PORTABLE, 13.5),
        (GFX942, PORTABLE, 15.0), (GFX950, PORTABLE, 15.0),
        (SM80, BF16X2, 9.5), (SM90, BF16X2, 8.5), (SM100, BF16X2, 8.5), (SM100, E2M1X2, 5.5),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, Variant) else str(value)[:40],
)  # fmt: skip
def test_bf16_in_few_instructions(
    target: Target, variant: Variant, most: float, tmp_path: Path
) -> None:
    """Rule `even` without statistics: what the memory of an H200 leaves time for is 18."""
    code = quantize(target, tmp_path, variant=variant)
    assert code.per_element <= most
    assert code.spilled == 0
    if target.backend == "cuda":
        loads, stores = code.all_of("LDG"), code.all_of("STG")
        assert loads == ["LDG.E.128"] * 4
        assert "STG.E.128" in stores
        assert not code.all_of("LDS", "STS", "BAR", "SHFL")
    else:
        assert len(code.all_of("global_load_dwordx4")) == 4
        assert code.all_of("global_store_dwordx4")


@pytest.mark.parametrize("dtype", [BF16, F16, F32, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("target", ALL, ids=lambda target: str(target.arch))
def test_every_source_compiles(target: Target, dtype: FloatType, tmp_path: Path) -> None:
    """Each with the search, and without spilling a register."""
    code = quantize(target, tmp_path, dtype, MSE)
    assert code.per_element <= {BF16: 35, F16: 35.5, F32: 46.5, E4M3: 43, E5M2: 37}[dtype]
    assert code.spilled == 0


@pytest.mark.parametrize("target", ALL, ids=lambda target: str(target.arch))
def test_everything_at_once(target: Target, tmp_path: Path) -> None:
    """The search, what is not finite and the error sums."""
    code = quantize(target, tmp_path, BF16, MSE, find=True, total=True)
    assert code.per_element <= 89
    assert code.spilled == 0


@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.COLUMNS], ids=["rows", "columns"])
@pytest.mark.parametrize("target", [SM90, GFX942], ids=["sm90", "gfx942"])
def test_slices_are_read_in_place(target: Target, layout: Layout, tmp_path: Path) -> None:
    code = quantize(target, tmp_path, layout=layout)
    assert code.spilled == 0
    assert code.per_element <= (21 if layout is Layout.ROWS else 25)


@pytest.mark.parametrize("target", ALL, ids=lambda target: str(target.arch))
def test_dequantize(target: Target, tmp_path: Path) -> None:
    from mxconvert_kernels.gpu import device

    arguments = {"packed": "*u8", "scales": "*u8", "output": "*i32", "blocks": "i32"}
    code = compiled(device.dequantize, target, arguments, tmp_path)
    assert code.per_element <= 13.5
    assert code.spilled == 0


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("target", [SM90, SM100, GFX942], ids=lambda target: str(target.arch))
def test_widen(target: Target, dtype: FloatType, tmp_path: Path) -> None:
    from mxconvert_kernels.gpu import device

    arguments = {
        "source": "*i16", "factors": "*fp32", "output": "*i32", "found": "*i64", "blocks": "i32",
    }  # fmt: skip
    code = compiled(device.widen, target, arguments, tmp_path, KIND=KINDS[dtype], FIND=False)
    assert code.per_element <= {E4M3: 34, E5M2: 27}[dtype]
    assert code.spilled == 0
