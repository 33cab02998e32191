"""A kernel that draws a token of each row of logits.

The search has two levels, chunks of the vocabulary first, so that only sums of chunks are kept of a
row. Sums of chunks are added up in 64 bits.
"""

from typing import Any

import numpy as np
from numba import carray

from engine.models.kernels.arithmetic import (
    as_float32,
    as_float64,
    as_int32,
    as_int64,
    as_uint16,
    exponential,
    float_of,
    widen,
)
from engine.models.kernels.compiling import FIRST, MAX_ARGUMENTS, Kernel, compiled, own_rows

CHUNK = 128
"""Tokens whose weights are added up first."""

_ZERO = np.float32(0)
_LEAST = np.float32(-87)
"""Tokens whose logits are further below the largest are never drawn."""
_LOWEST_ORDER = np.int32(-(2**31))
_SIGN, _MAGNITUDE = np.int32(31), np.int32(2**31 - 1)


@compiled
def _widen_chunk(row: int, is_wide: int, first: int, count: int, chunk: Any) -> None:
    """Copy logits of a row to float32."""
    if is_wide:
        wide = carray(as_float32(row + 4 * first), (count,))
        for i in range(count):
            chunk[i] = wide[i]
    else:
        narrow = carray(as_uint16(row + 2 * first), (count,))
        for i in range(count):
            chunk[i] = widen(narrow[i])


@compiled
def _largest(row: int, is_wide: int, vocab: int, chunk: Any, bits: Any) -> Any:
    """Return the largest logit of a row; zero if nothing may be drawn."""
    # Vectors find the largest integer whatever there is among floats that are no numbers.
    largest = _LOWEST_ORDER
    for first in range(0, vocab, CHUNK):
        count = min(CHUNK, vocab - first)
        _widen_chunk(row, is_wide, first, count, chunk)
        for i in range(count):
            order = bits[i] ^ ((bits[i] >> _SIGN) & _MAGNITUDE)
            largest = max(largest, order)
    value = float_of(np.uint32(largest ^ ((largest >> _SIGN) & _MAGNITUDE)))
    return value if np.isfinite(value) else _ZERO


@compiled
def _weigh_chunk(count: int, largest: Any, scale: Any, chunk: Any) -> Any:
    """Turn logits into weights; return their sum."""
    total = _ZERO
    for i in range(count):
        power = (chunk[i] - largest) * scale
        weight = exponential(power)
        weight = weight if power > _LEAST else _ZERO
        chunk[i] = weight
        total += weight
    return total


@compiled
def _first_above(values: Any, count: int, before: float, target: float) -> tuple[int, float]:
    """Return where the sum of values passes a target, else the last one that adds anything, and
    the sum before it."""
    found, found_before = 0, before
    for i in range(count):
        if values[i] > _ZERO:
            found, found_before = i, before
            before += np.float64(values[i])
            if before > target:
                break
    return found, found_before


def _draw(pointer: Any) -> None:
    arguments = carray(pointer, (MAX_ARGUMENTS,))
    own = arguments[FIRST:]
    logits, is_wide, scales, uniforms, target = own[0], own[1], own[2], own[3], own[4]
    scratch, stride, rows, vocab = own[5], own[6], own[7], own[8]
    scale, uniform = carray(as_float32(scales), (rows,)), carray(as_float64(uniforms), (rows,))
    drawn = carray(as_int64(target), (rows,))
    first_row, end = own_rows(arguments, rows)
    chunks = (vocab + CHUNK - 1) // CHUNK
    held = scratch + 4 * stride * first_row
    chunk, bits = carray(as_float32(held), (CHUNK,)), carray(as_int32(held), (CHUNK,))
    sums = carray(as_float32(held + 4 * CHUNK), (chunks,))
    for row in range(first_row, end):
        values = logits + (4 if is_wide else 2) * row * vocab
        largest = _largest(values, is_wide, vocab, chunk, bits)
        total = 0.0
        for index in range(chunks):
            count = min(CHUNK, vocab - index * CHUNK)
            _widen_chunk(values, is_wide, index * CHUNK, count, chunk)
            sums[index] = _weigh_chunk(count, largest, scale[row], chunk)
            total += np.float64(sums[index])
        goal = total * uniform[row]
        index, before = _first_above(sums, chunks, 0.0, goal)
        count = min(CHUNK, vocab - index * CHUNK)
        _widen_chunk(values, is_wide, index * CHUNK, count, chunk)
        _weigh_chunk(count, largest, scale[row], chunk)
        found, _ = _first_above(chunk, count, before, goal)
        drawn[row] = index * CHUNK + found


draw = Kernel(_draw)
"""Of logits [rows, vocab] in bfloat16, or in float32 if what follows is 1; scales [rows] in float32
that they are multiplied with; uniform numbers [rows] in float64; target [rows] int64; scratch
[rows, stride] in float32, of which each thread uses what begins at its first row; stride, at least
a chunk and a number for each chunk; rows, vocab."""
