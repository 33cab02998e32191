"""Block tables of sequences, one per layer group, and the number of blocks they need.

A block holds the keys and values of one layer group. Groups with sliding-window attention need only
the blocks that overlap the window.
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
"""Placeholder in a table for a block that the window has passed."""


class CacheShape:
    """Block requirements of the layer groups of a KV cache.

    Args:
        block_size: tokens per block.
        windows: per group, the number of positions a token attends to, including its own; None if
            unlimited.
        lookahead: maximum tokens of a sequence that are planned but not known to be computed, plus
            those of one more step. Blocks for them are allocated in advance.
    """

    def __init__(
        self, block_size: int, windows: Sequence[int | None] = (None,), lookahead: int = NEVER
    ) -> None:
        self.block_size = block_size
        self.windows = tuple(windows)
        self.sliding = {n: window for n, window in enumerate(windows) if window is not None}
        """Window sizes of the sliding groups, by group number."""
        self.spans = tuple(
            NEVER if window is None else -(-(window - 1 + lookahead) // block_size) + 1
            for window in windows
        )
        """Maximum number of blocks per sequence in each group."""

    def first_needed(self, group: int, position: int) -> int:
        """Return the first block of a group that tokens from `position` on attend to."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return the maximum blocks held at once by a sequence of `num_tokens` tokens."""
        blocks = -(-num_tokens // self.block_size)
        return sum(min(blocks, span) for span in self.spans)

    def longest(self, num_blocks: int, limit: int) -> int:
        """Return the maximum sequence length, up to `limit`, that fits in `num_blocks` blocks."""
        return bisect_right(range(limit + 1), num_blocks, key=self.blocks_for) - 1


def lookahead_tokens(
    scheduling: SchedulerConfig,
    max_model_len: int,
    *,
    num_stages: int = 1,
    in_one_step: bool = False,
) -> int:
    """Return the maximum tokens of a sequence that can be planned but not computed.

    Args:
        max_model_len: maximum tokens per sequence.
        num_stages: number of steps in flight at once.
        in_one_step: whether all tokens of a sequence are computed in the same step.
    """
    if in_one_step:
        return max_model_len
    threshold = scheduling.long_prefill_token_threshold or max_model_len
    tokens = min(scheduling.max_num_batched_tokens, threshold, max_model_len)
    return (1 + num_stages) * (tokens + 1 + scheduling.max_draft_tokens)


class GroupTable:
    """The blocks of one sequence in one group, in order of position."""

    __slots__ = ("first", "ids", "num_sent")

    def __init__(self) -> None:
        self.ids: list[int] = []
        """Block ids; those before index `first` are `FREED`."""
        self.first = 0
        self.num_sent = 0
        """Number of leading blocks already sent to the executor."""


class BlockTable:
    """The KV blocks of one sequence; only `KVCacheManager` modifies it."""

    __slots__ = (
        "capacity", "digests", "generation", "groups", "images", "next_commit", "next_release",
        "num_admitted", "num_blocks", "num_committed", "num_unsent", "offered", "root",
    )  # fmt: skip

    def __init__(
        self,
        root: bytes = ROOT_DIGEST,
        images: Sequence[EncoderInput] = (),
        *,
        offered: bool = False,
    ) -> None:
        self.root = root
        """Parent digest of the first block: tables with different roots share no blocks."""
        self.offered = offered
        """Whether another engine will read its blocks."""
        self.images = [
            SlotImage(each.position, each.num_tokens, each.digest, each.height, each.width)
            for each in images
        ]
        """Images in the sequence: blocks with equal tokens but different images are distinct."""
        self.groups: list[GroupTable] = []
        """Empty for a sequence that holds no blocks."""
        self.num_blocks = 0
        """Number of blocks held, over all groups."""
        self.capacity = 0
        """Number of positions for which all groups have blocks."""
        self.num_admitted = 0
        """Blocks for the tokens known at admission. A sliding group gets some of them only as it
        frees earlier ones."""
        self.num_unsent = 0
        """Number of blocks not yet sent to the executor."""
        self.digests: list[bytes] = []
        """Digests of the sequence's first full blocks, as far as computed."""
        self.num_committed = 0
        """Number of leading blocks offered to the prefix cache."""
        self.next_commit = NEVER
        """Number of computed tokens from which `commit` has work to do."""
        self.next_release = NEVER
        """Number of computed tokens from which `release_behind` has work to do."""
        self.generation = 0

    def take_new(self, slot: int) -> list[SlotBlocks]:
        """Return the blocks not yet sent to the executor, for this slot, and mark them as sent."""
        self.num_unsent = 0
        if len(self.groups) == 1:
            group = self.groups[0]
            first, group.num_sent = group.num_sent, len(group.ids)
            return [SlotBlocks(slot, first, group.ids[first:])] if first < group.num_sent else []
        new = []
        for number, group in enumerate(self.groups):
            if group.num_sent < len(group.ids):
                new.append(SlotBlocks(slot, group.num_sent, group.ids[group.num_sent :], number))
                group.num_sent = len(group.ids)
        return new

    def held(self) -> list[int]:
        """Return all blocks held, the last blocks of each group first."""
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
        """Drop all blocks; digests are kept."""
        self.groups = []
        self.num_blocks = self.capacity = self.num_admitted = self.num_unsent = 0
        self.num_committed = 0
        self.next_commit = self.next_release = NEVER
