"""The adapters of a step; no request waits for an adapter slot forever."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.adapter_slots import TURN_STEPS, AdapterSlots
from engine.shared.block_names import ROOT_DIGEST, adapter_root
from tests.engine.scheduler.conftest import Rig

VERSIONS = [f"{number:032x}" for number in range(0xA00, 0xA10)]
ONE, TWO, THREE, *_ = VERSIONS
MakeRig = Callable[..., Rig]


def adapters_of(rig: Rig, slots: list[int]) -> set[str]:
    """Return the adapters of the sequences in these slots."""
    running = rig.scheduler._requests.running.values()
    return {request.adapter for request in running if request.slot in slots} - {""}


# -- the slots alone ------------------------------------------------------------------------------


def test_least_recently_used_adapter_is_evicted() -> None:
    slots = AdapterSlots(2)
    for version in (ONE, TWO, ONE):
        slots.begin_step([])
        slots.take(version)
        slots.release(version)
    slots.begin_step([THREE])
    slots.take(THREE)
    assert set(slots.residents) == {ONE, THREE}


def test_pinned_adapters_stay_and_leave_one_slot() -> None:
    slots = AdapterSlots(2)
    assert slots.pin(ONE)
    assert not slots.pin(TWO)
    for version in (ONE, TWO, THREE):
        slots.begin_step([version])
        assert slots.admits(version)
        slots.take(version)
        slots.release(version)
    assert set(slots.residents) == {ONE, THREE}
    slots.unpin(ONE)
    slots.begin_step([TWO])
    slots.take(TWO)
    assert set(slots.residents) == {THREE, TWO}


def test_adapter_in_use_is_drained_after_its_time_slice() -> None:
    slots = AdapterSlots(1)
    slots.begin_step([])
    slots.take(ONE)
    for _ in range(TURN_STEPS - 1):
        slots.begin_step([TWO])
        assert slots.admits(ONE)
        assert not slots.admits(TWO)
    for _ in range(TURN_STEPS):
        slots.begin_step([TWO])
        assert not slots.admits(ONE)
        assert not slots.overdue()
    slots.begin_step([TWO])
    assert slots.overdue() == {ONE}
    slots.release(ONE)
    assert slots.admits(TWO)
    assert not slots.admits(THREE), "the slot is for those that wait"


def test_no_adapter_is_drained_without_waiting_requests() -> None:
    slots = AdapterSlots(1)
    slots.begin_step([])
    slots.take(ONE)
    for _ in range(TURN_STEPS):
        slots.begin_step([TWO])
    assert not slots.admits(ONE)
    slots.begin_step([])
    assert slots.admits(ONE)


def test_slot_filled_twice_in_a_plan_is_loaded_once() -> None:
    slots = AdapterSlots(1)
    slots.begin_step([])
    slot = slots.take(ONE)
    slots.release(ONE)
    assert slots.take(TWO) == slot
    assert slots.take_placed() == {slot: TWO}
    assert slots.take_placed() == {}


@pytest.mark.slow
@settings(max_examples=12)
@given(st.data())
def test_slots_stay_consistent_and_every_waiting_adapter_gets_one(data: st.DataObject) -> None:
    slots = AdapterSlots(data.draw(st.integers(1, 3)))
    waiting: dict[str, int] = {}
    held: list[str] = []
    asked: dict[str, int] = {}
    for step in range(400):
        for version in data.draw(st.lists(st.sampled_from(VERSIONS[:6]), max_size=2)):
            waiting[version] = waiting.get(version, 0) + 1
            asked.setdefault(version, step)
        slots.begin_step(waiting)
        overdue = slots.overdue()
        for version in [each for each in held if each in overdue]:
            held.remove(version)
            slots.release(version)
            waiting[version] = waiting.get(version, 0) + 1
            asked.setdefault(version, step)
        for version in list(waiting):
            if slots.admits(version):
                slots.take(version)
                held.append(version)
                asked.pop(version, None)
                waiting[version] -= 1
                if waiting[version] == 0:
                    del waiting[version]
        slots.check_integrity(held)
        for version in asked:
            assert step - asked[version] <= 6 * 2 * (TURN_STEPS + 2)
        if len(held) > 0 and data.draw(st.booleans()):
            slots.release(held.pop(0))


# -- in a scheduler --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_many_requests_over_more_adapters_than_slots_all_complete(
    make_rig: MakeRig, depth: int
) -> None:
    rig = make_rig(max_loras=2, adapters=VERSIONS[:8], num_kv_blocks=200)
    for number in range(64):
        rig.add(number + 1, range(5), adapter=VERSIONS[number % 8], max_tokens=20)
    most = 0
    while rig.scheduler.has_work:
        plan = rig.schedule()
        most = max(most, len(adapters_of(rig, plan.slots)))
        if len(rig.in_flight) >= depth:
            rig.update()
        while rig.in_flight and not rig.scheduler.gauges().running:
            rig.update()
    assert most == 2
    rig.assert_complete()
    rig.assert_idle()


def test_requests_without_adapter_or_with_resident_one_do_not_wait(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(max_loras=1, adapters=VERSIONS[:2])
    rig.add(1, range(5), adapter=ONE, max_tokens=40)
    rig.step()
    rig.add(2, range(5), adapter=TWO)
    rig.add(3, range(5))
    rig.add(4, range(5), adapter=ONE)
    for _ in range(6):
        rig.step()
    assert rig.last.keys() == {3, 4}
    rig.run()
    rig.assert_complete()


def test_a_hot_adapter_does_not_starve_another(make_rig: MakeRig) -> None:
    rig = make_rig(max_loras=1, adapters=VERSIONS[:2], max_num_seqs=4, num_kv_blocks=200)
    ids = iter(range(1, 10_000))
    for _ in range(4):
        rig.add(next(ids), range(5), adapter=ONE, max_tokens=10)
    rig.step()
    rig.add(5000, range(5), adapter=TWO, max_tokens=3)
    for _ in range(3 * TURN_STEPS):
        if 5000 in rig.last:
            break
        while rig.scheduler.gauges().waiting < 3:
            rig.add(next(ids), range(5), adapter=ONE, max_tokens=10)
        rig.step()
    assert 5000 in rig.last
    rig.run()
    rig.assert_complete()


def test_long_outputs_yield_their_slot_and_continue_later(make_rig: MakeRig) -> None:
    rig = make_rig(max_loras=1, adapters=VERSIONS[:2], max_model_len=1000, num_kv_blocks=400)
    rig.add(1, range(5), adapter=ONE, max_tokens=600)
    rig.step()
    rig.add(2, range(5), adapter=TWO, max_tokens=600)
    first = 0
    for step in range(3 * TURN_STEPS):
        rig.step()
        if rig.tokens[2]:
            first = step
            break
    assert 0 < first <= 2 * TURN_STEPS + 2
    assert rig.tokens[1], "the first one had its turn"
    rig.run()
    rig.assert_complete()
    assert rig.scheduler.counters.preemptions >= 2


def test_prefixes_are_shared_within_a_version_only(make_rig: MakeRig) -> None:
    rig = make_rig(max_loras=2, adapters=VERSIONS[:2])
    prompt = list(range(17))
    for id, adapter in ((1, ""), (2, ONE), (3, TWO), (4, ONE), (5, "")):
        rig.add(id, prompt, adapter=adapter)
        rig.run()
    cached = [rig.first[id].num_cached_tokens for id in (1, 2, 3, 4, 5)]
    assert cached == [0, 0, 0, 16, 16]
    assert adapter_root(ROOT_DIGEST, "") == ROOT_DIGEST


def test_preemption_and_speculation_keep_the_adapter(make_rig: MakeRig) -> None:
    rig = make_rig(
        max_loras=2,
        adapters=VERSIONS[:3],
        num_kv_blocks=16,
        max_num_batched_tokens=12,
        vocab_size=3,
        speculative_ngram=3,
    )
    for id in range(1, 9):
        rig.add(id, range(3), adapter=["", *VERSIONS[:3]][id % 4], max_tokens=30)
    rig.run()
    rig.assert_complete()
    assert rig.scheduler.counters.preemptions
    assert rig.scheduler.counters.spec_accepted_tokens
    rig.assert_idle()


def test_suspect_runs_exclusively_with_its_adapter(make_rig: MakeRig) -> None:
    rig = make_rig(max_loras=1, adapters=VERSIONS[:2])
    rig.add(1, range(5), adapter=ONE, max_tokens=30)
    rig.step()
    rig.add(2, range(5), adapter=TWO, alone=1, max_tokens=3)
    rig.run()
    rig.assert_complete()


def test_urgent_requests_without_adapter_slot_preempt_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(max_loras=1, adapters=VERSIONS[:2], max_num_seqs=2, scheduling_policy="priority")
    rig.add(1, range(5), adapter=ONE, priority=5, max_tokens=20)
    rig.add(2, range(5), adapter=ONE, priority=5, max_tokens=20)
    rig.step()
    rig.add(3, range(5), adapter=TWO, priority=0)
    for _ in range(10):
        rig.step()
    assert rig.scheduler.counters.preemptions == 0
    rig.run()
    rig.assert_complete()


def test_suspect_does_not_queue_behind_other_adapters(make_rig: MakeRig) -> None:
    """Nobody else is computed before its turn is over: it would wait for ever."""
    rig = make_rig(max_loras=1, adapters=VERSIONS)
    rig.add(1, range(5), adapter=ONE, max_tokens=200)
    for _ in range(TURN_STEPS // 2):
        rig.step()
    rig.add(2, range(5), adapter=TWO)
    rig.step()
    rig.add(3, range(5), adapter=THREE, alone=1)
    rig.run()
    rig.assert_complete()
    rig.assert_idle()


def test_request_for_unknown_adapter_fails_without_affecting_others(make_rig: MakeRig) -> None:
    rig = make_rig(max_loras=1, adapters=[ONE])
    answer: Any = rig.add(1, range(5), adapter=TWO)
    assert answer.finish_reason == "error"
    rig.assert_idle()


def test_adapters_are_reloaded_into_slots_after_sleep(make_rig: MakeRig) -> None:
    rig = make_rig(max_loras=1, adapters=[ONE])
    rig.add(1, range(5), adapter=ONE, max_tokens=8)
    rig.step()
    rig.scheduler.preempt_all()
    rig.scheduler.reset_prefix_cache()
    rig.executor.sleep(2)
    rig.executor.wake_up()
    plan = rig.step()
    assert plan.adapters == {0: ONE}
    rig.run()
    rig.assert_complete()
