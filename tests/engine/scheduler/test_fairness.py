"""Fair sharing among tenants: floods do not delay other tenants, and none starves."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from engine.scheduler.admission import Grant
from engine.scheduler.preemption import Capacity, FreeCapacity, choose_heaviest
from engine.scheduler.request import Request
from engine.scheduler.shares import GUARDED_STEPS, Shares
from engine.scheduler.step_costs import PRIOR_BASE, PRIOR_PREFILL
from engine.scheduler.waiting import WaitingQueue
from tests.engine.scheduler.conftest import queued

MakeRig = Callable[..., Any]

HOG, GUEST, OTHER = 1, 2, 3


def prompt(length: int, first: int = 0) -> list[int]:
    return [(7 * first + i) % 1000 for i in range(length)]


def steps_until(rig: Any, id: int) -> int:
    """Step until a request has its first token."""
    for count in range(1, 1000):
        rig.step()
        if rig.tokens[id]:
            return count
    raise AssertionError(f"request {id} got nothing")


def finish(rig: Any) -> None:
    rig.run()
    rig.assert_complete()
    rig.assert_idle()


# -- whose turn it is -----------------------------------------------------------------------------


def test_flood_of_one_tenant_does_not_delay_others(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(max_num_seqs=2, max_num_batched_tokens=16)
    for id in range(100):
        rig.add(id, prompt(12, id), max_tokens=2, tenant=HOG)
    rig.step()
    rig.add(100, prompt(4, 100), tenant=GUEST)
    assert steps_until(rig, 100) <= 5
    finish(rig)


def test_single_tenant_is_not_limited(make_rig: MakeRig) -> None:
    named, plain = make_rig(num_kv_blocks=30), make_rig(num_kv_blocks=30)
    for id in range(20):
        named.add(id, prompt(9 + id, id), tenant=HOG)
        plain.add(id, prompt(9 + id, id))
    while plain.scheduler.has_work:
        assert named.step() == plain.step()
    assert not named.scheduler.has_work


def test_requests_of_a_tenant_start_in_order(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_seqs=1)
    for id in range(12):
        rig.add(id, prompt(3 + id % 4, id), max_tokens=1, tenant=id % 3)
    finish(rig)
    for tenant in range(3):
        ended = [id for id in rig.last if id % 3 == tenant]
        assert ended == sorted(ended)


def test_tenants_get_equal_shares_for_any_prompt_lengths(make_rig: MakeRig) -> None:
    rig = make_rig(num_kv_blocks=400, max_num_batched_tokens=32, enable_prefix_caching=False)
    for id in range(300):
        length = 60 if id < 60 else 6
        rig.add(id, prompt(length, id), max_tokens=1, tenant=HOG if id < 60 else GUEST)
    computed: Counter[int] = Counter()
    for _ in range(60):
        rig.step()
    for id in rig.last:
        computed[rig.requests[id].tenant] += len(rig.requests[id].prompt_token_ids)
    assert 0.8 < computed[HOG] / computed[GUEST] < 1.25, computed
    finish(rig)


def test_rest_of_long_prompt_alternates_with_short_prompts(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(
        max_num_batched_tokens=8,
        max_tenant_prefill_tokens=8,
        max_model_len=256,
        num_kv_blocks=128,
    )
    rig.add(1, prompt(200), max_tokens=1, tenant=HOG)
    rig.step()
    rig.step()
    rig.add(2, prompt(6, 50), max_tokens=1, tenant=GUEST)
    assert steps_until(rig, 2) == 1
    rig.add(3, prompt(6, 60), max_tokens=1, tenant=HOG)
    assert steps_until(rig, 3) > 10, "within a tenant nobody overtakes"
    finish(rig)


def test_no_tenant_fills_steps_of_others_with_prompts(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_batched_tokens=64, num_kv_blocks=256, enable_prefix_caching=False)
    for id in range(3):
        rig.add(id, prompt(100, id), max_tokens=1, tenant=HOG)
    assert rig.step().num_tokens == 64
    rig.add(10, prompt(4, 10), max_tokens=2, tenant=GUEST)
    assert rig.step().num_tokens == 16 + 4
    while 10 not in rig.last:
        rig.step()
    assert rig.step().num_tokens == 16, "the guest may be back soon"
    finish(rig)
    for _ in range(GUARDED_STEPS):
        rig.step()
    rig.add(20, prompt(100), max_tokens=1, tenant=HOG)
    assert rig.step().num_tokens == 64
    finish(rig)


def test_the_first_tokens_of_others_do_not_wait_for_the_next_part_of_a_long_prompt(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(max_num_batched_tokens=512, num_kv_blocks=512, max_model_len=1100)
    rig.add(1, prompt(4), max_tokens=60, tenant=GUEST)
    rig.step()
    rig.add(2, prompt(1000, 2), max_tokens=1, tenant=HOG)
    rows = PRIOR_BASE + 1
    pieces = [rig.step().num_prefill_tokens for _ in range(3)]
    assert pieces[0] == pieces[1] == rows / PRIOR_PREFILL, "a step twice as long as without it"
    assert 0 < pieces[2] < pieces[1], "what it has saved since"
    rig.add(3, prompt(10, 3), max_tokens=1, tenant=OTHER)
    assert rig.step().num_prefill_tokens == 10
    assert 10 < rig.step().num_prefill_tokens < 128, "it has saved meanwhile"
    finish(rig)


def test_endless_newcomers_do_not_starve_waiting_requests(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_seqs=1, num_kv_blocks=64)
    for id in range(3):
        rig.add(id, prompt(30, id), max_tokens=1, tenant=HOG)
    for id in range(3, 10):
        rig.add(id, prompt(10, id), max_tokens=1, tenant=id)
    for id in range(10, 200):
        rig.add(id, prompt(10, id), max_tokens=1, tenant=id)
        rig.step()
    assert {0, 1, 2} <= set(rig.last), "others were there all the time, but always new ones"
    finish(rig)


def test_absent_tenant_saves_no_credit() -> None:
    shares = Shares()
    for tenant in (HOG, GUEST):
        shares.add(tenant)
    shares.remove(GUEST)
    shares.add(OTHER)
    for _ in range(100):
        shares.charge(HOG, 10)
        shares.charge(OTHER, 10)
    shares.add(GUEST)
    assert shares.served(GUEST) == shares.served(HOG) == shares.served(OTHER) == 1000


def in_debt(max_prefill: int) -> Shares:
    """Return the books of an engine that a guest uses beside somebody with an empty purse."""
    shares = Shares(max_prefill)
    shares.add(HOG)
    shares.add(GUEST)
    shares.begin_step(0)
    shares.prefill(HOG, max_prefill)
    return shares


def test_prompt_waits_for_others_unless_its_tenant_has_enough_credit() -> None:
    shares = in_debt(100)
    shares.begin_step(20)
    quota = shares.quota()
    assert quota.available(HOG, 500) == 20
    assert quota.take(GUEST, 30) == 30
    assert quota.available(HOG, 500) == 0
    assert quota.available(HOG, 21) == 0
    assert quota.take(HOG, 15) == 15, "this one need not be cut"
    assert quota.available(GUEST, 500) == 70, "who has not spent anything does not wait"


def test_long_prompts_of_several_tenants_are_not_computed_in_the_same_step() -> None:
    shares = Shares(1000)
    for tenant in (HOG, GUEST, OTHER):
        shares.add(tenant)
    shares.begin_step(refill=20, together=60)
    quota = shares.quota()
    assert quota.take(HOG, 500) == 60, "whatever it has saved"
    assert quota.take(HOG, 500) == 0
    assert quota.take(GUEST, 61) == 0, "it is cut too, and waits for its turn"
    quota = shares.quota()
    assert quota.take(OTHER, 40) == 40
    assert quota.take(GUEST, 20) == 20, "this one need not be cut"
    assert quota.take(HOG, 1) == 0, "that is what all may have together"
    shares.remove(GUEST)
    shares.remove(OTHER)
    assert shares.quota().take(HOG, 500) == 500, "nobody else is there"


def test_waiting_for_prompts_of_others_does_not_slow_a_tenant() -> None:
    shares = in_debt(100)
    computed = 0
    for _ in range(200):
        shares.begin_step(5)
        quota = shares.quota()
        quota.take(GUEST, 1)
        tokens = quota.take(HOG, 500)
        shares.prefill(HOG, tokens)
        computed += tokens
    assert computed > 200 * 5 * 0.8


def test_mixed_cost_is_charged_once_per_step() -> None:
    shares = in_debt(100)
    computed = 0
    for _ in range(400):
        shares.begin_step(refill=10, mixed_cost=16)
        quota = shares.quota()
        tokens = quota.take(HOG, 500)
        assert tokens == 0 or tokens >= 16, "most of a part would go into having any"
        if tokens:
            shares.prefill(HOG, tokens - 1)
            shares.prefill(HOG, 1)
            assert not shares.quota().available(HOG, 1)
        computed += tokens + (16 if tokens else 0)
    assert computed == pytest.approx(400 * 10, rel=0.1)


@pytest.mark.parametrize("max_prefill", [1, 3, 100])
def test_prompts_progress_with_any_credit(max_prefill: int) -> None:
    shares = in_debt(max_prefill)
    computed = 0
    for _ in range(500):
        shares.begin_step(refill=1, mixed_cost=1000)
        tokens = shares.quota().take(HOG, 500)
        if tokens:
            shares.prefill(HOG, tokens)
        computed += tokens
    assert computed > 100


def test_tenants_that_left_are_forgotten() -> None:
    shares = Shares()
    shares.add(0)
    for tenant in range(1, 20_000):
        shares.add(tenant)
        shares.charge(tenant, 5)
        shares.charge(0, 50)
        shares.remove(tenant)
    assert len(shares._served) < 1000


def test_urgent_request_precedes_tenants_with_less_work(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_seqs=1, scheduling_policy="priority")
    for id in range(6):
        urgent = id in (2, 4)
        tenant = HOG if id < 5 else GUEST
        rig.add(id, prompt(5, id), max_tokens=1, tenant=tenant, priority=-1 if urgent else 0)
    finish(rig)
    assert list(rig.last)[:2] == [2, 4]
    assert list(rig.last).index(5) < 4


# -- slots and blocks -----------------------------------------------------------------------------


def test_tenant_with_all_slots_yields_some(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_seqs=8, num_kv_blocks=256)
    for id in range(40):
        rig.add(id, prompt(4, id), max_tokens=90, tenant=HOG)
    for _ in range(5):
        rig.step()
    rig.add(100, prompt(4, 100), max_tokens=3, tenant=GUEST)
    assert steps_until(rig, 100) <= 3
    assert rig.scheduler.counters.preemptions == 1
    finish(rig)


def test_tenant_with_all_blocks_yields_some(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_seqs=8, num_kv_blocks=40, max_num_batched_tokens=128)
    for id in range(10):
        rig.add(id, prompt(24, id), max_tokens=60, tenant=HOG)
    for _ in range(10):
        rig.step()
    rig.add(100, prompt(20, 100), max_tokens=3, tenant=GUEST)
    assert steps_until(rig, 100) <= 4
    finish(rig)


def test_growing_sequences_preempt_tenant_with_most_blocks(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_seqs=8, num_kv_blocks=24, enable_prefix_caching=False)
    for id in range(5):
        rig.add(id, prompt(12, id), max_tokens=30, tenant=HOG)
    rig.step()
    rig.add(100, prompt(12, 100), max_tokens=30, tenant=GUEST)
    rig.step()
    while 100 not in rig.last:
        before = len(rig.tokens[100])
        rig.step()
        assert len(rig.tokens[100]) == before + 1, "the guest came last and is not preempted"
    assert rig.scheduler.counters.preemptions > 0
    finish(rig)


def test_tenants_with_similar_shares_do_not_preempt_each_other(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_seqs=8, num_kv_blocks=512)
    generator = random.Random(5)
    for id in range(200):
        tokens = generator.randint(2, 20)
        rig.add(id, prompt(4, id), max_tokens=tokens, tenant=generator.choice([HOG, GUEST]))
    finish(rig)
    assert rig.scheduler.counters.preemptions <= 4


def test_request_waiting_for_its_own_tenant_delays_no_other(make_rig: MakeRig) -> None:
    rig = make_rig(num_kv_blocks=20, max_num_batched_tokens=80, enable_prefix_caching=False)
    rig.add(1, prompt(40), max_tokens=20, tenant=HOG)
    rig.step()
    rig.add(2, prompt(60, 2), max_tokens=2, tenant=HOG)
    for id in range(10, 14):
        rig.add(id, prompt(3, id), max_tokens=1, tenant=GUEST)
    assert steps_until(rig, 13) <= 4
    assert not rig.tokens[2]
    finish(rig)


def test_a_large_request_is_not_starved_by_small_ones_of_others(make_rig: MakeRig) -> None:
    rig = make_rig(num_kv_blocks=20, max_num_batched_tokens=80, enable_prefix_caching=False)
    for id in range(10):
        rig.add(id, prompt(8, id), max_tokens=8, tenant=HOG)
    rig.step()
    rig.add(100, prompt(64, 100), max_tokens=2, tenant=GUEST)
    for id in range(101, 300):
        rig.add(id, prompt(8, id), max_tokens=8, tenant=HOG)
    assert steps_until(rig, 100) < 20
    finish(rig)


def test_policy_that_admits_nothing_causes_no_preemption(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_seqs=8, num_kv_blocks=256)
    for id in range(10):
        rig.add(id, prompt(4, id), max_tokens=20, tenant=HOG)
    rig.step()
    rig.add(100, prompt(4, 100), tenant=GUEST)
    for grant in (Grant(admit_new=False), Grant(token_cap=0)):
        rig.step(grant)
    assert rig.scheduler.counters.preemptions == 0
    assert steps_until(rig, 100) <= 3
    finish(rig)


@pytest.mark.slow
def test_hostile_tenant_does_not_slow_seven_others(make_rig: MakeRig) -> None:
    """The others wait at most twice as many steps for their first token as without it."""

    def waits(*, hostile: bool) -> list[int]:
        rig = make_rig(
            num_kv_blocks=512, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=256
        )
        generator = random.Random(11)
        sent: dict[int, int] = {}
        waited = []
        for step in range(400):
            if hostile and step % 100 == 0:
                for number in range(300):
                    rig.add(10**6 + 10**4 * step + number, prompt(200, number), max_tokens=50)
            for tenant in range(1, 8):
                if generator.random() < 0.03:
                    id = 1000 * tenant + step
                    rig.add(id, prompt(generator.randint(4, 40), id), max_tokens=8, tenant=tenant)
                    sent[id] = step
            rig.step()
            for id in [each for each in sent if rig.tokens[each]]:
                waited.append(step - sent.pop(id))
        return sorted(waited)

    calm, flooded = waits(hostile=False), waits(hostile=True)
    assert len(flooded) >= len(calm) - 2
    worst = int(0.99 * len(calm))
    assert flooded[worst] + 1 <= 2 * (calm[worst] + 1), (calm[-5:], flooded[-5:])


# -- by themselves --------------------------------------------------------------------------------


def test_admission_order_is_deterministic() -> None:
    shares = Shares()
    queue = WaitingQueue(shares)
    tenants = [HOG, HOG, HOG, GUEST, OTHER, GUEST]
    for arrival, tenant in enumerate(tenants):
        shares.add(tenant)
        queue.push(queued(arrival, tenant=tenant, length=10))
    expected = [each.arrival for each in queue]
    assert expected == [0, 3, 4, 1, 5, 2]
    admitted = []
    while (first := queue.first()) is not None:
        queue.remove(first)
        shares.charge(first.tenant, first.queued_tokens)
        admitted.append(first.arrival)
    assert admitted == expected
    assert len(queue) == 0


def test_queue_agrees_with_a_plain_list() -> None:
    generator = random.Random(3)
    shares, waiting = Shares(), dict[int, Request]()
    queue = WaitingQueue(shares)
    for tenant in range(6):
        shares.add(tenant)
    for arrival in range(3000):
        if generator.random() < 0.55 or not waiting:
            each = queued(
                arrival, tenant=generator.randrange(6), priority=generator.randrange(2), length=10
            )
            waiting[arrival] = each
            queue.push(each)
        elif generator.random() < 0.3:
            queue.remove(waiting.pop(generator.choice(list(waiting))))
        else:
            passed = {generator.randrange(6)} if generator.random() < 0.3 else set()
            first = queue.first(passed)
            top = min(each.priority for each in waiting.values())
            level = [
                each
                for each in waiting.values()
                if each.priority == top and each.tenant not in passed
            ]
            if first is None:
                assert not level
                continue
            assert first.priority == top
            least = min(shares.served(each.tenant) for each in level)
            assert shares.served(first.tenant) == least
            own = [each.arrival for each in level if each.tenant == first.tenant]
            assert first.arrival == min(own)
            queue.remove(waiting.pop(first.arrival))
        shares.charge(generator.randrange(6), generator.randrange(50))
        assert len(queue) == len(waiting) == len(list(queue))


def test_no_preemption_for_request_that_would_still_not_fit() -> None:
    running = [queued(arrival, tenant=HOG, blocks=2) for arrival in range(4)]
    engine = Capacity(slots=8, blocks=16)
    room = FreeCapacity(slots=4, blocks=8, headroom=0, tokens=99)
    assert choose_heaviest([queued(9, tenant=GUEST)], running, room, lambda _: 14, engine) == []
    assert choose_heaviest([queued(9, tenant=HOG)], running, room, lambda _: 9, engine) == []
    full = FreeCapacity(slots=0, blocks=8, headroom=0, tokens=99)
    chosen = choose_heaviest([queued(9, tenant=GUEST)], running, full, lambda _: 1, Capacity(4, 16))
    assert [victim.arrival for victim in chosen] == [3]


def test_no_preemption_for_less_urgent_request_of_other_tenant() -> None:
    running = [queued(arrival, tenant=HOG, blocks=2) for arrival in range(4)]
    room = FreeCapacity(slots=0, blocks=8, headroom=0, tokens=99)
    late = queued(9, tenant=GUEST, priority=5)
    assert choose_heaviest([late], running, room, lambda _: 1, Capacity(4, 16)) == []
