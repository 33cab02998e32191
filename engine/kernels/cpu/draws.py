"""A kernel that samples a token from each row of logits.

The search has two levels, chunks of the vocabulary first, so that only the sums of chunks are
stored per row. Sums of chunks are accumulated in float64.
"""

from typing import Any

import numpy as np

from engine.kernels.cpu.arithmetic import float32s, float64s, int32s, int64s
from engine.kernels.cpu.compiling import Kernel, arguments_of, compiled, thread_rows
from engine.kernels.cpu.logits import (
    LOWEST_ORDER,
    logit_of,
    order_of,
    row_at,
    weigh_chunk,
    widen_chunk,
)

CHUNK = 128
"""Tokens whose weights are summed first."""

_ZERO = np.float32(0)
_arguments = arguments_of(9)


@compiled
def _largest(row: int, is_wide: int, vocab: int, chunk: Any, bits: Any) -> Any:
    """Return the largest logit of a row; zero if it is not finite."""
    largest = LOWEST_ORDER
    for first in range(0, vocab, CHUNK):
        count = min(CHUNK, vocab - first)
        widen_chunk(row, is_wide, first, count, chunk)
        for i in range(count):
            largest = max(largest, order_of(bits[i]))
    value = logit_of(largest)
    return value if np.isfinite(value) else _ZERO


@compiled
def _first_above(values: Any, count: int, before: float, target: float) -> tuple[int, float]:
    """Return where the running sum passes a target, and the sum before that.

    Otherwise the last positive value is taken.
    """
    found, found_before = 0, before
    for i in range(count):
        if values[i] > _ZERO:
            found, found_before = i, before
            before += np.float64(values[i])
            if before > target:
                break
    return found, found_before


def _draw(pointer: Any) -> None:
    logits, is_wide, scales, uniforms, target, scratch, stride, rows, vocab = _arguments(pointer)
    scale, uniform = float32s(scales, rows), float64s(uniforms, rows)
    drawn = int64s(target, rows)
    first_row, end = thread_rows(pointer, rows)
    chunks = (vocab + CHUNK - 1) // CHUNK
    held = scratch + 4 * stride * first_row
    chunk, bits = float32s(held, CHUNK), int32s(held, CHUNK)
    sums = float32s(held + 4 * CHUNK, chunks)
    for row in range(first_row, end):
        values = row_at(logits, is_wide, vocab, row)
        largest = _largest(values, is_wide, vocab, chunk, bits)
        total = 0.0
        for index in range(chunks):
            count = min(CHUNK, vocab - index * CHUNK)
            widen_chunk(values, is_wide, index * CHUNK, count, chunk)
            sums[index] = weigh_chunk(count, largest, scale[row], chunk)
            total += np.float64(sums[index])
        goal = total * uniform[row]
        index, before = _first_above(sums, chunks, 0.0, goal)
        count = min(CHUNK, vocab - index * CHUNK)
        widen_chunk(values, is_wide, index * CHUNK, count, chunk)
        weigh_chunk(count, largest, scale[row], chunk)
        found, _ = _first_above(chunk, count, before, goal)
        drawn[row] = index * CHUNK + found


draw = Kernel(_draw, 9)
"""Arguments: logits [rows, vocab] in bfloat16, or in float32 if the next is 1; scales [rows] in
float32, multiplied with logits; uniform numbers [rows] in float64; target [rows] int64; scratch
[rows, stride] in float32, of which each thread uses the part from its first row; stride, at least a
chunk plus the number of chunks; rows, vocab."""
