"""How long engines on a Ray cluster take to be refused, to come back and to leave nothing behind.

    python -m benchmarks.ray_recovery
    python -m benchmarks.ray_recovery --rounds 3 --streams 64 -- --executor simulated

Each round has a cluster of its own on this machine: four nodes, each with room for one engine.
Three engines stream while an actor and then a node is killed. With the fourth node lost too, a
rank waits until another one joins. Then one supervisor is stopped, and another one killed.
"""

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.failover import Progress, asks, run
from benchmarks.ray_nodes import Nodes, engines, is_empty, read_options
from benchmarks.running_stack import RunningStack

ADMIN_KEY = "admin-secret"

INTERVAL = 0.05
"""Seconds between two looks at whether something has come about."""

PATIENCE = 120.0
"""Seconds after which it never will."""

PROMISED = {
    "refused for want of room": 10,
    "killed actor: rank serves again": None,
    "killed node: rank is elsewhere": 15,
    "killed node: rank serves again": None,
    "new node: waiting rank serves": None,
    "SIGTERM: nothing is left": None,
    "SIGKILL: nothing is left": 30,
}
"""What is measured, and within how many seconds it has to happen."""

Took = dict[str, list[float]]


def wait(condition: Callable[[], object], what: str) -> float:
    """Wait until a condition holds; return how many seconds it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > PATIENCE:
            raise TimeoutError(f"not within {PATIENCE} s: {what}")
        time.sleep(INTERVAL)
    return time.monotonic() - began


class Fleet:
    """Three engines on the nodes of a cluster."""

    def __init__(self, nodes: Nodes, more: list[str]) -> None:
        self._nodes = nodes
        self.stack = RunningStack(
            "--data-parallel-backend", "ray", "--ray-address", nodes.address, "--admin-key",
            ADMIN_KEY, "--api-server-count", "1", "--data-parallel-size", "3",
            "--ray-dp-pack-strategy", "fill", "--batch-invariant", *more,
        )  # fmt: skip

    def _told(self) -> dict[str, Any]:
        key = {"Authorization": f"Bearer {ADMIN_KEY}"}
        answer = httpx.get(f"{self.stack.url}/admin/scale", headers=key, timeout=30)
        told: dict[str, Any] = answer.raise_for_status().json()
        return told

    def node(self, rank: int) -> str:
        """Return the node of a rank; empty: it has none."""
        return str(self._told()["hosts"].get(str(rank), ""))

    def serves(self, rank: int) -> bool:
        """Whether a rank is ready."""
        return bool(self._told()["engines"][str(rank)] == "ready")

    def waits(self, rank: int) -> bool:
        """Whether a rank has found no room."""
        return bool(self._told()["engines"][str(rank)].startswith("waiting for"))

    def kill_actor(self, rank: int) -> float:
        """Return how many seconds its rank is away."""
        name = f"swell engine {rank} "
        actor = next(each for each in self._nodes.actors() if each["Name"].startswith(name))
        before = {each.pid for each in engines()}
        psutil.Process(actor["Pid"]).kill()
        return wait(
            lambda: {each.pid for each in engines()} - before and self.serves(rank),
            "the rank serves again",
        )

    def kill_node(self, rank: int) -> tuple[float, float]:
        """Return after how many seconds its rank is on another node, and serves there."""
        lost = self.node(rank)
        began = time.monotonic()
        self._nodes.lose(lost)
        placed = wait(lambda: self.node(rank) not in ("", lost), "it is placed again")
        wait(lambda: self.serves(rank), "it serves again")
        return placed, time.monotonic() - began


class Strikes:
    """Kills an actor and then a node once all streams have begun."""

    def __init__(self, fleet: Fleet, took: Took, expected: int) -> None:
        self._fleet = fleet
        self._took = took
        self._expected = expected

    async def run(self, progress: Progress) -> None:
        """Strike, and note how long each rank was away."""
        while progress.pieces < 0.1 * self._expected and not progress.done:  # noqa: ASYNC110
            await asyncio.sleep(INTERVAL)
        actor = await asyncio.to_thread(self._fleet.kill_actor, 1)
        placed, served = await asyncio.to_thread(self._fleet.kill_node, 2)
        self._took["killed actor: rank serves again"].append(actor)
        self._took["killed node: rank is elsewhere"].append(placed)
        self._took["killed node: rank serves again"].append(served)


def refusal(nodes: Nodes) -> float:
    """Return the seconds within which more ranks than there is room for are refused."""
    began = time.monotonic()
    done = subprocess.run(
        [
            Path(sys.executable).with_name("swell"), "serve", "--data-parallel-backend", "ray",
            "--ray-address", nodes.address, "--data-parallel-size", "5", "--port", "0",
            "--ray-dp-pack-strategy", "fill",
        ],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    took = time.monotonic() - began
    if done.returncode == 0 or "room for 4 of 5 ranks" not in " ".join(done.stderr.split()):
        raise RuntimeError(f"not refused: {done.stderr}")
    return took


def measure(took: Took, streams: int, tokens: int, more: list[str]) -> None:
    """Have one cluster suffer all of it.

    Raises:
        RuntimeError: a stream was not completed, or nothing was there to be killed.
        TimeoutError: something never came about.
    """
    with Nodes(1, 1, 1, 1) as nodes:
        nodes.groups()  # this process is connected before anything is timed
        took["refused for want of room"].append(refusal(nodes))
        fleet = Fleet(nodes, more)
        with fleet.stack as stack:
            todo = [ask for ask in asks(streams // 2, tokens) if "stream" in ask.kind]
            strikes: Any = Strikes(fleet, took, len(todo) * tokens)
            answers = asyncio.run(run(stack.url, todo, strikes, Progress()))
            failed = [answer.error for answer in answers if answer.error]
            if failed:
                raise RuntimeError(f"{len(failed)} of {len(todo)} streams failed: {failed[0]}")
            nodes.lose(fleet.node(2))
            wait(lambda: fleet.waits(2), "no node has room")
            began = time.monotonic()
            nodes.add(1)
            wait(lambda: fleet.serves(2), "the waiting rank serves")
            took["new node: waiting rank serves"].append(time.monotonic() - began)
            began = time.monotonic()
            stack.stop()
            wait(lambda: is_empty(nodes), "nothing is left")
            took["SIGTERM: nothing is left"].append(time.monotonic() - began)
        with Fleet(nodes, more).stack as successor:
            if is_empty(nodes):
                raise RuntimeError("what runs is not seen")
            began = time.monotonic()
            successor.kill()
            wait(lambda: is_empty(nodes), "nothing is left")
            took["SIGKILL: nothing is left"].append(time.monotonic() - began)


def main() -> None:
    options = read_options(__doc__, rounds=1, streams=64, tokens=90)
    console = Console(file=sys.stdout)
    took: Took = {what: [] for what in PROMISED}
    for _ in range(options.rounds):
        with redirect_stdout(StringIO()):  # Ray tells at length how its nodes have died
            measure(took, options.streams, options.tokens, options.serve)
    table = Table("what", "promised, s", "median, s", "longest, s")
    for what, promised in PROMISED.items():
        times = took[what]
        median, longest = statistics.median(times), max(times)
        table.add_row(what, str(promised or ""), f"{median:.1f}", f"{longest:.1f}")
    console.print(table)
    load = psutil.getloadavg()[0] / (psutil.cpu_count() or 1)
    console.print(
        f"{options.rounds} rounds, {options.streams} streams each, all completed; at the end "
        f"{load:.1f} processes wanted each processor"
    )


if __name__ == "__main__":
    main()
