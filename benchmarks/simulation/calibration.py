"""The calibrated lockstep group C1: its loads, its policies and what they have to show.

C1 is a cost model that was fitted to a published measurement of a MoE model on four
data-parallel ranks (TTFT 6.6 s, TPOT 86.9 ms, 1,297 output tok/s at a concurrency of 128). It is
a simulation with production scheduling code, not a measurement of hardware.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

from benchmarks.simulation.costs import CostModel
from benchmarks.simulation.lockstep import ByPolicy, HoldCheck, LockstepGroup, Router
from benchmarks.simulation.records import Recorder, Summary, summarize
from benchmarks.simulation.replica import EngineShape
from benchmarks.simulation.workload import (
    Lengths,
    Workload,
    burst,
    closed_loop,
    draw_requests,
    poisson,
)
from engine.shared.config import SchedulerConfig
from server.router.routing import LeastLoaded

COSTS = CostModel(step_ns=20_000_000, decode_ns=300_000, kv_token_ns=70, prefill_token_ns=315_000)
"""20 ms per step, 0.3 ms per sequence, 0.07 us per token attended to, 315 us per prefill token."""

PUBLISHED_EXTRA_S = 41.0
"""The published durations contain this much that is not scheduling (clients coming and going)."""

STREAMS = (1, 2, 3)
"""Seeds of the random streams."""

MAX_NUM_BATCHED_TOKENS = 4096
NUM_KV_BLOCKS = 8192
"""Of 256 tokens: more than any load here needs."""


@dataclass(frozen=True)
class Load:
    """A workload and the group that serves it."""

    title: str
    output: str = "normal:1500,24"
    prompt: str = "constant:3500"
    count: int = 512
    concurrency: int = 128
    rate: float = 0.0
    """Requests per second of an open loop; 0 is a closed loop."""
    burst: int = 0
    """Requests of an open loop that come at once, after `BURST_AT` seconds."""
    ranks: int = 4
    max_num_seqs: int = 32
    one_rank: bool = False
    """All traffic goes to rank 0."""

    def workload(self, seed: int) -> Workload:
        """Return the requests of one random stream."""
        rng = random.Random(seed)
        lengths = Lengths.parse(self.prompt), Lengths.parse(self.output)
        requests = draw_requests(self.count, *lengths, rng)
        if self.burst:
            return burst(requests, self.rate, self.burst, BURST_AT, rng)
        if self.rate:
            return poisson(requests, self.rate, rng)
        return closed_loop(requests, self.concurrency)


BURST_AT = 60.0

LOADS = {
    "pub": Load("the published load: 128 clients, 3,500 tokens in, N(1500, 24) out"),
    "var": Load("varied output U(750, 2250)", output="uniform:750,2250"),
    "mixed": Load(
        "lognormal input (median 2,000, sigma 0.8, at most 12,000), exponential output "
        "(mean 900)",
        prompt="lognormal:2000,0.8,max=12000",
        output="exponential:900",
    ),
    "over": Load("192 clients", concurrency=192),
    "under": Load("64 clients", concurrency=64),
    "sync": Load("in phase: every output has 1,500 tokens", output="constant:1500"),
    "pub33": Load("published, max_num_seqs 33", max_num_seqs=33),
    "poisson": Load("Poisson arrivals, 0.49 requests/s", rate=0.49),
    "burst": Load(
        "Poisson, 0.294 requests/s, and 128 at once after 60 s", rate=0.294, burst=128, count=384
    ),
    "lone": Load("Poisson, 0.1225 requests/s, all on one rank", rate=0.1225, one_rank=True,
                 count=128),
    "dp8 pub": Load("published, 8 ranks of 16", ranks=8, max_num_seqs=16),
    "dp8 var": Load("varied output, 8 ranks of 16", ranks=8, max_num_seqs=16,
                    output="uniform:750,2250"),
}  # fmt: skip

POLICIES = {
    "none": SchedulerConfig(admission_policy="none"),
    "balance": SchedulerConfig(admission_policy="balance"),
    "cadence 2": SchedulerConfig(admission_policy="cadence", admission_cadence=2),
    "cadence 4": SchedulerConfig(admission_policy="cadence", admission_cadence=4),
    "level": SchedulerConfig(admission_policy="level"),
    "level w=4 8/rank": SchedulerConfig(admission_policy="level", level_hold_per_rank=8),
    "level w=2 32/rank": SchedulerConfig(
        admission_policy="level", level_wait_weight=2, level_hold_per_rank=32
    ),
}

PROFILES = {"level w=4 8/rank", "level w=2 32/rank"}
"""Other parameters of `level`, run on some loads only: for latency, and for throughput."""

PROFILE_LOADS = {"pub", "var", "poisson"}

ROUTED_POLICIES = ("none", "balance", "level")
ROUTED_LOADS = ("pub", "var", "mixed", "poisson")
"""Where the routing of production is compared."""


class Case(NamedTuple):
    """What is to be run, once per random stream."""

    load: str
    policy: str
    variant: Literal["", "gather first", "least-loaded"] = ""
    """The wrong order of a step, or production's routing by requests and prefill tokens."""


class Run(NamedTuple):
    """One load under one policy with one random stream."""

    summary: Summary
    holds: HoldCheck
    recorder: Recorder


def _first_rank(requests: list[int], prefill_tokens: list[int]) -> int:
    return 0


def run_case(case: Case, seed: int) -> Run:
    """Simulate a case with one random stream."""
    return run_one(
        LOADS[case.load],
        POLICIES[case.policy],
        seed,
        gather_first=case.variant == "gather first",
        route=ByPolicy(LeastLoaded()) if case.variant == "least-loaded" else None,
    )


def run_one(
    load: Load,
    policy: SchedulerConfig,
    seed: int,
    *,
    gather_first: bool = False,
    route: Router | None = None,
) -> Run:
    """Simulate one load under one policy."""
    limits = _limited(policy, load.max_num_seqs)
    group = LockstepGroup(
        load.ranks,
        EngineShape(limits, NUM_KV_BLOCKS),
        COSTS,
        load.workload(seed),
        route=_first_rank if load.one_rank else route,
        gather_first=gather_first,
    )
    recorder = group.run()
    return Run(summarize(recorder), group.holds, recorder)


def _limited(policy: SchedulerConfig, max_num_seqs: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        admission_policy=policy.admission_policy,
        admission_cadence=policy.admission_cadence,
        level_wait_weight=policy.level_wait_weight,
        level_hold_per_rank=policy.level_hold_per_rank,
    )


def cases() -> Iterator[Case]:
    """Yield everything that the results page needs."""
    for load in LOADS:
        for policy in POLICIES:
            if policy not in PROFILES or load in PROFILE_LOADS:
                yield Case(load, policy)
    for policy in ("none", "level"):
        yield Case("poisson", policy, "gather first")
    for policy in ROUTED_POLICIES:
        for load in ROUTED_LOADS:
            yield Case(load, policy, "least-loaded")


class Mean(NamedTuple):
    """A case's numbers, averaged over the random streams."""

    rate: float
    """Output tok/s."""
    published_rate: float
    """The same on the published scale, where every run has 41 s more."""
    ttft: float
    """s"""
    ttft_p99: float
    tpot: float
    """ms"""
    e2e: float
    """s"""
    itl_p99: float
    """ms"""
    dummy_share: float
    longest_hold: int
    held_without_decodes: int
    late_tokens: int


def mean_of(runs: list[Run]) -> Mean:
    """Average over random streams; the invariants are the worst of all."""
    summaries = [run.summary for run in runs]
    return Mean(
        rate=fmean(s.output_rate for s in summaries),
        published_rate=fmean(
            s.output_rate * s.duration_s / (s.duration_s + PUBLISHED_EXTRA_S) for s in summaries
        ),
        ttft=fmean(s.ttft.mean for s in summaries) / 1e3,
        ttft_p99=fmean(s.ttft.p99 for s in summaries) / 1e3,
        tpot=fmean(s.tpot.mean for s in summaries),
        e2e=fmean(s.e2e.mean for s in summaries) / 1e3,
        itl_p99=fmean(s.itl.p99 for s in summaries),
        dummy_share=fmean(s.dummy_share for s in summaries),
        longest_hold=max(run.holds.longest_hold for run in runs),
        held_without_decodes=sum(run.holds.held_without_decodes for run in runs),
        late_tokens=sum(run.holds.late_tokens for run in runs),
    )


# -- acceptance ----------------------------------------------------------------------------------


class Check(NamedTuple):
    """One acceptance number: what is demanded and what came out."""

    load: str
    demand: str
    measured: str
    passed: bool


@dataclass(frozen=True)
class _Checker:
    """Reads the means and states demands about them."""

    means: dict[Case, Mean]

    def of(self, load: str, policy: str) -> Mean:
        return self.means[Case(load, policy)]

    def gain(self, load: str, policy: str, over: str = "none") -> float:
        """Relative throughput gain."""
        return self.of(load, policy).rate / self.of(load, over).rate - 1

    def within(self, load: str, name: str, value: float, low: float, high: float) -> Check:
        limits = f"at least {low:,g}" if high == float("inf") else f"{low:,.5g} to {high:,.5g}"
        return Check(load, f"{name} {limits}", f"{value:,.4g}", low <= value <= high)

    def gains(
        self, load: str, policy: str, low: float, high: float = float("inf"), over: str = "none"
    ) -> Check:
        value = self.gain(load, policy, over)
        limit = f"at least {low:+.1%}" if high == float("inf") else f"{low:+.1%} to {high:+.1%}"
        demand = f"{policy} over {over}: {limit} tok/s"
        return Check(load, demand, f"{value:+.2%}", low <= value <= high)

    def at_most(
        self, load: str, policy: str, read: Callable[[Mean], float], name: str, factor: float,
        over: str = "none",
    ) -> Check:  # fmt: skip
        value = read(self.of(load, policy)) / read(self.of(load, over))
        demand = f"{policy}: {name} at most {factor:g} x {over}"
        return Check(load, demand, f"{value:.3f} x", value <= factor)


def checks(means: dict[Case, Mean]) -> list[Check]:
    """Return every acceptance number, in the order of the specification."""
    check = _Checker(means)
    return [
        *_baseline_and_balance(check),
        *_level_closed_loops(check),
        *_level_open_loops(check),
        *_eight_ranks(check),
        *_invariants(check),
        *_ablation(check),
    ]


def _ttft(mean: Mean) -> float:
    return mean.ttft


def _tpot(mean: Mean) -> float:
    return mean.tpot


def _e2e(mean: Mean) -> float:
    return mean.e2e


def _baseline_and_balance(check: _Checker) -> list[Check]:
    none, balance = check.of("pub", "none"), check.of("pub", "balance")
    return [
        check.within("pub", "none: TTFT s", none.ttft, 6.6 * 0.95, 6.6 * 1.05),
        check.within("pub", "none: TPOT ms", none.tpot, 87 * 0.96, 87 * 1.04),
        check.within("pub", "none: tok/s", none.rate, 1390 * 0.96, 1390 * 1.04),
        check.gains("pub", "balance", 0.15, 0.25),
        check.at_most("pub", "balance", _tpot, "TPOT", 0.80),
        check.within(
            "pub", "balance: tok/s on the published scale", balance.published_rate,
            1530 * 0.96, 1530 * 1.04,
        ),
        check.gains("pub33", "balance", -0.005, 0.005),
        check.gains("sync", "balance", -0.15, 0.0),
    ]  # fmt: skip


def _level_closed_loops(check: _Checker) -> list[Check]:
    level = check.of("pub", "level")
    return [
        check.gains("pub", "level", 0.35),
        check.gains("pub", "level", 0.12, over="balance"),
        check.at_most("pub", "level", _ttft, "mean TTFT", 1.0, over="balance"),
        check.at_most("pub", "level", _ttft, "mean TTFT", 1.35),
        check.within(
            "pub", "level: tok/s on the published scale", level.published_rate, 1720, float("inf")
        ),
        check.gains("var", "level", 0.50),
        check.gains("mixed", "level", 0.55),
        check.gains("over", "level", 0.38),
        check.gains("under", "level", 0.35),
        check.gains("sync", "level", -0.02),
    ]


def _level_open_loops(check: _Checker) -> list[Check]:
    later = check.of("poisson", "level").ttft - check.of("poisson", "none").ttft
    lone = check.of("lone", "level").ttft / check.of("lone", "none").ttft - 1
    return [
        check.gains("poisson", "level", -0.01, 0.01),
        check.at_most("poisson", "level", _tpot, "TPOT", 0.80),
        check.at_most("poisson", "level", _ttft, "mean TTFT", 2.0),
        Check("poisson", "level: mean TTFT at most 1.5 s later", f"{later:+.2f} s", later <= 1.5),
        check.at_most("poisson", "level", _e2e, "mean request latency", 0.80),
        check.at_most("burst", "level", _e2e, "mean request latency", 0.85),
        check.at_most("burst", "level", _ttft, "mean TTFT", 1.0),
        Check("lone", "level: mean TTFT within 3 %", f"{lone:+.2%}", abs(lone) <= 0.03),
    ]


def _eight_ranks(check: _Checker) -> list[Check]:
    return [
        check.gains("dp8 var", "level", 0.80),
        check.gains("dp8 var", "level", -0.02, over="balance"),
        check.gains("dp8 pub", "level", 0.0, over="balance"),
    ]


def _invariants(check: _Checker) -> list[Check]:
    proper = {
        case: mean for case, mean in check.means.items() if case.variant != "gather first"
    }  # fmt: skip
    level = {case: mean for case, mean in proper.items() if case.policy == "level"}
    longest = max(level.items(), key=lambda item: item[1].longest_hold / LOADS[item[0].load].ranks)
    limit = 16 * LOADS[longest[0].load].ranks
    idle = sum(mean.held_without_decodes for mean in proper.values())
    late = sum(mean.late_tokens for mean in proper.values())
    return [
        Check("all", "level: no prefill held for more than 16 x ranks steps",
              f"{longest[1].longest_hold} of {limit}", longest[1].longest_hold <= limit),
        Check("all", "no hold while nothing decodes", f"{idle} steps", idle == 0),
        Check("all", "nothing that came after the gather is prefilled in its step",
              f"{late} tokens", late == 0),
    ]  # fmt: skip


def _ablation(check: _Checker) -> list[Check]:
    none = check.means[Case("poisson", "none", "gather first")]
    level = check.means[Case("poisson", "level", "gather first")]
    ratio = level.tpot / none.tpot
    return [
        Check("poisson", "gathering before draining: level's TPOT gain has to disappear "
              "(more than 0.95 x none)", f"{ratio:.3f} x", ratio > 0.95),
    ]  # fmt: skip
