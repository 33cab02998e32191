"""Row-wise kernels between a decoder's products: norms, gates, and writes to the KV cache."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu.arithmetic import (
    bfloat16_row,
    float32s,
    float_of,
    int64s,
    narrow,
    silu,
    widen,
)
from engine.kernels.cpu.compiling import (
    Kernel,
    arguments_of,
    bits_of,
    thread_rows,
    threads_for,
)
from engine.kernels.reference import row_independent

_ZERO, _ONE = np.float32(0), np.float32(1)
_SHARED_VALUES = 1 << 15
"""Minimum values for which a kernel uses all threads; about 10 us for one thread."""

_four, _six, _seven, _nine = (arguments_of(count) for count in (4, 6, 7, 9))


def _rms_norm(pointer: Any) -> None:
    source, weights, target, rows, width, eps = _six(pointer)
    weight = float32s(weights, width)
    first, end = thread_rows(pointer, rows)
    for row in range(first, end):
        x, out = bfloat16_row(source, row, width), bfloat16_row(target, row, width)
        squares = _ZERO
        for i in range(width):
            value = widen(x[i])
            squares += value * value
        mean = squares / np.float32(width)
        scale = _ONE / np.sqrt(mean + float_of(eps))
        for i in range(width):
            out[i] = narrow(widen(x[i]) * scale * weight[i])


def _rms_norm_heads(pointer: Any) -> None:
    source, weights, tokens, stride, heads, dim, eps = _seven(pointer)
    weight = float32s(weights, (heads, dim))
    first, end = thread_rows(pointer, tokens)
    for token in range(first, end):
        for head in range(heads):
            x = bfloat16_row(source + 2 * (token * stride + head * dim), 0, dim)
            squares = _ZERO
            for i in range(dim):
                value = widen(x[i])
                squares += value * value
            scale = _ONE / np.sqrt(squares / np.float32(dim) + float_of(eps))
            for i in range(dim):
                x[i] = narrow(widen(x[i]) * scale * weight[head, i])


def _swiglu(pointer: Any) -> None:
    source, target, rows, inner = _four(pointer)
    first, end = thread_rows(pointer, rows)
    for row in range(first, end):
        gate, up = bfloat16_row(source, 2 * row, inner), bfloat16_row(source, 2 * row + 1, inner)
        out = bfloat16_row(target, row, inner)
        for i in range(inner):
            out[i] = narrow(silu(widen(gate[i])) * widen(up[i]))


def _rotate_and_store(pointer: Any) -> None:
    source, cosines, sines, cache, slots, tokens, heads, kv_heads, dim = _nine(pointer)
    half, first_kept, kept = dim // 2, heads * dim, 2 * kv_heads * dim
    slot = int64s(slots, tokens)
    first, end = thread_rows(pointer, tokens)
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


rms_norm = Kernel(_rms_norm, 6)
"""Arguments, bfloat16 unless specified: source, weights in float32, target, rows, width, eps."""
rms_norm_heads = Kernel(_rms_norm_heads, 7)
"""Arguments, bfloat16 unless specified: heads [tokens, heads, dim], updated in place; weights
[heads, dim] in float32; tokens, token stride in values, heads, dim, eps."""
swiglu = Kernel(_swiglu, 4)
"""Arguments: source [rows, 2 * inner] and target [rows, inner] in bfloat16; rows, inner."""
rotate_and_store = Kernel(_rotate_and_store, 9)
"""Arguments, bfloat16 unless specified: queries, keys and values [tokens, (heads + 2 * kv_heads) *
dim], of which the first two are rotated in place; cosines and sines [tokens, dim]; the layer's KV
cache, which receives the last two; slots [tokens] int64; tokens, heads, kv_heads, dim."""


class CompiledKernels:
    """See `engine.kernels.registry.FusedKernels`; all take bfloat16."""

    @row_independent
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale each row to a root mean square of one, then by the weights."""
        x = x.contiguous()
        out = torch.empty_like(x)
        count, width = x.shape
        addresses = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        rms_norm(_threads(count, x), *addresses, count, width, bits_of(eps))
        return out

    def rms_norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale each head, in place, to a root mean square of one, then by its weights."""
        tokens, count, dim = heads.shape
        stride = heads.stride(0)
        addresses = heads.data_ptr(), weight.data_ptr()
        threads = _threads(tokens, heads)
        rms_norm_heads(threads, *addresses, tokens, stride, count, dim, bits_of(eps))
        return heads

    @row_independent
    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        gate_up = gate_up.contiguous()
        *outer, width = gate_up.shape
        out = torch.empty(*outer, width // 2, dtype=gate_up.dtype)
        count = out.numel() // (width // 2)
        swiglu(_threads(count, out), gate_up.data_ptr(), out.data_ptr(), count, width // 2)
        return out

    def rotate_and_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor
    ) -> None:
        """Rotate queries and keys in place, then store keys and values."""
        kv_heads, dim = cache.shape[3:]
        heads = qkv.shape[1] // dim - 2 * kv_heads
        tensors = qkv, cos, sin, cache, slots
        addresses = [each.data_ptr() for each in tensors]
        threads = _threads(len(qkv), qkv)
        rotate_and_store(threads, *addresses, len(qkv), heads, kv_heads, dim)


def _threads(rows: int, values: Tensor) -> int:
    return threads_for(rows, values.numel(), _SHARED_VALUES)
