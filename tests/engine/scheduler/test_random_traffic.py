"""Random traffic through scheduler, KV cache and a checking executor.

The rig checks all books after every call, the executor checks every read and write of the KV
memory, and each request has to end with the tokens it would get alone.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.scheduler.admission import UNLIMITED, Grant

MakeRig = Callable[..., Any]

VOCAB_SIZE = 12
FEW_TOKENS = 3
"""A vocabulary in which drafts are often right, and often wrong."""

WINDOWS: list[tuple[int | None, ...]] = [
    (None,),
    (None,),
    (7,),
    (1,),
    (None, 6),
    (9, None, 9),
    (4, 11),
]
"""Of the groups of layers that have KV blocks of their own."""

HOLDS = [
    Grant(token_cap=0),
    Grant(token_cap=3),
    Grant(admit_new=False),
    Grant(run_partials=False),
]


def shared_prompt(family: int, length: int, vocab_size: int) -> list[int]:
    """Prompts of one family share a prefix."""
    return [(family + i * i) % vocab_size for i in range(length)]


class Traffic(RuleBasedStateMachine):
    """One rig with up to `depth` plans in flight, and the requests that have to be complete."""

    def __init__(self, make_rig: MakeRig) -> None:
        super().__init__()
        self.make_rig = make_rig
        self.aborted: set[int] = set()

    @initialize(
        num_kv_blocks=st.integers(4, 20),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 24),
        caching=st.booleans(),
        depth=st.integers(1, 3),
        policy=st.sampled_from(["fcfs", "priority"]),
        threshold=st.sampled_from([0, 0, 1, 5]),
        drafts=st.sampled_from([0, 1, 3, 7]),
        vocab_size=st.sampled_from([VOCAB_SIZE, FEW_TOKENS]),
        windows=st.sampled_from(WINDOWS),
        whole=st.sampled_from([False, False, True]),
    )
    def start(
        self,
        num_kv_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        caching: bool,
        depth: int,
        policy: str = "fcfs",
        threshold: int = 0,
        drafts: int = 0,
        vocab_size: int = VOCAB_SIZE,
        windows: tuple[int | None, ...] = (None,),
        whole: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self.depth = depth
        self.rig = self.make_rig(
            num_kv_blocks=num_kv_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens + 40 * whole,
            max_model_len=40,
            vocab_size=vocab_size,
            eos_token_ids=(0,),
            enable_prefix_caching=caching,
            scheduling_policy=policy,
            long_prefill_token_threshold=0 if whole else threshold,
            enable_chunked_prefill=not whole,
            speculative_ngram=drafts,
            prompt_lookup_min=1 + drafts % 2,
            cache_windows=windows,
        )

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 30),
        max_tokens=st.integers(1, 20),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 4),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        logprobs=st.sampled_from([None, None, 1]),
        taken_over=st.integers(0, 3),
        priority=st.integers(-2, 2),
        tenant=st.sampled_from([0, 0, 1, 2]),
        alone=st.sampled_from([0, 0, 0, 1, 3]),
        follows=st.booleans(),
    )
    def add(
        self,
        family: int,
        length: int,
        max_tokens: int,
        ignore_eos: bool,
        min_tokens: int,
        prompt_logprobs: int | None,
        taken_over: int,
        priority: int = 0,
        logprobs: int | None = None,
        tenant: int = 0,
        alone: int = 0,
        follows: bool = False,
    ) -> None:
        rig, id = self.rig, len(self.rig.requests)
        limit = rig.scheduler.max_model_len
        if limit < 2:
            return
        sampling = {
            "max_tokens": max_tokens,
            "ignore_eos": ignore_eos,
            "min_tokens": min(min_tokens, max_tokens),
            "prompt_logprobs": prompt_logprobs,
            "logprobs": logprobs,
        }
        prompt = shared_prompt(family, min(length, limit - 1), self.vocab_size)
        # What an engine that died had sent before: never the token that ends the request.
        rig.describe(id, prompt, front_end=id % 3, **sampling)
        output = rig.expected(id)[0][:-1][:taken_over]
        rig.add(
            id,
            prompt,
            front_end=id % 3,
            output=output,
            priority=priority,
            tenant=tenant,
            cache_root=bytes(15) + b"x" if tenant == 2 else b"",
            alone=alone,
            group=id - id % 5 if follows else 0,
            **sampling,
        )

    @rule(position=st.floats(0, 1, exclude_max=True))
    def abort(self, position: float) -> None:
        live = [id for id in self.rig.requests if id not in self.rig.last]
        if live:
            victim = live[int(position * len(live))]
            self.aborted.add(victim)
            self.rig.scheduler.abort([victim])
            self.rig.scheduler.check_integrity()

    @rule(grant=st.sampled_from([UNLIMITED, UNLIMITED, UNLIMITED, *HOLDS]))
    def step(self, grant: Grant) -> None:
        self.rig.schedule(grant)
        if len(self.rig.in_flight) >= self.depth:
            self.rig.update()

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step(UNLIMITED)

    @precondition(lambda self: self.rig.in_flight)
    @rule()
    def update(self) -> None:
        self.rig.update()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.rig.scheduler.reset_prefix_cache()
        self.rig.scheduler.check_integrity()

    @rule()
    def preempt_all(self) -> None:
        rig = self.rig
        while rig.in_flight:
            rig.update()
        rig.scheduler.preempt_all()
        rig.scheduler.check_integrity()
        assert rig.scheduler.gauges().kv_usage == 0

    def finish(self) -> None:
        """Run the remaining requests and compare."""
        rig = self.rig
        rig.run(depth=self.depth)
        while rig.in_flight:
            rig.update()
        rig.assert_idle()
        assert not self.aborted & set(rig.last)
        for id, message in rig.requests.items():
            if id in self.aborted:
                continue
            rig.assert_complete(id)
            wants = message.sampling.prompt_logprobs is not None and not message.output_token_ids
            got = rig.first[id].prompt_logprobs
            assert (got is not None) == wants
            assert not wants or len(got) == len(message.prompt_token_ids) - 1

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.finish()


@pytest.mark.slow
def test_random_events_preserve_invariants_and_tokens(make_rig: MakeRig) -> None:
    class TrafficInThisRig(Traffic):
        def __init__(self) -> None:
            super().__init__(make_rig)

    limits = settings(max_examples=75, stateful_step_count=50, database=None)
    run_state_machine_as_test(TrafficInThisRig, settings=limits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "caching", "policy", "threshold", "drafts", "whole"),
    [
        (1, True, "fcfs", 0, 0, False),
        (2, False, "fcfs", 7, 0, False),
        (2, True, "priority", 7, 0, False),
        (1, False, "priority", 0, 0, False),
        (2, True, "fcfs", 0, 4, False),
        (1, True, "priority", 7, 3, False),
        (2, False, "fcfs", 7, 8, False),
        (2, True, "priority", 0, 3, True),
        (1, False, "fcfs", 0, 0, True),
    ],
)
def test_thousands_of_busy_steps_preserve_invariants(
    make_rig: MakeRig,
    depth: int,
    caching: bool,
    policy: str,
    threshold: int,
    drafts: int,
    whole: bool,
) -> None:
    rng = random.Random(depth * 2 + caching)
    traffic = Traffic(make_rig)
    vocab_size = FEW_TOKENS if drafts else VOCAB_SIZE
    traffic.start(22, 4, 8, 24, caching, depth, policy, threshold, drafts, vocab_size, whole=whole)
    rig = traffic.rig
    for _ in range(1500):
        if rig.scheduler.gauges().waiting < 4:
            traffic.add(
                rng.randrange(3),
                rng.randint(1, 39),
                rng.randint(1, 30),
                rng.random() < 0.8,
                0,
                rng.choice([None, None, None, 0]),
                rng.randrange(4),
                rng.randrange(3),
            )
        if rng.random() < 0.05:
            traffic.abort(rng.random())
        traffic.step(rng.choice(HOLDS) if rng.random() < 0.1 else UNLIMITED)
    counters = rig.scheduler.counters
    assert counters.preemptions > 50
    assert (counters.prefix_cache_hits > 1000) == caching
    assert len(rig.last) > 200
    if drafts:
        assert counters.spec_draft_tokens > counters.spec_accepted_tokens > 30
    traffic.finish()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_planned_requests_are_not_preempted(make_rig: MakeRig, depth: int, policy: str) -> None:
    """Suspects and tenants start out of order; who gives way has to be who is planned last."""
    rng = random.Random(depth)
    traffic = Traffic(make_rig)
    traffic.start(22, 2, 8, 24, False, depth, policy)
    rig = traffic.rig
    for _ in range(500):
        if rig.scheduler.gauges().waiting < 6:
            alone = 2 if rng.random() < 0.2 else 0
            tenant = rng.choice([0, 0, 0, 1, 2])
            length, most = rng.randint(1, 20), rng.randint(1, 20)
            priority = rng.randrange(2)
            traffic.add(0, length, most, True, 0, None, 0, priority, None, tenant, alone)
        traffic.step(UNLIMITED)
    assert rig.scheduler.counters.preemptions > 20
    traffic.finish()
