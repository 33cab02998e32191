"""Arithmetic for kernels: memory views, bfloat16 conversion, and a vectorizable exponential."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types

from engine.kernels.cpu.compiling import compiled
from engine.kernels.cpu.intrinsics import I16, I32, I64, instruction

_NAN = np.uint16(0x7FC0)
_ROUND, _ODD, _HALF_BITS = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)
_LOWEST, _HIGHEST = np.float32(-87.3), np.float32(88.3)
"""Range in which the exponential is a normal float32."""
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C7, _C6, _C5 = (
    np.float32(1.9875691500e-4),
    np.float32(1.3981999507e-3),
    np.float32(8.3334519073e-3),
)
_C4, _C3, _C2 = (
    np.float32(4.1665795894e-2),
    np.float32(1.6666665459e-1),
    np.float32(5.0000001201e-1),
)
_ONE, _HALF = np.float32(1), np.float32(0.5)
_BIAS, _MANTISSA = np.int32(127), np.int32(23)


def _memory(kind: Any, as_llvm: Any) -> Any:
    """Return a function that returns an array of a given shape at an address."""

    @instruction(types.CPointer(kind), types.int64)
    def pointer(builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, as_llvm.as_pointer())

    @compiled
    def values(address: int, shape: Any) -> Any:
        return carray(pointer(address), shape)

    return values


bfloat16s = _memory(types.uint16, I16)
"""Elements are the bits of bfloat16s."""
int32s = _memory(types.int32, I32)
int64s = _memory(types.int64, I64)
float32s = _memory(types.float32, ir.FloatType())
float64s = _memory(types.float64, ir.DoubleType())


@instruction(types.float32, types.uint32)
def float_of(builder: Any, bits: Any) -> Any:
    """Return the float32 with these bits."""
    return builder.bitcast(bits, ir.FloatType())


@instruction(types.uint32, types.float32)
def float_bits(builder: Any, value: Any) -> Any:
    """Return the bits of a float32."""
    return builder.bitcast(value, I32)


@compiled
def widen(bits: Any) -> Any:
    """Convert bfloat16 bits to float32."""
    return float_of(np.uint32(bits) << _HALF_BITS)


@compiled
def narrow(value: Any) -> Any:
    """Round a float32 to the nearest bfloat16, ties to even."""
    bits = float_bits(value)
    rounded = np.uint16((bits + _ROUND + ((bits >> _HALF_BITS) & _ODD)) >> _HALF_BITS)
    return rounded if value == value else _NAN


@compiled
def exponential(x: Any) -> Any:
    """Return e to the x in float32, accurate to two units in the last place.

    x is clamped to the range in which the result is normal. The polynomial is that of the Cephes
    library's expf.
    """
    if x < _LOWEST:
        x = _LOWEST
    if x > _HIGHEST:
        x = _HIGHEST
    power = np.floor(x * _LOG2_E + _HALF)
    rest = x - power * _LN2_HIGH - power * _LN2_LOW
    sum_ = ((((_C7 * rest + _C6) * rest + _C5) * rest + _C4) * rest + _C3) * rest + _C2
    sum_ = sum_ * rest * rest + rest + _ONE
    return sum_ * float_of(np.uint32((np.int32(power) + _BIAS) << _MANTISSA))


@compiled
def silu(x: Any) -> Any:
    """Return x * sigmoid(x)."""
    return x / (_ONE + exponential(-x))


@compiled
def bfloat16_row(address: int, row: int, width: int) -> Any:
    """Return a row of a contiguous bfloat16 matrix."""
    return bfloat16s(address + 2 * row * width, width)
