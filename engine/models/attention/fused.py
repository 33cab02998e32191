"""Paged attention on CPUs with a fused kernel for rows with one new token, which decodes are.

The kernel reads keys and values where they lie, so that nothing is gathered, and needs no mask.
Other rows attend through stock operators.
"""

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.models.attention.paged import PagedAttention
from engine.models.attention.plan import AttentionPlan
from engine.models.attention.rows import AttentionRows, IntArray
from engine.models.attention.shares import SharedTasks, shares_of
from engine.models.kernels.compiling import bits_of
from engine.models.kernels.decode_attention import decode_attention, padded_keys, scratch_size

_SHARED_KEYS = 64
"""Keys of KV heads, over all rows, from which on threads share them."""


class FusedPlan(msgspec.Struct, frozen=True):
    """How the rows of a step attend."""

    decodes: SharedTasks | None
    others: AttentionPlan | None
    """Of stock operators; None if all rows are decodes."""
    other_tokens: Tensor | None
    """[tokens] those of the other rows; None if all are."""


class FusedAttention:
    """Attention for one shape of heads."""

    def __init__(
        self,
        stock: PagedAttention,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None,
    ) -> None:
        """Take what attends in all other cases; scores are scaled as in `PagedAttention`."""
        group = num_heads // num_kv_heads
        self._stock = stock
        self._kernel = decode_attention(group, head_dim, num_kv_heads)
        self._shape = (group, head_dim, num_kv_heads)
        self._scale = bits_of(head_dim**-0.5 if scale is None else scale)

    def plan(self, rows: AttentionRows, window: int | None) -> FusedPlan:
        """Part decodes from other rows; `window` limits how far back a token looks."""
        single = rows.counts == 1
        if not single.any():
            return FusedPlan(None, self._stock.plan(rows, window), None)
        decodes = self._decodes(rows, np.flatnonzero(single), window)
        if single.all():
            return FusedPlan(decodes, None, None)
        others = np.flatnonzero(~single)
        counts = rows.counts[others]
        ends = np.cumsum(counts)
        within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        tokens = np.repeat(rows.first_token[others], counts) + within
        rest = msgspec.structs.replace(
            rows,
            starts=rows.starts[others],
            counts=counts,
            first_token=ends - counts,
            block_tables=rows.block_tables[others],
            other_tables=(),
        )
        return FusedPlan(decodes, self._stock.plan(rest, window), torch.from_numpy(tokens))

    def attend(
        self, queries: Tensor, cache: Tensor, plan: FusedPlan, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend as `PagedAttention` does; there are no sinks."""
        assert sinks is None, "models with sinks have stock operators"
        if plan.decodes is None:
            assert plan.others is not None
            return self._stock.attend(queries, cache, plan.others)
        out = torch.empty(len(queries), queries.shape[1] * queries.shape[2], dtype=queries.dtype)
        self._attend_decodes(queries, cache, plan.decodes, out)
        if plan.others is not None and plan.other_tokens is not None:
            some = queries.index_select(0, plan.other_tokens)
            out.index_copy_(0, plan.other_tokens, self._stock.attend(some, cache, plan.others))
        return out

    def _decodes(self, rows: AttentionRows, members: IntArray, window: int | None) -> SharedTasks:
        group, head_dim, _ = self._shape
        positions = rows.starts[members]
        first = np.zeros_like(positions)
        if window is not None:
            first = np.maximum(positions - window + 1, 0)
        num_keys = positions + 1 - first
        shares = shares_of(np.repeat(num_keys, self._shape[2]), _SHARED_KEYS)
        most = padded_keys(int(num_keys.max()))
        size = scratch_size(group, head_dim, most)
        scratch = np.empty((len(shares) - 1, size), np.float32)
        tables = np.ascontiguousarray(rows.block_tables[members], np.int32)
        held = tables, first, positions + 1, rows.first_token[members], shares, scratch
        return SharedTasks(
            shares=len(shares) - 1,
            addresses=tuple(each.ctypes.data for each in held),
            sizes=(len(members), tables.shape[1], rows.block_size, size, most, self._scale),
            held=held,
        )

    def _attend_decodes(
        self, queries: Tensor, cache: Tensor, rows: SharedTasks, out: Tensor
    ) -> None:
        self._kernel(
            rows.shares,
            queries.data_ptr(),
            cache.data_ptr(),
            out.data_ptr(),
            *rows.addresses,
            queries.stride(0),
            *rows.sizes,
        )
