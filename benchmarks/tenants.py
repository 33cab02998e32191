"""Measures the first tokens of seven tenants while an eighth is hostile.

Two engines and two API servers. Seven tenants send short prompts at random times; then they do so
again while an eighth sends long prompts, many choices and many prompts at once on as many
connections as it likes, and immediately retries whenever it is refused. The others' time to first
token may at most double at the 99th percentile. Calm and flooded phases alternate, so that other
load on the machine affects both.

    python -m benchmarks.tenants
    python -m benchmarks.tenants --seconds 30 --rate 2
    python -m benchmarks.tenants --limit           # a key may have 16 sequences at once
    python -m benchmarks.tenants --one-name        # all keys are one tenant: no fairness
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy import nan, quantile
from rich.console import Console
from rich.table import Table

from benchmarks.running_stack import RunningStack
from server.bench.client import complete
from server.bench.connection import HttpClient
from server.bench.summary import Record

WORDS = ["love", "death", "king", "crown", "night", "sword", "blood", "fool", "ghost", "storm"]
OTHERS = 7
HOSTILE = "hostile"
BOUND = 2.0
BUDGET = 16
"""Sequences per request of the hostile tenant, and with --limit the maximum per key."""

SERVE = ("--data-parallel-size", "2", "--api-server-count", "2")


@dataclass
class Phase:
    """Results of the requests of one phase."""

    results: dict[str, list[Record]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)

    def first_tokens(self, tenants: Sequence[str]) -> list[float]:
        """Return the times to first token of some tenants' requests."""
        found = [each for tenant in tenants for each in self.results.get(tenant, ())]
        return [each.first_token or 0.0 for each in found if each.error is None]

    def failures(self, tenants: Sequence[str]) -> int:
        """Return the number of failed requests of some tenants."""
        found = [each for tenant in tenants for each in self.results.get(tenant, ())]
        return sum(each.error is not None for each in found)


def text(rng: random.Random, words: int) -> str:
    """Return a new random prompt."""
    return " ".join(rng.choices(WORDS, k=words))


def polite_body(rng: random.Random) -> dict[str, Any]:
    """Return a short request, as in a chat."""
    return {"prompt": text(rng, rng.randint(20, 100)), "max_tokens": 24, "ignore_eos": True}


def hostile_body(rng: random.Random) -> dict[str, Any]:
    """Return one of the costliest requests that a client can send."""

    def prompt(words: int) -> str:
        # Cheap to build, since the sender shares the machine, and new from the first word on.
        return f"{rng.getrandbits(40)} {_LONG[: 5 * words]}"

    kind = rng.randrange(3)
    if kind == 0:
        return {"prompt": prompt(500), "max_tokens": 200, "ignore_eos": True}
    if kind == 1:
        return {"prompt": prompt(300), "n": BUDGET, "max_tokens": 300, "ignore_eos": True}
    prompts = [prompt(400) for _ in range(BUDGET)]
    return {"prompt": prompts, "max_tokens": 100, "ignore_eos": True}


_LONG = text(random.Random(0), 500)


async def send(url: str, key: str, body: dict[str, Any], seconds: float) -> Record:
    """Stream one completion on a new connection."""
    client = HttpClient(url, {"Authorization": f"Bearer {key}"}, keep_alive=False)
    whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
    payload = json.dumps(whole).encode()
    return await complete(client, "/v1/completions", payload, stream=True, give_up_after=seconds)


async def polite(url: str, tenant: str, phase: Phase, rate: float, deadline: float) -> None:
    """Send requests at random times, without waiting for answers."""
    rng = random.Random(f"{tenant} {deadline}")
    results = phase.results.setdefault(tenant, [])
    sent: list[asyncio.Task[Record]] = []
    while (pause := rng.expovariate(rate)) + time.monotonic() < deadline:
        await asyncio.sleep(pause)
        sent.append(asyncio.create_task(send(url, tenant, polite_body(rng), 60)))
    results += await asyncio.gather(*sent)


async def hostile(url: str, phase: Phase, number: int, pause: float, deadline: float) -> None:
    """Send requests as fast as accepted, retrying after refusals."""
    rng = random.Random(f"{number} {deadline}")
    results = phase.results.setdefault(HOSTILE, [])
    while (remaining := deadline - time.monotonic()) > 0:
        result = await send(url, HOSTILE, hostile_body(rng), remaining)
        if result.status == 429:
            phase.refused[HOSTILE] += 1
            await asyncio.sleep(pause)
        else:
            results.append(result)


async def run_phase(url: str, options: argparse.Namespace, phase: Phase, *, floods: int) -> None:
    """Let the tenants send for some seconds."""
    deadline = time.monotonic() + options.seconds
    crowd = [hostile(url, phase, n, options.pause, deadline) for n in range(floods)]
    await asyncio.gather(
        *crowd,
        *(polite(url, tenant, phase, options.rate, deadline) for tenant in tenants()),
    )


def tenants() -> list[str]:
    """Return the names, which are also the keys, of the well-behaved tenants."""
    return [f"tenant-{number}" for number in range(OTHERS)]


def key_file(directory: Path, *, one_name: bool) -> Path:
    """Write the file of API keys."""
    file = directory / "keys"
    keys = [*tenants(), HOSTILE]
    file.write_text("".join(f"{'all' if one_name else key}: {key}\n" for key in keys))
    return file


def report(console: Console, phases: dict[str, Phase]) -> float:
    """Print the results; return the ratio of the flooded to the calm p99."""
    table = Table("phase", "tenant", "requests", "failed", "refused", "p50 ms", "p90 ms", "p99 ms")
    p99 = []
    for name, phase in phases.items():
        for who in [*tenants(), HOSTILE]:
            if who in phase.results:
                add_row(table, name, who, phase, [who])
        add_row(table, name, "the seven together", phase, tenants())
        table.add_section()
        p99.append(quantile(phase.first_tokens(tenants()), 0.99))
    console.print(table)
    calm, flooded = phases.values()
    medians = [statistics.median(each.first_tokens(tenants())) for each in (calm, flooded)]
    console.print(
        f"time to the first token: median {medians[1] / medians[0]:.2f} times, "
        f"p99 [bold]{p99[1] / p99[0]:.2f}[/] times that without the hostile tenant"
    )
    return p99[1] / p99[0]


def add_row(table: Table, name: str, who: str, phase: Phase, of: Sequence[str]) -> None:
    """Add a row for the requests of some tenants."""
    times = phase.first_tokens(of)
    count = sum(len(phase.results.get(each, ())) for each in of)
    refused = sum(phase.refused[each] for each in of)
    shown = [f"{1000 * each:.0f}" for each in quantile(times or [nan], (0.5, 0.9, 0.99))]
    table.add_row(name, who, str(count), str(phase.failures(of)), str(refused), *shown)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=8, help="length of each phase")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second and tenant")
    parser.add_argument("--rounds", type=int, default=3, help="phases of each kind")
    parser.add_argument("--floods", type=int, default=32, help="connections of the hostile one")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds after a refusal")
    parser.add_argument("--limit", action="store_true", help="limit the sequences of each key")
    parser.add_argument("--one-name", action="store_true", help="make all keys one tenant")
    parser.add_argument("serve", nargs="*", help="flags for `swell serve`, after --")
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as directory:
        keys = key_file(Path(directory), one_name=options.one_name)
        limit = ["--max-sequences-per-key", str(BUDGET)] if options.limit else []
        flags = [*SERVE, *limit, "--api-key-file", str(keys), *options.serve]
        with RunningStack(*flags, timeout=120) as stack:
            asyncio.run(run_phase(stack.url, options, Phase(), floods=0))
            phases = {"calm": Phase(), "hostile": Phase()}
            for _ in range(options.rounds):
                for name, floods in (("calm", 0), ("hostile", options.floods)):
                    asyncio.run(run_phase(stack.url, options, phases[name], floods=floods))
    return 0 if report(console, phases) <= BOUND or options.one_name else 1


if __name__ == "__main__":
    sys.exit(main())
