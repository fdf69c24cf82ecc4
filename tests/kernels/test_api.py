"""Buffers, errors, threads, and the choice of a backend."""

from __future__ import annotations

import mmap
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from mxconvert_kernels import (
    BackendUnavailableError,
    FloatType,
    NonFinite,
    ScaleRule,
    explain_backend,
    get_backend,
)

from tests.kernels.blocks import (
    UNSIGNED,
    assert_same,
    dequantize,
    quantize,
    random_bits,
    spread_bits,
    to_floats,
)

BF16, EVEN, MSE = FloatType.BF16, ScaleRule.EVEN, ScaleRule.MSE


def read_only_mmap(data: bytes, tmp_path) -> mmap.mmap:
    path = tmp_path / "data"
    path.write_bytes(data)
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 7])
def test_any_alignment_and_any_kind_of_buffer(backend, dtype, offset, tmp_path):
    bits = spread_bits(dtype, 5, seed=11)
    expected = quantize(get_backend("numpy"), bits, dtype, MSE)
    mapped = read_only_mmap(b"x" * offset + bits.tobytes() + b"y", tmp_path)
    packed, scales = bytearray(offset + 5 * 16 + 1), bytearray(offset + 5 + 1)
    with memoryview(mapped) as whole, whole[offset:-1] as src:
        outputs = memoryview(packed)[offset:-1], memoryview(scales)[offset:-1]
        backend.quantize(src, dtype, MSE, *outputs)
        assert backend.scan(src, dtype) == NonFinite(0, -1)
    mapped.close()
    assert packed == bytes(offset) + expected.packed.tobytes() + b"\0"
    assert scales == bytes(offset) + expected.scales.tobytes() + b"\0"
    out = bytearray(offset + bits.nbytes + 1)
    backend.dequantize(*outputs, dtype, memoryview(out)[offset:-1])
    decoded = dequantize(get_backend("numpy"), expected.packed, expected.scales, dtype)
    assert out == bytes(offset) + decoded.tobytes() + b"\0"


def test_float_arrays_are_buffers_too(backend):
    values = np.linspace(-3, 3, 64, dtype=np.float32).reshape(2, 32)
    found = quantize(backend, values, FloatType.F32, MSE)
    assert_same(found, quantize(backend, values.view(np.uint32), FloatType.F32, MSE))
    out = np.zeros((2, 32), np.float16)
    backend.dequantize(found.packed, found.scales, FloatType.F16, out)
    exact = to_floats(dequantize(backend, found.packed, found.scales, FloatType.F32), FloatType.F32)
    np.testing.assert_array_equal(out, exact)


def test_nothing_is_fine(backend, dtype, rule):
    assert backend.quantize(b"", dtype, rule, bytearray(), bytearray()) == NonFinite(0, -1)
    backend.dequantize(b"", b"", dtype, bytearray())
    assert backend.scan(b"", dtype) == NonFinite(0, -1)
    empty = np.zeros((0, 32), UNSIGNED[dtype])
    assert not quantize(backend, empty, dtype, rule).nonfinite


@pytest.mark.parametrize("blocks", [1, 2, 3, 1023, 1024, 1025, 2049])
def test_any_number_of_blocks(fast_backend, dtype, blocks):
    bits = spread_bits(dtype, blocks, seed=12)
    bits[-1, -1] = dtype.layout.infinity
    other = get_backend("numpy" if fast_backend.name == "llvm" else "llvm")
    found = quantize(fast_backend, bits, dtype, MSE)
    assert_same(found, quantize(other, bits, dtype, MSE))
    assert found.nonfinite == NonFinite(1, blocks * 32 - 1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((63, 16, 1), "src: expected a multiple of 64 bytes .*BF16.* found 63 bytes"),
        ((32, 8, 1), "src: expected a multiple of 64 bytes"),
        ((128, 31, 2), "packed: expected 32 bytes for 64 elements, found 31 bytes"),
        ((128, 33, 2), "packed: expected 32 bytes"),
        ((128, 32, 1), "scales: expected 2 bytes for 64 elements, found 1 bytes"),
        ((0, 0, 1), "scales: expected 0 bytes"),
    ],
)
def test_wrong_sizes(backend, sizes, message):
    src, packed, scales = (bytearray(size) for size in sizes)
    with pytest.raises(ValueError, match=message):
        backend.quantize(src, BF16, EVEN, packed, scales)
    assert not any(packed)
    with pytest.raises(ValueError, match=message.replace("src", "out")):
        backend.dequantize(packed, scales, BF16, src)


def test_scan_refuses_part_of_an_element(backend):
    with pytest.raises(ValueError, match="src: expected a multiple of 2 bytes for BF16, found 3"):
        backend.scan(b"abc", BF16)


def test_outputs_must_be_writable(backend):
    src, packed, scales = bytes(64), bytearray(16), bytearray(1)
    with pytest.raises(ValueError, match="packed: expected a writable buffer"):
        backend.quantize(src, BF16, EVEN, bytes(packed), scales)
    with pytest.raises(ValueError, match="scales: expected a writable buffer"):
        backend.quantize(src, BF16, EVEN, packed, bytes(scales))
    frozen = np.zeros(32, np.uint16)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="out: expected a writable buffer"):
        backend.dequantize(packed, scales, BF16, frozen)
    backend.quantize(frozen, BF16, EVEN, packed, scales)


def test_buffers_must_be_contiguous(backend):
    strided = np.zeros((32, 4), np.uint16)[:, ::2]
    with pytest.raises(ValueError, match="src: expected a C-contiguous buffer"):
        backend.quantize(strided, BF16, EVEN, bytearray(32), bytearray(2))
    with pytest.raises(ValueError, match="src: expected a C-contiguous buffer"):
        backend.scan(strided, BF16)
    with pytest.raises(TypeError):
        backend.scan("text", BF16)


def test_a_failed_call_leaves_buffers_free(backend):
    packed = bytearray(15)
    with pytest.raises(ValueError, match="packed"):
        backend.quantize(bytes(64), BF16, EVEN, packed, bytearray(1))
    packed.append(0)  # would raise BufferError if a view were still held
    backend.quantize(bytes(64), BF16, EVEN, packed, bytearray(1))
    packed.clear()


@pytest.mark.parametrize("name", ["llvm", "numpy"])
@pytest.mark.parametrize("rule", [MSE, EVEN])
def test_threads(dtype, rule, name):
    """First use from many threads at once, each on its own part of one tensor."""
    from mxconvert_kernels.llvm.backend import LlvmBackend

    backend = LlvmBackend() if name == "llvm" else get_backend(name)
    bits = random_bits(dtype, 16 * 500, seed=13)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda p: quantize(backend, p, dtype, rule), np.split(bits, 16)))
    whole = quantize(get_backend("numpy"), bits, dtype, rule)
    np.testing.assert_array_equal(np.concatenate([part.packed for part in found]), whole.packed)
    np.testing.assert_array_equal(np.concatenate([part.scales for part in found]), whole.scales)
    assert sum(part.nonfinite.count for part in found) == whole.nonfinite.count


def test_llvm_allocates_nothing_to_speak_of(dtype):
    backend = get_backend("llvm")
    bits = spread_bits(dtype, 20_000, seed=14)
    packed, scales = np.zeros(bits.size // 2, np.uint8), np.zeros(len(bits), np.uint8)
    backend.quantize(bits, dtype, MSE, packed, scales)
    tracemalloc.start()
    backend.quantize(bits, dtype, MSE, packed, scales)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 8192


def test_nonfinite_is_false_when_there_is_none():
    assert not NonFinite(0, -1)
    assert NonFinite(1, 0)


def test_sizes_of_float_types():
    assert [dtype.itemsize for dtype in FloatType] == [2, 2, 4, 1, 1]
    assert FloatType("BF16") is BF16


def test_backends_are_made_once(backend):
    assert get_backend(backend.name) is backend
    assert explain_backend(backend.name).startswith(f"{backend.name}: ")


def test_auto_is_llvm():
    assert get_backend() is get_backend("llvm")
    assert "compiled for" in explain_backend()


def test_unknown_backend():
    with pytest.raises(
        ValueError, match="expected auto, llvm, numpy, reference or triton, found 'cuda'"
    ):
        get_backend("cuda")
    with pytest.raises(ValueError, match="'cuda'"):
        explain_backend("cuda")


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, 'kernels')\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_loads_neither_numpy_nor_llvmlite():
    code = "import mxconvert_kernels; print([m for m in sys.modules if m in ('numpy', 'llvmlite')])"
    assert run_python(code) == "[]\n"


def test_the_oracle_needs_no_numpy():
    code = """
sys.modules["numpy"] = sys.modules["llvmlite"] = None
from mxconvert_kernels import *
packed, scales = bytearray(16), bytearray(1)
src = b"\\x80\\x3f" * 32
print(get_backend("reference").quantize(src, FloatType.BF16, ScaleRule.MSE, packed, scales))
print(packed.hex(), scales[0])
"""
    assert run_python(code) == f"NonFinite(count=0, first=-1)\n{'66' * 16} 125\n"


def test_without_llvmlite_numpy_stands_in():
    code = """
sys.modules["llvmlite"] = None
from mxconvert_kernels import *
print(get_backend().name)
print(explain_backend())
print(explain_backend("llvm"))
try:
    get_backend("llvm")
except BackendUnavailableError as error:
    print(error)
"""
    name, auto, llvm, error = run_python(code).splitlines()
    assert name == "numpy"
    assert auto.startswith("numpy: llvmlite cannot be imported (")
    assert llvm == error == auto.removeprefix("numpy: ")


def test_unavailable_is_a_runtime_error():
    assert issubclass(BackendUnavailableError, RuntimeError)
