"""Scales a running stack up and down under load; prints failures and how even the load is.

From two engines to four, one and three. Five seconds after each change the requests that each
engine has running and waiting are looked at for some seconds: their means have to lie within a
tenth of each other's mean.

    python -m benchmarks.scale_bench
    python -m benchmarks.scale_bench --clients 96 --sizes 4 1 3 -- --executor simulated
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.running_stack import RunningStack

MODEL = "swell-shakespeare"
ADMIN_KEY = "scale-bench"
SETTLE_SECONDS = 5.0
"""From the end of a change until the load has to be even."""
_LOAD = re.compile(r'^swell_num_requests_(?:running|waiting)\{[^}]*engine="(\d+)"[^}]*\} (\S+)')


@dataclass
class Tally:
    """What the clients were told."""

    answers: dict[int, str] = field(default_factory=dict)
    ok: int = 0
    failed: list[str] = field(default_factory=list)
    differing: int = 0


@dataclass(frozen=True)
class Change:
    """One change of the number of engines."""

    size: int
    seconds: float
    requests: int
    """Answered meanwhile."""
    means: dict[int, float]
    """Requests running and waiting per engine, afterwards."""

    @property
    def imbalance(self) -> float:
        """Largest distance of an engine's load from the mean of all, as a share of it."""
        mean = sum(self.means.values()) / len(self.means)
        return max(abs(load - mean) for load in self.means.values()) / mean


async def client(url: str, seed: int, tokens: int, tally: Tally, over: asyncio.Event) -> None:
    """Send requests one after the other; the same one always gets the same answer."""
    chooser = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        while not over.is_set():
            which = chooser.randrange(200)
            body = {
                "model": MODEL, "prompt": f"Act {which}", "seed": which, "ignore_eos": True,
                "max_tokens": tokens // 2 + which % tokens,
            }  # fmt: skip
            try:
                response = await http.post("/v1/completions", json=body)
                response.raise_for_status()
            except httpx.HTTPError as error:
                tally.failed.append(f"{type(error).__name__}: {error}")
                continue
            told = json.dumps(response.json()["choices"])
            tally.differing += tally.answers.setdefault(which, told) != told
            tally.ok += 1


async def scale(http: httpx.AsyncClient, size: int) -> float:
    """Change the number of engines and wait until they serve; return how long that took."""
    began = time.monotonic()
    (await http.post("/admin/scale", json={"data_parallel_size": size})).raise_for_status()
    while True:
        status = (await http.get("/admin/scale")).json()
        engines = (await http.get("/admin/engines")).json()["engines"]
        ready = {engine["rank"] for engine in engines if engine["ready"]}
        if not status["busy"] and ready == set(range(size)):
            return time.monotonic() - began
        if time.monotonic() - began > 60:
            raise TimeoutError(f"not {size} engines after a minute: {status}")
        await asyncio.sleep(0.05)


async def mean_loads(http: httpx.AsyncClient, size: int, seconds: float) -> dict[int, float]:
    """Return the mean number of requests of each engine over some seconds."""
    until = time.monotonic() + seconds
    sums: Counter[int] = Counter()
    looks = 0
    while time.monotonic() < until:
        text = (await http.get("/metrics")).text
        for line in text.splitlines():
            if (found := _LOAD.match(line)) and int(found[1]) < size:
                sums[int(found[1])] += float(found[2])  # type: ignore[assignment]
        looks += 1
        await asyncio.sleep(0.1)
    return {rank: sums[rank] / looks for rank in range(size)}


async def measure(url: str, options: argparse.Namespace, tally: Tally) -> list[Change]:
    """Put load on the stack and change its size."""
    over = asyncio.Event()
    clients = [
        asyncio.create_task(client(url, seed, options.tokens, tally, over))
        for seed in range(options.clients)
    ]
    changes = []
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
        await asyncio.sleep(2)
        for size in options.sizes:
            before = tally.ok
            seconds = await scale(http, size)
            await asyncio.sleep(SETTLE_SECONDS)
            means = await mean_loads(http, size, options.look_seconds)
            changes.append(Change(size, seconds, tally.ok - before, means))
        over.set()
        await asyncio.gather(*clients)
    return changes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[4, 1, 3], help="one after the other"
    )
    parser.add_argument("--clients", type=int, default=64, help="requests under way at once")
    parser.add_argument("--tokens", type=int, default=60, help="mean tokens per answer")
    parser.add_argument("--look-seconds", type=float, default=5.0, help="how long loads are summed")
    parser.add_argument("serve", nargs="*", help="flags for `swell serve`, after --")
    options = parser.parse_args()
    console = Console()
    flags = ["--data-parallel-size", "2", "--admin-key", ADMIN_KEY, "--log-level", "error"]
    flags += options.serve or ["--executor", "simulated", "--simulated-step-us", "4000"]
    tally = Tally()
    with RunningStack(*flags, timeout=120) as stack:
        changes = asyncio.run(measure(stack.url, options, tally))
        stack.stop()
    table = Table("engines", "ready after", "answers", "load per engine", "farthest from even")
    for change in changes:
        loads = ", ".join(f"{load:.1f}" for load in change.means.values())
        table.add_row(
            str(change.size), f"{change.seconds:.1f} s", str(change.requests), loads,
            f"{change.imbalance:.1%}",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"{tally.ok} answers, {len(tally.failed)} failed, {tally.differing} not as before"
    )
    for error, count in Counter(tally.failed).most_common(5):
        console.print(f"[red]failed x{count}[/] {error}", soft_wrap=True)
    uneven = [change.size for change in changes if change.imbalance > 0.1]
    return 1 if tally.failed or tally.differing or uneven else 0


if __name__ == "__main__":
    sys.exit(main())
