"""Which part of a model each process of an engine computes; free of torch.

An engine's processes are a grid of pipeline stages by shards. The engine's own process, which leads
and draws the tokens, is the first shard of the last stage.
"""

from typing import NamedTuple

from engine.shared.config import ParallelConfig


class Place(NamedTuple):
    """One process's part: a stage has some of the layers, a shard has a part of each of them."""

    stage: int
    shard: int


class Layout(NamedTuple):
    """How many stages there are, and shards of each."""

    stages: int
    shards: int

    @classmethod
    def of(cls, parallel: ParallelConfig) -> "Layout":
        """Return what the settings ask for."""
        return cls(parallel.pipeline_parallel_size, parallel.tensor_parallel_size)

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.stages * self.shards

    def place(self, rank: int) -> Place:
        """Return the place of a process; the leader's rank is 0."""
        stage, shard = divmod(rank, self.shards)
        return Place((stage - 1) % self.stages, shard)

    def number(self, rank: int) -> int:
        """Return a process's number in the order of stages, in which devices are dealt out."""
        place = self.place(rank)
        return place.stage * self.shards + place.shard

    def ranks(self, stage: int) -> range:
        """Return the ranks of a stage's processes, its first shard's first."""
        first = (stage + 1) % self.stages * self.shards
        return range(first, first + self.shards)

    @property
    def mates(self) -> range:
        """Ranks of the leader's own stage, the leader's left out."""
        return range(1, self.shards)

    @property
    def earlier(self) -> range:
        """Ranks of all stages before the last."""
        return range(self.shards, self.size)
