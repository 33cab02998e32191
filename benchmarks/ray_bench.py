"""Engines as processes of this node against engines on a Ray cluster: start and streaming rate.

    python -m benchmarks.ray_bench
    python -m benchmarks.ray_bench --rounds 3 --streams 64 -- --executor simulated

A cluster of two nodes on this machine runs already when stacks are started. Rounds alternate. Both
kinds have two engines with one thread each and one API server.
"""

import argparse
import asyncio
import statistics
import time

from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

from benchmarks.failover import Progress, asks, run
from benchmarks.running_stack import RunningStack

OBJECT_STORE_BYTES = 80 * 2**20


def measure(flags: list[str], streams: int, tokens: int) -> tuple[float, float, float]:
    """Return seconds to ready, tokens a second, and seconds to stop."""
    with RunningStack(*flags, timeout=120) as stack:
        todo = [ask for ask in asks(streams // 2, tokens) if "stream" in ask.kind]
        asyncio.run(run(stack.url, todo[:8], None, Progress()))  # compiled and warm
        began = time.monotonic()
        answers = asyncio.run(run(stack.url, todo, None, Progress()))
        took = time.monotonic() - began
        failed = [answer.error for answer in answers if answer.error]
        if failed:
            raise RuntimeError(failed[0])
        return stack.ready_after, len(todo) * tokens / took, stack.stop(30)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=100, help="tokens per stream")
    parser.add_argument("serve", nargs="*", help="flags for `swell serve`, after --")
    options = parser.parse_args()
    console = Console()
    node = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(node_ip_address="127.0.0.2", **node)
        same = ["--data-parallel-size", "2", "--api-server-count", "1", "--threads", "1"]
        ray = ["--data-parallel-backend", "ray", "--ray-address", cluster.address]
        kinds = {
            "processes": [*same, *options.serve],
            "Ray": [*same, *ray, "--data-parallel-size-local", "1", *options.serve],
        }
        found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds):
            for kind, flags in kinds.items():
                found[kind].append(measure(flags, options.streams, options.tokens))
    finally:
        cluster.shutdown()
    table = Table("engines", "start to ready, s", "tokens/s", "stop, s")
    for kind, rounds in found.items():
        table.add_row(
            kind, *(f"{statistics.median(each):.4g}" for each in zip(*rounds, strict=True))
        )
    console.print(table)
    console.print(f"medians of {options.rounds} rounds, {options.streams} streams each")


if __name__ == "__main__":
    main()
