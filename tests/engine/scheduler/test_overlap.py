"""Two plans in flight: a step is planned before the previous one's tokens are known."""

from collections.abc import Callable
from typing import Any

from engine.batch.batch import BatchPlan
from engine.executor.simulated import simulated_token
from engine.scheduler.admission import Grant

MakeRig = Callable[..., Any]


def rows(plan: BatchPlan) -> list[tuple[int, int, int, bool]]:
    return list(zip(plan.slots, plan.starts, plan.counts, plan.samples, strict=True))


def test_a_decode_is_planned_before_its_token_is_known(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add(1, [1, 2, 3], max_tokens=4)
    assert rows(rig.schedule()) == [(0, 0, 3, True)]
    assert rows(rig.schedule()) == [(0, 3, 1, True)]
    rig.update()
    assert rows(rig.schedule()) == [(0, 4, 1, True)]
    rig.run(depth=2)
    rig.assert_complete()
    rig.assert_idle()


def test_chunks_of_a_prefill_follow_each_other_in_flight(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_batched_tokens=4)
    rig.add(1, list(range(10)), max_tokens=2)
    plans = [rows(rig.schedule()) for _ in range(4)]
    assert plans == [[(0, 0, 4, False)], [(0, 4, 4, False)], [(0, 8, 2, True)], [(0, 10, 1, True)]]
    for _ in plans:
        rig.update()
    rig.assert_complete()


def test_end_by_length_is_known_in_advance(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add(1, [1, 2, 3], max_tokens=2)
    rig.schedule()
    rig.schedule()
    assert rows(rig.schedule()) == []
    for _ in range(3):
        rig.update()
    rig.assert_complete()
    rig.assert_idle()


def test_a_token_planned_after_the_end_is_dropped(make_rig: MakeRig) -> None:
    rig = make_rig(num_kv_blocks=4, max_model_len=16)
    stop = simulated_token(1, 3, 3, 1000)
    rig.add(1, [1, 2, 3], max_tokens=9, stop_token_ids=(stop,))
    rig.schedule()
    rig.schedule()
    rig.update()
    assert rig.last[1].stop_token_id == stop
    assert rig.scheduler.gauges().kv_usage > 0, "the second step still writes its block"
    assert rig.scheduler.has_work
    assert rig.update() == {}
    rig.assert_complete()
    rig.assert_idle()


def test_slot_is_not_reassigned_while_a_step_uses_it(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_seqs=1)
    rig.add(1, [1, 2, 3], max_tokens=9)
    rig.add(2, [4, 5, 6], max_tokens=9)
    rig.schedule()
    rig.schedule()
    rig.scheduler.abort([1])
    assert rows(rig.schedule()) == []
    rig.update()
    assert rows(rig.schedule()) == []
    rig.update()
    assert rows(rig.schedule()) == [(0, 0, 3, True)]
    rig.run(depth=2)
    rig.assert_complete(2)
    rig.assert_idle()


def test_preempted_request_keeps_token_in_flight(make_rig: MakeRig) -> None:
    rig = make_rig(num_kv_blocks=4, max_model_len=16, enable_prefix_caching=False)
    rig.add(1, [1, 2, 3, 4, 5, 6, 7], max_tokens=6)
    rig.add(2, [11, 12, 13, 14, 15], max_tokens=3)
    rig.schedule()
    rig.schedule()  # position 7
    assert rows(rig.schedule()) == []  # no block for position 8: the second is preempted
    assert rig.scheduler.counters.preemptions == 1
    rig.update()
    assert rows(rig.schedule()) == []  # its blocks are still being written
    assert rig.scheduler.counters.preemptions == 1
    rig.update()
    assert rows(rig.schedule())[0] == (0, 8, 1, True)
    assert len(rig.tokens[2]) == 2
    rig.run(depth=2)
    rig.assert_complete()
    rig.assert_idle()


def test_preempted_request_does_not_restart_while_a_step_uses_its_blocks(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(num_kv_blocks=8, max_num_batched_tokens=12, enable_prefix_caching=False)
    rig.add(0, list(range(16)))
    rig.step()
    rig.add(1, [1, 2, 3, 4, 5, 6, 7], max_tokens=6)
    rig.add(2, [11, 12, 13, 14, 15], max_tokens=3)
    hold = Grant(run_partials=False)
    rig.schedule(hold)
    rig.schedule(hold)
    assert rows(rig.schedule(hold)) == []  # no block for position 8: the third is preempted
    rig.scheduler.abort([0])  # its blocks are idle and free at once
    assert rows(rig.schedule(hold)) == [(1, 8, 1, True)]
    rig.run(depth=4)
    rig.assert_complete(1, 2)
    rig.assert_idle()


def test_prefix_is_found_up_to_known_results(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_batched_tokens=8)
    rig.add(1, list(range(20)), max_tokens=2)
    rig.schedule()
    rig.schedule()
    rig.update()
    rig.schedule()
    rig.add(2, list(range(20)), max_tokens=2)
    rig.run(depth=2)
    assert rig.first[2].num_cached_tokens == 8
    rig.assert_complete()
