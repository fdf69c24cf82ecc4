"""Number formats, decoded and encoded slowly, by definition and without mxconvert.

Everything decodes to float64, which holds every value of every format here exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike, NDArray

Values = np.ndarray
BLOCK = 32
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes of the codes 0 to 7; bit 3 is the sign."""


def _bf16_bytes(values: NDArray[np.float64]) -> bytes:
    """Round to nearest, ties to even; NaN and infinities stay what they are."""
    single = values.astype("<f4")
    bits = single.view("<u4").astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    kept = np.where(np.isnan(single), (bits >> 16) | 0x40, rounded)
    return kept.astype("<u2").tobytes()


def _bf16_values(data: bytes) -> NDArray[np.float64]:
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)


def _e4m3_table() -> NDArray[np.float64]:
    """All 256 values of F8_E4M3 (finite variant: no infinities, NaN at 0x7F and 0xFF)."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    magnitude = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    magnitude[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -magnitude, magnitude)


E4M3 = _e4m3_table()


def _e4m3_bytes(values: NDArray[np.float64]) -> bytes:
    """Nearest code, ties to the even one; saturates at 448."""
    positive = E4M3[:127]
    distance = np.abs(np.abs(values).reshape(-1, 1) - positive)
    best = distance.min(axis=1, keepdims=True)
    ties = distance == best
    even = ties & (np.arange(127) % 2 == 0)
    code = np.where(even.any(axis=1), even.argmax(axis=1), ties.argmax(axis=1))
    sign = np.signbit(values).reshape(-1)
    return (code | (sign << 7)).astype(np.uint8).tobytes()


def _e5m2_values(data: bytes) -> NDArray[np.float64]:
    """F8_E5M2 is the upper half of an F16."""
    return (np.frombuffer(data, "u1").astype("<u2") << 8).view("<f2").astype(np.float64)


def _e5m2_bytes(values: NDArray[np.float64]) -> bytes:
    """Only values that E5M2 has."""
    halves = values.astype("<f2").view("<u2")
    assert not (halves & 0xFF).any()
    return (halves >> 8).astype("u1").tobytes()


def _e8m0_bytes(values: NDArray[np.float64]) -> bytes:
    """Only powers of two, and NaN."""
    mantissas, exponents = np.frexp(values)
    assert ((mantissas == 0.5) | np.isnan(values)).all()
    return np.where(np.isnan(values), 255, exponents - 1 + 127).astype("u1").tobytes()


_ENCODERS: dict[str, Callable[[NDArray[np.float64]], bytes]] = {
    "BF16": _bf16_bytes,
    "F16": lambda values: values.astype("<f2").tobytes(),
    "F32": lambda values: values.astype("<f4").tobytes(),
    "F64": lambda values: values.astype("<f8").tobytes(),
    "F8_E4M3": _e4m3_bytes,
    "F8_E5M2": _e5m2_bytes,
    "F8_E8M0": _e8m0_bytes,
    "I64": lambda values: values.astype("<i8").tobytes(),
    "U8": lambda values: values.astype("u1").tobytes(),
}
_DECODERS: dict[str, Callable[[bytes], Values]] = {
    "BF16": _bf16_values,
    "F16": lambda data: np.frombuffer(data, "<f2").astype(np.float64),
    "F32": lambda data: np.frombuffer(data, "<f4").astype(np.float64),
    "F64": lambda data: np.frombuffer(data, "<f8"),
    "F8_E4M3": lambda data: E4M3[np.frombuffer(data, "u1")],
    "F8_E5M2": _e5m2_values,
    "F8_E8M0": lambda data: e8m0(np.frombuffer(data, "u1")),
    "I64": lambda data: np.frombuffer(data, "<i8").astype(np.float64),
    "U8": lambda data: np.frombuffer(data, "u1").astype(np.float64),
}


def encode(values: ArrayLike, dtype: str) -> bytes:
    """Return ``values`` as the stored bytes of a safetensors dtype."""
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinities are values here
        return _ENCODERS[dtype](np.asarray(values, np.float64))


def decode(data: bytes, dtype: str, shape: Sequence[int]) -> NDArray[np.float64]:
    """Return stored bytes of a safetensors dtype as exact float64 values."""
    with np.errstate(invalid="ignore"):
        return _DECODERS[dtype](data).reshape(tuple(shape))


def e8m0(scales: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Powers of two with bias 127; byte 255 is NaN."""
    values = np.ldexp(1.0, scales.astype(np.int64) - 127)
    return np.where(scales == 255, np.nan, values)


def unpack_codes(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Split ``[..., K/2]`` bytes into ``[..., K]`` codes; the low nibble is the even element."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def decode_mxfp4(packed: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float64]:
    """RefDec: the value of every element of an MXFP4 weight.

    Args:
        packed: U8 ``[..., K/2]``, two E2M1 codes a byte, low nibble first.
        scales: U8 ``[..., K/32]``, E8M0, one for each block of 32 along the last axis.
    """
    codes = unpack_codes(packed)
    magnitudes = E2M1[codes & 7]
    signed = np.where(codes & 8, -magnitudes, magnitudes)
    return signed * np.repeat(e8m0(scales), BLOCK, axis=-1)
