"""A simulated executor that detects wrong reads and writes of KV memory by plans.

Its memory holds (token or part of an image, position) instead of keys and values. Before each row
it compares what attention would read with the expected contents.
"""

import struct
from typing import Any, Literal

import msgspec

from engine.batch.batch import BatchPlan, BatchResult, SlotImage
from engine.batch.executor import PendingResult
from engine.executor.simulated import SimulatedExecutor
from engine.shared.config import EngineConfig

NOT_HERE = -1
"""Placeholder for a block that was behind the window when its sequence started."""

Content = int | tuple[bytes, int]
"""A token, or a part of an image."""


class CheckedExecutor(SimulatedExecutor):
    """A simulated executor with checked KV memory.

    Args:
        eos_token_ids: reported to the scheduler; sampled like any other token.
        cache_windows: attention window of each layer group.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        timing: Literal["real", "virtual"] = "virtual",
        eos_token_ids: tuple[int, ...] = (),
        cache_windows: tuple[int | None, ...] = (None,),
        **options: Any,
    ) -> None:
        super().__init__(config, timing=timing, **options)
        self.info = msgspec.structs.replace(
            self.info, eos_token_ids=eos_token_ids, cache_windows=cache_windows
        )
        self._shape = self.info.num_kv_blocks, config.cache.block_size
        self._memory = _Memory(*self._shape)
        self._blocks: dict[int, list[list[int]]] = {}
        """Block tables of each slot, by layer group."""
        self._images: dict[int, list[SlotImage]] = {}
        self._encoded: set[bytes] = set()
        """Digests of the cached images."""

    def submit(self, plan: BatchPlan) -> PendingResult:
        """Run a step.

        Raises:
            AssertionError: the plan would read or overwrite wrong contents.
        """
        return _Checked(super().submit(plan), plan.step, self._memory)

    def sleep(self, level: int) -> None:
        """Also drop all contents of the KV memory."""
        super().sleep(level)
        self._encoded.clear()
        assert not self._memory.slots_in_flight, "a step in flight uses the memory"
        self._memory = _Memory(*self._shape)

    def read_block(self, block_id: int) -> bytes:
        """Return a block's contents; images are not supported."""
        return self._memory.read_block(block_id)

    def write_block(self, block_id: int, content: bytes) -> None:
        """Overwrite a block with the contents of another."""
        self._memory.write_block(block_id, content)

    def _apply_changes(self, plan: BatchPlan) -> None:
        super()._apply_changes(plan)
        for start in plan.starting:
            in_flight = self._memory.slots_in_flight
            assert start.slot not in in_flight, f"slot {start.slot} is in use by a step in flight"
            self._blocks[start.slot] = [[] for _ in self.info.cache_windows]
            self._images[start.slot] = start.images
        self._encoded.difference_update(plan.evicted_images)
        self._encoded.update(image.digest for image in plan.encoded)
        for added in plan.blocks:
            block_ids = self._blocks[added.slot][added.group]
            if not block_ids:
                block_ids += [NOT_HERE] * added.first
            assert added.first == len(block_ids), f"slot {added.slot}: gap in the block table"
            block_ids += added.block_ids

    def _run(self, plan: BatchPlan) -> BatchResult:
        """Read before any write: a row must not depend on other rows of the same step."""
        assert len(set(plan.slots)) == len(plan.slots), "a slot has two rows"
        rows = list(zip(plan.slots, plan.starts, plan.counts, plan.samples, strict=True))
        for slot, start, count, sample in rows:
            assert count > 0
            known = len(self._slots[slot].token_ids)
            assert start + count == known if sample else start + count <= known, (
                f"slot {slot}: row {start}+{count} does not fit {known} tokens"
            )
            for window, block_ids in zip(self.info.cache_windows, self._blocks[slot], strict=True):
                begin = 0 if window is None else max(0, start - window + 1)
                self._memory.read(block_ids, begin, self._contents(slot, begin, start))
            for image in self._images[slot]:
                if image.position < start + count and start < image.end:
                    assert image.digest in self._encoded, f"slot {slot}: its image is not there"
        for slot, start, count, _ in rows:
            contents = self._contents(slot, start, start + count)
            self._memory.write(plan.step, slot, self._blocks[slot], start, contents)
        return super()._run(plan)

    def _contents(self, slot: int, begin: int, end: int) -> list[Content]:
        """Return the expected contents of a sequence at positions `begin` to `end` - 1."""
        found: list[Content] = [*self._slots[slot].token_ids[begin:end]]
        for image in self._images[slot]:
            for at in range(max(begin, image.position), min(end, image.end)):
                found[at - begin] = (image.digest, at - image.position)
        return found


class _Checked:
    """A step whose writes are complete once its result has been fetched."""

    def __init__(self, pending: PendingResult, step: int, memory: "_Memory") -> None:
        self._pending = pending
        self._step = step
        self._memory = memory

    def result(self) -> BatchResult:
        result = self._pending.result()
        self._memory.done(self._step)
        return result


class _Memory:
    """KV memory that tracks which step in flight writes which block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._contents: list[list[Content]] = [[-1] * block_size for _ in range(num_blocks)]
        self._positions = [[-1] * block_size for _ in range(num_blocks)]
        self.slots_in_flight: dict[int, int] = {}
        self._writers: dict[int, tuple[int, int]] = {}

    def read(self, block_ids: list[int], begin: int, expected: list[Content]) -> None:
        """Compare the context of a row, from position `begin` on, with the expected contents."""
        size, end = self._block_size, begin + len(expected)
        for index in range(begin // size, -(-end // size)):
            first, after = max(begin, index * size), min(end, (index + 1) * size)
            block_id = block_ids[index]
            where = f"block {block_id}, to be read as positions {first} to {after - 1}"
            assert block_id != NOT_HERE, f"{where}, was never given"
            held = slice(first - index * size, after - index * size)
            positions, contents = self._positions[block_id][held], self._contents[block_id][held]
            assert positions == list(range(first, after)), f"{where}, has others"
            assert contents == expected[first - begin : after - begin], f"{where}, has other tokens"

    def write(
        self, step: int, slot: int, tables: list[list[int]], start: int, contents: list[Content]
    ) -> None:
        """Write a row through the slot's block tables."""
        size = self._block_size
        for block_ids in tables:
            for position, content in enumerate(contents, start):
                block_id, offset = block_ids[position // size], position % size
                _, writer = self._writers.setdefault(block_id, (step, slot))
                assert writer == slot, f"block {block_id} is being written by slot {writer}"
                self._writers[block_id] = (step, slot)
                self._contents[block_id][offset] = content
                self._positions[block_id][offset] = position
        self.slots_in_flight[slot] = step

    def read_block(self, block_id: int) -> bytes:
        values = [*self._contents[block_id], *self._positions[block_id]]
        return b"".join(struct.pack("q", value) for value in values)

    def write_block(self, block_id: int, content: bytes) -> None:
        assert block_id not in self._writers, f"a step in flight writes block {block_id}"
        values = list(struct.unpack(f"{2 * self._block_size}q", content))
        self._contents[block_id][:] = values[: self._block_size]
        self._positions[block_id][:] = values[self._block_size :]

    def done(self, step: int) -> None:
        """Record that the result of a step has been fetched."""
        self._writers = {b: entry for b, entry in self._writers.items() if entry[0] > step}
        self.slots_in_flight = {s: last for s, last in self.slots_in_flight.items() if last > step}
