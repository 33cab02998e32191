"""KV memory of a simulated executor, which finds reads and writes that a plan should not make."""

from engine.batch.batch import SlotImage
from engine.shared.messages import SamplingParams


class SimulatedSlot:
    """The state of one slot, as an executor keeps it between steps."""

    __slots__ = ("adapter", "block_ids", "images", "num_prompt_tokens", "sampling", "token_ids")

    def __init__(
        self,
        token_ids: list[int],
        num_prompt_tokens: int,
        sampling: SamplingParams,
        adapter: int,
        num_groups: int,
        images: list[SlotImage],
    ) -> None:
        self.adapter = adapter
        self.images = images
        self.token_ids = token_ids
        self.num_prompt_tokens = num_prompt_tokens
        self.sampling = sampling
        self.block_ids: list[list[int]] = [[] for _ in range(num_groups)]
        """By group of layers."""

    def contents(self, begin: int, end: int) -> list[int | tuple[bytes, int]]:
        """Return what is at positions: tokens, or parts of images."""
        found: list[int | tuple[bytes, int]] = [*self.token_ids[begin:end]]
        for image in self.images:
            for at in range(max(begin, image.position), min(end, image.end)):
                found[at - begin] = (image.digest, at - image.position)
        return found


NOT_HERE = -1
"""Stands for a block that was behind the window when its sequence came."""


class CheckedMemory:
    """KV memory that holds (token or part of an image, position).

    It knows which step in flight writes what.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: tuple[int | None, ...]) -> None:
        self._windows = windows
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._contents: list[list[int | tuple[bytes, int]]] = [
            [-1] * block_size for _ in range(num_blocks)
        ]
        self._positions = [[-1] * block_size for _ in range(num_blocks)]
        self._slots_in_flight: dict[int, int] = {}
        self._writers: dict[int, tuple[int, int]] = {}

    def emptied(self) -> "CheckedMemory":
        """Return memory of the same size that holds nothing."""
        assert not self._slots_in_flight, "a step in flight uses the memory"
        return CheckedMemory(self._num_blocks, self._block_size, self._windows)

    def start(self, slot: int) -> None:
        """A sequence takes a slot."""
        assert slot not in self._slots_in_flight, f"slot {slot} is in use by a step in flight"

    def read(self, state: SimulatedSlot, start: int) -> None:
        """Compare the context of a row that starts at `start` with the sequence's tokens."""
        for window, block_ids in zip(self._windows, state.block_ids, strict=True):
            begin = 0 if window is None else max(0, start - window + 1)
            self._read(state, block_ids, begin, start)

    def _read(self, state: SimulatedSlot, block_ids: list[int], begin: int, end: int) -> None:
        size = self._block_size
        for index in range(begin // size, -(-end // size)):
            first, after = max(begin, index * size), min(end, (index + 1) * size)
            block_id = block_ids[index]
            where = f"block {block_id}, to be read as positions {first} to {after - 1}"
            assert block_id != NOT_HERE, f"{where}, was never given"
            held = slice(first - index * size, after - index * size)
            positions, contents = self._positions[block_id][held], self._contents[block_id][held]
            assert positions == list(range(first, after)), f"{where}, has others"
            assert contents == state.contents(first, after), f"{where}, has other tokens"

    def write(self, step: int, slot: int, state: SimulatedSlot, start: int, count: int) -> None:
        """Write a row's tokens through the slot's block table."""
        size, contents = self._block_size, state.contents(start, start + count)
        places = ((ids, at) for ids in state.block_ids for at in range(start, start + count))
        for block_ids, position in places:
            block_id = block_ids[position // size]
            offset = position % size
            _, writer = self._writers.setdefault(block_id, (step, slot))
            assert writer == slot, f"block {block_id} is being written by slot {writer}"
            self._writers[block_id] = (step, slot)
            self._contents[block_id][offset] = contents[position - start]
            self._positions[block_id][offset] = position
        self._slots_in_flight[slot] = step

    def done(self, step: int) -> None:
        """The result of a step has been fetched."""
        self._writers = {b: entry for b, entry in self._writers.items() if entry[0] > step}
        self._slots_in_flight = {
            s: last for s, last in self._slots_in_flight.items() if last > step
        }
