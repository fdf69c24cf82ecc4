"""Magnitude bits of any type as float32 bits, by steps that neither round nor flush."""

from __future__ import annotations

from mxconvert_kernels.lanes import FLOAT32_MANTISSA_BITS, LIFT_EXPONENT, SUBNORMAL_TO_LIFTED
from mxconvert_kernels.llvm.emit import F32, I32, Value
from mxconvert_kernels.spec import SCALE_BIAS, FloatType


def widen(magnitudes: Value, dtype: FloatType) -> Value:
    """Magnitude bits in `dtype` as float32 bits; subnormals of F16 become normal numbers."""
    if dtype is FloatType.F32:
        return magnitudes
    wide = magnitudes.resize(I32)
    if dtype is FloatType.F16:
        return _widen_f16(wide)
    return wide << (FLOAT32_MANTISSA_BITS - dtype.layout.mantissa_bits)


def _widen_f16(half: Value) -> Value:
    layout = FloatType.F16.layout
    rebias = SCALE_BIAS - layout.bias
    shifted = half << (FLOAT32_MANTISSA_BITS - layout.mantissa_bits)
    normal = shifted + (rebias << FLOAT32_MANTISSA_BITS)
    # A subnormal's mantissa under the exponent of the smallest normal number is too large by
    # that number; the difference is a normal float32.
    smallest = float(2.0 ** (1 - layout.bias))
    one_too_many = (shifted | ((rebias + 1) << FLOAT32_MANTISSA_BITS)).bitcast_lanes(F32)
    subnormal = one_too_many.fsub(smallest).bitcast_lanes(I32)
    return half.compare("u<", 1 << layout.mantissa_bits).select(subnormal, normal)


def lift_lanes(magnitudes: Value) -> Value:
    """Multiply 32-bit lanes of tiny values by 2 ** 64, without arithmetic on subnormals."""
    as_integers = magnitudes.sitofp(F32).bitcast_lanes(I32)
    from_subnormal = as_integers - (SUBNORMAL_TO_LIFTED << FLOAT32_MANTISSA_BITS)
    from_normal = magnitudes + (LIFT_EXPONENT << FLOAT32_MANTISSA_BITS)
    is_subnormal = magnitudes.compare("u<", 1 << FLOAT32_MANTISSA_BITS)
    lifted = is_subnormal.select(from_subnormal, from_normal)
    return magnitudes.compare("==", 0).select(magnitudes, lifted)
