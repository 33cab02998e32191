"""Placement of ranks on the nodes of a Ray cluster. No I/O.

A rank's processes share a node. The strategies are those of vLLM:

- strict: `--data-parallel-size-local` ranks (by default all) on each node; a node with less room is
  left out.
- fill: `--data-parallel-size-local` ranks on the supervisor's node (by default as many as fit), and
  on each other node as many as fit, one node after the other.
- span: as fill. Intended for ranks that need more than one node, which are refused here.

The supervisor's node comes first, then the others by address. Ranks that are added or placed again
later go to any node with room, within the configured limits.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

PackStrategy = Literal["strict", "fill", "span"]

Resources = Mapping[str, float]
"""Amounts by Ray's resource names: CPU, GPU, memory (bytes), or custom ones."""

_MAX_NODES_NAMED = 8
_ROUNDING = 1e-6  # Ray counts in ten-thousandths


class RayNode(NamedTuple):
    """A live node of a Ray cluster."""

    id: str
    name: str
    """Its address, for display."""
    total: Resources
    free: Resources


class Choice(NamedTuple):
    """The outcome of placing a rank."""

    node: RayNode | None
    """None: no node has room."""
    reason: str
    """Why there is no room, for display."""
    lacks: str = ""
    """Names of the missing resources."""


@dataclass(frozen=True)
class Packing:
    """Resource needs of ranks, and the placement strategy."""

    strategy: PackStrategy
    needs: Resources
    """Resources of one rank."""
    per_node: int | None = None
    """Ranks on each node (strict), or on the head (fill, span); None: unlimited."""
    head: str = ""
    """Id of the supervisor's node."""

    def plan(self, nodes: Sequence[RayNode], ranks: int) -> list[RayNode]:
        """Return each rank's node, as far as there is room; the supervisor's node comes first."""
        planned: list[RayNode] = []
        for node in nodes:
            room, target = self._count(node.free), self._limit(node.id)
            if target is None and self.strategy == "strict":
                target = ranks
            if target is not None:
                if node.id == self.head and self.strategy != "strict" and room < target:
                    return []
                room = target if room >= target else 0
            planned += [node] * min(room, ranks - len(planned))
        return planned

    def _limit(self, node: str) -> int | None:
        return self.per_node if self.strategy == "strict" or node == self.head else None

    def choose(
        self,
        nodes: Sequence[RayNode],
        ranks_per_node: Mapping[str, int],
        avoid: Collection[str] = (),
    ) -> Choice:
        """Return a node for one more rank.

        Args:
            ranks_per_node: our ranks by node id; Ray's free resources may lag behind them.
            avoid: ids of nodes that are used only as a last resort.
        """
        full = self.full(ranks_per_node)
        fitting = [
            node
            for node in nodes
            if node.id not in full
            and self._count(node.free) >= 1
            and self._count(node.total) > ranks_per_node.get(node.id, 0)
        ]
        fitting.sort(key=lambda node: node.id in avoid)
        if fitting:
            return Choice(fitting[0], "")
        scarce = [
            name
            for name, amount in self.needs.items()
            if all(node.free.get(name, 0.0) < amount for node in nodes)
        ]
        lacks = ", ".join(scarce or self.needs)  # resources that no node has enough of, or all
        reason = f"waiting for {amounts(self.needs)}: free are {self._free(nodes, ranks_per_node)}"
        return Choice(None, reason, lacks)

    def full(self, ranks_per_node: Mapping[str, int]) -> list[str]:
        """Return the ids of nodes that have reached their limit of ranks."""
        limits = {node: self._limit(node) for node in {self.head, *ranks_per_node} if node}
        return sorted(
            node
            for node, limit in limits.items()
            if limit is not None and ranks_per_node.get(node, 0) >= limit
        )

    def _count(self, resources: Resources) -> int:
        counts = [
            int(resources.get(name, 0.0) / amount + _ROUNDING)
            for name, amount in self.needs.items()
            if amount
        ]
        return min(counts, default=0)

    def refusal(self, nodes: Sequence[RayNode], ranks: int) -> str | None:
        """Return why this many ranks cannot be placed, with advice; None if they can."""
        planned = self.plan(nodes, ranks)
        if len(planned) >= ranks:
            return None
        if not any(self._count(node.total) for node in nodes):
            advice = (
                "no node of the cluster has that much: the processes of one rank share a node, "
                "so lower --tensor-parallel-size, --pipeline-parallel-size or --threads, or add "
                "larger nodes"
            )
        elif self.strategy != "strict" and self.per_node and not planned:
            advice = (
                f"--data-parallel-size-local wants {self.per_node} ranks on the supervisor's node, "
                "the first one: lower it, lower --data-parallel-size or add nodes"
            )
        elif self.strategy == "strict":
            advice = (
                "--ray-dp-pack-strategy strict takes only nodes with room for "
                f"{ranks if self.per_node is None else self.per_node}: "
                "set --data-parallel-size-local to the ranks of each node, choose fill, "
                "lower --data-parallel-size or add nodes"
            )
        else:
            advice = "lower --data-parallel-size or add nodes"
        return (
            f"the Ray cluster has room for {len(planned)} of {ranks} ranks. Each needs "
            f"{amounts(self.needs)}. Free: {self._free(nodes, {})}. To go on: {advice}, or wait "
            "for nodes with --ray-wait-for-nodes"
        )

    def _free(self, nodes: Sequence[RayNode], ranks_per_node: Mapping[str, int]) -> str:
        parts = []
        for node in nodes[:_MAX_NODES_NAMED]:
            lacks = [
                f"{_amount(name, node.free.get(name, 0.0))} of "
                f"{_amount(name, node.total.get(name, 0.0))} {name}"
                for name in self.needs
            ]
            full = ", as many ranks as it may have" if node.id in self.full(ranks_per_node) else ""
            parts.append(f"{node.name} {' and '.join(lacks)}{full}")
        if len(nodes) > _MAX_NODES_NAMED:
            parts.append(f"{len(nodes) - _MAX_NODES_NAMED} more nodes")
        return "; ".join(parts) or "no nodes at all"


def max_ranks_per_node(planned: Sequence[RayNode]) -> int:
    """Return the maximum number of ranks on any node; at least 1."""
    return max(Counter(node.id for node in planned).values(), default=1)


def amounts(resources: Resources) -> str:
    """Format amounts for display, e.g. `2 CPU and 1 GPU`."""
    return " and ".join(f"{_amount(name, each)} {name}" for name, each in resources.items())


def _amount(name: str, amount: float) -> str:
    if name in ("memory", "object_store_memory"):
        return f"{amount / 2**30:.1f} GiB"
    return f"{amount:.4g}"
