"""Paged attention on CPUs by one kernel for both prompts and decodes.

A token gets the same bits in any step: with any other rows, in any chunk of its prompt, or as a
decode.
"""

import math
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu.compiling import bits_of
from engine.kernels.cpu.patch_attention import (
    KEYS,
    NO_WINDOW,
    patch_attention,
    scratch_bytes,
    tokens_of_patch,
)
from engine.models.attention.interface import Heads
from engine.models.attention.rows import AttentionRows, IntArray, parts_of

_LINE = 64
_LOG2_E = math.log2(math.e)
_SHARED_WORK = 512
"""Minimum work that is divided among threads."""
_PACKING = 3
"""Cost of packing a key, relative to one query attending to it."""


class SharedTasks(msgspec.Struct, frozen=True):
    """Kernel arguments for a step and the division of its tasks among threads."""

    shares: int
    addresses: tuple[int, ...]
    """Addresses of `kept_alive` arrays; like `sizes`, in the order of the kernel's arguments."""
    sizes: tuple[int, ...]
    kept_alive: tuple[Any, ...]


def shares_of(work: IntArray, min_work: int) -> IntArray:
    """Return the first task of each thread's share, and the end, balancing the work.

    Args:
        work: cost of each task.
        min_work: minimum total that is divided among threads.
    """
    total = np.cumsum(work)
    threads = min(torch.get_num_threads(), len(total))
    if int(total[-1]) < min_work:
        threads = 1
    bounds = total[-1] * np.arange(1, threads) / threads
    inner = np.searchsorted(total, bounds, side="left") + 1
    return np.concatenate(([0], np.minimum(inner, len(total)), [len(total)]))


class PatchAttention:
    """Attention for one shape of heads."""

    def __init__(self, heads: Heads) -> None:
        """Prepare for heads of a size that the kernel supports."""
        num_heads, num_kv_heads, head_dim, scale, softcap = heads
        self._kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._kernel = patch_attention(self._group, head_dim, num_kv_heads)
        self._scratch = scratch_bytes(self._group, head_dim)
        factor = head_dim**-0.5 if scale is None else scale
        self._unit = factor if softcap is None else 1.0
        """Scale of scores in the softmax; 1 for capped scores, which are scaled before."""
        self._factors = (
            bits_of(self._unit * _LOG2_E),
            0 if softcap is None else bits_of(softcap),
            0 if softcap is None else bits_of(2 * _LOG2_E * factor / softcap),
        )
        self._memory = np.empty(0, np.uint8)

    def plan(self, rows: AttentionRows, window: int | None) -> SharedTasks:
        """Cut the rows of a step into patches; `window` limits how far back a token attends."""
        every = np.arange(len(rows.counts))
        patches = np.ascontiguousarray(parts_of(rows, every, tokens_of_patch(self._group)))
        shares = shares_of(np.repeat(self._work(patches, window), self._kv_heads), _SHARED_WORK)
        tables = np.ascontiguousarray(rows.block_tables, np.int32)
        memory, scratch = self._lines(len(shares) - 1)
        return SharedTasks(
            shares=len(shares) - 1,
            addresses=(*(each.ctypes.data for each in (tables, patches, shares)), scratch),
            sizes=(
                tables.shape[1],
                rows.block_size,
                self._scratch,
                NO_WINDOW if window is None else window,
                *self._factors,
            ),
            kept_alive=(tables, patches, shares, memory),
        )

    def attend(
        self, queries: Tensor, cache: Tensor, plan: SharedTasks, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend as specified in `engine.models.attention.interface`."""
        out = torch.empty(
            queries.shape[0], queries.shape[1] * queries.shape[2], dtype=queries.dtype
        )
        scaled = None if sinks is None else sinks.float() / self._unit
        self._kernel(
            plan.shares,
            queries.data_ptr(),
            cache.data_ptr(),
            out.data_ptr(),
            0 if scaled is None else scaled.data_ptr(),
            *plan.addresses,
            queries.stride(0),
            *plan.sizes,
        )
        return out

    def _work(self, patches: IntArray, window: int | None) -> IntArray:
        """Return the approximate cost of each patch, in query-key pairs."""
        position, count = patches[:, 2], patches[:, 3]
        keys = position + count
        if window is not None:
            keys = np.minimum(keys, count + window + KEYS)
        return keys * (count * self._group + _PACKING)

    def _lines(self, shares: int) -> tuple[Any, int]:
        """Return scratch memory and its first cache-line-aligned address."""
        size = shares * self._scratch + _LINE
        if len(self._memory) < size:
            self._memory = np.empty(size, np.uint8)
        address = self._memory.ctypes.data
        return self._memory, -(-address // _LINE) * _LINE
