"""Engines as processes of this node against engines on a Ray cluster: start and streaming rate.

    python -m benchmarks.ray_bench
    python -m benchmarks.ray_bench --rounds 3 --streams 64 -- --executor simulated

A cluster of two nodes on this machine runs already when stacks are started. Rounds alternate. All
kinds have two engines with one thread each and one API server. Nodes speak TCP, encrypted, so
there are also processes of this node that do as if they were on several.

The clock says little on a machine that others use. Processor time says more: in seconds for a
start, in microseconds a token while streaming, by what the processes are.
"""

import asyncio
import secrets
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

from benchmarks.failover import Progress, asks, run
from benchmarks.ray_nodes import read_options
from benchmarks.running_stack import RunningStack

OBJECT_STORE_BYTES = 80 * 2**20

PARTS = {
    "swell: engine": "engines",
    "swell: api": "API server",
    "swell: coordinator": "coordinator",
    "ray::": "actors",
    "raylet": "cluster",
}
"""What the processes are whose command lines begin so."""


Costs = dict[str, float]
"""Processor time by part."""


class Round(NamedTuple):
    """One stack from its start to its end."""

    ready_after: float
    rate: float
    """Tokens a second."""
    stopped_after: float
    start_cost: Costs
    """Processor seconds from start to ready, by part."""
    token_cost: Costs
    """Processor microseconds a token, by part."""


def part(title: str) -> str:
    """Return which part a process is of, by its command line."""
    for beginning, name in PARTS.items():
        if title.startswith(beginning):
            return name
    return "cluster" if "/ray/" in title else "supervisor"


def spent() -> Costs:
    """Return the processor seconds of all living processes below this one, by part."""
    found: Costs = defaultdict(float)
    for each in psutil.Process().children(recursive=True):
        try:
            times = each.cpu_times()
            found[part(" ".join(each.cmdline()))] += times.user + times.system
        except psutil.Error:
            continue  # it has just ended
    return found


def since(before: Costs, scale: float) -> Costs:
    """Return what was spent since, times `scale`; processes that ended since are left out."""
    now = spent()
    return {name: scale * max(0.0, now[name] - before.get(name, 0.0)) for name in now}


def measure(flags: list[str], streams: int, tokens: int) -> Round:
    """Start a stack, stream from it and stop it."""
    idle = spent()
    with RunningStack(*flags, timeout=120) as stack:
        start_cost = since(idle, 1.0)
        todo = [ask for ask in asks(streams // 2, tokens) if "stream" in ask.kind]
        asyncio.run(run(stack.url, todo[:8], None, Progress()))  # compiled and warm
        warm, began = spent(), time.monotonic()
        answers = asyncio.run(run(stack.url, todo, None, Progress()))
        took = time.monotonic() - began
        token_cost = since(warm, 1e6 / (len(todo) * tokens))
        failed = [answer.error for answer in answers if answer.error]
        if failed:
            raise RuntimeError(failed[0])
        rate = len(todo) * tokens / took
        return Round(stack.ready_after, rate, stack.stop(30), start_cost, token_cost)


def show(console: Console, found: dict[str, list[Round]]) -> None:
    """Print medians: what the clock says, then what processors say."""
    kinds = list(found.values())
    parts = [*dict.fromkeys(PARTS.values()), "supervisor"]
    table = Table("median of each", *found)

    def row(what: str, number: Callable[[Round], float]) -> None:
        medians = [statistics.median(number(each) for each in rounds) for rounds in kinds]
        table.add_row(what, *(f"{each:.3g}" if each < 100 else f"{each:.0f}" for each in medians))

    row("start to ready, s", lambda each: each.ready_after)
    row("tokens/s", lambda each: each.rate)
    row("stop, s", lambda each: each.stopped_after)
    for what, costs in (("processor s to ready", _to_ready), ("processor us a token", _a_token)):
        table.add_section()
        row(what, partial(_of_all, costs))
        for name in parts:
            row(f"  {name}", partial(_of_part, costs, name))
    console.print(table)


def _to_ready(each: Round) -> Costs:
    return each.start_cost


def _a_token(each: Round) -> Costs:
    return each.token_cost


def _of_all(costs: Callable[[Round], Costs], each: Round) -> float:
    return sum(costs(each).values())


def _of_part(costs: Callable[[Round], Costs], name: str, each: Round) -> float:
    return costs(each).get(name, 0.0)


def main() -> None:
    options = read_options(__doc__, rounds=5, streams=32, tokens=100)
    console = Console()
    node = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    with tempfile.TemporaryDirectory() as directory:
        key = Path(directory) / "cluster.key"
        key.write_text(secrets.token_hex(32))
        try:
            cluster.add_node(node_ip_address="127.0.0.2", **node)
            same = ["--data-parallel-size", "2", "--api-server-count", "1", "--threads", "1"]
            nodes = ["--data-parallel-address", "127.0.0.1", "--cluster-key-file", str(key)]
            ray = ["--data-parallel-backend", "ray", "--ray-address", cluster.address]
            kinds = {
                "processes": same,
                "processes, TCP": [*same, *nodes, "--data-parallel-size-local", "2"],
                "Ray, over two nodes": [*same, *ray, "--data-parallel-size-local", "1"],
            }
            found: dict[str, list[Round]] = {kind: [] for kind in kinds}
            for _ in range(options.rounds):
                for kind, flags in kinds.items():
                    flags = [*flags, *options.serve]
                    found[kind].append(measure(flags, options.streams, options.tokens))
        finally:
            cluster.shutdown()
    show(console, found)
    console.print(f"medians of {options.rounds} rounds, {options.streams} streams each")


if __name__ == "__main__":
    main()
