"""No request or tenant makes steps long for others with many sequences."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from engine.scheduler.fairness import Fairness
from engine.scheduler.preemption import Capacity
from engine.scheduler.step_costs import PRIOR_BASE, PRIOR_PREFILL, StepCosts
from engine.shared.messages import RegexGrammar
from tests.engine.scheduler.conftest import queued

MakeRig = Callable[..., Any]

SLOWDOWN = 1.3
ENGINE = Capacity(slots=64, blocks=2048)
PART = int((SLOWDOWN - 1) * (PRIOR_BASE + 1))
"""Rows of a flow beside one row of others, as long as nothing is known of costs."""


def prompt(length: int, first: int = 0) -> list[int]:
    return [(7 * first + i) % 1000 for i in range(length)]


def roomy(make_rig: MakeRig, **options: Any) -> Any:
    sizes = {
        "num_kv_blocks": 2048,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "max_slowdown": SLOWDOWN,
    }
    return make_rig(**{**sizes, **options})


def add_group(rig: Any, first: int, count: int, **options: Any) -> None:
    """Add the sequences of one client's request."""
    options = {"max_tokens": 60, **options}
    for id in range(first, first + count):
        rig.add(id, prompt(3, id), group=0 if id == first else first, **options)


def rows_of(rig: Any, first: int, count: int) -> int:
    """Step once; return how many sequences of a group got a token."""
    before = Counter({id: len(rig.tokens[id]) for id in range(first, first + count)})
    rig.step()
    return sum(len(rig.tokens[id]) > before[id] for id in range(first, first + count))


def finish(rig: Any) -> None:
    rig.run()
    rig.assert_complete()
    rig.assert_idle()


def test_request_of_many_sequences_gets_a_share_of_steps(
    make_rig: MakeRig,
) -> None:
    rig = roomy(make_rig)
    add_group(rig, 100, 60)
    assert rows_of(rig, 100, 60) == 60, "alone it gets everything"
    assert rows_of(rig, 100, 60) == 60
    rig.add(1, prompt(4), max_tokens=40)
    rig.step()
    for _ in range(30):
        shown = len(rig.tokens[1])
        assert rows_of(rig, 100, 60) <= PART + 1
        assert len(rig.tokens[1]) == shown + 1, "the other one gets a token in every step"
    while 1 not in rig.last:
        rig.step()
    assert rows_of(rig, 100, 60) == 60, "alone again"
    finish(rig)


def test_all_sequences_of_a_request_alternate(make_rig: MakeRig) -> None:
    rig = roomy(make_rig)
    add_group(rig, 100, 60)
    rig.step()
    rig.add(1, prompt(4), max_tokens=100)
    for _ in range(70):
        rig.step()
    got = [len(rig.tokens[id]) for id in range(100, 160)]
    assert max(got) - min(got) <= 2
    assert min(got) >= 70 * PART // 60
    finish(rig)


def test_a_request_without_limit_gets_all_rows(make_rig: MakeRig) -> None:
    rig = roomy(make_rig, max_slowdown=0)
    add_group(rig, 100, 60)
    rig.add(1, prompt(4), max_tokens=40)
    rig.step()
    assert rows_of(rig, 100, 60) == 60
    finish(rig)


def test_many_prompts_of_a_request_start_gradually(make_rig: MakeRig) -> None:
    rig = roomy(make_rig, enable_prefix_caching=False)
    rig.add(1, prompt(4), max_tokens=100)
    rig.step()
    for id in range(100, 160):
        rig.add(id, prompt(30, id), max_tokens=1, group=0 if id == 100 else 100)
    first = rig.step().num_tokens
    assert 1 + 30 < first <= 1 + 30 + 2 * PART, "the first prompt is computed freely"
    for _ in range(20):
        assert rig.step().num_tokens <= 1 + 2 * PART + 4
    rig.add(2, prompt(50, 7), max_tokens=2)
    rig.step()
    assert rig.tokens[2], "a request of one sequence is not held up, neither by others nor at all"
    finish(rig)


def test_new_request_gets_slot_of_request_holding_all(make_rig: MakeRig) -> None:
    rig = roomy(make_rig, max_num_seqs=20)
    add_group(rig, 100, 50)
    for _ in range(3):
        rig.step()
    assert rig.scheduler.gauges().running == 20
    rig.add(1, prompt(4), max_tokens=5)
    for _ in range(3):
        rig.step()
    assert rig.tokens[1]
    assert rig.scheduler.counters.preemptions == 1
    finish(rig)


def test_new_request_preempts_no_single_slot_requests(make_rig: MakeRig) -> None:
    rig = roomy(make_rig, max_num_seqs=20)
    for id in range(20):
        rig.add(id, prompt(3, id), max_tokens=30)
    rig.step()
    rig.add(50, prompt(3, 50))
    for _ in range(10):
        rig.step()
    assert not rig.tokens[50]
    assert not rig.scheduler.counters.preemptions
    finish(rig)


def test_requests_of_equal_size_do_not_limit_each_other(make_rig: MakeRig) -> None:
    rig = roomy(make_rig)
    add_group(rig, 100, 30)
    add_group(rig, 200, 30)
    rig.step()
    while not all(rig.tokens[id] for id in (*range(100, 130), *range(200, 230))):
        rig.step()
    assert len(rig.step().slots) == 60
    finish(rig)


@pytest.mark.parametrize("slowdown", [1.0, 1.001])
def test_smallest_share_still_makes_progress(make_rig: MakeRig, slowdown: float) -> None:
    rig = roomy(make_rig, max_slowdown=slowdown)
    rig.add(1, prompt(4), max_tokens=90)
    add_group(rig, 100, 8, max_tokens=5)
    rig.add(2, prompt(4), max_tokens=90, tenant=1)
    finish(rig)


# -- by themselves --------------------------------------------------------------------------------


def test_sequence_with_costly_masks_waits_for_credit() -> None:
    costs = StepCosts()
    for rows in (1, 64):
        for _ in range(50):
            costs.observe(rows, 0, (32 + rows) * 1e-4)
    fairness = Fairness(costs, ENGINE, max_slowdown=SLOWDOWN)
    costly, plain = queued(1), queued(2)
    for each in (costly, plain):
        fairness.add(each)
        fairness.start(each)
    fairness.masked(costly, 10_000)
    held = [fairness.begin_decodes([costly, plain]) for _ in range(100)]
    assert not any(plain.id in each for each in held)
    computed = sum(costly.id not in each for each in held)
    # Ten milliseconds are a hundred rows, and its part of a step is a tenth of that.
    assert 100 * SLOWDOWN / 15 < computed < 100 * SLOWDOWN / 8 + 3


def test_step_costs_are_learned() -> None:
    costs = StepCosts()
    for step in range(200):
        rows = (1, 4, 16, 100)[step % 4]
        costs.observe(rows, 0, 5e-3 + rows * 2e-5)
    assert costs.base == pytest.approx(250, rel=0.15)
    for _ in range(100):
        costs.observe(4, 100, 5e-3 + 4 * 2e-5 + 100 * 4e-5)
    assert costs.prefill == pytest.approx(2, rel=0.3)
    assert costs.of_masks(200) == pytest.approx(10, rel=0.15)


def test_cost_of_few_more_rows_is_learned() -> None:
    costs = StepCosts()
    for step in range(200):
        rows = (4, 12)[step % 2]
        costs.observe(rows, 0, (10 + rows) * 1e-4)
    assert costs.base == pytest.approx(10, rel=0.3)


def with_grammars(cost: int) -> StepCosts:
    """Return costs of an engine whose steps take `cost` rows more for each row with a grammar."""
    costs = StepCosts()
    for step in range(400):
        rows, masked = (1, 64, 12)[step % 3], (0, 0, 8)[step % 3]
        costs.observe(rows, 0, (32 + rows + cost * masked) * 1e-4, num_masked=masked)
    return costs


def test_cost_of_rows_with_grammars_is_learned_apart_from_that_of_rows() -> None:
    costs = with_grammars(cost=3)
    assert costs.masked == pytest.approx(3, rel=0.2)
    assert costs.base == pytest.approx(32, rel=0.2)


@pytest.mark.parametrize("base", [10, 250, 1000])
def test_base_is_learned_whatever_it_is(base: int) -> None:
    costs = StepCosts()
    for step in range(400):
        rows = (1, 64)[step % 2]
        costs.observe(rows, 0, (base + rows) * 1e-5)
    assert costs.base == pytest.approx(base, rel=0.15)


@pytest.mark.parametrize("plain_every", [1000, 100_000])
def test_costs_are_learned_although_almost_all_steps_have_grammars(plain_every: int) -> None:
    costs = StepCosts()
    for step in range(1, 3001):
        if step % plain_every == 0:
            costs.observe(1, 0, 251e-4)
        else:
            rows = (4, 64)[step % 2]
            costs.observe(rows, 0, (250 + rows) * 1e-4, num_masked=1)
    assert costs.base == pytest.approx(250, rel=0.15)


def test_cost_of_masks_counts_once_if_all_rows_have_grammars() -> None:
    costs = with_grammars(cost=3)
    for step in range(20_000):
        rows = (2, 30)[step % 2]
        costs.observe(rows, 0, (32 + 4 * rows) * 1e-4, num_masked=rows)
    assert costs.base == pytest.approx(8, rel=0.2)
    assert costs.masked == pytest.approx(0, abs=0.1)


def test_noise_is_no_cost_of_rows_with_grammars() -> None:
    rng, costs = random.Random(1), StepCosts()
    learned = []
    for step in range(3000):
        rows, masked = (1, 16, 9)[step % 3], (0, 0, 1)[step % 3]
        costs.observe(rows, 0, (32 + rows) * 1e-4 * rng.uniform(0.8, 1.2), num_masked=masked)
        learned.append(costs.masked)
    assert sum(learned) / len(learned) < 0.5


def test_cost_of_rows_with_grammars_is_no_cost_of_prompts() -> None:
    costs = with_grammars(cost=3)
    for _ in range(100):
        costs.observe(12, 4, (32 + 12 + 3 * 8 + 4 * PRIOR_PREFILL) * 1e-4, num_masked=8)
    assert costs.mixed == pytest.approx(0, abs=1)


def test_rows_with_grammars_count_as_more_rows_except_the_first_of_a_request() -> None:
    fairness = Fairness(with_grammars(cost=3), ENGINE, max_slowdown=SLOWDOWN)
    plain, other = queued(1), queued(2, grammar=RegexGrammar("a*"))
    group = [queued(id, group=100, grammar=RegexGrammar("a*")) for id in range(100, 120)]
    for each in (plain, other, *group):
        fairness.add(each)
        fairness.start(each)
    computed = 0
    for _ in range(100):
        held = fairness.begin_decodes([plain, other, *group])
        assert plain.id not in held
        assert other.id not in held
        computed += sum(each.id not in held for each in group)
    # Each takes as long as four rows, and the request's part of a step is a third of its base.
    part = (SLOWDOWN - 1) * (32 + 2)
    assert computed / 100 == pytest.approx(part / 4, rel=0.2)
    for each in (plain, other, *group):
        fairness.stop(each)
        fairness.remove(each)
    fairness.check_integrity([], [])


def with_dear_prompts(mixed: int) -> StepCosts:
    """Return costs of an engine whose steps take so many rows more for a few prompt tokens."""
    costs = StepCosts()
    for rows in (1, 64):
        for _ in range(50):
            costs.observe(rows, 0, (32 + rows) * 1e-4)
    for _ in range(100):
        costs.observe(4, 8, (32 + 4 + mixed + 8 * PRIOR_PREFILL) * 1e-4)
    return costs


def test_mixed_cost_is_learned_from_steps_with_few_prompt_tokens() -> None:
    costs = with_dear_prompts(mixed=10)
    assert costs.mixed == pytest.approx(10, rel=0.15)
    assert costs.prefill == PRIOR_PREFILL
    for _ in range(100):
        costs.observe(4, 100, (32 + 4 + 10 + 100 * 2) * 1e-4)
    assert costs.prefill == pytest.approx(2, rel=0.15)


def test_mixed_cost_does_not_count_as_cost_per_token() -> None:
    costs = with_dear_prompts(mixed=10)
    for _ in range(100):
        costs.observe(4, 20, (32 + 4 + 10 + 20 * PRIOR_PREFILL) * 1e-4)
    assert costs.prefill == pytest.approx(PRIOR_PREFILL, rel=0.15)


def test_overestimated_mixed_cost_does_not_make_tokens_free() -> None:
    costs = with_dear_prompts(mixed=10)
    for _ in range(1000):
        costs.observe(4, 20, (32 + 4 + 4) * 1e-4)
    assert costs.prefill == pytest.approx(4 / 20 / 2, rel=0.15)


def test_no_mixed_cost_without_decodes() -> None:
    fairness = Fairness(with_dear_prompts(mixed=10), ENGINE, max_slowdown=SLOWDOWN)
    assert fairness.mixed_tokens(4) == pytest.approx(10 / PRIOR_PREFILL, rel=0.15)
    assert fairness.mixed_tokens(0) == 0
    assert Fairness(with_dear_prompts(mixed=10), ENGINE).mixed_tokens(4) == 0


def test_stalled_steps_with_few_prompt_tokens_are_clamped() -> None:
    costs = with_dear_prompts(mixed=0)
    for _ in range(100):
        costs.observe(4, 1, 5.0)
    assert costs.mixed <= 1.15 * (32 + 4)


@pytest.mark.parametrize("length", [3, 8, 64])
def test_resubmitted_beams_share_the_limit_of_their_request(length: int) -> None:
    costs = with_dear_prompts(mixed=10)
    fairness = Fairness(costs, ENGINE, max_slowdown=SLOWDOWN)
    streams = [queued(id) for id in range(4)]
    beam = queued(91, group=90)
    fairness.add(beam)
    computed, spent, steps = 0, 0.0, 400
    left: list[int] = []
    for _ in range(steps):
        fairness.begin_decodes(streams)
        left = left or [length] * 32
        mixes = False
        while left:
            count = min(left[0], fairness.group_tokens(beam))
            if not count:
                break
            fairness.prefill(beam, count)
            spent += 1 + count * costs.prefill + (0 if mixes else costs.mixed)
            mixes = True
            left[0] -= count
            if not left[0]:
                del left[0]
                computed += 1
    part = (SLOWDOWN - 1) * (costs.base + len(streams))
    assert spent / steps <= 1.05 * part
    # A good part of that goes into prompt tokens themselves.
    assert computed > steps * part / (3 * (1 + length * costs.prefill)) - 32


def test_step_stalled_by_scheduling_has_little_weight() -> None:
    costs = StepCosts()
    for step in range(64):
        costs.observe((1, 64)[step % 2], 0, (3.2 + (0.1, 6.4)[step % 2]) * 1e-3)
    before = costs.base
    costs.observe(1, 0, 0.5)
    costs.observe(64, 0, 0.5)
    assert costs.base == pytest.approx(before, rel=0.5)


def test_prior_costs_apply_without_measurements() -> None:
    costs = StepCosts()
    costs.observe(5, 0, 0.0)
    assert costs.base == PRIOR_BASE
