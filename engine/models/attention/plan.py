"""Decides, once per step, which rows attend together.

Rows of a batch are grouped by similar shape, which limits both calls and padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.models.attention.key_widths import FINE_STEP, STEP, KeyWidths
from engine.models.attention.rows import (
    SHORT_ROW,
    AttentionRows,
    IntArray,
    by_length,
    by_shape,
    groups,
)

TOKENS_AT_ONCE = 64
"""Maximum tokens per call, which bounds its memory."""
_ONE_PRODUCT = 32
"""Minimum tokens of a row for which one product, padded to `TOKENS_AT_ONCE`, is faster."""
WHOLE_QUERIES = 4
"""Products that treat remainder queries differently sum multiples of this count in one order."""


class PaddedGroup(msgspec.Struct, frozen=True):
    """Rows computed together, each padded to the same number of new tokens and blocks."""

    num_rows: int
    num_queries: int
    tokens: Tensor | None
    """[rows * queries] token of each padded query; None if the group is the whole batch in
    order."""
    valid: Tensor | None
    """[new tokens] indices of queries that are not padding; None without padding."""
    blocks: Tensor
    """[rows * blocks]"""
    mask: Tensor
    """[rows, 1, group * queries, keys], added to the scores."""


class TokensOfRow(msgspec.Struct, frozen=True):
    """Tokens of one row whose key counts are derived from their positions."""

    first: int
    end: int
    blocks: Tensor
    """Shared with other parts of the row that start at the same block."""
    mask: Tensor
    """[tokens, 1, 1, keys], added to the scores; or [queries, keys] for one product of all tokens,
    padded with copies of the last one."""


class LongRow(msgspec.Struct, frozen=True):
    """One row with many new tokens."""

    first: int
    end: int
    num_keys: int
    blocks: Tensor
    mask: Tensor | None
    """[queries, keys]; None for a plain causal mask over queries that start at position 0."""


AttentionPlan = list[PaddedGroup | LongRow | TokensOfRow]


@dataclass(kw_only=True, eq=False)
class AttentionPlanner:
    """Plans steps for a fixed number of query heads per KV head."""

    heads_per_kv: int
    dtype: torch.dtype
    """Of masks, except those of long rows."""
    long_dtype: torch.dtype
    device: torch.device
    token_by_token: bool = False
    """Makes each token's result depend only on its own position, keys and values, regardless of the
    rest of the step. The following three preserve that."""
    one_product: bool = False
    """Allows one product of `TOKENS_AT_ONCE` tokens."""
    key_widths: KeyWidths | None = None
    """Allows products of any multiple of `WHOLE_QUERIES`, with interchangeable key counts."""
    shares_calls: bool = False
    """Allows one product per `PaddedGroup`."""
    has_chunks: bool = False
    """As in `ModelSpec`."""
    first_key: int = 0
    """Positions before it are empty; all tokens come after them."""

    def plan(self, rows: AttentionRows, window: int | None) -> AttentionPlan:
        """Group the rows of a step; `window` limits how far back a token attends."""
        if self.token_by_token:
            return list(self._by_token(rows, window))
        first_block = self._first_seen(rows.starts, window) // rows.block_size
        last_block = (rows.starts + rows.counts - 1) // rows.block_size
        num_blocks = last_block - first_block + 1
        plan: AttentionPlan = []
        for members in groups(rows, num_blocks, self.heads_per_kv):
            if len(members) == 1 and rows.counts[members[0]] > SHORT_ROW:
                row = int(members[0])
                plan.append(
                    self._long_row(rows, row, int(first_block[row]), int(num_blocks[row]), window)
                )
            else:
                plan.append(self._padded_group(rows, members, first_block, num_blocks, window))
        return plan

    def plan_whole(self, rows: AttentionRows, window: int | None) -> AttentionPlan:
        """Plan rows whose tokens attend to the whole row, and to earlier tokens of the sequence."""
        plan: AttentionPlan = []
        size = rows.block_size
        first_seen = self._first_seen(rows.starts, window)
        for row, first_block in enumerate((first_seen // size).tolist()):
            queries = rows.starts[row] + np.arange(rows.counts[row])
            keys = np.arange(first_block * size, queries[-1] + 1)
            hidden = keys < self._first_seen(queries, window)[:, None]
            mask = torch.zeros(hidden.shape, dtype=self.long_dtype, device=self.device)
            last_block = int(queries[-1]) // size
            first = int(rows.first_token[row])
            plan.append(
                LongRow(
                    first=first,
                    end=first + len(queries),
                    num_keys=len(keys),
                    blocks=self._tensor(rows.block_tables[row, first_block : last_block + 1]),
                    mask=mask.masked_fill_(torch.from_numpy(hidden).to(self.device), -torch.inf),
                )
            )
        return plan

    def _first_seen(self, positions: IntArray, window: int | None) -> IntArray:
        """Return the first position that each of these positions attends to."""
        if window is None:
            return np.zeros_like(positions)
        if self.has_chunks:
            return positions // window * window
        return np.maximum(positions - window + 1, 0)

    def _key_blocks(
        self, positions: IntArray, block_size: int, step: int, window: int | None
    ) -> tuple[IntArray, IntArray]:
        """Return each position's first block, and its block count, a multiple of `step`."""
        first = self._first_seen(positions, window) // block_size
        return first, -(-(positions // block_size - first + 1) // step) * step

    def _by_token(
        self, rows: AttentionRows, window: int | None
    ) -> Iterator[PaddedGroup | TokensOfRow]:
        """Plan so that each token gets the same bits as when computed alone.

        A token's product has a shape that depends only on its position, or one that gives the same
        bits. Tokens share a call if their key counts are equal after rounding up to `STEP` (decodes
        of all rows, and neighbours within a row) or interchangeable.
        """
        yield from self._decode_groups(rows, window)
        several = rows.counts > 1
        if self.key_widths is not None and self.shares_calls and several.any():
            members, blocks = self._alike_rows(rows, self.key_widths, window)
            for group in by_shape(rows, members, blocks[1], self.heads_per_kv):
                yield self._padded_group(rows, group, *blocks, window)
            several[members] = False
        for row in np.flatnonzero(several).tolist():
            yield from self._neighbours(rows, row, window)

    def _decode_groups(self, rows: AttentionRows, window: int | None) -> Iterator[PaddedGroup]:
        size = rows.block_size
        single = np.flatnonzero(rows.counts == 1)
        first, width = self._key_blocks(rows.starts, size, max(1, STEP // size), window)
        if self.key_widths is not None:
            fine_step = max(1, FINE_STEP // size)
            fine = self._key_blocks(rows.starts, size, fine_step, window)[1]
            width = np.where(self.key_widths.are_alike(fine * size), fine, width)
        for members in self._sharing(width[single] * size):
            for at in range(0, len(members), TOKENS_AT_ONCE):
                part = single[members[at : at + TOKENS_AT_ONCE]]
                yield self._padded_group(rows, part, first, width, window)

    def _alike_rows(
        self, rows: AttentionRows, widths: KeyWidths, window: int | None
    ) -> tuple[IntArray, tuple[IntArray, IntArray]]:
        """Return the short rows whose tokens all have interchangeable key counts.

        Also returns the first block and the block count of every row.
        """
        size = rows.block_size
        step = max(1, FINE_STEP // size)
        first, fewest = self._key_blocks(rows.starts, size, step, window)
        last, max_blocks = self._key_blocks(rows.starts + rows.counts - 1, size, step, window)
        is_short = (rows.counts > 1) & (rows.counts <= SHORT_ROW)
        is_alike = (first == last) & widths.same_order_between(fewest * size, max_blocks * size)
        return np.flatnonzero(is_short & is_alike), (first, max_blocks)

    def _neighbours(
        self, rows: AttentionRows, row: int, window: int | None
    ) -> Iterator[TokensOfRow]:
        size = rows.block_size
        step = max(1, STEP // size)
        positions = rows.starts[row] + np.arange(rows.counts[row])
        first, width = self._key_blocks(positions, size, step, window)
        ends = np.flatnonzero(np.diff(width * (rows.block_tables.shape[1] + step) + first)) + 1
        seen, blocks = -1, self._tensor(rows.block_tables[row, :0])
        for tokens in np.split(np.arange(len(positions)), ends):
            begin = int(first[tokens[0]])
            if begin != seen:
                max_width = int(width[first == begin].max())
                logical = np.minimum(begin + np.arange(max_width), rows.block_tables.shape[1] - 1)
                seen, blocks = begin, self._tensor(rows.block_tables[row, logical])
            for at in range(0, len(tokens), TOKENS_AT_ONCE):
                part = tokens[at : at + TOKENS_AT_ONCE]
                keys = begin * size + np.arange(int(width[part[0]]) * size)
                first_token = int(rows.first_token[row] + part[0])
                yield TokensOfRow(
                    first=first_token,
                    end=first_token + len(part),
                    blocks=blocks,
                    mask=self._mask_of_tokens(positions[part], keys, window),
                )

    def _sharing(self, keys: IntArray) -> Iterator[IntArray]:
        """Yield groups of decodes that share a call, given the key count of each."""
        rest = keys
        if self.key_widths is not None:
            alike = self.key_widths.are_alike(keys)
            if alike.any():
                yield from by_length(np.flatnonzero(alike), keys[alike])
            rest = keys[~alike]
        for each in np.unique(rest) if len(rest) else ():
            yield np.flatnonzero(keys == each)

    def _mask_of_tokens(self, positions: IntArray, keys: IntArray, window: int | None) -> Tensor:
        """Return the mask of adjacent tokens, as in `TokensOfRow`."""
        queries = len(positions)
        if self.key_widths is not None:
            queries = -(-queries // WHOLE_QUERIES) * WHOLE_QUERIES
        elif self.one_product and queries >= _ONE_PRODUCT:
            queries = TOKENS_AT_ONCE
        else:  # one product per token
            return self._mask(positions[:, None], keys[None], window, self.dtype).unsqueeze(1)
        padded = np.minimum(np.arange(queries), len(positions) - 1)
        return self._mask(positions[None, padded], keys[None], window, self.dtype).squeeze(0)

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
        if self.token_by_token and num_queries > 1:
            num_queries = -(-num_queries // WHOLE_QUERIES) * WHOLE_QUERIES
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
        mask = self._mask(queries, keys, window, self.dtype)
        if num_queries > 1:
            mask = mask.repeat(1, self.heads_per_kv, 1)
        valid = None
        if ragged:
            valid = np.flatnonzero((np.arange(num_queries) < counts[:, None]).ravel())
        return PaddedGroup(
            num_rows=len(members),
            num_queries=num_queries,
            tokens=None if whole else self._tensor(tokens),
            valid=None if valid is None else self._tensor(valid),
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
            mask = self._mask(queries[None], keys[None], window, self.long_dtype)[0]
        first = int(rows.first_token[row])
        return LongRow(
            first=first,
            end=first + count,
            num_keys=num_keys,
            blocks=self._tensor(rows.block_tables[row, first_block : first_block + num_blocks]),
            mask=mask,
        )

    def _mask(
        self, queries: IntArray, keys: IntArray, window: int | None, dtype: torch.dtype
    ) -> Tensor:
        """Return a mask [rows, queries, keys] from positions [rows, queries] and [rows, keys]."""
        query, key = self._tensor(queries).unsqueeze(2), self._tensor(keys).unsqueeze(1)
        hidden = key > query
        if window is not None:
            hidden |= key < self._tensor(self._first_seen(queries, window)).unsqueeze(2)
        if self.first_key:
            hidden |= key < self.first_key
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
        return mask.masked_fill_(hidden, float("-inf"))

    def _tensor(self, array: npt.NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
