"""Stacks with engines on a Ray cluster, and what they say of themselves."""

from typing import Any

from benchmarks.running_stack import RunningStack
from tests.ray.nodes import Nodes
from tests.support.http import ADMIN_KEY, call, complete
from tests.support.metrics import metric


def serve(nodes: Nodes, *flags: str) -> RunningStack:
    """Return a stack whose engines are on the cluster's nodes."""
    return RunningStack(
        "--data-parallel-backend", "ray", "--ray-address", nodes.address,
        "--api-server-count", "1", "--admin-key", ADMIN_KEY, *flags,
    )  # fmt: skip


def scale(stack: RunningStack, size: int | None = None) -> dict[str, Any]:
    """Return what the supervisor says of its engines, after telling it how many there shall be."""
    body = None if size is None else {"data_parallel_size": size}
    return call(f"{stack.url}/admin/scale", body)


def hosts(stack: RunningStack) -> dict[str, str]:
    """Return the node of each engine, by rank."""
    found: dict[str, str] = scale(stack)["hosts"]
    return found


def uses(url: str) -> set[str]:
    """Return the engines that have been used once front ends were asked again."""
    for _ in range(6):
        complete(url, "Act", 2)
    return set(metric(url, "routing_decisions_total"))
