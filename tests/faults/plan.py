"""The plan of one run: a cluster, its requests and its faults, all drawn from one seed."""

import random
from typing import NamedTuple

from engine.shared.messages import SamplingParams
from tests.faults.oracle import POISON, VOCABULARY

LONG_CUT = 100.0
"""Duration in seconds of a cut that no request may wait for."""

FIRST_FAULT, LAST_FAULT = 1.0, 5.0
"""Interval in seconds in which faults begin."""


class Ask(NamedTuple):
    """One request of a client."""

    name: str
    at: float
    prompt: list[int]
    sampling: SamplingParams
    priority: int
    leaves_after: float | None
    """Seconds after which the client disconnects; None if never."""
    tenant: int = 0
    pinned_rank: int | None = None
    """The only engine that may run it."""

    @property
    def is_poison(self) -> bool:
        """Whether it kills engines."""
        return self.prompt[0] == POISON


class Fault(NamedTuple):
    """A fault at time `at`; `which` selects the victim, `seconds` is the duration."""

    at: float
    kind: str
    which: int
    seconds: float


KINDS = {
    "kill engine": 6,
    "lose node": 3,
    "stop engine": 4,
    "hang step": 3,
    "slow engine": 3,
    "retire engine": 2,
    "kill front end": 3,
    "stop front end": 2,
    "kill coordinator": 4,
    "stop coordinator": 2,
    "cut engine from coordinator": 3,
    "cut engine from front end": 4,
    "cut front end from coordinator": 2,
    "reset engine and front end": 4,
    "reset engine and coordinator": 2,
    "halt engine": 4,
    "halt all engines": 1,
    "lose control messages": 3,
    "delay control messages": 2,
    "cut engine from engine": 0,
    "damage blocks": 0,
}
"""Relative frequencies of faults; the last two replace some if engines read each other's KV
blocks."""


class Plan(NamedTuple):
    """One run."""

    seed: int
    engines: int
    front_ends: int
    asks: list[Ask]
    faults: list[Fault]
    max_resumes: int
    loading: float
    """Seconds that an engine takes to load its model."""
    prefix_caching: bool
    by_priority: bool
    async_scheduling: bool
    splits: bool
    """Whether engine 0 computes long prompts for the others."""

    def describe(self) -> str:
        """Describe the plan."""
        links = [
            f"{self.engines} engines, {self.front_ends} front ends, "
            f"{len(self.asks)} requests, max_resumes {self.max_resumes}, "
            f"loading {self.loading:.2f} s, prefix caching {self.prefix_caching}, "
            f"priorities {self.by_priority}, overlapped {self.async_scheduling}, "
            f"split {self.splits}"
        ]
        links += [
            f"  {ask.at:6.3f} {ask.name}: {len(ask.prompt)} tokens"
            f"{' of poison' if ask.is_poison else ''}, at most {ask.sampling.max_tokens}"
            f"{'' if ask.pinned_rank is None else f', on engine {ask.pinned_rank}'}"
            f"{'' if ask.leaves_after is None else f', leaves after {ask.leaves_after:.2f}'}"
            for ask in self.asks
        ]
        links += [
            f"  {fault.at:6.3f} {fault.kind} ({fault.which}, {fault.seconds:.2f} s)"
            for fault in self.faults
        ]
        return "\n".join(links)


def draw_plan(seed: int) -> Plan:
    """Draw the plan of a seed."""
    rng = random.Random(seed)
    prefix = [rng.randrange(POISON) for _ in range(8)]
    asks = [_ask(rng, number, prefix) for number in range(rng.randint(2, 7))]
    if rng.random() < 0.08:
        for number in range(rng.choice((1, 1, 2))):
            ask = asks[number]
            asks[number] = ask._replace(prompt=[POISON, *ask.prompt[1:]], leaves_after=None)
    kinds, weights = list(KINDS), list(KINDS.values())
    faults = [
        Fault(
            rng.uniform(FIRST_FAULT, LAST_FAULT),
            kind,
            rng.randrange(12),
            rng.choice((0.3, 1.0, 2.5, 5.0, 7.0)),
        )
        for kind in rng.choices(kinds, weights, k=rng.randint(1, 5))
    ]
    engines = rng.choice((1, 2, 2, 3))
    if rng.random() < 0.15:
        asks[-1] = asks[-1]._replace(pinned_rank=rng.randrange(engines))
    if engines > 1 and rng.random() < 0.2:
        faults[0] = faults[0]._replace(kind="cut engine from front end", seconds=LONG_CUT)
        faults = [fault for fault in faults if fault.kind != "retire engine"]
    front_ends, max_resumes = rng.choice((1, 1, 2)), rng.choice((1, 1, 2, 3))
    loading, prefix_caching = rng.uniform(0.1, 0.8), rng.random() < 0.7
    by_priority, async_scheduling = rng.random() < 0.3, rng.random() < 0.3
    splits = engines > 1 and rng.random() < 0.4
    if splits and prefix_caching:
        instead = {8: "damage blocks"} | dict.fromkeys((9, 10, 11), "cut engine from engine")
        faults = [
            fault._replace(kind=instead.get(fault.which, fault.kind))
            if fault.seconds < LONG_CUT
            else fault
            for fault in faults
        ]
    return Plan(
        seed=seed,
        engines=engines,
        front_ends=front_ends,
        asks=sorted(asks, key=lambda ask: ask.at),
        faults=sorted(faults),
        max_resumes=max_resumes,
        loading=loading,
        prefix_caching=prefix_caching,
        by_priority=by_priority,
        async_scheduling=async_scheduling,
        splits=splits,
    )


def _ask(rng: random.Random, number: int, prefix: list[int]) -> Ask:
    prompt = [rng.randrange(POISON) for _ in range(rng.randint(1, 20))]
    if rng.random() < 0.5:
        prompt = prefix + prompt
    penalized = rng.random() < 0.3
    sampling = SamplingParams(
        max_tokens=rng.randint(1, 40),
        seed=rng.getrandbits(32),
        temperature=rng.choice((0.0, 1.0)),
        ignore_eos=rng.random() < 0.8,
        min_tokens=rng.choice((0, 0, 4)),
        stop_token_ids=(rng.randrange(VOCABULARY),) if rng.random() < 0.2 else (),
        presence_penalty=0.5 if penalized else 0.0,
        logprobs=2 if rng.random() < 0.2 else None,
        prompt_logprobs=1 if rng.random() < 0.1 else None,
    )
    at = rng.uniform(0.9, LAST_FAULT)
    leaves = rng.uniform(0.0, 2.0) if rng.random() < 0.15 else None
    return Ask(f"r{number}", at, prompt, sampling, rng.randint(-1, 1), leaves, number % 3)
