"""Kernels of rows between a decoder's products: norms, gates, and what goes into the KV cache."""

from typing import Any

import numpy as np
from numba import carray

from engine.models.kernels.arithmetic import (
    as_float32,
    as_int64,
    bfloat16_row,
    float_of,
    narrow,
    silu,
    widen,
)
from engine.models.kernels.compiling import FIRST, MAX_ARGUMENTS, Kernel, own_rows

_ZERO, _ONE = np.float32(0), np.float32(1)


def _rms_norm(pointer: Any) -> None:
    arguments = carray(pointer, (MAX_ARGUMENTS,))
    own = arguments[FIRST:]
    source, weights, target, rows, width, eps = own[0], own[1], own[2], own[3], own[4], own[5]
    weight = carray(as_float32(weights), (width,))
    first, end = own_rows(arguments, rows)
    for row in range(first, end):
        x, out = bfloat16_row(source, row, width), bfloat16_row(target, row, width)
        squares = _ZERO
        for i in range(width):
            value = widen(x[i])
            squares += value * value
        mean = squares / np.float32(width)
        scale = _ONE / np.sqrt(mean + float_of(np.uint32(eps)))
        for i in range(width):
            out[i] = narrow(widen(x[i]) * scale * weight[i])


def _rms_norm_heads(pointer: Any) -> None:
    arguments = carray(pointer, (MAX_ARGUMENTS,))
    own = arguments[FIRST:]
    source, weights, tokens, stride, heads = own[0], own[1], own[2], own[3], own[4]
    dim, eps = own[5], float_of(np.uint32(own[6]))
    weight = carray(as_float32(weights), (heads, dim))
    first, end = own_rows(arguments, tokens)
    for token in range(first, end):
        for head in range(heads):
            x = bfloat16_row(source + 2 * (token * stride + head * dim), 0, dim)
            squares = _ZERO
            for i in range(dim):
                value = widen(x[i])
                squares += value * value
            scale = _ONE / np.sqrt(squares / np.float32(dim) + eps)
            for i in range(dim):
                x[i] = narrow(widen(x[i]) * scale * weight[head, i])


def _swiglu(pointer: Any) -> None:
    arguments = carray(pointer, (MAX_ARGUMENTS,))
    own = arguments[FIRST:]
    source, target, rows, inner = own[0], own[1], own[2], own[3]
    first, end = own_rows(arguments, rows)
    for row in range(first, end):
        gate, up = bfloat16_row(source, 2 * row, inner), bfloat16_row(source, 2 * row + 1, inner)
        out = bfloat16_row(target, row, inner)
        for i in range(inner):
            out[i] = narrow(silu(widen(gate[i])) * widen(up[i]))


def _rotate_and_store(pointer: Any) -> None:
    arguments = carray(pointer, (MAX_ARGUMENTS,))
    own = arguments[FIRST:]
    source, cosines, sines, cache, slots = own[0], own[1], own[2], own[3], own[4]
    tokens, heads, kv_heads, dim = own[5], own[6], own[7], own[8]
    half, first_kept, kept = dim // 2, heads * dim, 2 * kv_heads * dim
    slot = carray(as_int64(slots), (tokens,))
    first, end = own_rows(arguments, tokens)
    for token in range(first, end):
        qkv = bfloat16_row(source, token, first_kept + kept)
        cos, sin = bfloat16_row(cosines, token, dim), bfloat16_row(sines, token, dim)
        for head in range(heads + kv_heads):
            x = qkv[head * dim : (head + 1) * dim]
            for i in range(half):
                one, other = widen(x[i]), widen(x[half + i])
                x[i] = narrow(one * widen(cos[i]) + other * widen(sin[i]))
                x[half + i] = narrow(other * widen(cos[half + i]) + one * widen(sin[half + i]))
        stored = bfloat16_row(cache, slot[token], kept)
        for i in range(kept):
            stored[i] = qkv[first_kept + i]


rms_norm = Kernel(_rms_norm)
"""Of bfloat16: source, weights in float32, target, rows, width, eps."""
rms_norm_heads = Kernel(_rms_norm_heads)
"""Of bfloat16, in place: heads [tokens, heads, dim], weights [heads, dim] in float32, tokens, how
many values tokens are apart, heads, dim, eps."""
swiglu = Kernel(_swiglu)
"""Of bfloat16: source [rows, 2 * inner], target [rows, inner], rows, inner."""
rotate_and_store = Kernel(_rotate_and_store)
"""Of bfloat16: queries, keys and values [tokens, (heads + 2 * kv_heads) * dim], of which the first
two are rotated in place; cosines and sines [tokens, dim]; the layer's KV cache, which gets the last
two; slots [tokens] int64; tokens, heads, kv_heads, dim."""
