"""KV block events in the encoding of vLLM 0.32.

Subscribers decode the messages with vLLM's types (`vllm.distributed.kv_events`), so names, order
and tags must match those.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from engine.shared.messages import ROOT_SIZE


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """Consecutive blocks have been cached."""

    block_hashes: list[bytes]
    """Digest of all tokens up to each block's end, 16 bytes."""
    parent_block_hash: bytes | None
    """Digest of the previous block; None at the start of a sequence."""
    token_ids: list[int]
    """Tokens of all these blocks."""
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    """For each block, in hex: the root of its digests, if that of an adapter, a tenant or a
    `cache_salt`; then the digest and offset of each image in it."""
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """Blocks are no longer cached."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """No blocks are cached any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(eq=False)
class KvEventLog:
    """Collects the events of a step for a publisher. Only for the engine's thread."""

    block_size: int
    medium: str
    publish: Callable[[list[Event]], None]

    def __post_init__(self) -> None:
        self._events: list[Event] = []

    def stored(
        self,
        group: int,
        root: bytes,
        digests: Sequence[bytes],
        start: int,
        token_ids: Sequence[int],
        shown: Sequence[bytes] = (),
    ) -> None:
        """Record a new block.

        Args:
            group: layer group of the block.
            root: root of the sequence's digests.
            digests: of the previous block, if there is one, and of this one.
            start: index of its first token.
            token_ids: all tokens of the sequence.
            shown: digests and offsets of images in the block.
        """
        tokens = list(token_ids[start : start + self.block_size])
        extra_roots = [] if root == bytes(ROOT_SIZE) else [root]
        extra = [each.hex() for each in (*extra_roots, *shown)] or None
        last = self._events[-1] if self._events else None
        parent = digests[-2] if len(digests) > 1 else None
        if (
            isinstance(last, BlockStored)
            and parent == last.block_hashes[-1]
            and (last.group_idx, last.extra_keys is None) == (group, extra is None)
        ):
            last.block_hashes.append(digests[-1])
            last.token_ids.extend(tokens)
            if last.extra_keys is not None:
                last.extra_keys.append(extra)
            return
        self._events.append(
            BlockStored(
                [digests[-1]],
                parent,
                tokens,
                self.block_size,
                None,
                self.medium,
                None,
                None if extra is None else [extra],
                group,
            )
        )

    def removed(self, group: int, digest: bytes) -> None:
        """Record that a block is about to be overwritten."""
        self._events.append(BlockRemoved([digest], self.medium, group))

    def cleared(self) -> None:
        """Record that all blocks were dropped, and publish it immediately."""
        self._events = [AllBlocksCleared()]
        self.flush()

    def flush(self) -> None:
        """Publish the collected events."""
        if self._events:
            self.publish(self._events)
            self._events = []


SNAPSHOT = 2**64 - 1
"""Start number that requests all blocks instead of the kept batches."""


class Journal:
    """Batches of one engine process.

    The first batch clears all blocks, since restarting numbers indicate a new process.
    """

    def __init__(self, rank: int, max_batches: int) -> None:
        self._rank = rank
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=max_batches)
        self._blocks: dict[tuple[int | None, bytes], BlockStored] = {}
        """All cached blocks, as single-block events, in order of storage."""
        self._next = 0
        self._encoder = msgspec.msgpack.Encoder()

    def add(self, events: Sequence[Event], timestamp: float) -> tuple[int, bytes]:
        """Add a batch; return its number and content."""
        for event in events:
            match event:
                case AllBlocksCleared():
                    self._blocks.clear()
                case BlockRemoved():
                    for digest in event.block_hashes:
                        self._blocks.pop((event.group_idx, digest), None)
                case BlockStored():
                    self._note(event)
        batch = self._next, self._encode(events, timestamp)
        self._next += 1
        self._batches.append(batch)
        return batch

    def replay(self, start: int, timestamp: float) -> list[tuple[int, bytes]]:
        """Return the batches from a number on.

        If one of them is no longer kept, or for `SNAPSHOT`, return instead a single batch with the
        newest number that clears all blocks and stores the current ones.
        """
        is_kept = not self._next or (self._batches and self._batches[0][0] <= start)
        if is_kept and start != SNAPSHOT:
            return [batch for batch in self._batches if batch[0] >= start]
        if not self._next:
            return []
        events: list[Event] = [AllBlocksCleared(), *self._blocks.values()]
        return [(self._next - 1, self._encode(events, timestamp))]

    def _encode(self, events: Sequence[Event], timestamp: float) -> bytes:
        return self._encoder.encode((timestamp, events, self._rank))

    def _note(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        for index, digest in enumerate(event.block_hashes):
            self._blocks[event.group_idx, digest] = msgspec.structs.replace(
                event,
                block_hashes=[digest],
                parent_block_hash=parent,
                token_ids=event.token_ids[index * size : (index + 1) * size],
                extra_keys=event.extra_keys and event.extra_keys[index : index + 1],
            )
            parent = digest
