"""Paged attention with stock operators: gather a group's blocks, then one attention call.

Works on any device. The KV cache of a layer is one tensor [num_blocks, block_size, 2, kv_heads,
head_dim] with keys at index 0 and values at index 1 of the third axis.

Rows of a batch are put into groups of similar shape, so that a step costs few calls and little
padding. Which rows share a group is decided once per step, not per layer.
"""

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

IntArray = npt.NDArray[np.int64]

_SHORT_ROW = 64
"""Rows of up to so many new tokens share groups; longer ones are worth a call of their own."""
_FREE_PADDING = 4096
"""Padded key positions below which splitting a group costs more than it saves."""
_TOKEN_KEYS = 64
"""Keys by which the products of single tokens grow, where each token attends by itself."""
_TOKENS_AT_ONCE = 64
"""Most tokens of one such call, which bounds its memory."""
_MAX_SCORES = 1 << 22
"""Most padded scores per head group, which bounds the mask of a group of short rows."""


class AttentionRows(msgspec.Struct, frozen=True):
    """The rows of one step, as attention needs them.

    Row i attends from positions `starts[i]` to `starts[i] + counts[i] - 1`; its new tokens are
    the batch's tokens from `first_token[i]` on.
    """

    starts: IntArray
    counts: IntArray
    first_token: IntArray
    block_tables: npt.NDArray[np.int32]
    """[rows, blocks]: unused entries may hold any valid block."""
    block_size: int


class PaddedGroup(msgspec.Struct, frozen=True):
    """Rows computed together, each padded to the same number of new tokens and blocks."""

    num_rows: int
    num_queries: int
    tokens: Tensor | None
    """[rows * queries] token of each padded query; None if the group is the batch as it is."""
    valid: Tensor | None
    """[new tokens] index of the queries that are not padding; None if none is."""
    blocks: Tensor
    """[rows * blocks]"""
    mask: Tensor
    """[rows, 1, group * queries, keys], added to the scores."""


class TokensOfRow(msgspec.Struct, frozen=True):
    """Tokens of one row, each of which attends by itself to as many keys as its position has."""

    first: int
    end: int
    blocks: Tensor
    mask: Tensor
    """[tokens, 1, 1, keys], added to the scores."""


class LongRow(msgspec.Struct, frozen=True):
    """One row with many new tokens."""

    first: int
    end: int
    num_keys: int
    blocks: Tensor
    mask: Tensor | None
    """[queries, keys]; None for a plain causal mask over queries that start at position 0."""


AttentionPlan = list[PaddedGroup | LongRow | TokensOfRow]


class PagedAttention:
    """Plans and computes attention for one shape of heads."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        token_by_token: bool = False,
    ) -> None:
        """Prepare for one shape; `token_by_token` makes each token's result a function of its own
        position, keys and values alone, whatever else is in the step."""
        self._token_by_token = token_by_token
        self._heads = num_heads
        self._kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._dtype = dtype
        self._long_dtype = _fastest_for_long_rows(dtype, device)
        self._device = device

    def plan(self, rows: AttentionRows, window: int | None) -> AttentionPlan:
        """Group the rows of a step; `window` limits how far back a token looks."""
        first_block = np.zeros_like(rows.starts)
        if window is not None:
            first_block = np.maximum(rows.starts - window + 1, 0) // rows.block_size
        last_block = (rows.starts + rows.counts - 1) // rows.block_size
        num_blocks = last_block - first_block + 1
        if self._token_by_token:
            return list(self._by_token(rows, window))
        plan: AttentionPlan = []
        for members in _groups(rows, num_blocks, self._group):
            if len(members) == 1 and rows.counts[members[0]] > _SHORT_ROW:
                row = int(members[0])
                plan.append(
                    self._long_row(rows, row, int(first_block[row]), int(num_blocks[row]), window)
                )
            else:
                plan.append(self._padded_group(rows, members, first_block, num_blocks, window))
        return plan

    def _by_token(
        self, rows: AttentionRows, window: int | None
    ) -> Iterator[PaddedGroup | TokensOfRow]:
        """Plan so that the shape of each token's product follows from its position alone.

        Tokens share a call if they have equally many keys, in steps of `_TOKEN_KEYS`: decodes of
        all rows, and neighbours within a row.
        """
        size = rows.block_size
        step = max(1, _TOKEN_KEYS // size)
        single = np.flatnonzero(rows.counts == 1)
        first, width = _key_blocks(rows.starts[single], size, step, window)
        for blocks in np.unique(width):
            where = width == blocks
            members = single[where]
            for at in range(0, len(members), _TOKENS_AT_ONCE):
                part = members[at : at + _TOKENS_AT_ONCE]
                yield self._decodes(rows, part, first[where][at : at + len(part)], blocks, window)
        for row in np.flatnonzero(rows.counts > 1).tolist():
            positions = rows.starts[row] + np.arange(rows.counts[row])
            first, width = _key_blocks(positions, size, step, window)
            ends = np.flatnonzero(np.diff(width * (rows.block_tables.shape[1] + step) + first)) + 1
            for tokens in np.split(np.arange(len(positions)), ends):
                for at in range(0, len(tokens), _TOKENS_AT_ONCE):
                    part = tokens[at : at + _TOKENS_AT_ONCE]
                    yield self._tokens(rows, row, part, first[part[0]], width[part[0]], window)

    def _decodes(
        self,
        rows: AttentionRows,
        members: IntArray,
        first: IntArray,
        width: int,
        window: int | None,
    ) -> PaddedGroup:
        logical = first[:, None] + np.arange(width)
        logical = np.minimum(logical, rows.block_tables.shape[1] - 1)
        keys = (first * rows.block_size)[:, None] + np.arange(width * rows.block_size)
        whole = len(members) == len(rows.counts)
        return PaddedGroup(
            num_rows=len(members),
            num_queries=1,
            tokens=None if whole else self._tensor(rows.first_token[members]),
            valid=None,
            blocks=self._tensor(rows.block_tables[members[:, None], logical].ravel()),
            mask=self._mask(rows.starts[members][:, None], keys, window).unsqueeze(1),
        )

    def _tokens(
        self,
        rows: AttentionRows,
        row: int,
        tokens: IntArray,
        first: int,
        width: int,
        window: int | None,
    ) -> TokensOfRow:
        logical = np.minimum(first + np.arange(width), rows.block_tables.shape[1] - 1)
        keys = first * rows.block_size + np.arange(width * rows.block_size)
        positions = rows.starts[row] + tokens
        mask = self._mask(positions[:, None], keys[None], window)
        at = int(rows.first_token[row])
        return TokensOfRow(
            first=at + int(tokens[0]),
            end=at + int(tokens[-1]) + 1,
            blocks=self._tensor(rows.block_tables[row, logical]),
            mask=mask.unsqueeze(1),
        )

    def _padded_group(
        self,
        rows: AttentionRows,
        members: IntArray,
        first_block: IntArray,
        num_blocks: IntArray,
        window: int | None,
    ) -> PaddedGroup:
        counts = rows.counts[members]
        num_queries, width = int(counts.max()), int(num_blocks[members].max())
        offsets = np.minimum(np.arange(num_queries), counts[:, None] - 1)
        tokens = (rows.first_token[members][:, None] + offsets).ravel()
        ragged = int(counts.sum()) != tokens.size
        whole = len(members) == len(rows.counts) and not ragged
        logical = np.minimum(
            first_block[members][:, None] + np.arange(width), rows.block_tables.shape[1] - 1
        )
        blocks = rows.block_tables[members[:, None], logical]
        queries = rows.starts[members][:, None] + offsets
        keys = (first_block[members] * rows.block_size)[:, None] + np.arange(
            width * rows.block_size
        )
        mask = self._mask(queries, keys, window)
        if num_queries > 1:
            mask = mask.repeat(1, self._group, 1)
        valid = np.flatnonzero((np.arange(num_queries) < counts[:, None]).ravel())
        return PaddedGroup(
            num_rows=len(members),
            num_queries=num_queries,
            tokens=None if whole else self._tensor(tokens),
            valid=self._tensor(valid) if ragged else None,
            blocks=self._tensor(blocks.ravel()),
            mask=mask.unsqueeze(1),
        )

    def _long_row(
        self,
        rows: AttentionRows,
        row: int,
        first_block: int,
        num_blocks: int,
        window: int | None,
    ) -> LongRow:
        start, count = int(rows.starts[row]), int(rows.counts[row])
        first_key = first_block * rows.block_size
        num_keys = start + count - first_key
        mask = None
        if start > 0 or (window is not None and window < count):
            queries = start + np.arange(count)
            keys = first_key + np.arange(num_keys)
            mask = self._mask(queries[None], keys[None], window)[0].to(self._long_dtype)
        first = int(rows.first_token[row])
        return LongRow(
            first=first,
            end=first + count,
            num_keys=num_keys,
            blocks=self._tensor(rows.block_tables[row, first_block : first_block + num_blocks]),
            mask=mask,
        )

    def _mask(self, queries: IntArray, keys: IntArray, window: int | None) -> Tensor:
        """Return [rows, queries, keys] from the positions [rows, queries] and [rows, keys]."""
        query, key = self._tensor(queries).unsqueeze(2), self._tensor(keys).unsqueeze(1)
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))

    def _tensor(self, array: npt.NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def attend(self, queries: Tensor, cache: Tensor, plan: AttentionPlan) -> Tensor:
        """Attend from all tokens of the step to the cache, which holds their keys already.

        Args:
            queries: [tokens, heads, head_dim], rotated
            cache: [num_blocks, block_size, 2, kv_heads, head_dim]

        Returns:
            [tokens, heads * head_dim]
        """
        flat = cache.view(cache.shape[0], -1)
        if len(plan) == 1 and isinstance(plan[0], PaddedGroup) and plan[0].tokens is None:
            return self._attend_padded(queries, flat, plan[0])
        out = queries.new_empty(queries.shape[0], self._heads * self._head_dim)
        for part in plan:
            if isinstance(part, TokensOfRow):
                out[part.first : part.end] = self._attend_tokens(queries, flat, part)
                continue
            if isinstance(part, LongRow):
                out[part.first : part.end] = self._attend_long(queries, flat, part)
                continue
            assert part.tokens is not None, "a group over the whole batch is the only one"
            result = self._attend_padded(queries.index_select(0, part.tokens), flat, part)
            tokens = part.tokens
            if part.valid is not None:
                result, tokens = result.index_select(0, part.valid), tokens[part.valid]
            out.index_copy_(0, tokens, result)
        return out

    def _attend_padded(self, queries: Tensor, flat: Tensor, group: PaddedGroup) -> Tensor:
        """Heads that share a KV head are folded into the query axis, so no key is repeated."""
        rows, count, kv_heads, dim = (
            group.num_rows,
            group.num_queries,
            self._kv_heads,
            self._head_dim,
        )
        kv = flat.index_select(0, group.blocks).view(rows, -1, 2, kv_heads, dim)
        keys, values = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
        if count == 1:
            folded = queries.view(rows, kv_heads, self._group, dim)
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=group.mask)
            return out.reshape(rows, -1)
        spread = queries.view(rows, count, kv_heads, self._group, dim).permute(0, 2, 3, 1, 4)
        folded = spread.reshape(rows, kv_heads, self._group * count, dim)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=group.mask)
        out = out.view(rows, kv_heads, self._group, count, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(rows * count, -1)

    def _attend_tokens(self, queries: Tensor, flat: Tensor, part: TokensOfRow) -> Tensor:
        """The products of `_attend_padded` for decodes, with keys that all tokens share."""
        count, kv_heads, dim = part.end - part.first, self._kv_heads, self._head_dim
        kv = flat.index_select(0, part.blocks).view(1, -1, 2, kv_heads, dim)
        shape = (count, kv_heads, kv.shape[1], dim)
        keys, values = (kv[:, :, i].transpose(1, 2).expand(shape) for i in (0, 1))
        folded = queries[part.first : part.end].view(count, kv_heads, self._group, dim)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=part.mask)
        return out.reshape(count, -1)

    def _attend_long(self, queries: Tensor, flat: Tensor, row: LongRow) -> Tensor:
        """KV heads become the batch axis, over which keys are expanded without a copy."""
        count, kv_heads, dim = row.end - row.first, self._kv_heads, self._head_dim
        kv = flat.index_select(0, row.blocks).view(-1, 2, kv_heads, dim)[: row.num_keys]
        kv = kv.to(self._long_dtype)
        shape = (kv_heads, self._group, row.num_keys, dim)
        keys = kv[:, 0].permute(1, 0, 2).unsqueeze(1).expand(shape)
        values = kv[:, 1].permute(1, 0, 2).unsqueeze(1).expand(shape)
        spread = queries[row.first : row.end].view(count, kv_heads, self._group, dim)
        out = F.scaled_dot_product_attention(
            spread.to(self._long_dtype).permute(1, 2, 0, 3),
            keys,
            values,
            attn_mask=row.mask,
            is_causal=row.mask is None,
        )
        return out.permute(2, 0, 1, 3).reshape(count, -1).to(queries.dtype)


def _fastest_for_long_rows(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type that rows of many tokens are attended in.

    On processors without a unit for matrices of 16-bit floats torch converts tile by tile, which
    takes a third longer than to convert once and compute in float32.
    """
    if device.type == "cpu" and not torch.cpu._is_amx_tile_supported():
        return torch.float32
    return dtype


def _key_blocks(
    positions: IntArray, block_size: int, step: int, window: int | None
) -> tuple[IntArray, IntArray]:
    """Return the first block that each position attends to, and how many, in steps of `step`."""
    first = np.zeros_like(positions)
    if window is not None:
        first = np.maximum(positions - window + 1, 0) // block_size
    return first, -(-(positions // block_size - first + 1) // step) * step


def _groups(rows: AttentionRows, num_blocks: IntArray, heads_per_kv: int) -> Iterator[IntArray]:
    """Yield the rows (ascending) of each group: decodes by length, short rows by shape, others."""
    counts = rows.counts
    single = np.flatnonzero(counts == 1)
    if len(single):
        yield from _by_length(single, num_blocks[single] * rows.block_size)
    if len(single) == len(counts):
        return
    for row in np.flatnonzero(counts > _SHORT_ROW):
        yield np.array([row])
    short = np.flatnonzero((counts > 1) & (counts <= _SHORT_ROW))
    shape = _log2_up(counts[short]) * 64 + _log2_up(num_blocks[short])
    for key in np.unique(shape):
        members = short[shape == key]
        scores = counts[members].max() * num_blocks[members].max() * rows.block_size * heads_per_kv
        most = max(1, _MAX_SCORES // int(scores))
        for first in range(0, len(members), most):
            yield members[first : first + most]


def _by_length(members: IntArray, lengths: IntArray) -> Iterator[IntArray]:
    """Split so that no row is padded to more than twice its length, unless padding is cheap."""
    if int(lengths.max()) * len(lengths) - int(lengths.sum()) <= _FREE_PADDING:
        yield members
        return
    order = np.argsort(lengths, kind="stable")
    ascending = lengths[order]
    end = len(order)
    while end:
        longest = int(ascending[end - 1])
        first = int(np.searchsorted(ascending, longest // 2, side="right"))
        if longest * end - int(ascending[:end].sum()) <= _FREE_PADDING:
            first = 0
        yield np.sort(members[order[first:end]])
        end = first


def _log2_up(values: IntArray) -> IntArray:
    return np.ceil(np.log2(values)).astype(np.int64)


def write_keys_values(cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store new keys and values, each [tokens, kv_heads, head_dim], at flat token slots."""
    by_slot = cache.view(-1, *cache.shape[2:])
    by_slot[:, 0].index_copy_(0, slots, keys)
    by_slot[:, 1].index_copy_(0, slots, values)
