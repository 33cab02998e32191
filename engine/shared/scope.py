"""Which engines a front end routes to: all, those of its node, or one.

- internal: every front end balances over every engine of the cluster.
- hybrid: a front end balances over the engines of its own node; an external load balancer
  balances over the nodes.
- external: a front end serves one engine; an external load balancer balances over the engines.

A front end sends its scope when it joins, and engines connect only to front ends that reach them,
so that a cluster of a thousand engines does not need a connection for every pair.
"""

import socket

import msgspec

from engine.shared.config import ClusterConfig, ParallelConfig


class MissingRank(ValueError):
    """External load balancing without the rank of the engine to serve."""


class Scope(msgspec.Struct, frozen=True, array_like=True):
    """The engines of one front end; None matches any."""

    node: str | None = None
    rank: int | None = None

    def contains(self, rank: int, node: str) -> bool:
        """Return whether an engine is in scope."""
        return self.rank in (None, rank) and self.node in (None, node)


EVERYTHING = Scope()


def node_name(cluster: ClusterConfig) -> str:
    """Return the name of this node."""
    return cluster.node or socket.gethostname()


def front_end_scope(parallel: ParallelConfig, cluster: ClusterConfig) -> Scope:
    """Return the scope of a front end with these settings.

    Raises:
        MissingRank: external load balancing without the rank of the engine.
    """
    match parallel.data_parallel_lb:
        case "internal":
            return EVERYTHING
        case "hybrid":
            return Scope(node=node_name(cluster))
        case "external":
            if parallel.data_parallel_rank is None:
                raise MissingRank(
                    "--data-parallel-lb external needs --data-parallel-rank: the engine that this "
                    "front end serves"
                )
            return Scope(rank=parallel.data_parallel_rank)
