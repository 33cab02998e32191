"""The rows of a step, grouped by similar shape."""

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

SHORT_ROW = 64
"""Rows with at most this many new tokens can share groups; longer ones get their own call."""
_FREE_PADDING = 4096
"""Padded key positions below which splitting a group costs more than it saves."""
_MAX_SCORES = 1 << 22
"""Maximum padded scores per head group, which bounds the mask of a group of short rows."""


class AttentionRows(msgspec.Struct, frozen=True):
    """The rows of one step as used by attention.

    Row i attends from positions `starts[i]` to `starts[i] + counts[i] - 1`; its new tokens start at
    index `first_token[i]` of the batch.
    """

    starts: IntArray
    counts: IntArray
    first_token: IntArray
    block_tables: npt.NDArray[np.int32]
    """[rows, blocks]: unused entries can hold any valid block."""
    block_size: int
    other_tables: tuple[npt.NDArray[np.int32], ...] = ()
    """Block tables of the cache groups after the first, each of the same shape."""

    def of_group(self, group: int) -> "AttentionRows":
        """Return the rows with the block tables of a cache group."""
        if group == 0:
            return self
        tables = self.other_tables[group - 1]
        return msgspec.structs.replace(self, block_tables=tables, other_tables=())


def parts_of(rows: AttentionRows, chosen: IntArray, tokens_each: int) -> IntArray:
    """Cut the chosen rows into parts of at most `tokens_each` tokens, in order.

    Returns:
        [parts, 4]: row, first token, its position, number of tokens.
    """
    counts = rows.counts[chosen]
    num_parts = -(-counts // tokens_each)
    ends = np.cumsum(num_parts)
    row = np.repeat(chosen, num_parts)
    offset = (np.arange(ends[-1]) - np.repeat(ends - num_parts, num_parts)) * tokens_each
    count = np.minimum(rows.counts[row] - offset, tokens_each)
    return np.stack([row, rows.first_token[row] + offset, rows.starts[row] + offset, count], axis=1)


def groups(rows: AttentionRows, num_blocks: IntArray, heads_per_kv: int) -> Iterator[IntArray]:
    """Yield each group's rows: decodes by length, short rows by shape, long rows alone."""
    counts = rows.counts
    single = np.flatnonzero(counts == 1)
    if len(single):
        yield from by_length(single, num_blocks[single] * rows.block_size)
    if len(single) == len(counts):
        return
    for row in np.flatnonzero(counts > SHORT_ROW):
        yield np.array([row])
    short = np.flatnonzero((counts > 1) & (counts <= SHORT_ROW))
    yield from by_shape(rows, short, num_blocks, heads_per_kv)


def by_shape(
    rows: AttentionRows, short: IntArray, num_blocks: IntArray, heads_per_kv: int
) -> Iterator[IntArray]:
    """Yield groups of short rows that are padded to one shape."""
    counts = rows.counts
    shape = _log2_up(counts[short]) * 64 + _log2_up(num_blocks[short])
    for key in np.unique(shape):
        members = short[shape == key]
        scores = counts[members].max() * num_blocks[members].max() * rows.block_size * heads_per_kv
        max_members = max(1, _MAX_SCORES // int(scores))
        for first in range(0, len(members), max_members):
            yield members[first : first + max_members]


def by_length(members: IntArray, lengths: IntArray) -> Iterator[IntArray]:
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
