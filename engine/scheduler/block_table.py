"""Which KV blocks a sequence holds, and how many it needs: one table for each group of layers.

Layers of a model are in groups, and a block has the keys and values of one group. Groups whose
layers slide need only the blocks that reach into their window.
"""

import sys
from bisect import bisect_right
from collections.abc import Sequence

from engine.batch.batch import SlotBlocks, SlotImage
from engine.shared.block_names import ROOT_DIGEST
from engine.shared.config import SchedulerConfig
from engine.shared.messages import EncoderInput

NEVER = sys.maxsize
FREED = -1
"""Stands in a table for a block behind the window."""


class CacheShape:
    """What the groups of a KV cache need, in numbers.

    Args:
        block_size: tokens of a block.
        windows: for each group how many last positions a token attends to, itself included; None
            for all.
        lookahead: maximum tokens of a sequence that are planned and not known to be computed, and
            those of one step more. As many have their blocks in advance.
    """

    def __init__(
        self, block_size: int, windows: Sequence[int | None] = (None,), lookahead: int = NEVER
    ) -> None:
        self.block_size = block_size
        self.windows = tuple(windows)
        self.sliding = {n: window for n, window in enumerate(windows) if window is not None}
        """The windows of the groups that have one, by number."""
        self.spans = tuple(
            NEVER if window is None else -(-(window - 1 + lookahead) // block_size) + 1
            for window in windows
        )
        """Maximum blocks that a sequence holds of each group."""

    def first_needed(self, group: int, position: int) -> int:
        """Return the first block of a group that tokens from a position on attend to."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of so many tokens holds at once."""
        blocks = -(-num_tokens // self.block_size)
        return sum(min(blocks, span) for span in self.spans)

    def longest(self, num_blocks: int, limit: int) -> int:
        """Return the length of the longest sequence, up to a limit, that so many blocks hold."""
        return bisect_right(range(limit + 1), num_blocks, key=self.blocks_for) - 1


def lookahead_tokens(
    scheduling: SchedulerConfig,
    max_model_len: int,
    *,
    num_stages: int = 1,
    in_one_step: bool = False,
) -> int:
    """Return how far ahead of its computed tokens a sequence may be planned.

    Args:
        max_model_len: tokens of the longest sequence.
        num_stages: steps that are computed at once.
        in_one_step: whether all tokens of a sequence are computed in the same step.
    """
    if in_one_step:
        return max_model_len
    threshold = scheduling.long_prefill_token_threshold or max_model_len
    tokens = min(scheduling.max_num_batched_tokens, threshold, max_model_len)
    return (1 + num_stages) * (tokens + 1 + scheduling.max_draft_tokens)


class GroupTable:
    """The blocks of one sequence in one group, in order of position."""

    __slots__ = ("first", "ids", "told")

    def __init__(self) -> None:
        self.ids: list[int] = []
        """Those before `first` are `FREED`."""
        self.first = 0
        self.told = 0
        """Leading blocks that the executor has been told."""


class BlockTable:
    """The KV blocks of one sequence; written by `KVCacheManager` only."""

    __slots__ = (
        "capacity", "digests", "generation", "groups", "images", "next_commit", "next_release",
        "num_admitted", "num_blocks", "num_committed", "num_untold", "offered", "root",
    )  # fmt: skip

    def __init__(
        self,
        root: bytes = ROOT_DIGEST,
        images: Sequence[EncoderInput] = (),
        *,
        offered: bool = False,
    ) -> None:
        self.root = root
        """Parent of its first block: tables with different ones share nothing."""
        self.offered = offered
        """Whether another engine is to read its blocks."""
        self.images = [
            SlotImage(each.position, each.num_tokens, each.digest, each.height, each.width)
            for each in images
        ]
        """What the sequence shows: blocks with the same tokens and other images are others."""
        self.groups: list[GroupTable] = []
        """Empty for a sequence that holds no blocks."""
        self.num_blocks = 0
        """Blocks that it holds, of all groups."""
        self.capacity = 0
        """Positions that the blocks of all groups have room for."""
        self.num_admitted = 0
        """Blocks that the tokens take which were known when it was admitted. A sliding group gets
        some of them only in exchange for those that it frees."""
        self.num_untold = 0
        """Blocks that the executor has not been told."""
        self.digests: list[bytes] = []
        """Names of the sequence's first full blocks, as far as they were needed or known."""
        self.num_committed = 0
        """Leading blocks that were offered to the prefix cache."""
        self.next_commit = NEVER
        """Computed tokens from which on `commit` has something to do."""
        self.next_release = NEVER
        """Computed tokens from which on `release_behind` has something to do."""
        self.generation = 0

    def take_new(self, slot: int) -> list[SlotBlocks]:
        """Return the blocks that the executor has not been told; now it is, for this slot."""
        self.num_untold = 0
        if len(self.groups) == 1:
            group = self.groups[0]
            first, group.told = group.told, len(group.ids)
            return [SlotBlocks(slot, first, group.ids[first:])] if first < group.told else []
        new = []
        for number, group in enumerate(self.groups):
            if group.told < len(group.ids):
                new.append(SlotBlocks(slot, group.told, group.ids[group.told :], number))
                group.told = len(group.ids)
        return new

    def held(self) -> list[int]:
        """Return all blocks that it holds, the last ones of each group first."""
        if len(self.groups) == 1:
            group = self.groups[0]
            return group.ids[: group.first - 1 if group.first else None : -1]
        longest = max((len(group.ids) for group in self.groups), default=0)
        return [
            group.ids[index]
            for index in range(longest - 1, -1, -1)
            for group in self.groups
            if group.first <= index < len(group.ids)
        ]

    def clear(self) -> None:
        """Hold nothing; names of blocks stay known."""
        self.groups = []
        self.num_blocks = self.capacity = self.num_admitted = self.num_untold = 0
        self.num_committed = 0
        self.next_commit = self.next_release = NEVER
