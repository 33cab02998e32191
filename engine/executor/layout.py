"""The part of a model that each process of an engine computes; free of torch.

An engine's processes form a grid of pipeline stages by shards. The engine's own process, which
leads and samples, is the first shard of the last stage. If the engine spans nodes, each has the
same number of consecutive stages: node 1 has the first ones, and node 0, the leader's, the last.
"""

from typing import NamedTuple

from engine.shared.config import ParallelConfig


class GridPosition(NamedTuple):
    """One process's part: a stage has some of the layers, a shard a part of each of them."""

    stage: int
    shard: int


class Layout(NamedTuple):
    """Number of stages, of shards per stage, and of nodes, each with equally many stages."""

    stages: int
    shards: int
    nodes: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig) -> "Layout":
        """Return the layout of the settings."""
        return cls(parallel.pipeline_parallel_size, parallel.tensor_parallel_size, parallel.nnodes)

    @property
    def size(self) -> int:
        """Total number of processes."""
        return self.stages * self.shards

    def position(self, rank: int) -> GridPosition:
        """Return the position of a process; the leader's rank is 0."""
        stage, shard = divmod(rank, self.shards)
        return GridPosition((stage - 1) % self.stages, shard)

    def node(self, rank: int) -> int:
        """Return the node of a process; the leader's is 0."""
        return (self.position(rank).stage // self._stages_on_node + 1) % self.nodes

    def on_node(self, node: int) -> list[int]:
        """Return the ranks of a node's processes, in order."""
        return [rank for rank in range(self.size) if self.node(rank) == node]

    def index_on_node(self, rank: int) -> int:
        """Return a process's index on its node, in stage order, which determines its device."""
        position = self.position(rank)
        return position.stage % self._stages_on_node * self.shards + position.shard

    @property
    def _stages_on_node(self) -> int:
        return self.stages // self.nodes

    def ranks(self, stage: int) -> range:
        """Return the ranks of a stage's processes, first shard first."""
        first = (stage + 1) % self.stages * self.shards
        return range(first, first + self.shards)

    @property
    def stage_workers(self) -> range:
        """Ranks of the other processes in the leader's stage."""
        return range(1, self.shards)
