"""Sequences computed in a single step: never split, in order, within the budget."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.batch.batch import BatchPlan, BatchResult
from engine.batch.executor import ExecutorInfo
from engine.scheduler.admission import Grant
from engine.scheduler.scheduler import Scheduler
from engine.shared.config import CacheConfig, SchedulerConfig
from engine.shared.messages import AddRequest, PoolingParams, RequestOutput, SamplingParams


class Rig:
    """A scheduler over an encoder that answers each sequence with its tokens."""

    def __init__(self, *, depth: int = 1, budget: int = 64, seqs: int = 8, **settings: Any) -> None:
        info = ExecutorInfo(seqs, 40, 1000, (), "", task="embed", in_one_step=True, has_kv=False)
        config = SchedulerConfig(
            max_num_seqs=seqs, max_num_batched_tokens=budget, max_slowdown=1.25, **settings
        )
        self.scheduler = Scheduler(config, CacheConfig(), info)
        self.plans: list[BatchPlan] = []
        self.found: dict[int, RequestOutput] = {}
        self.order: list[int] = []
        self._depth = depth
        self._in_flight: list[BatchPlan] = []

    def add(self, id: int, tokens: Sequence[int], *, tenant: int = 0, group: int = 0) -> None:
        message = AddRequest(
            id,
            str(id),
            0,
            0,
            list(tokens),
            SamplingParams(max_tokens=1, seed=0),
            tenant=tenant,
            group=group,
            pooling=PoolingParams(),
        )
        answer = self.scheduler.add(message)
        if answer is not None:
            self.found[id] = answer

    def step(self, grant: Grant = Grant()) -> BatchPlan:
        plan = self.scheduler.schedule(grant)
        self.scheduler.check_integrity()
        self.plans.append(plan)
        self._in_flight.append(plan)
        while len(self._in_flight) >= self._depth:
            self._land()
        return plan

    def _land(self) -> None:
        plan = self._in_flight.pop(0)
        tokens = {each.slot: each.token_ids for each in plan.starting}
        pooled = {
            row: np.array(tokens[slot], np.float32).tobytes() for row, slot in enumerate(plan.slots)
        }
        for output in self.scheduler.update(plan, BatchResult([], pooled=pooled)).get(0, []):
            assert output.id not in self.found
            self.found[output.id] = output
            self.order.append(output.id)
        self.scheduler.check_integrity()

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()
            while self._in_flight and not self.scheduler.gauges().running:
                self._land()


def _prompts(count: int) -> dict[int, list[int]]:
    draw = random.Random(5)
    return {id: [id] * draw.randint(2, 40) for id in range(1, count + 1)}


def test_every_sequence_is_computed_once_in_full() -> None:
    for depth in (1, 2):
        rig = Rig(depth=depth)
        prompts = _prompts(60)
        for id, tokens in prompts.items():
            rig.add(id, tokens)
        rig.run()
        computed = []
        for plan in rig.plans:
            lengths = {each.slot: len(each.token_ids) for each in plan.starting}
            assert plan.counts == [lengths[slot] for slot in plan.slots]
            assert not any(plan.starts)
            computed += plan.counts
        assert sorted(computed) == sorted(map(len, prompts.values()))
        assert max(plan.num_tokens for plan in rig.plans) <= 64
        for id, tokens in prompts.items():
            assert np.frombuffer(rig.found[id].pooled or b"", np.float32).tolist() == tokens
        assert rig.order == sorted(rig.order), "first come, first served"
        assert rig.scheduler.counters.pooled_sequences == 60
        assert rig.scheduler.gauges() == (0, 0, 0.0, 0)


def test_step_fits_longest_sequence_with_any_budget() -> None:
    rig = Rig(budget=16, long_prefill_token_threshold=8)
    rig.add(1, [7] * 40)
    rig.add(2, [7] * 3)
    rig.add(3, [7] * 41)
    assert rig.step().counts == [40]
    assert rig.step().counts == [3]
    assert rig.found[3].error == "the input has 41 tokens, but this engine takes 40"


def test_grant_holds_sequences_only_temporarily() -> None:
    rig = Rig()
    for id in (1, 2, 3):
        rig.add(id, [7] * 20)
    assert rig.step(Grant(token_cap=0)).counts == []
    assert rig.step(Grant(admit_new=False)).counts == []
    assert rig.step(Grant(token_cap=10)).counts == [20]
    assert rig.step().counts == [20, 20]


def test_tenants_share_steps_of_pooling_models() -> None:
    rig = Rig(budget=80, seqs=32)
    for id in range(1, 101):
        rig.add(id, [7] * 10, tenant=1, group=1)
    for id in range(101, 111):
        rig.add(id, [7] * 10, tenant=2)
    rig.run()
    last = max(rig.order.index(id) for id in range(101, 111))
    assert last < 40, "a few of one tenant do not wait for all of another"


def test_aborted_sequence_releases_its_slot() -> None:
    rig = Rig(depth=2, seqs=2)
    for id in (1, 2, 3):
        rig.add(id, [7] * 10)
    rig.step()
    rig.scheduler.abort([1, 3])
    rig.run()
    assert rig.order == [2]


def test_invalid_pooling_requests_are_refused() -> None:
    rig = Rig()
    rig.add(1, [])
    rig.add(2, [1000])
    sampling = SamplingParams(max_tokens=1, seed=0)
    generated = rig.scheduler.add(AddRequest(3, "3", 0, 0, [5], sampling))
    assert "empty" in (rig.found[1].error or "")
    assert "token ids must be from 0 to 999" in (rig.found[2].error or "")
    assert generated is not None
    assert generated.error == "this engine's model generates nothing"
