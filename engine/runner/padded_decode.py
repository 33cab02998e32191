"""Decode steps at a few fixed sizes, so that a device can replay what it recorded of them."""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from engine.models.attention.rows import AttentionRows
from engine.runner.inputs import BatchRows

IntArray = npt.NDArray[np.int64]

_SMALL_SIZES = (1, 2, 4)
_STRIDE = 8
_LARGEST = 256


class PaddedDecode(msgspec.Struct, frozen=True):
    """The arrays of a decode step, padded with rows that read and write a block of their own."""

    token_ids: IntArray
    positions: IntArray
    cache_slots: IntArray
    num_keys: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    """[size, blocks of the longest sequence]"""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows to record: few while small, then every eighth."""
    most = min(max_num_seqs, _LARGEST)
    sizes = {size for size in _SMALL_SIZES if size < most} | set(range(_STRIDE, most, _STRIDE))
    return (*sorted(sizes), most)


def padded_size(num_rows: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest size with room for so many rows; None if all are too small."""
    index = bisect_left(sizes, num_rows)
    return sizes[index] if index < len(sizes) else None


def pad_decode(
    rows: BatchRows, shape: AttentionRows, *, size: int, width: int, scratch_block: int
) -> PaddedDecode:
    """Pad a step of one-token rows to `size` rows and `width` blocks.

    Args:
        rows: what is computed.
        shape: the same for attention, one row per token.
        size: rows of the recorded step, at least as many as there are.
        width: blocks of its block tables.
        scratch_block: what padding reads and writes.
    """
    count = len(rows.token_ids)
    padding = size - count
    block_tables = np.full((size, width), scratch_block, np.int32)
    block_tables[:count, : shape.block_tables.shape[1]] = shape.block_tables
    scratch_slot = scratch_block * shape.block_size
    return PaddedDecode(
        token_ids=np.pad(rows.token_ids, (0, padding)),
        positions=np.pad(rows.positions, (0, padding)),
        cache_slots=np.pad(rows.cache_slots, (0, padding), constant_values=scratch_slot),
        num_keys=np.pad(rows.positions + 1, (0, padding), constant_values=1).astype(np.int32),
        block_tables=block_tables,
    )
