"""Limits on what decodes of several large tenants add to a small tenant's steps."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.fairness import Fairness
from engine.scheduler.preemption import Capacity
from engine.scheduler.step_costs import PRIOR_BASE, StepCosts
from tests.engine.scheduler.conftest import queued

SLOWDOWN = 1.25


class Decodes:
    """An engine on which each tenant decodes some endless sequences."""

    def __init__(self, sequences: list[int]) -> None:
        self.fairness = Fairness(StepCosts(), Capacity(1024, 1 << 16), max_slowdown=SLOWDOWN)
        self.requests = [
            queued(1000 * tenant + each, tenant=tenant)
            for tenant, count in enumerate(sequences)
            for each in range(count)
        ]
        for each in self.requests:
            self.fairness.add(each)
            self.fairness.start(each)

    def step(self) -> list[int]:
        """Return the tenant of each row of the next step."""
        held = self.fairness.begin_decodes(self.requests)
        return [each.tenant for each in self.requests if each.id not in held]

    def rows(self, steps: int) -> list[int]:
        """Return the number of rows of each of some steps."""
        return [len(self.step()) for _ in range(steps)]


@pytest.mark.parametrize("tenants", [1, 4, 9, 64])
def test_n_large_tenants_add_at_most_sqrt_n_times_the_limit_of_one(
    tenants: int,
) -> None:
    streams = 1
    rows = Decodes([streams, *[30] * tenants]).rows(400)
    alone = PRIOR_BASE + streams
    together = max((SLOWDOWN - 1) * math.sqrt(tenants) * alone, tenants * streams)
    assert sum(rows) / len(rows) - streams == pytest.approx(together, rel=0.05)
    assert max(rows) - streams <= together + tenants  # each may have saved up a part of a row


@settings(max_examples=200)
@given(sequences=st.lists(st.integers(1, 40), min_size=2, max_size=12))
def test_no_tenant_gets_fewer_rows_than_the_smallest(sequences: list[int]) -> None:
    engine = Decodes(sequences)
    for _ in range(20):
        rows = engine.step()
        for tenant in range(len(sequences)):
            assert rows.count(tenant) >= min(sequences)


def test_every_sequence_of_large_tenant_is_decoded_in_turn() -> None:
    engine = Decodes([2, *[50] * 9])
    waiting = {each.id for each in engine.requests}
    for _ in range(60):
        waiting &= set(engine.fairness.begin_decodes(engine.requests))
    assert not waiting
