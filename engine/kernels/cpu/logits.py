"""Operations of kernels on a row of logits, in bfloat16 or in float32.

Logits are compared as integers of the same order, so that a vectorized maximum is well-defined even
with NaNs.
"""

from typing import Any

import numpy as np
from torch import Tensor

from engine.kernels.cpu.arithmetic import (
    bfloat16s,
    exponential,
    float32s,
    float_bits,
    float_of,
    widen,
)
from engine.kernels.cpu.compiling import compiled, threads_for

_SHARED_VALUES = 1 << 17
"""Minimum logits for which several threads are used; about 20 us for one thread."""
_ZERO = np.float32(0)
_LEAST = np.float32(-87)
"""Tokens whose logits are further below the largest have no weight."""
LOWEST_ORDER = np.int32(-(2**31))
_SIGN, _MAGNITUDE = np.int32(31), np.int32(2**31 - 1)


def threads_for_logits(logits: Tensor) -> int:
    """Return the number of threads among which to divide the rows of logits."""
    return threads_for(len(logits), logits.numel(), _SHARED_VALUES)


@compiled
def order_of(bits: Any) -> Any:
    """Return an integer with the order of the float32 with these bits, given as an int32."""
    return bits ^ ((bits >> _SIGN) & _MAGNITUDE)


@compiled
def order_of_logit(logit: Any) -> Any:
    """Return the order of a float32."""
    return order_of(np.int32(float_bits(logit)))


@compiled
def logit_of(order: Any) -> Any:
    """Return the float32 of an order."""
    return float_of(np.uint32(order ^ ((order >> _SIGN) & _MAGNITUDE)))


@compiled
def row_at(logits: int, is_wide: int, vocab: int, row: int) -> int:
    """Return the address of a row."""
    return logits + (4 if is_wide else 2) * row * vocab


@compiled
def widen_chunk(row: int, is_wide: int, first: int, count: int, chunk: Any) -> None:
    """Copy logits of a row to float32."""
    if is_wide:
        wide = float32s(row + 4 * first, count)
        for i in range(count):
            chunk[i] = wide[i]
    else:
        narrow = bfloat16s(row + 2 * first, count)
        for i in range(count):
            chunk[i] = widen(narrow[i])


@compiled
def weigh_chunk(count: int, largest: Any, scale: Any, chunk: Any) -> Any:
    """Replace logits by weights; return their sum."""
    total = _ZERO
    for i in range(count):
        power = (chunk[i] - largest) * scale
        weight = exponential(power)
        weight = weight if power > _LEAST else _ZERO
        chunk[i] = weight
        total += weight
    return total
