"""Scaled FP8 weights, dequantized by definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.support.numbers import decode, encode

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from numpy.typing import NDArray

    from tests.support.container import Tensor

BLOCK = 128
SCALE_NAMES = ("{name}_scale_inv", "{name}_scale", "{module}.scale")


def is_scaled(tensor: Tensor) -> bool:
    """Whether a tensor is an FP8 matrix, which needs a scale."""
    return tensor.dtype in {"F8_E4M3", "F8_E5M2"} and len(tensor.shape) == 2 and bool(tensor.data)


def scale_name(name: str, tensors: Container[str]) -> str:
    """Return the name of the scales of an FP8 weight."""
    module = name.removesuffix(".weight")
    names = [pattern.format(name=name, module=module) for pattern in SCALE_NAMES]
    return next(name for name in names if name in tensors)


def dequantized(
    tensors: Mapping[str, Tensor], name: str, block: tuple[int, int] = (BLOCK, BLOCK)
) -> NDArray[np.float64]:
    """Return values times scales, each product rounded to float32 once.

    A product of 4 and 24 bits is exact in float64, so one rounding is all there is.
    """
    weight, scale = tensors[name], tensors[scale_name(name, tensors)]
    values = decode(weight.data, weight.dtype, weight.shape)
    factors = decode(scale.data, scale.dtype, scale.shape)
    rows, columns = weight.shape
    if factors.size == 1:
        factors = factors.reshape(1, 1)
        block = (rows, columns)
    elif factors.size == rows and scale.shape[0] == rows:
        factors = factors.reshape(rows, 1)
        block = (1, columns)
    return one_rounding(values * spread(factors, block, weight.shape))


def spread(
    factors: NDArray[np.float64], block: tuple[int, int], shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Return the factor of each element."""
    tall = np.repeat(np.repeat(factors, block[0], axis=0), block[1], axis=1)
    return tall[: shape[0], : shape[1]]


def one_rounding(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round to float32."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(np.float64)


def bf16_of(values: NDArray[np.float64]) -> bytes:
    """Return float32 values as BF16."""
    return encode(values, "BF16")
