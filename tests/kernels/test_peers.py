"""The kernels against torchao and compressed-tensors, byte for byte where they agree by design."""

from __future__ import annotations

import numpy as np
import pytest
from mxconvert_kernels import FloatType, ScaleRule

from tests.kernels.blocks import quantize, spread_bits

pytestmark = [
    pytest.mark.interop,
    pytest.mark.xdist_group("interop"),
    pytest.mark.filterwarnings("default"),
]


def plain_blocks(dtype: FloatType) -> np.ndarray:
    """Normal values far from both ends of the range, half of them at or next to ties.

    torchao gives an exact negative zero code 8, so there is none.
    """
    blocks = [spread_bits(dtype, 400, seed=top, top=top) for top in (60, 100, 120, 127, 128, 190)]
    bits = np.concatenate(blocks)
    rng = np.random.default_rng(16)
    gaussian = (rng.standard_normal((4000, 32)) * 0.02).astype(np.float32).view(np.uint32)
    if dtype is FloatType.BF16:
        gaussian = (gaussian >> 16).astype(np.uint16)
    bits = np.concatenate([bits, gaussian])
    assert (bits & dtype.layout.magnitude_mask).all()
    return bits


def to_torch(bits: np.ndarray, dtype: FloatType):
    import torch

    if dtype is FloatType.BF16:
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(bits.view(np.float32))


@pytest.mark.parametrize("dtype", [FloatType.BF16, FloatType.F32])
@pytest.mark.parametrize("rule", [ScaleRule.FLOOR, ScaleRule.EVEN, ScaleRule.RCEIL])
def test_torchao(fast_backend, dtype, rule):
    pytest.importorskip("torchao")
    import torch
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    bits = plain_blocks(dtype)
    if rule is ScaleRule.RCEIL and dtype is FloatType.F32:
        # One step above 6 scales torchao's amax / 6 rounds down to the scale, and 6 saturates.
        amax = (bits & dtype.layout.magnitude_mask).max(axis=1)
        bits = bits[amax & 0x7FFFFF != 0x400001]
    mode = ScaleCalculationMode[rule.name]
    scales, packed = to_mx(to_torch(bits, dtype), torch.float4_e2m1fn_x2, 32, mode)
    found = quantize(fast_backend, bits, dtype, rule)
    np.testing.assert_array_equal(found.scales, scales.view(torch.uint8).numpy().ravel())
    np.testing.assert_array_equal(
        found.packed, packed.view(torch.uint8).numpy().reshape(found.packed.shape)
    )


def test_compressed_tensors(fast_backend):
    pytest.importorskip("compressed_tensors")
    import torch
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

    bits = plain_blocks(FloatType.BF16)
    weight = to_torch(bits, FloatType.BF16)
    args = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="group",
        group_size=32,
        symmetric=True,
        scale_dtype=torch.uint8,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    exponents = generate_mx_scales(weight.abs().amax(-1, keepdim=True))
    state = {"weight": weight, "weight_scale": 2.0 ** (exponents.float() - 127)}
    theirs = MXFP4PackedCompressor.compress(state, scheme)
    found = quantize(fast_backend, bits, FloatType.BF16, ScaleRule.EVEN)
    np.testing.assert_array_equal(found.scales, theirs["weight_scale"].numpy().ravel())
    np.testing.assert_array_equal(found.packed, theirs["weight_packed"].numpy())
