"""A kernel that samples a token from each row of logits with top-k, top-p and min-p.

Only tokens that can pass the filters, the *candidates* of a row, are weighed. At least k tokens are
as likely as the k-th largest of the maxima of the vocabulary's chunks, so anything below it is not
among the k largest. A cutoff is found by bisection of the logits' order, with a pass over the
candidates for each bit: nothing is sorted, and equal logits are cut off together.
"""

from typing import Any, NamedTuple

import numpy as np

from engine.kernels.cpu.arithmetic import float32s, float64s, int32s, int64s
from engine.kernels.cpu.compiling import Kernel, arguments_of, compiled, thread_shares
from engine.kernels.cpu.logits import (
    LOWEST_ORDER,
    logit_of,
    order_of,
    order_of_logit,
    row_at,
    weigh_chunk,
    widen_chunk,
)

CHUNK = 64
"""Tokens per chunk for finding maxima."""
_NUCLEUS = 256
"""Minimum candidates tried for top-p before all tokens are."""
BLOCK = 128
"""Candidates whose weights are summed in float32 before adding the sum in float64."""
_ZERO = np.float32(0)
_LOWEST_FINITE = np.int32(-0x7F800000)
"""Order of the smallest finite number; anything below is masked."""


@compiled
def _count_from(orders: Any, count: int, least: Any) -> int:
    """Count orders >= `least`."""
    found = 0
    for i in range(count):
        found += orders[i] >= least
    return found


@compiled
def _mass_from(orders: Any, weights: Any, count: int, least: Any) -> float:
    """Sum the weights of orders >= `least`; arrays must be padded to whole blocks."""
    total = 0.0
    for block in range((count + BLOCK - 1) // BLOCK):
        part = _ZERO
        for i in range(BLOCK):
            place = block * BLOCK + i
            part += weights[place] if orders[place] >= least else _ZERO
        total += np.float64(part)
    return total


@compiled
def _middle(below: int, above: int, is_wide: int) -> int:
    """Return an order between two, or the lower one if there is none.

    Orders of bfloat16 only differ in the upper 16 bits, so the others are zero in the result.
    """
    middle = (below + above) >> 1
    if is_wide:
        return middle
    middle = (middle >> 16) << 16
    if middle <= below:
        middle += 1 << 16
    return middle if middle < above else below


@compiled
def _cut(
    orders: Any,
    weights: Any,
    count: int,
    wanted: float,
    low: int,
    high: int,
    by_mass: int,
    is_wide: int,
) -> int:
    """Return the largest order in a range with enough candidates at or above it; else `low`.

    `wanted` is a mass if `by_mass`, otherwise a count.
    """
    below, above = low, high + 1
    middle = _middle(below, above, is_wide)
    while middle > below:
        if by_mass:
            found = _mass_from(orders, weights, count, np.int32(middle))
        else:
            found = np.float64(_count_from(orders, count, np.int32(middle)))
        if found >= wanted:
            below = middle
        else:
            above = middle
        middle = _middle(below, above, is_wide)
    return below


@compiled
def _find_maxima(row: int, is_wide: int, vocab: int, chunk: Any, bits: Any, maxima: Any) -> Any:
    """Store the order of each chunk's largest logit; return the overall largest."""
    largest = LOWEST_ORDER
    for index in range((vocab + CHUNK - 1) // CHUNK):
        count = min(CHUNK, vocab - index * CHUNK)
        widen_chunk(row, is_wide, index * CHUNK, count, chunk)
        highest = LOWEST_ORDER
        for i in range(count):
            highest = max(highest, order_of(bits[i]))
        maxima[index] = highest
        largest = max(largest, highest)
    return np.int32(largest)


@compiled
def _collect(
    row: int,
    is_wide: int,
    vocab: int,
    least: Any,
    maxima: Any,
    orders: Any,
    tokens: Any,
    chunk: Any,
    bits: Any,
) -> int:
    """Collect tokens with orders >= `least`, in vocabulary order; return their number."""
    taken = 0
    for index in range((vocab + CHUNK - 1) // CHUNK):
        if maxima[index] >= least:
            count = min(CHUNK, vocab - index * CHUNK)
            widen_chunk(row, is_wide, index * CHUNK, count, chunk)
            for i in range(count):
                order = np.int32(order_of(bits[i]))
                orders[taken] = order
                tokens[taken] = index * CHUNK + i
                taken += order >= least
    return taken


@compiled
def _weigh(count: int, largest: Any, scale: Any, orders: Any, weights: Any) -> None:
    """Compute candidates' weights, 1 for the largest, and pad the last block."""
    for i in range(count):
        weights[i] = logit_of(orders[i])
    weigh_chunk(count, largest, scale, weights)
    for i in range(count, (count + BLOCK - 1) // BLOCK * BLOCK):
        orders[i], weights[i] = LOWEST_ORDER, _ZERO


@compiled
def _mass_of_row(row: int, is_wide: int, vocab: int, largest: Any, scale: Any, chunk: Any) -> float:
    """Sum the weights of all tokens."""
    total = 0.0
    for first in range(0, vocab, CHUNK):
        count = min(CHUNK, vocab - first)
        widen_chunk(row, is_wide, first, count, chunk)
        total += np.float64(weigh_chunk(count, largest, scale, chunk))
    return total


@compiled
def _search(orders: Any, weights: Any, count: int, least: Any, uniform: float) -> int:
    """Return where the running sum of weights passes its share, or else the last candidate."""
    goal = _mass_from(orders, weights, count, least) * uniform
    found, before = 0, 0.0
    for i in range(count):
        if orders[i] >= least and weights[i] > _ZERO:
            found = i
            before += np.float64(weights[i])
            if before > goal:
                break
    return found


class _Arguments(NamedTuple):
    """The kernel's arguments: numbers and addresses."""

    logits: int
    """[rows, vocab] bfloat16, or float32 if `is_wide`."""
    is_wide: int
    rows: int
    vocab: int
    scales: int
    """[rows] float32, multiplied with logits."""
    uniforms: int
    """[rows] float64"""
    top_k: int
    """[rows] int64; 0 for all."""
    top_p: int
    """[rows] float64"""
    depths: int
    """[rows] float32: maximum distance of a logit below the largest of its row."""
    target: int
    """[rows] int64: sampled tokens; -1 if the largest logit is not finite."""
    scratch: int
    """[threads, stride] float32"""
    stride: int
    """At least `scratch_size`."""


_arguments = arguments_of(len(_Arguments._fields))


def _draw(pointer: Any) -> None:
    own = _Arguments(*_arguments(pointer))
    logits, is_wide, rows, vocab = own.logits, own.is_wide, own.rows, own.vocab
    scales, uniforms = float32s(own.scales, rows), float64s(own.uniforms, rows)
    top_k, top_p = int64s(own.top_k, rows), float64s(own.top_p, rows)
    depths, drawn = float32s(own.depths, rows), int64s(own.target, rows)
    _, thread, threads = thread_shares(pointer)
    chunks, room = (vocab + CHUNK - 1) // CHUNK, vocab + BLOCK
    held = own.scratch + 4 * own.stride * thread
    chunk, bits = float32s(held, CHUNK), int32s(held, CHUNK)
    maxima = int32s(held + 4 * CHUNK, chunks)
    held += 4 * (CHUNK + chunks)
    orders, tokens = int32s(held, room), int32s(held + 4 * room, room)
    weights = float32s(held + 8 * room, room)
    for row in range(rows * thread // threads, rows * (thread + 1) // threads):
        values = row_at(logits, is_wide, vocab, row)
        high = _find_maxima(values, is_wide, vocab, chunk, bits, maxima)
        largest, scale, k = logit_of(high), scales[row], top_k[row]
        if not np.isfinite(largest):
            drawn[row] = -1
            continue
        lowest = max(_LOWEST_FINITE, order_of_logit(largest - depths[row]))
        is_bounded = k > 0 or np.isfinite(depths[row])
        least, wanted = lowest, k if is_bounded else _NUCLEUS
        if 0 < wanted <= chunks:
            least = _cut(maxima, weights, chunks, wanted, lowest, high, 0, is_wide)
        total = 0.0
        if not is_bounded:
            total = _mass_of_row(values, is_wide, vocab, largest, scale, chunk)
        while True:
            count = _collect(values, is_wide, vocab, least, maxima, orders, tokens, chunk, bits)
            _weigh(count, largest, scale, orders, weights)
            mass = _mass_from(orders, weights, count, least)
            if is_bounded or least == lowest or mass >= top_p[row] * total:
                break
            least = lowest
        if not is_bounded:
            mass = total
        elif k > 0:
            least = _cut(orders, weights, count, k, least, high, 0, is_wide)
            mass = _mass_from(orders, weights, count, least)
        if top_p[row] < 1:
            mass *= top_p[row]
            least = _cut(orders, weights, count, mass, least, high, 1, is_wide)
        drawn[row] = tokens[_search(orders, weights, count, least, uniforms[row])]


draw = Kernel(_draw, len(_Arguments._fields))


def scratch_size(vocab: int) -> int:
    """Return the scratch values needed per thread."""
    return CHUNK + -(-vocab // CHUNK) + 3 * (vocab + BLOCK)
