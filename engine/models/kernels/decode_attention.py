"""A kernel of attention for rows with one query each, straight from the blocks of the KV cache."""

from functools import cache
from typing import Any

import numpy as np
from numba import carray

from engine.models.kernels.arithmetic import (
    as_float32,
    as_int32,
    as_int64,
    as_uint16,
    exponential,
    float_of,
    narrow,
    widen,
)
from engine.models.kernels.compiling import FIRST, MAX_ARGUMENTS, Kernel, compiled, own_shares

_TILE = 16
"""Keys whose products with the queries of a KV head are computed together."""
_ZERO, _LOWEST = np.float32(0), np.float32(-3e38)


def padded_keys(num_keys: int) -> int:
    """Return how many keys are computed for a row that has so many."""
    return -(-num_keys // _TILE) * _TILE


def scratch_size(group: int, head_dim: int, keys: int) -> int:
    """Return the float32 values that a thread needs for rows of up to so many padded keys."""
    return group * keys + (2 * group + _TILE) * head_dim


@compiled
def _read(
    cache: int, table: Any, block_size: int, first: int, count: int, row: int, at: int, out: Any
) -> None:
    """Widen a tile of one head's keys or values; what is missing of it becomes zeros.

    Args:
        cache: address of the layer's KV cache
        table: [blocks] of the row of the step
        block_size: tokens in a block
        first: position of the first key
        count: keys of the tile
        row: values that are stored of a token
        at: the first of them
        out: [TILE * head_dim]
    """
    head_dim = len(out) // _TILE
    for j in range(count):
        key = first + j
        slot = np.int64(table[key // block_size]) * block_size + key % block_size
        stored = carray(as_uint16(cache + 2 * (slot * row + at)), (head_dim,))
        for i in range(head_dim):
            out[j * head_dim + i] = widen(stored[i])
    for i in range(count * head_dim, len(out)):
        out[i] = _ZERO


@compiled
def _score(keys: Any, query: Any, scores: Any, head_dim: int) -> None:
    """Set the scores of a tile of keys for one query head."""
    for j in range(_TILE):
        score = _ZERO
        for i in range(head_dim):
            score += keys[j * head_dim + i] * query[i]
        scores[j] = score


@compiled
def _add(values: Any, weights: Any, sums: Any, head_dim: int) -> None:
    """Add a tile of weighted values to the sums of one query head."""
    for i in range(head_dim):
        total = sums[i]
        for j in range(_TILE):
            total += weights[j] * values[j * head_dim + i]
        sums[i] = total


@compiled
def _softmax(scores: Any, num_keys: int) -> None:
    """Make weights of the scores of keys, and zeros of what is behind them."""
    largest = _LOWEST
    for j in range(num_keys):
        largest = max(largest, scores[j])
    total = _ZERO
    for j in range(num_keys):
        weight = exponential(scores[j] - largest)
        scores[j] = weight
        total += weight
    for j in range(num_keys):
        scores[j] /= total
    for j in range(num_keys, len(scores)):
        scores[j] = _ZERO


@cache
def decode_attention(group: int, head_dim: int, kv_heads: int) -> Kernel:
    """Return the kernel for a shape of heads: `group` query heads to each KV head.

    A task is one KV head of one row; its queries attend together. Each row is computed by itself,
    in an order that only its keys decide. Arguments, addresses first:

    - queries [tokens, group * kv_heads, head_dim] bfloat16, the tokens' `query_stride` values apart
    - the layer's KV cache [blocks, block_size, 2, kv_heads, head_dim] bfloat16
    - result [tokens, group * kv_heads * head_dim] bfloat16
    - block tables [rows, table_width] int32
    - of each row its first key, the key behind its last one, and its token, int64
    - the first task of each share, and the end, int64
    - scratch memory, `scratch` values of float32 for each share
    - query_stride, rows, table_width, block_size, scratch, keys that there is scratch memory for,
      scale of scores
    """
    width, heads, stored = group * head_dim, group * kv_heads, 2 * kv_heads * head_dim

    def attend(pointer: Any) -> None:
        arguments = carray(pointer, (MAX_ARGUMENTS,))
        own = arguments[FIRST:]
        queries, cache, target, tables, scratch = own[0], own[1], own[2], own[3], own[8]
        query_stride, rows, table_width, block_size = own[9], own[10], own[11], own[12]
        size, most, scale = own[13], own[14], float_of(np.uint32(own[15]))
        first_keys = carray(as_int64(own[4]), (rows,))
        end_keys = carray(as_int64(own[5]), (rows,))
        tokens = carray(as_int64(own[6]), (rows,))
        num_shares, thread, threads = own_shares(arguments)
        begins = carray(as_int64(own[7]), (num_shares + 1,))
        for share in range(thread, num_shares, threads):
            held = scratch + 4 * share * size
            scores = carray(as_float32(held), (group * most,))
            query = carray(as_float32(held + 4 * group * most), (width,))
            sums = carray(as_float32(held + 4 * (group * most + width)), (width,))
            tile = carray(as_float32(held + 4 * (group * most + 2 * width)), (_TILE * head_dim,))
            for task in range(begins[share], begins[share + 1]):
                row, head = task // kv_heads, task % kv_heads
                token, first = tokens[row], first_keys[row]
                num_keys = end_keys[row] - first
                padded = (num_keys + _TILE - 1) // _TILE * _TILE
                table = carray(as_int32(tables + 4 * row * table_width), (table_width,))
                asked = queries + 2 * (token * query_stride + head * width)
                asking = carray(as_uint16(asked), (width,))
                for i in range(width):
                    query[i] = widen(asking[i]) * scale
                    sums[i] = _ZERO
                at = head * head_dim
                for done in range(0, num_keys, _TILE):
                    count = min(_TILE, num_keys - done)
                    _read(cache, table, block_size, first + done, count, stored, at, tile)
                    for g in range(group):
                        asks = query[g * head_dim : (g + 1) * head_dim]
                        begin = g * most + done
                        _score(tile, asks, scores[begin : begin + _TILE], head_dim)
                for g in range(group):
                    _softmax(scores[g * most : g * most + padded], num_keys)
                at += kv_heads * head_dim
                for done in range(0, num_keys, _TILE):
                    count = min(_TILE, num_keys - done)
                    _read(cache, table, block_size, first + done, count, stored, at, tile)
                    for g in range(group):
                        gets = sums[g * head_dim : (g + 1) * head_dim]
                        begin = g * most + done
                        _add(tile, scores[begin : begin + _TILE], gets, head_dim)
                result = target + 2 * (token * heads + head * group) * head_dim
                out = carray(as_uint16(result), (width,))
                for i in range(width):
                    out[i] = narrow(sums[i])

    return Kernel(attend)
