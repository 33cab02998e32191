"""A scheduler's statistics of request durations and tokens per step."""

from engine.shared.messages import RequestOutput, RequestTiming
from tests.engine.scheduler.conftest import Rig


def step(rig: Rig, planned: float, known: float) -> dict[int, RequestOutput]:
    rig.now = planned
    rig.schedule()
    rig.now = known
    return {each.id: each for outputs in rig.update().values() for each in outputs}


def test_waiting_for_a_slot_counts_as_queue_time() -> None:
    rig = Rig(max_num_seqs=1)
    rig.now = 1.0
    rig.add(1, [1, 2, 3], max_tokens=2)
    rig.now = 2.0
    rig.add(2, [4, 5, 6], max_tokens=3)
    first = step(rig, 10.0, 11.0)[1]
    assert first.timing == RequestTiming(9.0, 1.0)
    last = step(rig, 12.0, 14.0)[1]
    assert last.timing == RequestTiming(9.0, 1.0, 3.0)
    assert step(rig, 20.0, 22.0)[2].timing == RequestTiming(18.0, 2.0)
    assert step(rig, 23.0, 24.0)[2].timing is None, "only first and last outputs say it"
    assert step(rig, 25.0, 26.0)[2].timing == RequestTiming(18.0, 2.0, 4.0)


def test_all_chunks_count_as_prefill_time() -> None:
    rig = Rig(max_num_batched_tokens=4)
    rig.add(1, range(10), max_tokens=1)
    assert step(rig, 1.0, 2.0) == step(rig, 2.0, 3.0) == {}
    assert step(rig, 3.0, 5.0)[1].timing == RequestTiming(1.0, 4.0, 0.0)


def test_preemption_counts_as_the_interrupted_phase() -> None:
    rig = Rig()
    rig.add(1, [1, 2, 3], max_tokens=2)
    step(rig, 1.0, 2.0)
    rig.scheduler.preempt_all()
    assert step(rig, 50.0, 60.0)[1].timing == RequestTiming(1.0, 1.0, 58.0, 1)


def test_moved_request_is_timed_anew() -> None:
    rig = Rig()
    rig.now = 5.0
    rig.add(1, [1, 2, 3], output=[7, 8], max_tokens=4)
    assert step(rig, 6.0, 8.0)[1].timing == RequestTiming(1.0, 2.0)


def test_steps_are_counted_by_computed_and_sampled_tokens() -> None:
    rig = Rig(max_num_batched_tokens=16, enable_prefix_caching=False)
    rig.add(1, range(20), max_tokens=2)
    step(rig, 0.0, 0.0)
    assert rig.scheduler.counters.step_tokens == 16
    step(rig, 0.0, 0.0)
    assert rig.scheduler.counters.step_tokens == 20 + 1, "the prompt and its first token"
    step(rig, 0.0, 0.0)
    assert rig.scheduler.counters.step_tokens == 20 + 2
    step(rig, 0.0, 0.0)
    assert rig.scheduler.counters.step_tokens_buckets == [1, 1, 1, *[0] * 11], "no empty step"
