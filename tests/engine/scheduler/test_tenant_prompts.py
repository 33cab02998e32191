"""Limits on what all tenants' prompts add to the steps of streams, and their shares."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.fairness import Fairness
from engine.scheduler.preemption import Capacity
from engine.scheduler.step_costs import PRIOR_BASE, PRIOR_PREFILL, StepCosts
from tests.engine.scheduler.conftest import Rig, queued

MakeRig = Callable[..., Any]

SLOWDOWN = 1.25
STREAMS = 100
"""The tenant whose streams run."""
LIMIT = 512
"""Prompt tokens of a tenant in a step, and what it may save up."""


def prompt(length: int, first: int = 0) -> list[int]:
    return [(7 * first + i) % 1000 for i in range(length)]


class Engines:
    """An engine on which streams of one tenant run, and prompts of others wait without end."""

    def __init__(self, tenants: int, streams: int, *, mixed: float = 0.0) -> None:
        self.costs = StepCosts()
        self.costs.mixed = mixed
        self.fairness = Fairness(
            self.costs, Capacity(64, 2048), max_prefill=LIMIT, max_slowdown=SLOWDOWN
        )
        self.streams = [queued(id, tenant=STREAMS) for id in range(streams)]
        self.prompts = [queued(streams + each, tenant=each) for each in range(tenants)]
        for each in (*self.streams, *self.prompts):
            self.fairness.add(each)
        for each in self.streams:
            self.fairness.start(each)
        self.computed = [0] * tenants

    def step(self, wanted: Callable[[int], int]) -> int:
        """Compute a step in which each tenant wants a prompt; return how many tokens it has."""
        rows = len(self.streams)
        self.fairness.begin_decodes(self.streams)
        self.fairness.begin_prefill(rows)
        total = 0
        shares = self.fairness.shares
        for each in sorted(self.prompts, key=lambda each: shares.served(each.tenant)):
            tokens = self.fairness.tenant_tokens(each, wanted(each.tenant))
            if tokens:
                self.fairness.prefill(each, tokens)
                self.computed[each.tenant] += tokens
                total += tokens
        return total

    @property
    def alone(self) -> float:
        """Cost of a step without prompts, in prompt tokens."""
        return (self.costs.base + len(self.streams)) / self.costs.prefill


@settings(max_examples=300)
@given(
    tenants=st.integers(1, 20),
    streams=st.integers(1, 16),
    mixed=st.sampled_from([0.0, 5.0, 30.0]),
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=8),
)
def test_prompts_of_one_tenant_never_double_step_time(
    tenants: int, streams: int, mixed: float, lengths: list[int]
) -> None:
    engine = Engines(tenants, streams, mixed=mixed)
    generator = random.Random(tenants)
    for _ in range(50):
        tokens = engine.step(lambda _: generator.choice(lengths))
        many = max(1.0, (SLOWDOWN - 1) * math.sqrt(tenants))
        extra = min(int(mixed / PRIOR_PREFILL), int(many * engine.alone * 3 / 4))
        assert tokens <= max(1, many * engine.alone - extra + 1)


@pytest.mark.parametrize("tenants", [1, 2, 4, 9, 16])
@pytest.mark.parametrize("mixed", [0.0, 6.0])
def test_prompts_of_n_tenants_add_sqrt_n_times_the_limit_of_one(tenants: int, mixed: float) -> None:
    engine = Engines(tenants, 4, mixed=mixed)
    for _ in range(1000):
        engine.step(lambda _: 1000)  # what they have saved
    engine.computed, spent, steps = [0] * tenants, 0, 1000
    for _ in range(steps):
        before = list(engine.computed)
        engine.step(lambda _: 1000)
        for tenant, then in enumerate(before):
            tokens = engine.computed[tenant] - then
            spent += tokens + (int(mixed / PRIOR_PREFILL) if tokens else 0)
    may = (SLOWDOWN - 1) * engine.alone * math.sqrt(tenants)
    assert 0.75 * may <= spent / steps <= 1.01 * may
    assert max(engine.computed) <= 1.5 * min(engine.computed), "nobody gets much more"


@settings(max_examples=200)
@given(st.lists(st.integers(200, 1000), min_size=2, max_size=12), st.integers(1, 16))
def test_prompt_length_does_not_change_tenant_shares(lengths: list[int], streams: int) -> None:
    engine = Engines(len(lengths), streams)
    for _ in range(60 * len(lengths)):
        engine.step(lengths.__getitem__)
    assert max(engine.computed) - min(engine.computed) <= LIMIT


def test_occasional_short_prompt_is_neither_split_nor_delayed() -> None:
    engine = Engines(5, 4)
    lengths = [1000] * 4 + [0]
    waits = []
    for step in range(600):
        lengths[4] = 40 if step % 30 == 0 else lengths[4]
        before = engine.computed[4]
        engine.step(lengths.__getitem__)
        if engine.computed[4] > before:
            assert engine.computed[4] - before == 40, "it is not cut"
            lengths[4] = 0
            waits.append(step % 30)
    assert len(waits) == 20
    assert waits[0] <= 4, "all had the same, and each has its turn"
    assert max(waits[1:]) == 0


@settings(max_examples=10)
@given(st.integers(0, 1 << 30))
def test_single_tenant_is_planned_without_limits(seed: int) -> None:
    generator = random.Random(seed)
    sizes = {"num_kv_blocks": 400, "max_num_batched_tokens": 128, "max_model_len": 512}
    limited = Rig(max_slowdown=SLOWDOWN, **sizes)  # type: ignore[arg-type]
    free = Rig(max_slowdown=0, **sizes)  # type: ignore[arg-type]
    for id in range(30):
        length, tokens = generator.randint(1, 300), generator.randint(1, 20)
        for rig in (limited, free):
            rig.add(id, prompt(length, id), max_tokens=tokens, tenant=7)
        for _ in range(generator.randint(0, 4)):
            assert limited.step() == free.step()
    while free.scheduler.has_work:
        assert limited.step() == free.step()
    assert not limited.scheduler.has_work


def test_prompts_without_decodes_get_tenant_share_of_each_step(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(
        num_kv_blocks=1024,
        max_num_batched_tokens=512,
        max_model_len=1100,
        enable_prefix_caching=False,
    )
    for tenant in range(3):
        rig.add(tenant, prompt(1000, tenant), max_tokens=1, tenant=tenant)
    computed = [rig.step().num_prefill_tokens for _ in range(10)]
    assert min(computed) >= 512 // 4, "not what would make a step of decodes a quarter longer"
    rig.add(10, prompt(40, 10), max_tokens=1, tenant=10)
    assert rig.step().num_prefill_tokens == 40, "its first token waits for no part of those"
    rig.run()
    rig.assert_complete()
    rig.assert_idle()


def test_prompts_computed_without_decodes_cause_no_debt() -> None:
    engine = Engines(2, 0)
    for _ in range(50):
        assert engine.step(lambda _: 1000) >= LIMIT
    assert engine.fairness.shares.quota().available(0, 1000) == LIMIT
    engine.streams = [queued(1000, tenant=STREAMS)]
    engine.fairness.add(engine.streams[0])
    engine.fairness.start(engine.streams[0])
    part = (SLOWDOWN - 1) * (PRIOR_BASE + 1) / PRIOR_PREFILL
    for _ in range(20):
        assert engine.step(lambda _: 1000) <= 2 * part, "nothing is saved up either"
