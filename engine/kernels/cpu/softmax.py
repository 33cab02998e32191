"""A vectorized online softmax over tiles of keys: earlier sums are rescaled to a new maximum.

A row has one sum per lane, and its maximum in all lanes. Masked keys contribute to neither; a tile
without visible keys changes nothing. Score addresses are those of a block, four vectors.
"""

import math
from typing import Any

import numpy as np

from engine.kernels.cpu.avx512 import (
    LANES,
    LINE,
    floats_at,
    lanes_between,
    largest_lane,
    maximum,
    minimum,
    multiply_add,
    nearest_whole,
    spread,
    store_floats,
    store_rounded,
    sum_of_lanes,
    times_power_of_two,
    where,
)
from engine.kernels.cpu.compiling import compiled, compiled_once

LOWEST = -3e38
"""Maximum without any scores."""
_LOWEST = np.float32(LOWEST)
_LEAST_POWER = np.float32(-200)
"""Its power of two is zero in float32."""
_MOST = np.float32(100)
"""Adding one to its power of two has no effect in float32."""
_T0, _T1, _T2, _T3, _T4, _T5 = (np.float32(math.log(2) ** n / math.factorial(n)) for n in range(6))
"""Taylor coefficients of 2**x for |x| <= 1/2, accurate to 3e-6."""
_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)
_VECTORS = 4
"""Vectors per block of columns."""


@compiled
def _power_of_two(x: Any) -> Any:
    """Return 2**x for a vector with values up to `_MOST`."""
    x = maximum(x, spread(_LEAST_POWER))
    whole = nearest_whole(x)
    rest = x - whole
    result = multiply_add(spread(_T5), rest, spread(_T4))
    result = multiply_add(result, rest, spread(_T3))
    result = multiply_add(result, rest, spread(_T2))
    result = multiply_add(result, rest, spread(_T1))
    result = multiply_add(result, rest, spread(_T0))
    return times_power_of_two(result, whole)


@compiled_once
def cap_scores(scores: int, cap: Any, power: Any) -> None:
    """Cap a block's scores s to cap * tanh(s * scale / cap).

    `power` is 2 * log2(e) * scale / cap.
    """
    for vector in range(_VECTORS):
        at = scores + LINE * vector
        x = minimum(floats_at(at) * spread(power), spread(_MOST))
        tanh = spread(_ONE) - spread(_TWO) / (_power_of_two(x) + spread(_ONE))
        store_floats(at, spread(cap) * tanh)


@compiled_once
def raise_maximum(scores: int, maximums: int, first: int, end: int) -> None:
    """Raise each lane's maximum by a block's scores of the keys from `first` to `end`."""
    largest = floats_at(maximums)
    for vector in range(_VECTORS):
        seen = lanes_between(first - LANES * vector, end - LANES * vector)
        values = where(seen, floats_at(scores + LINE * vector), spread(_LOWEST))
        largest = maximum(values, largest)
    store_floats(maximums, largest)


@compiled_once
def settle_maximum(lanes: int, settled: int, sums: int, factor: int, scale: Any) -> None:
    """Reduce the lanes' maximums to the row's, and rescale its sums.

    Addresses are of the lanes' maximums, the row's maximum, which is replaced, its sums, and the
    target of the rescaling factor; `scale` is the multiplier of scores.
    """
    largest = largest_lane(floats_at(lanes))
    scaling = _power_of_two((floats_at(settled) - largest) * spread(scale))
    store_floats(settled, largest)
    store_floats(factor, scaling)
    store_floats(sums, floats_at(sums) * scaling)


@compiled_once
def store_weights(
    scores: int, weights: int, settled: int, sums: int, scale: Any, first: int, end: int
) -> None:
    """Convert a block's scores to bfloat16 weights, adding them to the sums before rounding.

    Keys outside of `first` to `end` have weight zero.
    """
    largest, total = floats_at(settled), floats_at(sums)
    for vector in range(_VECTORS):
        power = (floats_at(scores + LINE * vector) - largest) * spread(scale)
        seen = lanes_between(first - LANES * vector, end - LANES * vector)
        weight = where(seen, _power_of_two(power), spread(_ZERO))
        total = total + weight
        store_rounded(weights + LINE // 2 * vector, weight)
    store_floats(sums, total)


@compiled_once
def add_scaled(sums: int, factor: int, added: int) -> None:
    """Multiply a block of sums by a factor and add another block."""
    scaling = floats_at(factor)
    for vector in range(_VECTORS):
        at = LINE * vector
        store_floats(sums + at, multiply_add(floats_at(sums + at), scaling, floats_at(added + at)))


@compiled_once
def store_averages(weighted: int, sums: int, vectors: int, target: int) -> None:
    """Divide weighted sums, `vectors` vectors, by the sum of weights; store them in bfloat16."""
    total = sum_of_lanes(floats_at(sums))
    for vector in range(vectors):
        average = floats_at(weighted + LINE * vector) / total
        store_rounded(target + LINE // 2 * vector, average)
