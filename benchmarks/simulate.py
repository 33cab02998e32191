"""Simulates admission policies on a lockstep group in virtual time.

Scheduler, KV cache and policies are the production classes; a formula replaces the model. It was
fitted to a published measurement of a MoE model on four data-parallel ranks (TTFT 6.6 s, TPOT 86.9
ms, 1,297 output tok/s at a concurrency of 128), so this is not a hardware measurement. Equal seeds
give equal numbers.

python -m benchmarks.simulate
python -m benchmarks.simulate --loads pub mixed --policies none level --seeds 1
"""

import argparse
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Self

from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.batch.batch import BatchPlan, BatchResult
from engine.batch.executor import ExecutorInfo
from engine.scheduler.admission import Grant, RankState
from engine.scheduler.policies import build_admission_policy
from engine.scheduler.scheduler import Scheduler
from engine.shared.config import CacheConfig, SchedulerConfig
from engine.shared.messages import AddRequest, SamplingParams

NS = 1_000_000_000
"""Virtual time is in integer nanoseconds, so that sums do not depend on their order."""
STEP_NS, DECODE_NS, KV_TOKEN_NS, PREFILL_TOKEN_NS = 20_000_000, 300_000, 70, 315_000
"""Cost of a step, of each one-token row, each token it attends to, and each prompt token."""
TURNAROUND_NS = 1_000_000
"""From an answer to the same client's next request. With 0 it would be in time for the next step,
which an engine begins before a client can respond."""
MAX_NUM_BATCHED_TOKENS, NUM_KV_BLOCKS, BLOCK_SIZE = 4096, 8192, 256
MAX_TOKENS = 16_384
BURST_AT = 60.0

Length = Callable[[random.Random], float]


@dataclass(frozen=True)
class Load:
    """Requests, and the group that serves them."""

    title: str
    output: Length = lambda rng: rng.gauss(1500, 24)
    prompt: Length = lambda _: 3500
    count: int = 512
    concurrency: int = 128
    """Number of clients with one request in flight each, if there is no `rate`."""
    rate: float = 0.0
    """Requests per second, independent of answers."""
    burst: int = 0
    """Requests that arrive at once after `BURST_AT` seconds."""
    ranks: int = 4
    max_num_seqs: int = 32
    one_rank: bool = False
    """All requests go to rank 0."""

    def draw(self, seed: int) -> tuple[list[tuple[int, int]], list[int]]:
        """Return the (prompt, output) tokens of all requests, and the arrivals known in advance."""
        rng = random.Random(seed)
        requests = [
            (_tokens(self.prompt, rng), _tokens(self.output, rng)) for _ in range(self.count)
        ]
        if not self.rate:
            return requests, [0] * min(self.concurrency, self.count)
        now, arrivals = 0.0, [round(BURST_AT * NS)] * self.burst
        for _ in range(self.count - self.burst):
            now += rng.expovariate(self.rate)
            arrivals.append(round(now * NS))
        return requests, sorted(arrivals)


def _tokens(length: Length, rng: random.Random) -> int:
    return min(MAX_TOKENS, max(1, round(length(rng))))


def _varied(rng: random.Random) -> float:
    return rng.uniform(750, 2250)


LOADS = {
    "pub": Load("the published load: 128 clients, 3,500 tokens in, N(1500, 24) out"),
    "var": Load("varied output U(750, 2250)", _varied),
    "mixed": Load(
        "lognormal input (median 2,000, at most 12,000), exponential output (mean 900)",
        lambda rng: rng.expovariate(1 / 900),
        lambda rng: min(12_000, rng.lognormvariate(math.log(2000), 0.8)),
    ),
    "over": Load("192 clients", concurrency=192),
    "under": Load("64 clients", concurrency=64),
    "sync": Load("in phase: every output has 1,500 tokens", lambda _: 1500),
    "pub33": Load("published, max_num_seqs 33", max_num_seqs=33),
    "poisson": Load("Poisson arrivals, 0.49 requests/s", rate=0.49),
    "burst": Load("Poisson, 0.294/s, and 128 at once after 60 s", rate=0.294, burst=128, count=384),
    "lone": Load("Poisson, 0.1225/s, all on one rank", rate=0.1225, one_rank=True, count=128),
    "dp8 pub": Load("published, 8 ranks of 16", ranks=8, max_num_seqs=16),
    "dp8 var": Load("varied output, 8 ranks of 16", _varied, ranks=8, max_num_seqs=16),
}


@dataclass
class Record:
    """One request: the rank that served it, and its times (ns)."""

    rank: int
    arrived: int
    output_tokens: int
    first: int = -1
    last: int = -1
    finished: bool = False


class Rank:
    """The production scheduler of one rank, between steps or within one."""

    def __init__(self, config: SchedulerConfig) -> None:
        cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False)
        info = ExecutorInfo(NUM_KV_BLOCKS, 65_536, 1, (), "simulated")
        self.scheduler = Scheduler(config, cache, info)
        self.inbox: list[AddRequest] = []
        self.prefill_tokens = 0
        """Prefill tokens of the current or last step."""
        self.plan: BatchPlan | None = None

    def take_in(self) -> None:
        """Add the requests that have arrived."""
        for request in self.inbox:
            refusal = self.scheduler.add(request)
            assert refusal is None, refusal
        self.inbox.clear()

    def begin(self, grant: Grant) -> int:
        """Start a step; return its duration in ns."""
        plan = self.plan = self.scheduler.schedule(grant)
        # Single-token rows come first in every plan.
        decodes = plan.counts.count(1)
        self.prefill_tokens = sum(plan.counts) - decodes
        context = sum(plan.starts[:decodes]) + decodes
        rows = DECODE_NS * decodes + KV_TOKEN_NS * context
        return STEP_NS + rows + PREFILL_TOKEN_NS * self.prefill_tokens


@dataclass
class Group:
    """The ranks of one group in lockstep, each step as slow as the slowest rank."""

    load: Load
    policy: SchedulerConfig
    seed: int
    records: list[Record] = field(default_factory=list)
    longest_hold: int = 0
    """Maximum consecutive steps in which ready prefill was held."""
    held_without_decodes: int = 0
    """Steps in which prefill was held although nothing decoded."""
    steps: int = 0
    dummy_steps: int = 0
    """Steps of all ranks that computed nothing."""

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        tokens = sum(each.output_tokens for each in self.records)
        return tokens * NS / max(each.last for each in self.records)

    @property
    def ttft(self) -> float:
        """Mean seconds to the first token."""
        return fmean(each.first - each.arrived for each in self.records) / NS

    @property
    def tpot(self) -> float:
        """Mean ms per further token of a request."""
        long = [each for each in self.records if each.output_tokens > 1]
        return fmean((each.last - each.first) / (each.output_tokens - 1) for each in long) / 1e6

    def run(self) -> Self:
        """Serve the whole load.

        Raises:
            AssertionError: ranks with the same table came to different grants.
        """
        load = self.load
        config = SchedulerConfig(
            max_num_seqs=load.max_num_seqs, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            admission_policy=self.policy.admission_policy,
            admission_cadence=self.policy.admission_cadence,
        )  # fmt: skip
        ranks = [Rank(config) for _ in range(load.ranks)]
        policies = [build_admission_policy(config, load.ranks) for _ in ranks]
        requests, known = load.draw(self.seed)
        arrivals, under_way = deque(known), [0] * load.ranks
        now = in_a_row = number = last_us = finished = turn = 0

        def take_arrivals(until: int) -> None:
            nonlocal turn
            while arrivals and arrivals[0] <= until and len(self.records) < load.count:
                turn += 1
                fewest = [rank for rank, n in enumerate(under_way) if n == min(under_way)]
                rank = 0 if load.one_rank else fewest[turn % len(fewest)]
                under_way[rank] += 1
                prompt, output = requests[len(self.records)]
                sampling = SamplingParams(max_tokens=output, seed=0, ignore_eos=True)
                request = AddRequest(len(self.records), "", 0, 0, [0] * prompt, sampling)
                ranks[rank].inbox.append(request)
                self.records.append(Record(rank, arrivals.popleft(), output))

        while finished < load.count:
            take_arrivals(now)
            if not any(rank.inbox or rank.scheduler.has_work for rank in ranks):
                now, number, last_us = arrivals[0], 0, 0
                continue
            for rank in ranks:
                rank.take_in()
            table = [rank.scheduler.rank_state(last_us, rank.prefill_tokens) for rank in ranks]
            if policies[0].exchanges:
                grants = [policy.decide(number, tuple(table)) for policy in policies]
                assert all(grant == grants[0] for grant in grants), f"grants differ: {grants}"
            else:
                grants = [p.decide(number, (own,)) for p, own in zip(policies, table, strict=True)]
            in_a_row = self._observe(table, grants, in_a_row)
            duration = max(rank.begin(grant) for rank, grant in zip(ranks, grants, strict=True))
            number, last_us = number + 1, duration // 1000
            # Requests that arrive during the step are routed before its end is known.
            take_arrivals(now + duration - 1)
            now += duration
            for rank in ranks:
                for id in self._finish(rank, now):
                    finished += 1
                    under_way[self.records[id].rank] -= 1
                    if not load.rate:
                        arrivals.append(now + TURNAROUND_NS)
        return self

    def _observe(self, table: list[RankState], grants: list[Grant], in_a_row: int) -> int:
        held = any(
            state.ready_prefill_tokens and (grant.token_cap == 0 or not grant.run_partials)
            for state, grant in zip(table, grants, strict=True)
        )
        in_a_row = in_a_row + 1 if held else 0
        self.longest_hold = max(self.longest_hold, in_a_row)
        self.held_without_decodes += held and not any(state.decodes for state in table)
        return in_a_row

    def _finish(self, rank: Rank, now: int) -> list[int]:
        """Finish a rank's step; return the requests that it ended."""
        plan, done = rank.plan, []
        assert plan is not None
        self.steps += 1
        self.dummy_steps += not plan.slots
        outputs = rank.scheduler.update(plan, BatchResult([0] * sum(plan.samples)))
        for output in outputs.get(0) or ():
            record = self.records[output.id]
            record.first = now if record.first < 0 else record.first
            record.last = now
            if output.finish_reason is not None:
                record.finished = True
                done.append(output.id)
        return done


def main() -> None:
    """Simulate and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), metavar="LOAD")
    parser.add_argument("--policies", nargs="+", default=["none", "balance", "cadence", "level"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--count", type=int, help="requests of each load; default: its own number")
    options = parser.parse_args()
    table = Table("load", "policy", "output tok/s", "gain", "TTFT", "TPOT", "longest hold")
    for name in track(options.loads, transient=True):
        load, first = LOADS[name], 0.0
        load = replace(load, count=options.count or load.count)
        for policy in options.policies:
            config = SchedulerConfig(admission_policy=policy)
            runs = [Group(load, config, seed).run() for seed in options.seeds]
            rate = fmean(each.rate for each in runs)
            first = first or rate
            table.add_row(
                name, policy, f"{rate:,.0f}", f"{100 * (rate / first - 1):+.1f} %",
                f"{fmean(each.ttft for each in runs):.1f} s",
                f"{fmean(each.tpot for each in runs):.1f} ms",
                f"{max(each.longest_hold for each in runs)} steps",
            )  # fmt: skip
    Console().print(table)
    for name in options.loads:
        print(f"{name}: {LOADS[name].title}")


if __name__ == "__main__":
    main()
