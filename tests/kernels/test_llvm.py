"""The compiled kernels: other targets, and threads that flush subnormals."""

from __future__ import annotations

import ctypes
import platform
import re

import numpy as np
import pytest
from mxconvert_kernels import FloatType, ScaleRule, get_backend
from mxconvert_kernels.llvm import dequantize as dequantize_kernel
from mxconvert_kernels.llvm import jit
from mxconvert_kernels.llvm import quantize as quantize_kernel
from mxconvert_kernels.llvm import scan as scan_kernel

from tests.kernels.blocks import assert_same, dequantize, quantize, spread_bits, sum_errors
from tests.kernels.interpreter import INTERPRETING

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
TARGETS = [
    pytest.param(jit.Target(triple, cpu), registers, id=cpu)
    for triple, cpu, registers in (
        (X86, "x86-64", "xmm"),
        (X86, "x86-64-v3", "ymm"),
        (X86, "x86-64-v4", "zmm"),
        (ARM, "neoverse-n1", r"v\d+\.8h"),
        (ARM, "neoverse-v2", r"v\d+\.8h"),
    )
]


@pytest.mark.parametrize(("target", "registers"), TARGETS)
def test_code_for_other_processors(target, registers, dtype):
    """LLVM turns the vectors into each target's own, with no call into a runtime library."""
    modules = [
        quantize_kernel.build(dtype, search=search, sums=sums)
        for search in (False, True)
        for sums in (False, True)
    ]
    modules += [dequantize_kernel.build(dtype), scan_kernel.build(dtype)]
    for module in modules:
        assembly = jit.emit_assembly(module, target)
        assert re.search(registers, assembly)
        assert not re.search(r"^\s+(callq?|blr?)\s", assembly, re.MULTILINE)


@pytest.mark.parametrize("cpu", ["znver4", "sapphirerapids"])
def test_code_with_instructions_of_its_own(cpu):
    """Processors with AVX512-BF16 get two instructions that LLVM would not choose."""
    module = quantize_kernel.build(FloatType.BF16, search=True, sums=True, native=True)
    assembly = jit.emit_assembly(module, jit.Target(X86, cpu))
    assert "vdpbf16ps" in assembly
    assert "vpermw" in assembly
    assert not re.search(r"^\s+(callq?)\s", assembly, re.MULTILINE)


def test_a_broken_module_is_refused():
    with pytest.raises(RuntimeError):
        jit.compile_for_host("define i64 @f() { ret i32 0 }")


def test_an_old_llvmlite_is_refused(monkeypatch):
    from mxconvert_kernels.llvm.backend import LlvmBackend

    monkeypatch.setattr(jit.binding, "llvm_version_info", (15, 0, 7))
    with pytest.raises(RuntimeError, match=r"llvmlite is too old: expected 0\.45, found"):
        LlvmBackend()


FLUSH_MODES = 0x8040
"""MXCSR: flush results to zero, treat subnormal operands as zero."""
MXCSR_MODULE = """
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
define i64 @swap(ptr %new, ptr %old) {
  call void @llvm.x86.sse.stmxcsr(ptr %old)
  call void @llvm.x86.sse.ldmxcsr(ptr %new)
  ret i64 0
}
"""


@pytest.fixture
def flush_subnormals():
    """Sets the modes that some numerical libraries leave behind on a thread."""
    if INTERPRETING:
        pytest.skip("GPUs have no such modes")
    if platform.machine() != "x86_64":
        pytest.skip("sets the modes of an x86-64 processor")
    compiled = jit.compile_for_host(MXCSR_MODULE)
    swap = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)(compiled.address)
    before, scratch = ctypes.c_uint32(), ctypes.c_uint32()
    flushing = ctypes.c_uint32(0x1F80 | FLUSH_MODES)
    swap(ctypes.addressof(flushing), ctypes.addressof(before))
    yield
    swap(ctypes.addressof(before), ctypes.addressof(scratch))
    assert scratch.value & FLUSH_MODES == FLUSH_MODES


def test_flushing_changes_nothing(flush_subnormals, fast_backend, dtype, rule):
    tiny = np.float32(2.0**-120) * np.full(1, 2.0**-20, np.float32)
    assert tiny[0] == 0, "the modes are not in force"
    tops = [*range(6), 28, 29, 30]
    bits = np.concatenate([spread_bits(dtype, 60, seed=top, top=top) for top in tops])
    expected = quantize(get_backend("reference"), bits, dtype, rule)
    found = quantize(fast_backend, bits, dtype, rule)
    assert_same(found, expected)
    expected_sums, found_sums = (
        sum_errors(backend, bits, dtype, rule)
        for backend in (get_backend("reference"), fast_backend)
    )
    assert found_sums.flushed == expected_sums.flushed
    assert found_sums.max_abs_err == expected_sums.max_abs_err
    assert found_sums.sum_err2 == pytest.approx(expected_sums.sum_err2, rel=1e-5, abs=0)
    np.testing.assert_array_equal(
        dequantize(fast_backend, found.packed, found.scales, dtype),
        dequantize(get_backend("reference"), found.packed, found.scales, dtype),
    )


def test_all_zero_and_subnormal_tensors_are_not_slow():
    """They take a path of their own, which must not fall behind by more than a small factor."""
    from time import perf_counter

    backend = get_backend("llvm")
    normal = spread_bits(FloatType.BF16, 40_000, seed=15, top=127)

    def seconds(bits: np.ndarray) -> float:
        runs = []
        for _ in range(7):
            start = perf_counter()
            quantize(backend, bits, FloatType.BF16, ScaleRule.MSE)
            runs.append(perf_counter() - start)
        return min(runs)

    limit = 10 * seconds(normal)
    assert seconds(np.zeros_like(normal)) < limit
    assert seconds(np.full_like(normal, 3)) < limit
