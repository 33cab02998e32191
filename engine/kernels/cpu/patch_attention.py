"""An attention kernel for prompts and decodes, reading directly from blocks of the KV cache.

A patch is some tokens of a row with the queries of the heads that share a KV head. Keys are
processed in tiles that begin at multiples of a fixed number of positions, so a query is computed in
the same order in any patch, prompt chunk or step. Scores and sums are float32; weights are rounded
to bfloat16, like keys and values.

Scores sum over pairs of head dimensions, so keys are transposed; results sum over pairs of keys, so
values of adjacent keys are interleaved.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types

from engine.kernels.cpu.arithmetic import bfloat16s, float32s, float_of, int32s, int64s
from engine.kernels.cpu.avx512 import LANES, LINE, interleave, transposition
from engine.kernels.cpu.compiling import Kernel, arguments_of, compiled, thread_shares
from engine.kernels.cpu.intrinsics import instruction
from engine.kernels.cpu.pair_sums import GROUP, PAIR_BYTES, SUMS_BYTES, WIDTH, adder
from engine.kernels.cpu.softmax import (
    LOWEST,
    add_scaled,
    cap_scores,
    raise_maximum,
    settle_maximum,
    store_averages,
    store_weights,
)

STRIP = LANES
"""Keys transposed together."""
CHUNK = LANES
"""Values interleaved together; head sizes are multiples of it."""

_transpose = transposition(LANES, PAIR_BYTES)
_transpose_half = transposition(LANES // 2, PAIR_BYTES)
"""It reads beyond the half, but within the same token."""

KEYS = 128
"""Keys per tile: packed, with their values, they fit the L2 cache."""
_QUERIES = 96
"""Approximate queries per patch, which share the cost of packing a tile."""
NO_WINDOW = 1 << 40
_ZERO, _ONE, _LOWEST = np.float32(0), np.float32(1), np.float32(LOWEST)
_SCORES_BYTES = GROUP * SUMS_BYTES
"""Bytes of scores of a group of queries for a block of columns."""


_add_up = adder()


class _Arguments(NamedTuple):
    """The kernel's arguments: numbers and addresses."""

    queries: int
    """[tokens, group * kv_heads, head_dim] bfloat16, tokens `query_stride` values apart"""
    cache: int
    """[blocks, block_size, 2, kv_heads, head_dim] bfloat16, of a layer"""
    target: int
    """[tokens, group * kv_heads * head_dim] bfloat16"""
    sinks: int
    """[group * kv_heads] float32, divided by the scale of scores; or 0"""
    tables: int
    """[rows, table_width] int32"""
    patches: int
    """[patches, 4] int64: row, first token, its position, number of tokens"""
    begins: int
    """[shares + 1] int64: the first task of each share, and the end"""
    memory: int
    """[shares, share_bytes]"""
    query_stride: int
    table_width: int
    block_size: int
    share_bytes: int
    window: int
    """Keys that a query attends to, including its own; `NO_WINDOW` for all"""
    scale: int
    """Bits of the scale of scores times log2(e); without the scale if capped"""
    cap: int
    """Bits of `softmax.cap_scores`'s arguments, with `power`; 0 without a cap"""
    power: int


_arguments = arguments_of(len(_Arguments._fields))


class _Shape(NamedTuple):
    """The shape of heads, constant in a kernel."""

    group: int
    head_dim: int
    padded: int
    """Columns of results, in whole blocks."""
    row_bytes: int
    """Bytes per token in a layer's cache."""


class _Scores(NamedTuple):
    """Score modifications and window."""

    window: int
    scale: float
    cap: float
    power: float


class _Memory(NamedTuple):
    """A thread's scratch memory: sizes in bytes, or addresses."""

    found: int
    """Addresses of a tile's keys."""
    keys: int
    """Packed, like the values."""
    values: int
    queries: int
    results: int
    """Weighted sums of values."""
    sums: int
    """Sums of weights, per lane; the maximums too."""
    maximums: int
    scores: int
    """For a group of queries and a tile, as all that follow."""
    weights: int
    parts: int
    """A tile's contribution to the results."""
    lanes: int
    """Maximums of a query, per lane."""
    factors: int
    """Factors that rescale earlier sums."""


_ADDRESSES = types.UniTuple(types.int64, len(_Memory._fields))


@instruction(_ADDRESSES, types.int64, _ADDRESSES)
def _places(builder: Any, start: Any, offsets: Any) -> Any:
    """Return addresses from a start and offsets."""
    for i in range(len(_Memory._fields)):
        place = builder.add(start, builder.extract_value(offsets, i))
        offsets = builder.insert_value(offsets, place, i)
    return offsets


def fits(head_dim: int) -> bool:
    """Return whether the kernel supports this head size."""
    return head_dim % CHUNK == 0


def tokens_of_patch(group: int) -> int:
    """Return the maximum number of tokens per patch, with `group` query heads per KV head."""
    return max(1, _QUERIES // group)


def _shape(group: int, head_dim: int, kv_heads: int) -> _Shape:
    return _Shape(group, head_dim, -(-head_dim // WIDTH) * WIDTH, 4 * kv_heads * head_dim)


def _sizes(shape: _Shape) -> _Memory:
    queries = shape.group * tokens_of_patch(shape.group)
    return _Memory(
        found=8 * (KEYS + STRIP),
        keys=2 * KEYS * shape.head_dim,
        values=2 * KEYS * shape.padded,
        queries=-(-2 * queries * shape.head_dim // LINE) * LINE,
        results=4 * queries * shape.padded,
        sums=LINE * queries,
        maximums=LINE * queries,
        scores=KEYS // WIDTH * _SCORES_BYTES,
        weights=2 * GROUP * KEYS,
        parts=shape.padded // WIDTH * _SCORES_BYTES,
        lanes=LINE,
        factors=LINE * GROUP,
    )


def scratch_bytes(group: int, head_dim: int) -> int:
    """Return a thread's scratch memory in bytes, in whole cache lines."""
    return sum(_sizes(_shape(group, head_dim, 1)))


@compiled
def find_keys(
    addresses: int, table: int, block_size: int, first: int, count: int, head: int, row: int
) -> None:
    """Write the addresses of a tile's keys, repeating the last one up to a whole strip.

    Args:
        addresses: target, [keys] int64
        table: address of the row's block table, int32
        block_size: tokens per block
        first: position of the first key
        count: keys of the tile, at least one
        head: address of the head's first key in the cache
        row: bytes stored per token
    """
    found = int64s(addresses, count + STRIP)
    blocks = int32s(table, first // block_size + count + 1)
    block, at = first // block_size, first % block_size
    here = head + (blocks[block] * block_size + at) * row
    for key in range(count):
        if at == block_size:
            block += 1
            at = 0
            here = head + blocks[block] * block_size * row
        found[key] = here
        at += 1
        here += row
    for key in range(count, (count + STRIP - 1) // STRIP * STRIP):
        found[key] = found[count - 1]


@compiled
def pack_keys(addresses: int, count: int, head_dim: int, packed: int) -> None:
    """Transpose keys at the given addresses to [keys / WIDTH, head_dim / 2, WIDTH, 2].

    Columns beyond the last strip are left unchanged.
    """
    for strip in range((count + STRIP - 1) // STRIP):
        block, column = strip * STRIP // WIDTH, strip * STRIP % WIDTH
        target = packed + 2 * block * WIDTH * head_dim + 4 * column
        keys, whole = addresses + 8 * strip * STRIP, head_dim // 32 * 32
        for first in range(0, whole, 32):
            _transpose(keys, 2 * first, target + PAIR_BYTES * first // 2)
        if whole < head_dim:
            _transpose_half(keys, 2 * whole, target + PAIR_BYTES * whole // 2)


@compiled
def pack_values(
    addresses: int, behind: int, count: int, room: int, head_dim: int, packed: int
) -> None:
    """Interleave values, `behind` bytes after keys: [head_dim / WIDTH, room / 2, WIDTH, 2]."""
    found = int64s(addresses, count + STRIP)
    for key in range(0, count, 2):
        one, other = found[key] + behind, found[key + 1] + behind
        for chunk in range(head_dim // CHUNK):
            block, column = chunk * CHUNK // WIDTH, chunk * CHUNK % WIDTH
            target = packed + PAIR_BYTES * (block * room + key) // 2 + 4 * column
            interleave(one + 2 * chunk * CHUNK, other + 2 * chunk * CHUNK, target)


@compiled
def _begin(at: Any, shape: Any, queries: int, stride: int, tokens: int, sinks: int) -> None:
    """Copy the queries of a patch to contiguous memory; initialize sums and maximums."""
    width, rows = shape.group * shape.head_dim, tokens * shape.group
    for token in range(tokens):
        source = bfloat16s(queries + 2 * token * stride, width)
        target = bfloat16s(at.queries + 2 * token * width, width)
        for i in range(width):
            target[i] = source[i]
    results = float32s(at.results, rows * shape.padded)
    for i in range(rows * shape.padded):
        results[i] = _ZERO
    sums = float32s(at.sums, rows * LANES)
    maximums = float32s(at.maximums, rows * LANES)
    for row in range(rows):
        maximum = _LOWEST
        if sinks:
            maximum = float32s(sinks, shape.group)[row % shape.group]
        for lane in range(LANES):
            sums[row * LANES + lane] = _ZERO
            maximums[row * LANES + lane] = maximum
        if sinks:
            sums[row * LANES] = _ONE


@compiled
def _weigh(at: Any, query: int, slot: int, first: int, end: int, scale: Any) -> None:
    """Convert a query's scores for keys from `first` to `end` to weights.

    `slot` is the query's index in its group.
    """
    maximum, sums = at.maximums + LINE * query, at.sums + LINE * query
    scores, weights = at.scores + SUMS_BYTES * slot, at.weights + 2 * KEYS * slot
    lanes = float32s(at.lanes, LANES)
    known = float32s(maximum, LANES)
    for lane in range(LANES):
        lanes[lane] = known[lane]
    for here in range(0, end, WIDTH):
        of_block = scores + here // WIDTH * _SCORES_BYTES
        raise_maximum(of_block, at.lanes, first - here, end - here)
    settle_maximum(at.lanes, maximum, sums, at.factors + LINE * slot, scale)
    for here in range(0, end, WIDTH):
        of_block = scores + here // WIDTH * _SCORES_BYTES
        store_weights(of_block, weights + 2 * here, maximum, sums, scale, first - here, end - here)


@compiled
def _attend_group(
    at: Any, shape: Any, score: Any, top: int, count: int, position: int, tile: int
) -> None:
    """Add a packed tile's contribution for some queries; `position` is the patch's first."""
    seen = min(KEYS, position + (top + count - 1) // shape.group + 1 - tile)
    queries = at.queries + 2 * top * shape.head_dim
    for here in range(0, seen, WIDTH):
        columns = at.keys + 2 * here * shape.head_dim
        scores = at.scores + here // WIDTH * _SCORES_BYTES
        _add_up(count, queries, 2 * shape.head_dim, columns, shape.head_dim // 2, scores, 0)
        if score.cap > 0:
            for slot in range(count):
                cap_scores(scores + SUMS_BYTES * slot, score.cap, score.power)
    for slot in range(count):
        own = position + (top + slot) // shape.group + 1 - tile
        end = max(0, min(seen, own))
        _weigh(at, top + slot, slot, max(0, own - score.window), end, score.scale)
        weights = bfloat16s(at.weights + 2 * KEYS * slot, KEYS)
        for i in range((end + WIDTH - 1) // WIDTH * WIDTH, (seen + 1) // 2 * 2):
            weights[i] = 0
    for chunk in range(shape.padded // WIDTH):
        columns = at.values + 2 * chunk * KEYS * WIDTH
        parts = at.parts + chunk * _SCORES_BYTES
        _add_up(count, at.weights, 2 * KEYS, columns, (seen + 1) // 2, parts, 0)
        for slot in range(count):
            results = at.results + 4 * ((top + slot) * shape.padded + chunk * WIDTH)
            add_scaled(results, at.factors + LINE * slot, parts + SUMS_BYTES * slot)


@compiled
def _attend_patch(
    at: Any,
    shape: Any,
    score: Any,
    head: int,
    table: int,
    block_size: int,
    position: int,
    tokens: int,
) -> None:
    """Process all tiles for the queries copied by `_begin`; `head`: address of its first key."""
    end, rows = position + tokens, tokens * shape.group
    groups = (rows + GROUP - 1) // GROUP
    each = (rows + groups - 1) // groups
    for tile in range(max(0, position + 1 - score.window) // KEYS * KEYS, end, KEYS):
        count = min(KEYS, end - tile)
        find_keys(at.found, table, block_size, tile, count, head, shape.row_bytes)
        pack_keys(at.found, count, shape.head_dim, at.keys)
        pack_values(at.found, shape.row_bytes // 2, count, KEYS, shape.head_dim, at.values)
        for top in range(0, rows, each):
            some = min(each, rows - top)
            first = position + top // shape.group
            last = position + (top + some - 1) // shape.group
            if last >= tile and first + 1 - score.window < tile + KEYS:
                _attend_group(at, shape, score, top, some, position, tile)


@compiled
def _store(at: Any, shape: Any, tokens: int, heads: int, target: int) -> None:
    """Store the averages of a patch, starting at the target of its first token and head."""
    for query in range(tokens * shape.group):
        of_query = query // shape.group * heads + query % shape.group
        store_averages(
            at.results + 4 * query * shape.padded,
            at.sums + LINE * query,
            shape.head_dim // LANES,
            target + 2 * of_query * shape.head_dim,
        )


@cache
def patch_attention(group: int, head_dim: int, kv_heads: int) -> Kernel:
    """Return the kernel for a shape of heads: `group` query heads per KV head.

    Its arguments are `_Arguments`. A task is one KV head of one patch.
    """
    heads, (_, _, padded, row_bytes) = group * kv_heads, _shape(group, head_dim, kv_heads)
    sizes = _sizes(_shape(group, head_dim, kv_heads))
    offsets = tuple(sum(sizes[:i]) for i in range(len(sizes)))

    def attend(pointer: Any) -> None:
        own = _Arguments(*_arguments(pointer))
        num_shares, thread, threads = thread_shares(pointer)
        begins = int64s(own.begins, num_shares + 1)
        shape = _Shape(group, head_dim, padded, row_bytes)
        score = _Scores(own.window, float_of(own.scale), float_of(own.cap), float_of(own.power))
        for share in range(thread, num_shares, threads):
            at = _Memory(*_places(own.memory + share * own.share_bytes, offsets))
            for task in range(begins[share], begins[share + 1]):
                head = task % kv_heads
                patch = int64s(own.patches + 32 * (task // kv_heads), 4)
                row, token, position, tokens = patch[0], patch[1], patch[2], patch[3]
                sinks = own.sinks + 4 * head * group if own.sinks else 0
                asked = own.queries + 2 * (token * own.query_stride + head * group * head_dim)
                _begin(at, shape, asked, own.query_stride, tokens, sinks)
                keys, table = (
                    own.cache + 2 * head * head_dim,
                    own.tables + 4 * row * own.table_width,
                )
                _attend_patch(at, shape, score, keys, table, own.block_size, position, tokens)
                at_head = token * heads + head * group
                _store(at, shape, tokens, heads, own.target + 2 * at_head * head_dim)

    return Kernel(attend, len(_Arguments._fields))
