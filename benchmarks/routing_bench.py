"""Compares routing policies in virtual time: skewed lengths, bursts and shared prefixes.

Engine cores, schedulers, front ends' routers and the load table are the production classes; only
the model and the clock are simulated. Every policy in `server.router.routing.POLICIES` takes part.

python -m benchmarks.routing_bench
python -m benchmarks.routing_bench --engines 16 --requests 4000
python -m benchmarks.routing_bench --workloads chats agents --policies prefix-aware least-loaded
python -m benchmarks.routing_bench --engines 64 --workloads documents --policies least-loaded \
    --prefill-engines 0 16 24 32 --prefill-split-lengths 128 512 2048
"""

import argparse
import heapq
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product, takewhile
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

from numpy import quantile

from engine.core.engine_core import EngineCore
from engine.core.events import PrerequisitesSettled
from engine.core.front_ends import CoreStep
from engine.executor.simulated import SimulatedExecutor
from engine.kv.tiers import BlockName, KvTiers
from engine.kv.transfer_messages import pack
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
    KvBlocksQuery,
    KvSource,
    RequestOutput,
    RouteHello,
    SamplingParams,
    StepOutputs,
)
from server.router.block_index import BlockIndex
from server.router.events import (
    Action,
    Deliver,
    EngineHello,
    Send,
    SendIfReachable,
)
from server.router.load_table import LoadTable, create_load_table
from server.router.request import RoutedRequest
from server.router.router import Router
from server.router.routing import POLICIES, PrefixAware, RoutingPolicy
from server.router.split import Split

HOP = 0.0002
"""Network latency from a front end to an engine in seconds."""

_GRACE = 5.0
"""Seconds after which a silent engine is dropped."""

VIEW_INTERVAL = 0.1
"""Seconds between the coordinator's snapshots."""

BLOCK_QUERY_INTERVAL = 0.1
"""Seconds between a front end's requests for an engine's block changes."""

INDEX_BLOCKS = 2_000_000

STEP_US, TOKEN_US = 2000, 100
MOVED_TOKEN_US = 10
"""Per token whose keys and values another engine reads: 128 KiB at 100 Gbit/s."""
VOCABULARY = 32_000


class Spec(NamedTuple):
    """One request of a workload."""

    at: float
    prompt: list[int]
    output_tokens: int
    then: "Callable[[float, list[int]], list[Spec]] | None" = None
    """Returns the requests that follow an answer, given its end time and all tokens."""


Workload = Callable[[random.Random, int, int], Iterator[Spec]]
"""(random generator, number of requests, engines) to requests in order of arrival."""


def skewed(rng: random.Random, count: int, engines: int) -> Iterator[Spec]:
    """A steady stream in which few requests are most of the work."""
    at = 0.0
    for _ in range(count):
        at += rng.expovariate(16.0 * engines)
        length = min(3000, int(rng.lognormvariate(4.6, 1.3)) + 1)
        output = min(800, int(rng.lognormvariate(3.8, 1.2)) + 1)
        yield Spec(at, _tokens(rng, length), output)


def bursts(rng: random.Random, count: int, engines: int) -> Iterator[Spec]:
    """Bursts of many requests, with pauses between them."""
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


CHAT_TURNS = 6


def chats(rng: random.Random, count: int, engines: int) -> Iterator[Spec]:
    """Conversations that begin with one of a few system prompts, and continue after pauses."""
    systems = [_tokens(rng, 256) for _ in range(8)]
    at = 0.0
    for _ in range(count // CHAT_TURNS):
        at += rng.expovariate(3.0 * engines)
        opening = rng.choice(systems) + _tokens(rng, rng.randint(100, 800))
        yield _turn(rng, at, opening, CHAT_TURNS, lambda: rng.expovariate(0.5), (30, 250), (30, 90))


def _turn(
    rng: random.Random,
    at: float,
    prompt: list[int],
    turns: int,
    pause: Callable[[], float],
    added: tuple[int, int],
    answer: tuple[int, int],
) -> Spec:
    """Return a request of a conversation with this many turns left, including this one.

    Args:
        pause: samples the seconds between an answer and the next request.
        added: minimum and maximum tokens that the next request adds.
        answer: minimum and maximum tokens of an answer.
    """

    def then(now: float, tokens: list[int]) -> list[Spec]:
        if turns == 1:
            return []
        more = tokens + _tokens(rng, rng.randint(*added))
        return [_turn(rng, now + pause(), more, turns - 1, pause, added, answer)]

    return Spec(at, prompt, rng.randint(*answer), then)


FEW_SHOT_BATCH = 24


def few_shot(rng: random.Random, count: int, engines: int) -> Iterator[Spec]:
    """Batches of short questions after shared examples; few of the examples are popular."""
    examples = [_tokens(rng, 1500) for _ in range(6 * engines)]
    weights = [1 / (rank + 1) for rank in range(len(examples))]
    at = 0.0
    for _ in range(count // FEW_SHOT_BATCH):
        at += rng.expovariate(engines)
        shared = rng.choices(examples, weights)[0]
        for index in range(FEW_SHOT_BATCH):
            question = _tokens(rng, rng.randint(30, 120))
            yield Spec(at + index * 0.005, shared + question, rng.randint(4, 16))


AGENT_TURNS, AGENT_BRANCHES = 5, 3


def agents(rng: random.Random, count: int, engines: int) -> Iterator[Spec]:
    """Agent runs: long instructions, a task, tool results, and branches that continue."""
    kinds = [_tokens(rng, 1200) for _ in range(6)]

    def pause() -> float:
        return rng.expovariate(4.0)

    def branch(now: float, tokens: list[int]) -> list[Spec]:
        return [
            _turn(rng, now, tokens + _tokens(rng, 60), AGENT_TURNS, pause, (60, 250), (20, 60))
            for _ in range(AGENT_BRANCHES)
        ]

    at = 0.0
    for _ in range(count // (1 + AGENT_BRANCHES * AGENT_TURNS)):
        at += rng.expovariate(0.8 * engines)
        task = rng.choice(kinds) + _tokens(rng, rng.randint(200, 900))
        yield Spec(at, task, rng.randint(40, 90), branch)


def documents(rng: random.Random, count: int, engines: int) -> Iterator[Spec]:
    """Short questions, three in ten about a long text: most of the work is prefill."""
    at = 0.0
    for _ in range(count):
        at += rng.expovariate(5.0 * engines)
        length = rng.randint(1500, 3500) if rng.random() < 0.3 else rng.randint(50, 400)
        yield Spec(at, _tokens(rng, length), rng.randint(50, 250))


def stories(rng: random.Random, count: int, engines: int) -> Iterator[Spec]:
    """Prompts of all lengths and long answers: half of the work is decoding."""
    at = 0.0
    for _ in range(count):
        at += rng.expovariate(3.5 * engines)
        length = min(3000, int(rng.lognormvariate(5.8, 1.1)) + 1)
        yield Spec(at, _tokens(rng, length), rng.randint(200, 800))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


WORKLOADS: dict[str, Workload] = {
    "skewed lengths": skewed, "bursts": bursts, "shared prefixes": shared_prefixes,
    "chats": chats, "few-shot": few_shot, "agents": agents, "documents": documents,
    "stories": stories,
}  # fmt: skip


@dataclass
class Result:
    """Results of one policy with one workload; times in seconds."""

    first_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Between tokens of an answer."""
    total: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    """Per engine."""
    cached: int = 0
    """Prompt tokens that were not computed."""
    expected: int = 0
    """Prompt tokens that front ends expected to be cached; 0 without an index."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    ended: float = 0.0


class _Engine:
    """One engine: core, inbox, and end of its step. It reads KV blocks of other `engines`.

    Args:
        after: calls a function after a number of seconds.
    """

    def __init__(
        self,
        rank: int,
        front_ends: int,
        role: Literal["", "prefill", "decode"],
        engines: "Sequence[_Engine]",
        after: Callable[[float, Callable[[float], None]], None],
        wake: Callable[[float], None],
    ) -> None:
        self._engines, self._after, self._wake = engines, after, wake
        self._offered: set[bytes] = set()
        config = EngineConfig(
            model=ModelConfig(max_model_len=4096),
            cache=CacheConfig(num_kv_blocks=2048),
            scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512),
            executor=ExecutorConfig(simulated_step_us=STEP_US, simulated_token_us=TOKEN_US),
        )
        self.executor = SimulatedExecutor(config, vocab_size=VOCABULARY, timing="virtual")
        tiers = KvTiers((), "all", lambda _: b"", lambda *_: None, peers=self)
        self.core = EngineCore(
            config,
            self.executor,
            rank=rank,
            incarnation=rank + 1,
            tiers=tiers,
            kv_role=role,
            kv_address=str(rank) if role == "prefill" else "",
        )
        for index in range(front_ends):
            self.core.front_end_joined(index, index + 1)
        self.inbox: list[AddRequest | KvBlocksQuery | PrerequisitesSettled] = []
        self.stepping = False
        self.stats: EngineStats | None = None

    # Implements `engine.kv.tiers.Peers`; memory for copies is unlimited.

    def offer(self, key: bytes, read: Callable[[], bytes]) -> None:
        self._offered.add(key)

    def pull(
        self,
        source: KvSource,
        model: bytes,
        wanted: Sequence[BlockName],
        take: Callable[[BlockName, bytes], bool],
        over: Callable[[bool], None],
    ) -> None:
        offered = self._engines[int(source.address)]._offered
        found = list(takewhile(lambda name: model + pack(name) in offered, wanted))
        tokens = len(found) * self.core.setup.block_size

        def arrived(now: float) -> None:
            for name in found:
                take(name, b"")
            over(len(found) == len(wanted))
            self._wake(now)

        self._after(2 * HOP + tokens * MOVED_TOKEN_US / 1e6, arrived)

    def clear(self) -> None:
        self._offered.clear()

    def shutdown(self) -> None:
        pass


class Simulation:
    """Serves one workload under one policy.

    Args:
        prefill_engines: number of engines that compute prompts for the others.
        split_length: minimum prompt tokens for a split.
    """

    def __init__(
        self,
        policy: Callable[[int], RoutingPolicy],
        engines: int,
        front_ends: int,
        nodes: int,
        directory: Path,
        *,
        prefill_engines: int = 0,
        split_length: int = 512,
    ) -> None:
        per_node = -(-front_ends // nodes)
        for node in range(nodes):
            create_load_table(directory / f"loads-{node}", per_node)
        self.result = Result(busy=[0.0] * engines)
        self._now = 0.0
        self._engines: list[_Engine] = []
        for rank in range(engines):
            role: Literal["", "prefill", "decode"] = ""
            if prefill_engines:
                role = "prefill" if rank < prefill_engines else "decode"
            settled = partial(self._receive, rank, PrerequisitesSettled())
            self._engines.append(
                _Engine(rank, front_ends, role, self._engines, self._after, settled)
            )
        self._routers = [
            Router(
                front_end=index,
                incarnation=index + 1,
                first_id=index << 32,
                policy=policy(index),
                table=LoadTable(directory / f"loads-{index // per_node}", index % per_node),
                grace=_GRACE,
                max_resumes=3,
                resume_timeout=_GRACE,
                halted_timeout=_GRACE,
                index=BlockIndex(index, INDEX_BLOCKS) if policy is PrefixAware else None,
                split=Split(split_length, policy(index)) if prefill_engines else None,
            )
            for index in range(front_ends)
        ]
        self._views = 0
        self._specs: list[Spec] = []
        self._num_open = 0
        self._tokens: dict[int, list[int]] = {}
        """Of requests with follow-up requests."""
        self._arrived: dict[int, float] = {}
        self._told_at: dict[int, float] = {}
        """Arrival time of each request's newest token."""
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0

    def run(self, specs: list[Spec]) -> Result:
        """Serve all requests, including follow-ups."""
        self._expect(specs)
        self._publish(0.0)
        for index, router in enumerate(self._routers):
            for rank in range(len(self._engines)):
                router.handle(EngineHello(b"%d" % rank, RouteHello(rank, rank + 1, 1)), 0.0)
            if router.index is not None:
                first = BLOCK_QUERY_INTERVAL * index / len(self._routers)
                self._at(first, partial(self._follow, router))
        while self._num_open:
            self._now, _, event = heapq.heappop(self._events)
            event(self._now)
        self.result.ended = self._now
        self.result.cached = sum(
            engine.core.stats().counters.prefix_cache_hits for engine in self._engines
        )
        return self.result

    def _expect(self, specs: Iterable[Spec]) -> None:
        for spec in specs:
            index = len(self._specs)
            self._specs.append(spec)
            self._num_open += 1
            self._at(spec.at, partial(self._arrive, index, spec))

    def _follow(self, router: Router, now: float) -> None:
        self._perform(router.block_queries(now), now)
        self._at(now + BLOCK_QUERY_INTERVAL, partial(self._follow, router))

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, event))

    def _after(self, seconds: float, event: Callable[[float], None]) -> None:
        self._at(self._now + seconds, event)

    def _publish(self, now: float) -> None:
        entries = [
            EngineEntry(rank, rank + 1, True, "node", 0, engine.core.setup, engine.stats)
            for rank, engine in enumerate(self._engines)
        ]
        self._views += 1
        view = ClusterView(1, self._views, 0, True, entries, len(self._routers))
        for router in self._routers:
            self._perform(router.handle(view, now), now)
        self._at(now + VIEW_INTERVAL, self._publish)

    def _arrive(self, index: int, spec: Spec, now: float) -> None:
        sender = index % len(self._routers)
        sampling = SamplingParams(max_tokens=spec.output_tokens, seed=index, ignore_eos=True)
        request = RoutedRequest(AddRequest(0, str(index), sender, 0, spec.prompt, sampling))
        self._perform(self._routers[sender].submit(request, now), now)
        self._arrived[index] = now
        self.result.prompt_tokens += len(spec.prompt)
        self.result.expected += request.expected_cached or 0
        if spec.then is not None:
            self._tokens[index] = list(spec.prompt)

    def _perform(self, actions: list[Action], now: float) -> None:
        for action in actions:
            match action:
                case (
                    Send(message=AddRequest() as message)
                    | SendIfReachable(message=KvBlocksQuery() as message)
                ):
                    self._after(HOP, partial(self._receive, int(action.to), message))
                case Deliver():
                    for request, output in action.outputs:
                        self._show(int(request.message.request_id), output, now)

    def _receive(
        self, rank: int, message: AddRequest | KvBlocksQuery | PrerequisitesSettled, now: float
    ) -> None:
        engine = self._engines[rank]
        engine.inbox.append(message)
        if not engine.stepping:
            self._begin(rank, engine, now)

    def _begin(self, rank: int, engine: _Engine, now: float) -> None:
        for message in engine.inbox:
            engine.core.handle(message)
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
            router = self._routers[front_end]
            self._perform(router.handle(StepOutputs(step.stats, outputs), now), now)
        for front_end, blocks in step.blocks:
            self._routers[front_end].handle(blocks, now)
        if engine.inbox or engine.core.has_work:
            self._begin(rank, engine, now)

    def _show(self, index: int, output: RequestOutput, now: float) -> None:
        result, waited = self.result, now - self._arrived[index]
        result.output_tokens += len(output.token_ids)
        before = self._told_at.get(index)
        if before is None:
            result.first_token.append(waited)
        else:
            result.gaps.append(now - before)
        self._told_at[index] = now
        if index in self._tokens:
            self._tokens[index] += output.token_ids
        if output.finish_reason is not None:
            result.total.append(waited)
            self._num_open -= 1
            then = self._specs[index].then
            if then is not None:
                self._expect(then(now, self._tokens.pop(index)))


HEADINGS = (
    "policy", "TTFT p50 ms", "TTFT p99 ms", "gap p50 ms", "gap p99 ms", "request p50 s",
    "request p99 s", "output tok/s", "busiest / mean", "prompt cached", "expected",
)  # fmt: skip


def row(policy: str, result: Result) -> list[str]:
    """Return the table row of a result."""
    milliseconds = [1000 * quantile(of, (0.5, 0.99)) for of in (result.first_token, result.gaps)]
    return [
        policy,
        *(f"{each:.0f}" for pair in milliseconds for each in pair),
        *(f"{each:.2f}" for each in quantile(result.total, (0.5, 0.99))),
        f"{result.output_tokens / result.ended:.0f}",
        f"{max(result.busy) / fmean(result.busy):.2f}",
        f"{100 * result.cached / result.prompt_tokens:.0f} %",
        f"{100 * result.expected / result.prompt_tokens:.0f} %" if result.expected else "",
    ]


def compare(options: argparse.Namespace, workload: str) -> None:
    """Print a Markdown table of every policy and split; all serve the same requests.

    Follow-ups differ: they are sent when the answer is complete.
    """
    splits = [
        (count, length)
        for count in options.prefill_engines
        for length in (options.prefill_split_lengths if count else (0,))
    ]
    print(f"\n**{workload}**\n\n| {' | '.join(HEADINGS)} |\n{'| --- ' * len(HEADINGS)}|")
    for policy, (count, length) in product(options.policies, splits):
        rng = random.Random(options.seed)
        specs = list(WORKLOADS[workload](rng, options.requests, options.engines))
        with tempfile.TemporaryDirectory() as directory:
            result = Simulation(
                POLICIES[policy].build, options.engines, options.front_ends, options.nodes,
                Path(directory), prefill_engines=count, split_length=length,
            ).run(specs)  # fmt: skip
        split = f" {count}:{options.engines - count} from {length}" if count else ""
        print(f"| {' | '.join(row(policy + split, result))} |", flush=True)


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
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument(
        "--prefill-engines", nargs="+", type=int, default=(0,), help="0: all do everything"
    )
    parser.add_argument("--prefill-split-lengths", nargs="+", type=int, default=(512,))
    options = parser.parse_args()
    for workload in options.workloads:
        compare(options, workload)


if __name__ == "__main__":
    main()
