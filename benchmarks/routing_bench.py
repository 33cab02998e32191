"""Compares routing policies in virtual time: skewed lengths, bursts and shared prefixes.

The engines' cores and schedulers, the front ends' members and loads, the table they share and the
policies are those of production; only the model and the clock are simulated.

python -m benchmarks.routing_bench
python -m benchmarks.routing_bench --engines 16 --requests 4000 --markdown
"""

import argparse
import heapq
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from engine.core.engine_core import EngineCore
from engine.core.front_ends import CoreStep
from engine.executor.simulated import SimulatedExecutor
from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.shared.messages import (
    AddRequest,
    ClusterView,
    EngineEntry,
    EngineStats,
    RouteHello,
    SamplingParams,
)
from server.router.load import Loads
from server.router.load_table import LoadTable, create_load_table
from server.router.members import Members
from server.router.routing import POLICIES, RoutingPolicy

HOP = 0.0002
"""Seconds from a front end to an engine."""

_GRACE = 5.0
"""Seconds for which an engine that is not heard is kept."""

VIEW_INTERVAL = 0.1
"""Seconds between two of the coordinator's snapshots."""

STEP_US, TOKEN_US = 2000, 100
VOCABULARY = 32_000


class Spec(NamedTuple):
    """One request of a workload."""

    at: float
    prompt: list[int]
    output_tokens: int


Workload = Callable[[random.Random, int, int], Iterator[Spec]]
"""(random numbers, requests, engines) to requests in the order of their arrival."""


def skewed(rng: random.Random, count: int, engines: int) -> Iterator[Spec]:
    """A steady stream in which few requests are most of the work."""
    at = 0.0
    for _ in range(count):
        at += rng.expovariate(16.0 * engines)
        length = min(3000, int(rng.lognormvariate(4.6, 1.3)) + 1)
        output = min(800, int(rng.lognormvariate(3.8, 1.2)) + 1)
        yield Spec(at, _tokens(rng, length), output)


def bursts(rng: random.Random, count: int, engines: int) -> Iterator[Spec]:
    """Many requests at once, then none for a while."""
    size = 24 * engines
    for index in range(count):
        length, output = rng.randint(16, 400), rng.randint(8, 100)
        yield Spec(index // size * 2.0 + rng.random() * 0.002, _tokens(rng, length), output)


def shared_prefixes(rng: random.Random, count: int, engines: int) -> Iterator[Spec]:
    """Prompts that begin with one of many long instructions, some of them popular."""
    beginnings = [_tokens(rng, 1024) for _ in range(12 * engines)]
    weights = [1 / (rank + 1) for rank in range(len(beginnings))]
    at = 0.0
    for _ in range(count):
        at += rng.expovariate(14.0 * engines)
        beginning = rng.choices(beginnings, weights)[0]
        yield Spec(at, beginning + _tokens(rng, rng.randint(16, 128)), rng.randint(16, 64))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


WORKLOADS: dict[str, Workload] = {
    "skewed lengths": skewed,
    "bursts": bursts,
    "shared prefixes": shared_prefixes,
}


@dataclass
class Result:
    """What one policy did with one workload; times in seconds."""

    first_token: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    """Per engine."""
    cached: int = 0
    """Prompt tokens that did not have to be computed."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    ended: float = 0.0


class FrontEnd:
    """A front end that chooses engines and does nothing else, numbered `index`."""

    def __init__(
        self, index: int, policy: RoutingPolicy, table: LoadTable, view: ClusterView
    ) -> None:
        self._members = Members(index + 1, _GRACE)
        self._loads = Loads(index, index + 1, _GRACE, table)
        self._policy = policy
        self._members.take_view(view, 0.0)
        for engine in view.engines:
            hello = RouteHello(engine.rank, engine.incarnation, 1)
            self._members.heard(b"route", hello, 0.0)

    def observe(self, stats: EngineStats, now: float) -> None:
        """Take an engine's stats."""
        route = self._members.find(stats.rank, stats.incarnation)
        if route is not None:
            self._loads.observe(route, stats, now)

    def send(self, prompt: Sequence[int], num_tokens: int) -> int:
        """Choose an engine for a prompt, count it as sent there, and return its rank."""
        routes = self._members.routes
        unseen = self._members.unseen_front_ends(self._loads.num_front_ends)
        rank = self._policy.choose(self._loads.of(routes.values()), prompt, unseen).rank
        self._loads.sent(routes[rank], num_tokens)
        return rank


class _Engine:
    """One engine: core, inbox, and when its step ends."""

    def __init__(self, rank: int, front_ends: int) -> None:
        config = EngineConfig(
            model=ModelConfig(max_model_len=4096),
            cache=CacheConfig(num_kv_blocks=2048),
            scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512),
            executor=ExecutorConfig(simulated_step_us=STEP_US, simulated_token_us=TOKEN_US),
        )
        self.executor = SimulatedExecutor(config, vocab_size=VOCABULARY, timing="virtual")
        self.core = EngineCore(config, self.executor, rank=rank, incarnation=rank + 1)
        for index in range(front_ends):
            self.core.front_end_joined(index, index + 1)
        self.inbox: list[AddRequest] = []
        self.stepping = False
        self.stats: EngineStats | None = None


class Simulation:
    """Serves one workload under one policy."""

    def __init__(
        self,
        policy: Callable[[int], RoutingPolicy],
        engines: int,
        front_ends: int,
        nodes: int,
        directory: Path,
    ) -> None:
        per_node = -(-front_ends // nodes)
        for node in range(nodes):
            create_load_table(directory / f"loads-{node}", per_node)
        self.result = Result(busy=[0.0] * engines)
        self._engines = [_Engine(rank, front_ends) for rank in range(engines)]
        entries = [
            EngineEntry(rank, rank + 1, True, "node", 0, engine.core.setup, None)
            for rank, engine in enumerate(self._engines)
        ]
        view = ClusterView(1, 1, 0, True, entries, front_ends)
        self._front_ends = [
            FrontEnd(index, policy(index), LoadTable(table, place), view)
            for index in range(front_ends)
            for node, place in [divmod(index, per_node)]
            for table in [directory / f"loads-{node}"]
        ]
        self._arrived: dict[int, float] = {}
        self._begun: set[int] = set()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0

    def run(self, specs: list[Spec]) -> Result:
        """Serve all requests."""
        for index, spec in enumerate(specs):
            self._at(spec.at, lambda now, i=index, s=spec: self._arrive(i, s, now))  # type: ignore[misc]
        self._at(VIEW_INTERVAL, self._publish)
        while len(self.result.total) < len(specs):
            now, _, event = heapq.heappop(self._events)
            event(now)
        self.result.ended = now
        self.result.cached = sum(
            engine.core.stats().counters.prefix_cache_hits for engine in self._engines
        )
        return self.result

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, event))

    def _publish(self, now: float) -> None:
        for engine in self._engines:
            if engine.stats is not None:
                for front_end in self._front_ends:
                    front_end.observe(engine.stats, now)
        self._at(now + VIEW_INTERVAL, self._publish)

    def _arrive(self, index: int, spec: Spec, now: float) -> None:
        sender = index % len(self._front_ends)
        sampling = SamplingParams(max_tokens=spec.output_tokens, seed=index, ignore_eos=True)
        request = AddRequest(index, "", sender, 0, spec.prompt, sampling)
        rank = self._front_ends[sender].send(spec.prompt, request.num_tokens)
        self._arrived[index] = now
        self.result.prompt_tokens += len(spec.prompt)
        self._at(now + HOP, lambda at: self._receive(rank, request, at))

    def _receive(self, rank: int, request: AddRequest, now: float) -> None:
        engine = self._engines[rank]
        engine.inbox.append(request)
        if not engine.stepping:
            self._begin(rank, engine, now)

    def _begin(self, rank: int, engine: _Engine, now: float) -> None:
        for request in engine.inbox:
            engine.core.handle(request)
        engine.inbox.clear()
        engine.stepping = True
        before = engine.executor.virtual_us
        step = engine.core.step()
        seconds = (engine.executor.virtual_us - before) / 1e6
        self.result.busy[rank] += seconds
        self._at(now + seconds, lambda at: self._end(rank, engine, step, at))

    def _end(self, rank: int, engine: _Engine, step: CoreStep, now: float) -> None:
        engine.stepping = False
        engine.stats = step.stats
        for front_end, outputs in step.outputs.items():
            self._front_ends[front_end].observe(step.stats, now)
            for output in outputs:
                waited = now - self._arrived[output.id]
                self.result.output_tokens += len(output.token_ids)
                if output.id not in self._begun:
                    self._begun.add(output.id)
                    self.result.first_token.append(waited)
                if output.finish_reason is not None:
                    self.result.total.append(waited)
        if engine.inbox or engine.core.has_work:
            self._begin(rank, engine, now)


def compare(
    engines: int, front_ends: int, nodes: int, requests: int, seed: int
) -> dict[str, dict[str, Result]]:
    """Return a result for every workload and policy; all policies serve the same requests."""
    results: dict[str, dict[str, Result]] = {}
    with Progress(transient=True) as progress, tempfile.TemporaryDirectory() as directory:
        task = progress.add_task("simulating", total=len(WORKLOADS) * len(POLICIES))
        for workload, generate in WORKLOADS.items():
            specs = list(generate(random.Random(seed), requests, engines))
            results[workload] = {}
            for name, policy in POLICIES.items():
                progress.update(task, description=f"{workload}, {name}")
                simulation = Simulation(policy, engines, front_ends, nodes, Path(directory))
                results[workload][name] = simulation.run(specs)
                progress.advance(task)
    return results


HEADINGS = (
    "policy", "TTFT p50 ms", "TTFT p99 ms", "request p50 s", "request p99 s", "output tok/s",
    "busiest / mean", "prompt cached",
)  # fmt: skip


def row(policy: str, result: Result) -> list[str]:
    """Return what the tables show of a result."""
    busiest = max(result.busy) / (sum(result.busy) / len(result.busy))
    return [
        policy,
        f"{1000 * percentile(result.first_token, 0.5):.0f}",
        f"{1000 * percentile(result.first_token, 0.99):.0f}",
        f"{percentile(result.total, 0.5):.2f}",
        f"{percentile(result.total, 0.99):.2f}",
        f"{result.output_tokens / result.ended:.0f}",
        f"{busiest:.2f}",
        f"{100 * result.cached / result.prompt_tokens:.0f} %",
    ]


def percentile(values: list[float], share: float) -> float:
    """Return the value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def show(results: dict[str, dict[str, Result]], *, markdown: bool) -> None:
    """Print one table per workload."""
    console = Console()
    for workload, by_policy in results.items():
        rows = [row(policy, result) for policy, result in by_policy.items()]
        if markdown:
            lines = [HEADINGS, ("---",) * len(HEADINGS), *rows]
            text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
            console.print(f"\n**{workload}**\n\n{text}", soft_wrap=True, markup=False)
            continue
        table = Table(Column(HEADINGS[0], no_wrap=True), *HEADINGS[1:], title=workload)
        for line in rows:
            table.add_row(*line)
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--front-ends", type=int, default=2)
    parser.add_argument(
        "--nodes", type=int, default=1, help="front ends of different nodes do not see each other"
    )
    parser.add_argument("--requests", type=int, default=1000, help="per workload and policy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="tables for documents")
    options = parser.parse_args()
    results = compare(
        options.engines, options.front_ends, options.nodes, options.requests, options.seed
    )
    show(results, markdown=options.markdown)


if __name__ == "__main__":
    main()
