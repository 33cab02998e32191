"""Paged attention with stock operators: gather a group's blocks, then one attention call.

Works on any device. A layer's KV cache is one tensor [num_blocks, block_size, ...]. Its format
(`kv_format`) encodes each token's [parts, kv_heads, head_dim]: keys in the first part and values in
the second, or a single part that serves as both.
"""

from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.processor import type_of_long_rows
from engine.models.attention.agreement import BitComparison
from engine.models.attention.interface import Heads
from engine.models.attention.key_widths import KeyWidths
from engine.models.attention.kv_format import KvFormat, PlainKv
from engine.models.attention.plan import (
    WHOLE_QUERIES,
    AttentionPlan,
    AttentionPlanner,
    LongRow,
    PaddedGroup,
    TokensOfRow,
)
from engine.models.attention.rows import AttentionRows
from engine.models.layers import sigmoid, softcap

_GATHERED_BYTES = 1 << 20
"""Bytes of keys and values that each CPU thread gathers at once: half of a core's L2 cache, so that
they are still cached when attention reads them."""
_MAX_PLAIN_SCORES = 1 << 24
"""Maximum scores held at once when computed without a fused operator."""


class PagedAttention:
    """Plans and computes attention for one shape of heads."""

    def __init__(
        self,
        heads: Heads,
        *,
        dtype: torch.dtype,
        device: torch.device,
        token_by_token: bool = False,
        parts: int = 2,
        has_chunks: bool = False,
        kv_format: KvFormat | None = None,
        first_key: int = 0,
    ) -> None:
        """Prepare for one shape of heads.

        Args:
            has_chunks: as in `ModelSpec`.
            parts: 2 for keys and values, 1 if keys also serve as values.
            kv_format: format of the cache; default: plain values in `dtype`.
            token_by_token: make each token's result depend only on its own position, keys and
                values, regardless of the rest of the step.
            first_key: first valid position; all tokens are at or after it.
        """
        self._heads, self._kv_heads, self._head_dim, self._scale, self._softcap = heads
        self._group = self._heads // self._kv_heads
        self._kv_shape = (parts, self._kv_heads, self._head_dim)
        self._kv = kv_format or PlainKv(dtype)
        self._row = self._kv.row(self._kv_shape)
        self._long_dtype = type_of_long_rows(dtype, device)
        self._dtype = self._long_dtype if token_by_token else self._kv.dtype
        self._added_queries = 0
        self._device = device
        agreement = BitComparison(
            partial(self._by_token, sinks=None),
            partial(self._in_one_product, sinks=None),
            self._in_padded_rows,
            num_heads=self._heads,
            kv_shape=self._kv_shape,
            dtype=self._dtype,
        )
        widths = self._find_widths(agreement) if token_by_token else None
        shares_calls = widths is not None and agreement.of_padded_rows(widths)
        self._planner = AttentionPlanner(
            heads_per_kv=self._group,
            dtype=self._dtype if token_by_token else dtype,
            long_dtype=self._long_dtype,
            device=device,
            token_by_token=token_by_token,
            has_chunks=has_chunks,
            one_product=token_by_token and widths is None and agreement.of_one_product(),
            key_widths=widths,
            shares_calls=shares_calls,
            first_key=first_key,
        )

    def plan(self, rows: AttentionRows, window: int | None) -> AttentionPlan:
        """Group the rows of a step; `window` limits how far back a token attends."""
        return self._planner.plan(rows, window)

    def plan_whole(self, rows: AttentionRows, window: int | None) -> AttentionPlan:
        """Plan rows whose tokens attend to the whole row, and to earlier tokens of the sequence."""
        return self._planner.plan_whole(rows, window)

    def attend(
        self, queries: Tensor, cache: Tensor, plan: AttentionPlan, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend from all tokens of the step; the cache already holds their keys.

        Args:
            queries: [tokens, heads, head_dim], rotated
            cache: [num_blocks, block_size, ...] in the storage format
            sinks: [heads] float32: extra softmax scores without a value

        Returns:
            [tokens, heads * head_dim]
        """
        flat = cache.view(cache.shape[0], -1)
        if sinks is not None:
            sinks = sinks.view(self._kv_heads, self._group, 1)
        if len(plan) == 1 and isinstance(plan[0], PaddedGroup) and plan[0].tokens is None:
            return self._attend_padded(queries, flat, plan[0], sinks)
        width = self._heads * self._head_dim
        out = torch.empty(len(queries), width, dtype=self._dtype, device=queries.device)
        held, kv = None, queries
        for part in plan:
            if isinstance(part, TokensOfRow):
                if part.blocks is not held:  # adjacent parts share their first keys
                    held = part.blocks
                    stored = flat.index_select(0, held).view(-1, *self._row)
                    kv = self._read(stored, self._dtype)
                some = queries[part.first : part.end].to(self._dtype)
                attend = self._by_token if part.mask.dim() == 4 else self._in_one_product
                keys = kv[: part.mask.shape[-1]]
                out[part.first : part.end] = attend(some, keys, part.mask, sinks)
                continue
            if isinstance(part, LongRow):
                out[part.first : part.end] = self._attend_long(queries, flat, part, sinks)
                continue
            assert part.tokens is not None, "a group over the whole batch is the only one"
            tokens = part.tokens
            result = self._attend_padded(queries.index_select(0, tokens), flat, part, sinks)
            if part.valid is not None:
                result, tokens = result.index_select(0, part.valid), tokens[part.valid]
            out.index_copy_(0, tokens, result)
        return out

    def _products(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        sinks: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attend from [.., queries, head_dim]; sinks are [.., queries] or broadcast from size 1."""
        if self._softcap is None and sinks is None:
            return F.scaled_dot_product_attention(
                queries, keys, values, attn_mask, is_causal=is_causal, scale=self._scale
            )
        if self._softcap is not None or sinks is None or queries.device.type != "cpu":
            return _plain_products(
                queries,
                keys,
                values,
                attn_mask,
                is_causal=is_causal,
                scale=self._scale or self._head_dim**-0.5,
                cap=self._softcap,
                sinks=sinks,
            )
        # The operator behind torch's function, which also returns the log-sum-exp.
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, is_causal, attn_mask=attn_mask, scale=self._scale
        )
        return with_sinks(out, sums, sinks)

    def _attend_padded(
        self, queries: Tensor, flat: Tensor, group: PaddedGroup, sinks: Tensor | None
    ) -> Tensor:
        rows, count = group.num_rows, group.num_queries
        if sinks is not None:
            sinks = sinks.expand(-1, -1, count).flatten(1)
        folded, sinks = self._whole(self._folded(queries, rows), sinks)
        blocks = group.blocks.view(rows, -1)
        at_once = self._rows_at_once(flat, blocks)
        held = flat.new_empty(at_once * blocks.shape[1], flat.shape[1])
        parts = []
        for first in range(0, rows, at_once):
            wanted = blocks[first : first + at_once]
            kv = torch.index_select(flat, 0, wanted.view(-1), out=held[: wanted.numel()])
            kv = self._read(kv.view(len(wanted), -1, *self._row), self._dtype)
            part = slice(first, first + at_once)
            parts.append(self._from_folded(folded[part], kv, group.mask[part], sinks))
        return self._unfolded(parts[0] if len(parts) == 1 else torch.cat(parts), count)

    def _from_folded(
        self, folded: Tensor, kv: Tensor, mask: Tensor, sinks: Tensor | None
    ) -> Tensor:
        keys, values = (kv[:, :, part].transpose(1, 2) for part in (0, -1))
        return self._products(folded, keys, values, sinks=sinks, attn_mask=mask)

    def _in_padded_rows(self, queries: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        """Attend from `count` tokens per row to KV [rows, keys, ...]."""
        rows, count, _ = mask.shape
        folded, _ = self._whole(self._folded(queries, rows), None)
        spread = mask.repeat(1, self._group, 1).unsqueeze(1)
        return self._unfolded(self._from_folded(folded, kv, spread, None), count)

    def _folded(self, queries: Tensor, rows: int) -> Tensor:
        """Return [rows, kv_heads, group * queries, head_dim].

        Queries of heads that share a KV head are adjacent, so no key is repeated.
        """
        spread = queries.view(rows, -1, self._kv_heads, self._group, self._head_dim)
        return spread.permute(0, 2, 3, 1, 4).reshape(rows, self._kv_heads, -1, self._head_dim)

    def _unfolded(self, out: Tensor, count: int) -> Tensor:
        """Return [rows * count, heads * head_dim], with `count` queries per row."""
        shape = (len(out), self._kv_heads, self._group, count, self._head_dim)
        spread = out[:, :, : self._group * count].reshape(shape)
        return spread.permute(0, 3, 1, 2, 4).reshape(len(out) * count, -1)

    def _whole(self, folded: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Convert queries [.., queries, head_dim] to the compute dtype.

        Queries and sinks [.., queries] are padded to a multiple of `WHOLE_QUERIES` if required.
        """
        *others, count, dim = folded.shape
        added = -count % WHOLE_QUERIES if self._added_queries else 0
        if not added:
            return folded.to(self._dtype), sinks
        padded = torch.zeros((*others, count + added, dim), dtype=self._dtype, device=folded.device)
        padded[..., :count, :] = folded
        return padded, None if sinks is None else F.pad(sinks, (0, added))

    def _by_token(self, queries: Tensor, kv: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend as `_attend_padded` does for decodes, with keys shared by all tokens."""
        count = len(queries)
        keys, values = (
            kv[:, i].transpose(0, 1).expand(count, self._kv_heads, len(kv), -1) for i in (0, -1)
        )
        folded = queries.view(count, self._kv_heads, self._group, -1)
        folded, sinks = self._whole(folded, None if sinks is None else sinks.squeeze(2))
        out = self._products(folded, keys, values, sinks=sinks, attn_mask=mask)
        return out[:, :, : self._group].reshape(count, -1)

    def _in_one_product(
        self, queries: Tensor, kv: Tensor, mask: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attend as `_by_token` does, with one product per head.

        Queries are padded to the length of `mask`, since their count can determine the summation
        order.
        """
        count, shape = len(queries), (self._kv_heads, self._group, len(kv), self._head_dim)
        keys, values = (kv[:, i].transpose(0, 1).unsqueeze(1).expand(shape) for i in (0, -1))
        padded = F.pad(queries, (0, 0, 0, 0, 0, len(mask) - count))
        spread = padded.view(len(mask), self._kv_heads, self._group, -1).permute(1, 2, 0, 3)
        out = self._products(spread, keys, values, sinks=sinks, attn_mask=mask)
        return out[:, :, :count].permute(2, 0, 1, 3).reshape(count, -1)

    def _read(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return self._kv.read(rows, self._kv_shape, dtype)

    def _rows_at_once(self, flat: Tensor, blocks: Tensor) -> int:
        """Return how many rows of `blocks`, [rows, blocks], to gather at once."""
        rows = len(blocks)
        if flat.device.type != "cpu":
            return rows
        num_keys = blocks.numel() * (flat.shape[1] // prod(self._row))
        gathered = num_keys * prod(self._kv_shape) * self._kv.dtype.itemsize
        parts = -(-gathered // (_GATHERED_BYTES * torch.get_num_threads()))
        return -(-rows // parts)

    def _find_widths(self, agreement: BitComparison) -> KeyWidths | None:
        """Return the key counts for which tokens get the same bits in any batch.

        Sets the query padding if they do so only in multiples of `WHOLE_QUERIES`.
        """
        if self._dtype != torch.float32 or self._device.type != "cpu":
            return None  # 16-bit rounding hides most differences
        for added in {0: None, -self._group % WHOLE_QUERIES: None}:
            self._added_queries = added
            widths = agreement.key_widths()
            if widths is not None:
                return widths
        self._added_queries = 0
        return None

    def _attend_long(
        self, queries: Tensor, flat: Tensor, row: LongRow, sinks: Tensor | None
    ) -> Tensor:
        """Attend with KV heads as the batch axis, over which keys are expanded without a copy."""
        count, kv_heads, dim = row.end - row.first, self._kv_heads, self._head_dim
        kv = flat.index_select(0, row.blocks).view(-1, *self._row)
        kv = self._read(kv[: row.num_keys], self._long_dtype)
        shape = (kv_heads, self._group, row.num_keys, dim)
        keys = kv[:, 0].permute(1, 0, 2).unsqueeze(1).expand(shape)
        values = kv[:, -1].permute(1, 0, 2).unsqueeze(1).expand(shape)
        spread = queries[row.first : row.end].view(count, kv_heads, self._group, dim)
        out = self._products(
            spread.to(self._long_dtype).permute(1, 2, 0, 3),
            keys,
            values,
            sinks=sinks,
            attn_mask=row.mask,
            is_causal=row.mask is None,
        )
        return out.permute(2, 0, 1, 3).reshape(count, -1).to(queries.dtype)


def with_sinks(out: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Rescale, in place, averages over keys to include sinks in the softmax.

    Args:
        out: [.., head_dim]
        sums: [..] log-sum-exp of the scores
        sinks: one additional score each, broadcastable to `sums`
    """
    return out.mul_(sigmoid(sums - sinks).unsqueeze(-1))


def _plain_products(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with optionally capped scores, some queries [.., queries, head_dim] at a time.

    Sinks are [.., queries] or broadcast from size 1.
    """
    num_queries, num_keys = queries.shape[-2], keys.shape[-2]
    at_once = max(1, _MAX_PLAIN_SCORES // (queries.shape[:-2].numel() * num_keys))
    parts = []
    for first in range(0, num_queries, at_once):
        part = queries[..., first : first + at_once, :]
        scores = torch.matmul(part, keys.transpose(-1, -2)).mul_(scale)
        if cap is not None:
            scores = softcap(scores, cap)
        if mask is not None:
            scores += mask if mask.shape[-2] == 1 else mask[..., first : first + at_once, :]
        elif is_causal:
            position = torch.arange(first, first + part.shape[-2], device=queries.device)
            later = torch.arange(num_keys, device=queries.device) > position.unsqueeze(1)
            scores.masked_fill_(later, float("-inf"))
        weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
        out = torch.matmul(weights, values)
        if sinks is not None:
            own = sinks if sinks.shape[-1] == 1 else sinks[..., first : first + at_once]
            out = with_sinks(out, scores.float().logsumexp(-1), own)
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
