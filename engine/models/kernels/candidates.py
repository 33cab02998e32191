"""Kernels that find the few tokens of each row of logits that filters can leave.

The largest of a row are found by chunks of the vocabulary: at least k tokens are as likely as the
k-th largest of the chunks' maxima, so what is below that is not among the k largest. The orders of
`engine.models.kernels.logits` are compared.
"""

from typing import Any

import numpy as np
from numba import carray

from engine.models.kernels.arithmetic import as_float32, as_float64, as_int32, as_int64, as_uint16
from engine.models.kernels.compiling import FIRST, MAX_ARGUMENTS, Kernel, compiled, own_rows
from engine.models.kernels.logits import (
    LOWEST_ORDER,
    logit_of,
    order_of,
    row_at,
    weigh_chunk,
    widen_chunk,
)

CHUNK = 64
"""Tokens of which the largest is found first."""

_HALF_BITS = np.int32(16)


@compiled
def _largest_of_chunk(row: int, is_wide: int, first: int, count: int) -> Any:
    largest = LOWEST_ORDER
    if is_wide:
        wide = carray(as_int32(row + 4 * first), (count,))
        for i in range(count):
            largest = max(largest, order_of(wide[i]))
    else:
        narrow = carray(as_uint16(row + 2 * first), (count,))
        for i in range(count):
            largest = max(largest, order_of(np.int32(np.int32(narrow[i]) << _HALF_BITS)))
    return largest


def _find_maxima(pointer: Any) -> None:
    arguments = carray(pointer, (MAX_ARGUMENTS,))
    own = arguments[FIRST:]
    logits, is_wide, target, rows, vocab = own[0], own[1], own[2], own[3], own[4]
    chunks = (vocab + CHUNK - 1) // CHUNK
    maxima = carray(as_int32(target), (rows, chunks))
    first_row, end = own_rows(arguments, rows)
    for row in range(first_row, end):
        values = row_at(logits, is_wide, vocab, row)
        for index in range(chunks):
            count = min(CHUNK, vocab - index * CHUNK)
            maxima[row, index] = _largest_of_chunk(values, is_wide, index * CHUNK, count)


find_maxima = Kernel(_find_maxima)
"""Of logits [rows, vocab] in bfloat16, or in float32 if what follows is 1; target [rows, chunks] in
int32, the orders of the chunks' largest logits; rows, vocab."""


def _collect(pointer: Any) -> None:
    arguments = carray(pointer, (MAX_ARGUMENTS,))
    own = arguments[FIRST:]
    logits, is_wide, rows, vocab, capacity = own[0], own[1], own[2], own[3], own[4]
    chunks = (vocab + CHUNK - 1) // CHUNK
    maxima = carray(as_int32(own[5]), (rows, chunks))
    floors = carray(as_int32(own[6]), (rows,))
    counts = carray(as_int64(own[7]), (rows,))
    tokens = carray(as_int64(own[8]), (rows, capacity))
    found = carray(as_float32(own[9]), (rows, capacity))
    first_row, end = own_rows(arguments, rows)
    held = own[10] + 4 * CHUNK * first_row
    chunk, bits = carray(as_float32(held), (CHUNK,)), carray(as_int32(held), (CHUNK,))
    for row in range(first_row, end):
        values = row_at(logits, is_wide, vocab, row)
        taken = 0
        for index in range(chunks):
            if maxima[row, index] >= floors[row] and taken < capacity:
                count = min(CHUNK, vocab - index * CHUNK)
                widen_chunk(values, is_wide, index * CHUNK, count, chunk)
                for i in range(count):
                    if order_of(bits[i]) >= floors[row] and taken < capacity:
                        tokens[row, taken] = index * CHUNK + i
                        found[row, taken] = chunk[i]
                        taken += 1
        counts[row] = taken


collect = Kernel(_collect)
"""Of logits [rows, vocab] in bfloat16, or in float32 if what follows is 1; rows, vocab, capacity;
maxima [rows, chunks] in int32; floors [rows] in int32, the least orders to collect; target counts
[rows] in int64; target tokens [rows, capacity] in int64 and logits [rows, capacity] in float32, in
the order of the vocabulary, of which more than the capacity are left out; scratch [rows, chunk] in
float32."""


def _add_up(pointer: Any) -> None:
    arguments = carray(pointer, (MAX_ARGUMENTS,))
    own = arguments[FIRST:]
    logits, is_wide, rows, vocab = own[0], own[1], own[2], own[3]
    largest, scale = carray(as_int32(own[4]), (rows,)), carray(as_float32(own[5]), (rows,))
    totals = carray(as_float64(own[6]), (rows,))
    first_row, end = own_rows(arguments, rows)
    chunk = carray(as_float32(own[7] + 4 * CHUNK * first_row), (CHUNK,))
    for row in range(first_row, end):
        values = row_at(logits, is_wide, vocab, row)
        total = 0.0
        for first in range(0, vocab, CHUNK):
            count = min(CHUNK, vocab - first)
            widen_chunk(values, is_wide, first, count, chunk)
            total += np.float64(weigh_chunk(count, logit_of(largest[row]), scale[row], chunk))
        totals[row] = total


add_up = Kernel(_add_up)
"""Of logits [rows, vocab] in bfloat16, or in float32 if what follows is 1; rows, vocab; the order
[rows] in int32 of each row's largest; scales [rows] in float32 that logits are multiplied with;
target [rows] in float64, what weights, of which the largest is 1, add up to; scratch [rows, chunk]
in float32."""
